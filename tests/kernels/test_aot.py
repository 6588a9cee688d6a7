"""What the compilers make of the kernels, for GPUs that need not be here."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

import torch
from normswap_kernels import aot, aot_cases, norm_forward
from normswap_kernels.aot_cases import OPERATIONS, Case
from normswap_kernels.aot_compile import TARGETS, compile_launch, device_for, read_figures
from normswap_kernels.formula import Formula
from normswap_kernels.launch import Launch, choose_tile

FORWARDS = [name for name in OPERATIONS if "backward" not in name]


@pytest.mark.parametrize("target", ("sm_90", "gfx942"))
@pytest.mark.parametrize("operation", OPERATIONS)
def test_each_operation_keeps_its_bounds_at_4096_in_bf16(operation: str, target: str) -> None:
    compiled = aot.compile_case(Case(operation, 4096), target)
    assert compiled.broken == ()
    assert (compiled.load_bytes, compiled.store_bytes, compiled.spills) == (16, 16, 0)


@pytest.mark.parametrize("target", ("sm_80", "sm_100"))
@pytest.mark.parametrize("operation", ("rms_norm", "layer_norm", "rms_norm_quant fp8"))
def test_other_targets_keep_them_too(operation: str, target: str) -> None:
    assert aot.compile_case(Case(operation, 4096), target).broken == ()


@pytest.mark.parametrize("gain", (torch.bfloat16, torch.float32), ids=str)
@pytest.mark.parametrize("operation", ("rms_norm", "rms_norm per head", "layer_norm"))
def test_short_rows_are_moved_by_16_bytes_with_their_gain(operation: str, gain: torch.dtype) -> None:
    for width in (64, 128, 256):
        compiled = aot.compile_case(Case(operation, width, gain=gain), "sm_90")
        assert compiled.broken == ()
        assert compiled.narrowest_bytes == 16


@pytest.mark.slow
def test_the_whole_table_keeps_its_bounds() -> None:
    results = aot.compile_all(list(aot_cases.default_cases()), TARGETS, os.cpu_count() or 1)
    assert [aot.describe(result) for result in results if result.broken] == []
    forwards = [r for r in results if not r.operation.endswith("backward")]
    assert {r.ratio for r in forwards if choose_tile(r.width).one_block} == {1.0}


@pytest.mark.parametrize(
    ("operation", "ratio"),
    [
        ("rms_norm", 3 / 2),
        ("layer_norm", 3 / 2),
        ("add_rms_norm", 5 / 4),
        ("gated_rms_norm before", 5 / 3),
        ("gated_rms_norm after", 4 / 3),
        ("rms_norm partial", 9 / 8),
        ("rms_norm_quant int8", 7 / 3),
    ],
)
def test_looped_rows_are_read_as_often_as_stated(operation: str, ratio: float) -> None:
    compiled = aot.compile_case(Case(operation, 65536), "sm_90")
    assert compiled.broken == ()
    assert compiled.ratio == pytest.approx(ratio, abs=1e-3)


@pytest.mark.parametrize(
    ("operation", "width", "ratio"),
    [
        ("rms_norm backward", 16384, 1),
        ("layer_norm backward", 8192, 1),
        # The bias's gradient is left, and needs one more read of the result's.
        ("layer_norm backward", 16384, 4 / 3),
        ("rms_norm backward", 65536, 7 / 3),
        ("layer_norm backward", 65536, 7 / 3),
        ("add_rms_norm backward", 65536, 8 / 4),
        ("l2_norm backward", 65536, 5 / 3),
        ("gated_rms_norm before backward", 8192, 1),
        ("gated_rms_norm after backward", 16384, 11 / 5),
    ],
)
def test_gradients_read_rows_as_often_as_stated(operation: str, width: int, ratio: float) -> None:
    compiled = aot.compile_case(Case(operation, width), "sm_90")
    assert compiled.broken == ()
    assert compiled.ratio == pytest.approx(ratio, abs=1e-3)


@pytest.mark.parametrize("width", (127, 576, 1000, 12000, 20000))
def test_gradients_of_other_widths_compile_without_spills(width: int) -> None:
    for operation in ("add_layer_norm backward", "gated_rms_norm before backward"):
        for dtype in (torch.bfloat16, torch.float32):
            assert aot.compile_case(Case(operation, width, dtype, torch.float32), "sm_90").spills == 0


@pytest.mark.parametrize("width", (1, 127, 576, 1000, 12000, 16384, 20000, 65537))
def test_other_widths_compile_without_spills(width: int) -> None:
    for operation in ("rms_norm", "layer_norm", "rms_norm_quant int8"):
        compiled = aot.compile_case(Case(operation, width, torch.float32, torch.float32), "sm_90")
        assert compiled.spills == 0
        if width % 4 == 0:
            assert compiled.load_bytes == 16


@pytest.mark.parametrize("width", (576, 1000, 2880))
def test_rows_of_a_slice_are_moved_by_16_bytes(width: int) -> None:
    # Width and stride are multiples of 8, not of 16.
    dtype = torch.bfloat16
    x = torch.empty(100, 1, 3 * width, dtype=dtype, device="meta")[..., :width]
    gain, y = (torch.empty(*shape, dtype=dtype, device="meta") for shape in ((1, width), (100, 1, width)))
    formula = Formula("rms", 1e-6, 0.0, None, None, dtype)
    launch = norm_forward.prepare(formula, x, None, None, gain, None, y, None, None, None, device_for("sm_90"))
    assert launch.options["ALIGN"] == (16 if width % 16 == 0 else 8)
    figures = read_figures(launch, "sm_90")
    assert (figures.load_bytes, figures.store_bytes, figures.narrowest_bytes) == (16, 16, 16)


def _launches(width: int) -> list[tuple[str, Launch]]:
    return [(name, launch) for name in OPERATIONS for launch in Case(name, width).launches(device_for("sm_90"))]


@pytest.mark.parametrize("width", (1000, 65536))
def test_nothing_is_computed_in_float64(width: int) -> None:
    for name, launch in _launches(width):
        assert "f64" not in compile_launch(launch, "sm_90").asm["ttir"], name


def test_scalars_are_declared_float32() -> None:
    for name, launch in _launches(128):
        declared = {p.name: p.annotation for p in launch.kernel.params}
        assert declared.get("eps", "fp32") == "fp32", name
        floats = [n for n, a in zip(declared, launch.arguments, strict=False) if isinstance(a, float)]
        assert set(floats) <= {"eps"}, name


@pytest.mark.parametrize("operation", FORWARDS)
def test_row_offsets_are_multiplied_in_64_bits(operation: str) -> None:
    for width in (128, 65536):
        (launch,) = Case(operation, width).launches(device_for("sm_90"))
        ttir = compile_launch(launch, "sm_90").asm["ttir"]
        products = [line for line in ttir.splitlines() if "arith.muli" in line]
        assert products
        assert [line for line in products if not re.search(r": (tensor<[\dx]+i64>|i64)", line)] == []
        # Only what lies within a row is added to a pointer in 32 bits.
        wide = re.findall(r"tt\.addptr %\w+_ptr\w*, .* : (\S+), (\S+)", ttir)
        assert all("i64" in offset for pointer, offset in wide if not pointer.startswith("tensor<1x"))


@pytest.mark.parametrize("operation", ("add_layer_norm backward", "gated_rms_norm before backward"))
def test_gradients_multiply_row_offsets_in_64_bits(operation: str) -> None:
    for width in (128, 65536):
        for launch in Case(operation, width).launches(device_for("sm_90")):
            ttir = compile_launch(launch, "sm_90").asm["ttir"]
            narrow = [
                line for line in ttir.splitlines() if "arith.muli" in line and re.search(r": (tensor<[\dx]+)?i32", line)
            ]
            # What may stay narrow counts blocks of columns, or parts.
            assert all(re.search(r"%(cols|at|start|program|which|n_parts|part)", line) for line in narrow), narrow


def test_float8_is_converted_by_the_instruction_where_there_is_one() -> None:
    for target, native in (("sm_80", False), ("sm_90", True), ("sm_100", True)):
        (launch,) = Case("rms_norm_quant fp8", 128).launches(device_for(target))
        assert ("e4m3x2" in compile_launch(launch, target).asm["ptx"]) == native


@pytest.mark.parametrize(("target", "width"), [("sm_90", 4096), pytest.param("gfx942", 16384, marks=pytest.mark.slow)])
def test_spills_are_seen_and_break_a_bound(target: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    build = OPERATIONS["layer_norm"]

    def with_one_warp(*arguments: Any) -> list[Launch]:
        return [launch._replace(options={**launch.options, "num_warps": 1}) for launch in build(*arguments)]

    monkeypatch.setitem(OPERATIONS, "layer_norm", with_one_warp)
    compiled = aot.compile_case(Case("layer_norm", width), target)
    assert compiled.spills > 0
    assert "spilled, 0 allowed" in " ".join(compiled.broken)


def test_command_line_writes_json_and_fails_on_a_broken_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(aot, "default_cases", lambda: [Case("rms_norm", 65536), Case("layer_norm", 4096)])
    command = ["--json", str(tmp_path / "aot.json"), "--target", "sm_90", "--operation", "rms_norm", "--jobs", "1"]
    assert aot.main(command) == 0
    (found,) = json.loads((tmp_path / "aot.json").read_text())
    assert found["target"] == "sm_90" and found["spills"] == 0 and found["registers"] > 0 and found["ratio"] == 1.5
    assert "rms_norm" in capsys.readouterr().out
    monkeypatch.setattr(aot, "MOST_LOOPED_OTHERWISE", 1.25)
    assert aot.main(command) == 1
    assert "1.50 of the least bytes, 1.25 allowed" in capsys.readouterr().out


def test_unknown_target_is_refused() -> None:
    for target in ("h100", "sm_x"):
        with pytest.raises(ValueError, match=rf"expected a target such as sm_80.*got '{target}'"):
            aot.compile_case(Case("rms_norm", 4096), target)


@pytest.mark.parametrize(
    ("command", "said"),
    (
        (["--target", "sm_1"], "argument --target: invalid choice: 'sm_1' (choose from 'sm_80', "),
        (["--target", "h100"], "'gfx942'"),
        (["--jobs", "0"], "argument --jobs: expected a whole number of at least 1, got '0'"),
    ),
    ids=str,
)
def test_a_bad_argument_is_said_to_be_one(command: list[str], said: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as ended:
        aot.main(command)
    assert ended.value.code == 2
    # Some versions of Python quote each choice, others none.
    assert said.replace("'", "") in capsys.readouterr().err.replace("'", "")


def test_the_targets_are_taken() -> None:
    assert set(TARGETS) <= set(aot.KNOWN_TARGETS)


def test_cases_name_an_operation_each_and_differ() -> None:
    cases = list(aot_cases.default_cases())
    assert len(set(cases)) == len(cases)
    assert {case.operation for case in cases} == set(OPERATIONS)


def test_tiles_depend_on_the_width_alone_and_have_a_reason() -> None:
    for width in (1, 2, 16, 100, 1024, 1025, 4096, 16384, 16385, 10**6):
        tile = choose_tile(width)
        assert tile.reason
        assert tile.block_n & (tile.block_n - 1) == 0
        assert tile.one_block == (tile.block_n >= width)
        assert 32 <= tile.threads <= 1024
        assert tile.num_warps(64) * 64 <= max(64, tile.threads)
