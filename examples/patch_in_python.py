"""Fuse the norms of a model in a script, before it generates. Nothing is saved.

    python examples/patch_in_python.py

`normswap.patch` works on the model you already have, and hands it back, as `torch.compile` does. Here it is a Llama
with random weights, so that nothing has to be downloaded; with a real one, only the line that makes it differs.
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

import normswap


def make_model() -> PreTrainedModel:
    """A Llama of 0.6 million parameters, in bfloat16, with gains that are not all 1."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = LlamaForCausalLM(config)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(parameter, mean=1.0, std=0.3)
    return model.to(torch.bfloat16).eval()


@torch.inference_mode()
def main() -> None:
    """Generate with the original, with the patched and with the restored model."""
    model = make_model()
    prompt = torch.tensor([[1, 17, 301, 44, 5]])
    options = {"max_new_tokens": 16, "min_new_tokens": 16, "do_sample": False, "pad_token_id": 0}
    mask = torch.ones_like(prompt)

    before = model.generate(prompt, attention_mask=mask, **options)
    logits_before = model(prompt).logits.float()

    normswap.patch(model)
    after = model.generate(prompt, attention_mask=mask, **options)
    logits_after = model(prompt).logits.float()
    print(f"a patched norm:    {model.model.norm}")
    print(f"original tokens:   {before[0, prompt.shape[1] :].tolist()}")
    print(f"patched tokens:    {after[0, prompt.shape[1] :].tolist()}")
    difference = (logits_after - logits_before).abs().max() / logits_before.abs().max()
    print(f"largest difference of logits: {difference.item():.2%} of the largest logit, in {model.dtype}")

    normswap.unpatch(model)
    print(f"restored norm:     {model.model.norm}")
    print(f"restored logits are bit-identical: {torch.equal(model(prompt).logits.float(), logits_before)}")


if __name__ == "__main__":
    main()
