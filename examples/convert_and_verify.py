"""Convert a checkpoint, verify it, and see a damaged copy fail.

    python examples/convert_and_verify.py [FOLDER]

What a release engineer does: `normswap.convert` saves only what passed, `normswap.verify` measures somebody's
checkpoint against its original and gives a verdict with figures to attach. The checkpoint is a small Mistral with
random weights, made here; all is written to a temporary folder, or to FOLDER.
"""

import json
import shutil
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, MistralConfig, MistralForCausalLM

import normswap


def make_checkpoint(folder: Path) -> Path:
    """Save a Mistral of 0.4 million parameters."""
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=512,
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=24,
        tie_word_embeddings=False,
    )
    model = MistralForCausalLM(config)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(parameter, mean=1.0, std=0.3)
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def damage(converted: Path, out: Path) -> Path:
    """Copy a checkpoint with the gain of one norm 2% off: too little to be seen in any text it writes."""
    shutil.copytree(converted, out)
    weights = load_file(out / "model.safetensors")
    weights["model.layers.1.input_layernorm.weight"] *= 1.02
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    return out


def main(folder: Path) -> None:
    """Convert, load with and without normswap, verify, and verify a damaged copy."""
    original = make_checkpoint(folder / "original")

    done = normswap.convert(original, folder / "converted", device="cpu")
    print(f"converted: {len(done.plan.swaps)} of {len(done.plan.decisions)} norms swapped, saved to {done.out.name}/")

    fused = normswap.load(done.out)
    plain = AutoModelForCausalLM.from_pretrained(done.out)
    print(f"loaded by normswap:     {fused.model.norm}")
    print(f"loaded by transformers: {plain.model.norm}")

    report = normswap.verify(done.out, against=original, device="cpu")
    figures = report.to_dict()
    (folder / "parity.json").write_text(json.dumps(figures, indent=2))
    low, high = figures["logits"]["ratio_interval"]
    print(f"verdict: {figures['verdict']} ({figures['dtype']} on {figures['device']}, backend {figures['backend']})")
    print(f"  exact, in float32:   error {figures['exact']['error']:.1e}, bound {figures['exact']['bound']:.0e}")
    print(f"  as served:           distance ratio {figures['logits']['ratio']:.3f}, interval {low:.3f} to {high:.3f}")
    print(f"  worst norm:          {max(norm['max_ulp'] for norm in figures['norms'])} units in the last place")

    damaged = normswap.verify(damage(done.out, folder / "damaged"), against=original, device="cpu")
    print(f"verdict on the copy with one gain 2% off: {damaged.to_dict()['verdict']}")
    for failure in damaged.failures:
        print(f"  {failure}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as temporary:
            main(Path(temporary))
