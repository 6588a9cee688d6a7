"""What the compilers make of the kernels, for GPUs that need not be here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("triton")

import torch
from normswap_kernels import aot
from normswap_kernels.launch import choose_tile

CASES = [
    aot.Case("rms_norm", 4096, round_dtype=torch.bfloat16),
    aot.Case("rms_norm", 4096, offset=1.0),
    aot.Case("layer_norm", 4096, bias=True),
    aot.Case("layer_norm", 4096, round_dtype=torch.bfloat16, bias=True),
]


@pytest.mark.parametrize("target", aot.TARGETS)
@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.operation}-{c.round_dtype}-{c.offset}-{c.bias}")
def test_width_4096_in_bf16_moves_16_bytes_and_spills_nothing(case: aot.Case, target: str) -> None:
    compiled = aot.compile_case(case, target)
    assert (compiled.load_bytes, compiled.store_bytes, compiled.narrowest_bytes) == (16, 16, 16)
    assert compiled.spills == 0


@pytest.mark.parametrize("target", aot.TARGETS)
@pytest.mark.parametrize("width", (1, 127, 576, 16384, 65537))
def test_other_widths_compile_without_spills(width: int, target: str) -> None:
    for operation in ("rms_norm", "layer_norm"):
        case = aot.Case(operation, width, torch.float32, gain=width > 1, bias=operation == "layer_norm")
        assert aot.compile_case(case, target).spills == 0


def test_command_line_writes_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(aot, "default_cases", lambda: CASES[:1])
    assert aot.main(["--json", str(tmp_path / "aot.json"), "--target", "sm_90"]) == 0
    (found,) = json.loads((tmp_path / "aot.json").read_text())
    assert found["target"] == "sm_90" and found["spills"] == 0 and found["registers"] > 0
    assert "rms_norm" in capsys.readouterr().out


def test_unknown_target_is_refused() -> None:
    with pytest.raises(ValueError, match=r"expected a target such as sm_80.*got 'h100'"):
        aot.compile_case(CASES[0], "h100")


def test_tiles_depend_on_the_width_alone_and_have_a_reason() -> None:
    for width in (1, 2, 16, 100, 1024, 1025, 4096, 16384, 16385, 10**6):
        tile = choose_tile(width)
        assert tile.reason
        assert tile.block_n & (tile.block_n - 1) == 0
        assert tile.one_block == (tile.block_n >= width)
        assert 32 <= tile.threads <= 1024
        assert tile.num_warps(64) * 64 <= max(64, tile.threads)
