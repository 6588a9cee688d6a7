"""Compile a launch ahead of time, for a GPU that need not be here, and read from the result what it costs."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .backends import BackendUnavailable
from .launch import Device, Launch

TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")

_POINTERS = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.int8: "*i8"}
_SIZES = {"bf16": 2, "f16": 2, "f32": 4, "i8": 1, "i32": 4}
# Values, pointers and types as Triton's text has them.
_VALUE = r"%[\w#]+"
_TENSOR = r"tensor<((?:\d+x)+)(?:!tt\.ptr<)?(\w+)"


@dataclass(frozen=True)
class Figures:
    """What the compiler made of one launch.

    Attributes:
        load_bytes: bytes that the widest load from global memory fetches for a thread.
        store_bytes: bytes that the widest store to global memory writes for a thread.
        narrowest_bytes: bytes of the narrowest access to rows and parameters. Where the launch reads or writes a
            number for each row too, accesses of 4 bytes are taken for those.
        registers: vector registers a thread.
        spills: bytes (NVIDIA) or registers (AMD) spilled.
        shared_bytes: shared memory of a program.
        moved: bytes of rows that are asked for, for each row.
    """

    load_bytes: int
    store_bytes: int
    narrowest_bytes: int
    registers: int
    spills: int
    shared_bytes: int
    moved: float


def device_for(target: str) -> Device:
    """Describe a target as `launch.device_of` describes a device.

    Raises:
        ValueError: the target's name is of another form.
    """
    match = re.fullmatch(r"(sm_|gfx)(\w+)", target)
    if match is None or (match[1] == "sm_" and not match[2].isdecimal()):
        raise ValueError(f"expected a target such as {', '.join(TARGETS)}, got {target!r}")
    if match[1] == "gfx":
        return Device(64, native_fp8=False, processors=304, interpreted=False, shared_bytes=64 * 1024)
    # As torch's device properties give it for A100, H100 and B200; the least there is for others.
    shared_bytes = {"80": 163, "90": 227, "100": 227}.get(match[2], 99) * 1024
    return Device(32, native_fp8=int(match[2]) >= 89, processors=132, interpreted=False, shared_bytes=shared_bytes)


def compile_launch(launch: Launch, target: str) -> Any:
    """Compile a launch as Triton would where it is first run.

    Args:
        launch: its tensors may be meta tensors; they count as aligned to 16 bytes, as torch allocates.
        target: one of `TARGETS`, or another name of that form.

    Returns:
        Triton's compiled kernel; ``asm`` holds the text of each stage.

    Raises:
        BackendUnavailable: Triton interprets in this process and so does not compile.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.runtime.jit import JITFunction

    kernel = launch.kernel
    if not isinstance(kernel, JITFunction):
        raise BackendUnavailable(
            "compiling needs a process where Triton does not interpret: start a new one without TRITON_INTERPRET"
        )
    warp_size = device_for(target).warp_size
    gpu = GPUTarget("cuda", int(target[3:]), 32) if warp_size == 32 else GPUTarget("hip", target, 64)
    signature, constants, attributes = _specialise(launch)
    options = {name: value for name, value in launch.options.items() if name not in kernel.arg_names}
    source = ASTSource(kernel, signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=gpu, options=options)


def read_figures(launch: Launch, target: str) -> Figures:
    """Compile a launch and read its figures; arguments and exceptions as in `compile_launch`."""
    compiled = compile_launch(launch, target)
    if "ptx" in compiled.asm:
        loads, stores, registers, spills = _read_ptx(compiled.asm["ptx"], int(target[3:]))
    else:
        loads, stores, registers, spills = _read_amdgcn(compiled.asm["amdgcn"])
    statistics = any(isinstance(a, Tensor) and a.dim() == 2 and a.shape[0] == _n_rows(launch) for a in launch.arguments)
    counted = [size for size in loads + stores if not (statistics and size == 4)]
    return Figures(
        max(loads, default=0),
        max(stores, default=0),
        min(counted, default=0),
        registers,
        spills,
        compiled.metadata.shared,
        # Before loads are moved ahead of a loop, where they would count twice.
        _bytes_moved(compiled.asm["ttir"], launch),
    )


def row_tensors(launch: Launch) -> dict[str, Tensor]:
    """Return the arguments of a launch that are rows, ``(R, G, D)``, by name."""
    named = zip(launch.kernel.arg_names, launch.arguments, strict=False)
    rows = _n_rows(launch)
    return {name: a for name, a in named if isinstance(a, Tensor) and a.dim() == 3 and a.shape[0] == rows}


def _n_rows(launch: Launch) -> Any:
    x = dict(zip(launch.kernel.arg_names, launch.arguments, strict=False)).get("x_ptr")
    return None if x is None else x.shape[0]


