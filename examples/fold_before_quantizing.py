"""Fold the gains of a model's norms into the weights that read them, and see what that does to int8 weights.

    python examples/fold_before_quantizing.py [FOLDER]

What comes before a quantizer: `normswap.inspect` says what would be folded and what stands in the way,
`normswap.convert` folds, measures and saves, and plain transformers loads the result. The checkpoint is a small Mixtral
with random weights, made here; all is written to a temporary folder, or to FOLDER.
"""

import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM

import normswap


def make_checkpoint(folder: Path) -> Path:
    """Save a Mixtral of 0.7 million parameters, its experts stored one by one."""
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=512,
        hidden_size=96,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        head_dim=24,
    )
    model = MixtralForCausalLM(config)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(parameter, mean=1.0, std=0.3)
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def main(folder: Path) -> None:
    """Inspect, fold, reload and compare."""
    original = make_checkpoint(folder / "original")

    for fold in normswap.inspect(original, fold=True).folds.folds[:2]:
        print(f"{fold.name} goes into")
        for name in fold.parameters:
            print(f"    {name}")

    done = normswap.convert(original, folder / "folded", fold=True, quant_report=True, device="cpu")
    print(f"{len(done.folds.folds)} of {len(done.folds.decisions)} gains folded, verdict {done.report.verdict}")
    print(f"  before rounding, at most {max(done.algebra.values()):.0e} apart on random rows")
    change = {name: errors.change for name, errors in done.quantization.total.items()}
    print(f"  int8 weights err {change['int8']:.2f} times as much as before")

    before, after = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in (original, done.out))
    print(f"the last norm's gain is now {after.model.norm.weight.unique().tolist()}")
    ids = torch.arange(32)[None]
    with torch.no_grad():
        expected, got = before(ids).logits, after(ids).logits
    print(f"logits, from bfloat16 weights in float32: {float((got - expected).norm() / expected.norm()):.1e} apart")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as temporary:
            main(Path(temporary))
