"""Judge checkpoints that somebody else made of another: folded by hand, and with one value wrong.

    python examples/judge_a_checkpoint.py [FOLDER]

`normswap.verify` compares the tensors first and says what was done to them, then runs both. The checkpoint is a small
Llama with random weights, made here; all is written to a temporary folder, or to FOLDER, with a page for each verdict.
"""

import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import normswap
from normswap.page import to_html


def make_checkpoint(folder: Path) -> Path:
    """Save a Llama of 0.3 million parameters whose gains are not 1."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=96, intermediate_size=160, num_hidden_layers=3, num_attention_heads=4
    )
    model = LlamaForCausalLM(config)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(parameter, mean=1.0, std=0.3)
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


@torch.no_grad()
def fold_by_hand(source: Path, folder: Path) -> Path:
    """Do what many a script does before quantizing: multiply in bfloat16, without a manifest."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        readers = (attention.q_proj, attention.k_proj, attention.v_proj), (mlp.gate_proj, mlp.up_proj)
        for norm, linears in zip((layer.input_layernorm, layer.post_attention_layernorm), readers, strict=True):
            for linear in linears:
                linear.weight.mul_(norm.weight)
            norm.weight.fill_(1.0)
    model.save_pretrained(folder)
    return folder


@torch.no_grad()
def spoil(source: Path, folder: Path) -> Path:
    """Change one value of one gain by 3%."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    model.model.layers[1].input_layernorm.weight[7] *= 1.03
    model.save_pretrained(folder)
    return folder


def main(folder: Path) -> None:
    """Make three checkpoints and judge two of them."""
    original = make_checkpoint(folder / "original")
    for make in (fold_by_hand, spoil):
        made = make(original, folder / make.__name__)
        report = normswap.verify(made, against=original, device="cpu", tokens=512)
        print(f"{made.name}: {report.verdict}: {report.tensors.summary}")
        for failure in report.failures:
            print(f"    {failure}")
        print(f"    first layer that departs: {report.departs}; smallest fault seen: {report.power.smallest:.1e}")
        (folder / f"{made.name}.html").write_text(to_html(report), encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as temporary:
            main(Path(temporary))
