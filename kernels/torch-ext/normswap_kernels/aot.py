"""Compile the kernels ahead of time, for GPUs that need not be here, and report what the compiler made of them.

``python -m normswap_kernels.aot [--json FILE|-]`` compiles each case for NVIDIA sm_80, sm_90 and sm_100 and for AMD
gfx942, and prints for each the widest load and store, the registers and the spills.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from .backends import BackendUnavailable, Operation, kernels
from .launch import choose_tile

TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")

_POINTERS = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}
_KERNELS: dict[str, tuple[Operation, str]] = {
    "rms_norm": ("rmsnorm", "_rms_norm_fwd_kernel"),
    "layer_norm": ("layernorm", "_layer_norm_fwd_kernel"),
}


@dataclass(frozen=True)
class Case:
    """One kernel with one choice of its compile-time options.

    Attributes:
        operation: ``"rms_norm"`` or ``"layer_norm"``.
        width: length of a row; the rows lie densely.
        dtype: of input, gain, bias and output.
        round_dtype: dtype that the normalised row is rounded to before the gain, or None.
        gain: whether there is a gain.
        offset: added to the gain.
        bias: whether there is a bias.
    """

    operation: str
    width: int
    dtype: torch.dtype = torch.bfloat16
    round_dtype: torch.dtype | None = None
    gain: bool = True
    offset: float = 0.0
    bias: bool = False


@dataclass(frozen=True)
class Compiled:
    """What the compiler made of a case.

    Attributes:
        operation: as in the case.
        width: as in the case.
        dtype: as in the case, by name.
        round_dtype: as in the case, by name; None for one rounding.
        bias: as in the case.
        target: what it was compiled for.
        load_bytes: bytes that the widest load from global memory fetches for a thread.
        store_bytes: bytes that the widest store to global memory writes for a thread.
        narrowest_bytes: bytes of the narrowest access to global memory.
        registers: vector registers a thread.
        spills: bytes (NVIDIA) or registers (AMD) spilled; 0 is what is wanted.
    """

    operation: str
    width: int
    dtype: str
    round_dtype: str | None
    bias: bool
    target: str
    load_bytes: int
    store_bytes: int
    narrowest_bytes: int
    registers: int
    spills: int


def default_cases() -> Iterator[Case]:
    """Yield the cases of the report: short, usual, widest one-block and looped rows, in bf16 and float32."""
    for width in (128, 4096, 16384, 65536):
        for dtype in (torch.bfloat16, torch.float32):
            yield Case("rms_norm", width, dtype, round_dtype=dtype)
            yield Case("layer_norm", width, dtype, bias=True)


def compile_case(case: Case, target: str) -> Compiled:
    """Compile one case for one target.

    Args:
        case: what to compile.
        target: one of `TARGETS`, or another name of that form.

    Returns:
        The compiler's figures.

    Raises:
        ValueError: the target's name is of another form.
        BackendUnavailable: Triton is missing, or interprets in this process and so does not compile.
    """
    match = re.fullmatch(r"(sm_|gfx)(\w+)", target)
    if match is None:
        raise ValueError(f"expected a target such as {', '.join(TARGETS)}, got {target!r}")
    try:
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource
        from triton.runtime.jit import JITFunction
    except ImportError as error:
        raise BackendUnavailable(
            "compiling needs the package triton, which is not installed: pip install triton"
        ) from error

    nvidia = match[1] == "sm_"
    gpu = GPUTarget("cuda", int(match[2]), 32) if nvidia else GPUTarget("hip", target, 64)
    module, name = _KERNELS[case.operation]
    kernel = getattr(kernels(module), name)
    if not isinstance(kernel, JITFunction):
        raise BackendUnavailable(
            "compiling needs a process where Triton does not interpret: start a new one without TRITON_INTERPRET"
        )
    signature, constants = _specialise(case, kernel.arg_names, kernels(module))
    # What the launcher's arguments are specialised to: pointers from torch's allocator, and a dense width of 16s.
    aligned = {"x_ptr", "w_ptr", "b_ptr", "y_ptr"}
    if case.width % 16 == 0:
        aligned |= {"x_row_stride", "n_cols"}
    attributes = {
        (index,): [["tt.divisibility", 16]]
        for index, argument in enumerate(kernel.arg_names)
        if argument in aligned and argument not in constants
    }
    source = ASTSource(kernel, signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": choose_tile(case.width).num_warps(gpu.warp_size), "enable_fp_fusion": False}
    compiled = triton.compile(source, target=gpu, options=options)
    figures = _read_ptx(compiled.asm["ptx"], int(match[2])) if nvidia else _read_amdgcn(compiled.asm["amdgcn"])
    return Compiled(
        case.operation,
        case.width,
        _name(case.dtype),
        None if case.round_dtype is None else _name(case.round_dtype),
        case.bias,
        target,
        *figures,
    )


def _specialise(case: Case, arguments: Sequence[str], module: Any) -> tuple[dict[str, str], dict[str, Any]]:
    """Split a kernel's arguments into a signature and constants, as the launcher's call does."""
    tile = choose_tile(case.width)
    constants: dict[str, Any] = {
        "x_col_stride": 1,
        "HAS_GAIN": case.gain,
        "OFFSET": case.offset,
        "HAS_BIAS": case.bias,
        "MIDDLE": module.triton_dtype(case.round_dtype),
        "DENSE": True,
        "ROWS": tile.rows,
        "BLOCK_N": tile.block_n,
        "ONE_BLOCK": tile.one_block,
        "EMULATE": False,
    }
    if not case.gain:
        constants["w_ptr"] = None
    if not case.bias:
        constants["b_ptr"] = None
    types = {"x_row_stride": "i32", "n_rows": "i32", "n_cols": "i32", "width": "fp32", "eps": "fp32"}
    types |= dict.fromkeys(("x_ptr", "w_ptr", "b_ptr", "y_ptr"), _POINTERS[case.dtype])
    return {name: "constexpr" if name in constants else types[name] for name in arguments}, constants


def _read_ptx(ptx: str, architecture: int) -> tuple[int, int, int, int, int]:
    """Read the widest accesses from PTX; ask the assembler that Triton brings for registers and spills."""
    from triton.backends.nvidia.compiler import get_ptxas

    def access_bytes(operation: str) -> list[int]:
        found = re.findall(rf"\b{operation}\.global\S*?(?:\.v(\d+))?\.[bfsu](\d+)\s", ptx)
        return [int(lanes or 1) * int(bits) // 8 for lanes, bits in found]

    target = re.search(r"^\.target (\w+)", ptx, re.MULTILINE)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.ptx")
        path.write_text(ptx)
        name = target[1] if target else f"sm_{architecture}"
        command = [get_ptxas(architecture).path, "-v", f"--gpu-name={name}", str(path), "-o", f"{path}.cubin"]
        log = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    registers = re.search(r"Used (\d+) registers", log)
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    if registers is None or spills is None:
        raise RuntimeError(f"expected registers and spills in the assembler's log, got: {log}")
    loads, stores = access_bytes("ld"), access_bytes("st")
    return max(loads), max(stores), min(loads + stores), int(registers[1]), int(spills[1]) + int(spills[2])


def _read_amdgcn(text: str) -> tuple[int, int, int, int, int]:
    """Read the widest accesses, registers and spills from AMD assembly."""

    def access_bytes(operation: str) -> list[int]:
        found = re.findall(rf"\b(?:global|buffer|flat)_{operation}_(?:dword(?:x(\d))?|[a-z]*(short|byte))", text)
        return [{"short": 2, "byte": 1}.get(part, 4 * int(lanes or 1)) for lanes, part in found]

    registers = re.search(r"\.vgpr_count:\s+(\d+)", text)
    spills = re.search(r"\.vgpr_spill_count:\s+(\d+)", text)
    if registers is None or spills is None:
        raise RuntimeError("expected .vgpr_count and .vgpr_spill_count in the assembly, found none")
    loads, stores = access_bytes("load"), access_bytes("store")
    return max(loads), max(stores), min(loads + stores), int(registers[1]), int(spills[1])


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code: 1 where a kernel spills."""
    parser = argparse.ArgumentParser(prog="python -m normswap_kernels.aot", description=__doc__)
    parser.add_argument("--json", metavar="FILE", help="write the figures as JSON; - for standard output")
    parser.add_argument("--target", action="append", help=f"default: {' '.join(TARGETS)}")
    options = parser.parse_args(arguments)
    targets = options.target or TARGETS
    results = [compile_case(case, target) for case in default_cases() for target in targets]
    if options.json != "-":
        print(
            f"{'operation':11}{'width':>6}  {'dtype':9}{'target':8}"
            f"{'load B':>7}{'store B':>8}{'least B':>8}{'regs':>6}{'spills':>7}"
        )
        for r in results:
            print(
                f"{r.operation:11}{r.width:6}  {r.dtype:9}{r.target:8}"
                f"{r.load_bytes:7}{r.store_bytes:8}{r.narrowest_bytes:8}{r.registers:6}{r.spills:7}"
            )
    if options.json:
        text = json.dumps([asdict(result) for result in results], indent=2)
        if options.json == "-":
            print(text)
        else:
            Path(options.json).write_text(text + "\n")
    return int(any(result.spills for result in results))


if __name__ == "__main__":
    sys.exit(main())