def _specialise(launch: Launch) -> tuple[dict[str, Any], dict[tuple[int, ...], Any], dict[tuple[int, ...], Any]]:
    """Split the arguments into a signature, constants and attributes, as Triton does at a launch."""
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}

    def specialise(path: tuple[int, ...], value: Any, parameter: Any) -> Any:
        if value is None or (type(value) is int and value == 1 and not parameter.do_not_specialize):
            constants[path] = value
            return "constexpr"
        if isinstance(value, tuple):
            return tuple(specialise((*path, i), v, parameter) for i, v in enumerate(value))
        if isinstance(value, Tensor):
            attributes[path] = [["tt.divisibility", 16]]
            return _POINTERS[value.dtype]
        if isinstance(value, int):
            if value % 16 == 0 and not parameter.do_not_specialize:
                attributes[path] = [["tt.divisibility", 16]]
            return "i32" if -(2**31) <= value < 2**31 else "i64"
        return "fp32"

    signature: dict[str, Any] = {}
    for index, parameter in enumerate(launch.kernel.params):
        if parameter.is_constexpr:
            signature[parameter.name] = "constexpr"
            constants[(index,)] = launch.options[parameter.name]
        else:
            signature[parameter.name] = specialise((index,), launch.arguments[index], parameter)
    return signature, constants, attributes


def _bytes_moved(ttir: str, launch: Launch) -> float:
    """Add up, from the IR, the bytes of row tensors that a program loads and stores, for each of its rows."""
    rows = row_tensors(launch)
    # Where programs share the columns of a row, or a loop over them has an end that is no constant, all of it is moved.
    whole = not {"n_parts", "n_cols"}.isdisjoint(launch.kernel.arg_names)
    total = 0.0
    for name, lanes, size, trips in _accesses(ttir):
        if name in rows and len(lanes) == 2:
            # Lanes past the end of a row are masked off.
            width = rows[name].shape[-1]
            total += size * (width if whole else min(lanes[1] * trips, width))
    groups = next(iter(rows.values())).shape[1] if rows else 1
    return total * groups


def _accesses(ttir: str) -> Iterator[tuple[str, tuple[int, ...], int, int]]:
    """Yield each access: the argument that it goes to, its tile, the bytes of an element, and how often it is done.

    A loop whose bounds are not constants goes along rows, not columns, and counts once.
    """
    roots: dict[str, str] = {}
    constants: dict[str, int] = {}
    loops: list[int] = []
    for raw in ttir.splitlines():
        line = re.sub(r"\s*loc\(.*", "", raw).strip()
        if line.startswith("tt.func"):
            roots = {f"%{name}": name for name in re.findall(r"%(\w+): !tt\.ptr", raw)}
        if line.startswith("}") and loops:
            loops.pop()
        result = re.match(rf"({_VALUE})(?::\d+)? = (.*)", line)
        operands = re.findall(_VALUE, result[2] if result else line)
        if found := re.match(r"%(\w+) = arith\.constant (-?\d+) : i\d+", line):
            constants[f"%{found[1]}"] = int(found[2])
        yield from _access(line, roots, loops)
        for value, start in re.findall(rf"({_VALUE}) = ({_VALUE})(?=[,)])", line):
            if start in roots:
                roots[value] = roots[start]
        if result and operands and operands[0] in roots:
            roots[result[1]] = roots[operands[0]]
        if line.endswith("{"):
            trips = 1
            if found := re.search(rf"scf\.for {_VALUE} = ({_VALUE}) to ({_VALUE}) step ({_VALUE})", line):
                bounds = [constants.get(found[i]) for i in (1, 2, 3)]
                if None not in bounds:
                    low, high, step = (bound or 0 for bound in bounds)
                    trips = max(0, -(-(high - low) // step))
            loops.append(trips)


def _access(line: str, roots: dict[str, str], loops: list[int]) -> Iterator[tuple[str, tuple[int, ...], int, int]]:
    found = re.search(r"(?:tt\.load|tt\.store) (.*)", line)
    if not found:
        return
    tensor = re.findall(_TENSOR, found[1])
    pointer = next((roots[value] for value in re.findall(_VALUE, found[1]) if value in roots), None)
    if not tensor or pointer is None:
        return
    trips = 1
    for loop in loops:
        trips *= loop
    shape, element = tensor[-1]
    yield pointer, tuple(int(n) for n in shape.split("x") if n), _SIZES[element], trips


def _read_ptx(ptx: str, architecture: int) -> tuple[list[int], list[int], int, int]:
    """Read the accesses from PTX; ask the assembler that Triton brings for registers and spills."""
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
    # Copies to shared memory that a loop's earlier iterations start.
    ahead = re.findall(r"\bcp\.async\.c[ag]\.shared\.global\S* \[[^]]*\], \[[^]]*\], 0x(\w+)", ptx)
    loads = access_bytes("ld") + [int(size, 16) for size in ahead]
    return loads, access_bytes("st"), int(registers[1]), int(spills[1]) + int(spills[2])


def _read_amdgcn(text: str) -> tuple[list[int], list[int], int, int]:
    """Read accesses, registers and spills from AMD assembly."""

    def access_bytes(operation: str) -> list[int]:
        found = re.findall(rf"\b(?:global|buffer|flat)_{operation}_(?:dword(?:x(\d))?|[a-z]*(short|byte))", text)
        return [{"short": 2, "byte": 1}.get(part, 4 * int(lanes or 1)) for lanes, part in found]

    registers = re.search(r"\.vgpr_count:\s+(\d+)", text)
    spills = re.search(r"\.vgpr_spill_count:\s+(\d+)", text)
    if registers is None or spills is None:
        raise RuntimeError("expected .vgpr_count and .vgpr_spill_count in the assembly, found none")
    return access_bytes("load"), access_bytes("store"), int(registers[1]), int(spills[1])
