"""The examples, the docstrings and the demo do what they say."""

from __future__ import annotations

import doctest
import importlib
import os
import pkgutil
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import normswap

ROOT = Path(__file__).resolve().parent.parent
EXPECTED = {
    "convert_and_verify.py": [
        r"^converted: 7 of 7 norms swapped",
        r"^loaded by normswap: +MistralRMSNorm\(.*normswap=",
        r"^loaded by transformers: MistralRMSNorm\(\(96,\), eps=1e-06\)$",
        r"^verdict: pass \(bfloat16 on cpu, backend cpu\)$",
        r"^verdict on the copy with one gain 2% off: fail$",
        r"^  tensors: .*model\.layers\.1\.input_layernorm\.weight",
        r"^  exact: error ",
    ],
    "fold_before_quantizing.py": [
        r"^model\.layers\.0\.post_attention_layernorm goes into\n    model\.layers\.0\.\w+\.experts\.",
        r"^5 of 5 gains folded, verdict pass$",
        r"^  before rounding, at most \de-1\d apart",
        r"^the last norm's gain is now \[1\.0\]$",
        # Rounded weights turn a token's router to another expert in some of its random models.
        r"^logits, from bfloat16 weights in float32: \d\.\de-0[23] apart$",
    ],
    "inspect_handwritten.py": [
        r"^0\.norm +ScaleThenCast +swap\n    kind rms, eps 1e-06, gain w, cast after_gain$",
        r"^1\.norm +CastThenScale +swap\n    kind rms, eps 3e-05, gain w, cast before_gain$",
        r"^2\.norm +OnePlusGain +swap\n    kind rms, eps 1e-06, gain 1\+w, cast after_gain$",
        r"^3\.norm +BatchScaleNorm +refuse\n    its rows are not independent",
        r"^4\.norm +LayerNorm +swap\n    kind layer, eps 1e-05, gain w",
        r"^patched: 3 of 5 norms$",
        r"^bit-identical outputs, in bfloat16: (100\.00|99\.\d\d)%$",
    ],
    "judge_a_checkpoint.py": [
        r"^fold_by_hand: pass: 6 gains folded into 15 linears$",
        r"^    first layer that departs: None; smallest fault seen: \d\.\de-0\d$",
        r"^spoil: fail: unknown change in 1 tensor$",
        r"^    tensors: model\.layers\.1\.input_layernorm\.weight differs in 1 of 96 values, channel 7, by 3%$",
        r"^    first layer that departs: model\.layers\.1;",
    ],
    "patch_in_python.py": [
        r"^a patched norm: +LlamaRMSNorm\(.*normswap=",
        r"^original tokens: +(\[.*\])\npatched tokens: +\1$",
        r"^restored norm: +LlamaRMSNorm\(\(128,\), eps=1e-06\)$",
        r"^restored logits are bit-identical: True$",
    ],
    "train_with_kernels.py": [r"^eager: +loss (1\.\d+ at first, 0\.[01]\d+ at last)\ncompiled: +loss \1$"],
}


@pytest.mark.core
@pytest.mark.parametrize("script", sorted(path.name for path in (ROOT / "examples").glob("*.py")))
def test_example_prints_what_it_promises(script: str) -> None:
    # Such small models have nothing to share among threads, which on a busy machine only wait for each other.
    printed = run(ROOT / "examples" / script, OMP_NUM_THREADS="1")
    for pattern in EXPECTED[script]:
        assert re.search(pattern, printed, re.MULTILINE), f"no line like {pattern} in:\n{printed}"


@pytest.mark.core
@pytest.mark.parametrize(
    "name", sorted(m.name for m in pkgutil.iter_modules(normswap.__path__) if m.name != "__main__")
)
def test_docstring_examples_run(name: str) -> None:
    failed, _ = doctest.testmod(importlib.import_module(f"normswap.{name}"))
    assert not failed


@pytest.mark.slow
def test_demo_converts_a_real_model_over_an_old_output(smollm2: Path, tmp_path: Path) -> None:
    shutil.copytree(smollm2, tmp_path / "smollm2-135m-normswap")
    printed = run(ROOT / "tools" / "demo.py", "--out", str(tmp_path), "--parity-tokens", "256")
    assert "PASS" in printed
    assert "61 of 61 norms swapped" in printed
    assert re.search(r"^  identical: all 20 tokens agree$|^  a tie: rounding decides it$", printed, re.MULTILINE)
    assert re.search(r"61 norm forwards.*ms +-> .*ms +\d+\.\d\dx$", printed, re.MULTILINE)
    assert re.search(r"prefill of 512 tokens.*tok/s +-> .*tok/s +\d+\.\d\dx$", printed, re.MULTILINE)
    assert (tmp_path / "parity.json").is_file()
    assert (tmp_path / "smollm2-135m-normswap" / "normswap.json").is_file()


def run(*command: str | Path, **environment: str) -> str:
    quiet = {**os.environ, "TQDM_DISABLE": "1", **environment}
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, env=quiet)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
