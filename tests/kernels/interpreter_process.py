"""Run cases in Triton's interpreter, in a process of its own: ``python interpreter_process.py RESULTS [slow]``.

Triton decides at its import whether it interprets, so the process that compiles kernels in the tests cannot. The
results go to a file by the name of the case; a case that raised leaves its traceback there instead. All memory that
a kernel writes is full of NaN before (of 99 where there is none), so that an unwritten lane cannot pass.
"""

from __future__ import annotations

import importlib
import itertools
import sys
import traceback
from typing import Any

import normswap_kernels
import torch
from norm_cases import BF16, CHOICES, FP16, FP32, Case, covering_cases, public_cases
from normswap_kernels.formula import Formula
from normswap_kernels.rows import find_rows
from torch import Tensor

CASES = [*covering_cases(), *public_cases()]
QUANTIZED_CASES = covering_cases(
    choices={
        **CHOICES,
        "kind": ("rms",),
        "width": (1, 3, 127, 1000, 4096, 20000),
        "rows": (0, 1, 7, 100),
        "structure": ("plain",),
        "partial": (False,),
        "eps_position": ("inside",),
        "reduction": ("mean",),
        "residual": (None,),
        "wide_sum": (False,),
        "gate": ("none",),
        "gate_dtype": ("same",),
        "activation": ("silu",),
        "save": (False,),
    }
)
QUANTIZED_DTYPES = (torch.int8, torch.float8_e4m3fn)
# The widest rows and every kernel's loop.
SLOW_CASES = [
    Case("rms", 65537, 60, dtype=BF16, gain=BF16, roundings="middle", save=True),
    Case("layer", 65537, 60, dtype=BF16, gain=BF16, bias=BF16, save=True),
    Case("rms", 70000, 20, "groups", dtype=BF16, gain=FP32, residual="same", gate="before"),
    Case("rms", 131072, 20, "heads", dtype=FP16, gain=FP16, residual="same", gate="after", wide_sum=True),
]
SPECIAL_WIDTHS = (3, 300, 20000)
FAR = 2**30 + 63
"""Elements between rows, or between columns, of which the third begins past 2**31; odd, as 16 of them would be one."""


def forward(
    formula: Formula, x: Tensor, *, gate: Tensor | None = None, weight: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """Normalise ``(R, D)`` rows."""
    y = torch.full((x.size(0), 1, x.size(1)), torch.nan, dtype=formula.out_dtype)
    tensors = [None if t is None else t.unsqueeze(-2) for t in (x, None, gate, weight, bias)]
    _module("norm_forward").forward(formula, *tensors, y, None, None, None, interpret=True)
    return y.squeeze(1)


def run(case: Case) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Return the result, the sum with the residual, and the statistics (rows, groups or heads) that are saved."""
    formula, inputs = case.formula(), case.inputs()
    rows = find_rows(inputs.x, formula.groups, case.structure == "heads")
    shape = rows.shape

    def poisoned(size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.full(size, torch.nan, dtype=dtype)

    x, residual, gate = (None if t is None else rows.view(t) for t in inputs[:3])
    weight, bias = (None if t is None else t.view(shape[1:]) for t in inputs[3:])
    y = poisoned(shape, formula.out_dtype)
    summed = None if formula.sum_dtype is None else poisoned(shape, formula.sum_dtype)
    scale = poisoned(shape[:2], FP32) if case.save else None
    mean = poisoned(shape[:2], FP32) if case.save and case.kind == "layer" else None
    _module("norm_forward").forward(formula, x, residual, gate, weight, bias, y, summed, scale, mean, interpret=True)
    full = inputs.x.shape
    return y.view(full), None if summed is None else summed.view(full), scale, mean


def quantize(
    formula: Formula, dtype: torch.dtype, x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return values (as bytes), scales, and the result of the norm that does not quantize."""
    values = torch.full(x.shape, 99, dtype=torch.int8).view(dtype).unsqueeze(1)
    scales = torch.full((x.size(0), 1), torch.nan)
    weight_row, bias_row = (None if t is None else t.unsqueeze(0) for t in (weight, bias))
    _module("norm_quant").quantize(formula, x.unsqueeze(1), weight_row, bias_row, values, scales, interpret=True)
    return values.squeeze(1).view(torch.int8), scales, forward(formula, x, weight=weight, bias=bias)


def special_values() -> Tensor:
    """Give float32 numbers that are hard to round to bfloat16: ties, neighbours of ties, denormals, NaNs, limits."""
    high = torch.tensor([0, 1, 0x3F80, 0x3F81, 0x7F7F, 0x7F80, 0x0080, 0x007F, 0x4049, 0xFF7F - 65536, 0x8001 - 65536])
    low = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    bits = (high[:, None] * 65536 + low).flatten()
    random = torch.randint(-(2**31), 2**31, (4096,), generator=torch.Generator().manual_seed(0))
    return torch.cat([bits, random]).to(torch.int32).view(torch.float32)


def quantizable_values() -> Tensor:
    """Give float32 numbers within +-448: all of bfloat16, between them, and halves of integers."""
    every = torch.arange(2**16).to(torch.uint16).view(torch.bfloat16).float()
    within = every[every.abs() <= 448]
    between = within + torch.rand(len(within), generator=torch.Generator().manual_seed(0)) * within / 128
    return torch.cat([within, between.clamp(-448, 448), torch.arange(-896, 897) / 2, torch.arange(-896, 897) / 1024])


def special_rows(width: int, dtype: torch.dtype) -> Tensor:
    """Give rows of one value or of several: zero, denormal, huge, infinite, NaN."""
    limits = torch.finfo(dtype)
    plain = torch.randn(width, generator=torch.Generator().manual_seed(width))
    rows = [plain * 0, plain * limits.smallest_normal, plain.clamp(-1, 1) * limits.max, plain * 0 + limits.max, plain]
    for special in (torch.inf, -torch.inf, torch.nan):
        rows.append(torch.cat([torch.tensor([special]), plain[1:]]))
    return torch.stack(rows).to(dtype)


def special_formula(kind: str, dtype: torch.dtype, eps: float = 1e-6) -> Formula:
    """Say what `special_rows` are normalised by."""
    return Formula(kind, eps, 0.0, dtype, None, dtype)  # type: ignore[arg-type]


def apply_helper(module: str, name: str, values: Tensor, out: Tensor, *constants: Any) -> Tensor:
    """Apply one of the kernels' own helpers to each value."""
    import triton
    import triton.language as tl

    @triton.jit
    def _apply_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + at, mask=at < n, other=0.0)
        tl.store(y_ptr + at, helper(x, *constants), mask=at < n)  # noqa: F821

    # The interpreter compiles the source anew, without what it closes over.
    _apply_kernel.fn.__globals__.update(tl=tl, helper=getattr(_module(module), name), constants=constants)
    _apply_kernel[(triton.cdiv(values.numel(), 1024),)](values, out, values.numel(), 1024)
    return out


def batch_invariance() -> dict[str, bool]:
    """Say for each norm whether rows come out the same alone, in a batch, and beside NaN and infinity."""
    found = {}
    for kind in ("rms", "layer"):
        for width in (3, 128, 1000, 20000):
            for gate in ("none", "before"):
                formula = Formula(kind, 1e-6, 0.0, None, None, FP32, gate_position=gate)  # type: ignore[arg-type]
                generator = torch.Generator().manual_seed(width)
                x = torch.randn(37, width, generator=generator)
                g = None if gate == "none" else torch.randn(37, width, generator=generator)
                batch = forward(formula, x, gate=g)
                alone = [forward(formula, x[i : i + 1], gate=None if g is None else g[i : i + 1]) for i in range(37)]
                x[1], x[3] = torch.nan, torch.inf
                beside = forward(formula, x, gate=g)
                keep = [i for i in range(37) if i not in (1, 3)]
                same = torch.equal(batch, torch.cat(alone)) and torch.equal(batch[keep], beside[keep])
                found[f"{kind}-{width}-{gate}"] = same and bool(beside[[1, 3]].isnan().any(-1).all())
    return found


def far_apart() -> dict[str, bool | str]:
    """Say whether rows and columns that begin past 2**31 elements are found; memory is reserved but hardly touched."""
    try:
        memory = torch.empty(2 * FAR + 4096, dtype=torch.bfloat16)
    except RuntimeError as error:
        return {"memory": str(error)}
    found: dict[str, bool | str] = {}
    for name, shape, strides in (("rows", (3, 64), (FAR, 1)), ("columns", (64, 3), (1, FAR))):
        x = memory.as_strided(shape, strides)
        x.copy_(torch.randn(shape, generator=torch.Generator().manual_seed(0)))
        formula = Formula("rms", 1e-6, 0.0, None, None, BF16)
        found[name] = torch.equal(forward(formula, x), forward(formula, x.contiguous()))
    return found


def _module(name: str) -> Any:
    return importlib.import_module(f"normswap_kernels.{name}")


def main() -> None:
    # The first use of the backend is what switches the interpreter on.
    assert normswap_kernels.check_backend("interpret", "cpu") == "interpret"
    results: dict[str, Any] = {}
    slow = "slow" in sys.argv
    work: list[tuple[str, Any, tuple[Any, ...]]] = [
        (str(case), run, (case,)) for case in (SLOW_CASES if slow else CASES)
    ]
    if not slow:
        for dtype in QUANTIZED_DTYPES:
            for case in QUANTIZED_CASES:
                x, _, _, weight, bias = case.inputs()
                work.append((f"{case} to {dtype}", quantize, (case.formula(), dtype, x, weight, bias)))
            for width, eps in itertools.product(SPECIAL_WIDTHS, (0.0, 1e-6)):
                arguments = (special_formula("rms", BF16, eps), dtype, special_rows(width, BF16))
                work.append((f"special {width} {eps} to {dtype}", quantize, arguments))
        work += [
            (f"special {kind} {width} {dtype}", forward, (special_formula(kind, dtype), special_rows(width, dtype)))
            for kind in ("rms", "layer")
            for width in SPECIAL_WIDTHS
            for dtype in (FP32, FP16, BF16)
        ]
        work += [("invariance", batch_invariance, ()), ("far", far_apart, ())]
    for name, function, arguments in work:
        try:
            results[name] = function(*arguments)
        except Exception:
            results[name] = traceback.format_exc()
    if not slow:
        values, quantizable = special_values(), quantizable_values()
        tl = importlib.import_module("triton.language")
        results["rounding"] = apply_helper(
            "tiles", "round_to", values, torch.empty_like(values, dtype=BF16), tl.bfloat16, True
        )
        byte = torch.empty_like(quantizable, dtype=torch.int8)
        results["e4m3"] = apply_helper("norm_quant", "_to_e4m3", quantizable, byte.clone())
        results["int8"] = apply_helper("norm_quant", "_quantized", quantizable, byte.clone(), 1.0, 127.0, False)
        try:
            normswap_kernels.rms_norm(torch.ones(1, 4), eps=1e-6, backend="triton")
        except normswap_kernels.BackendUnavailable as error:
            results["explicit triton"] = str(error)
    torch.save(results, sys.argv[1])


if __name__ == "__main__":
    main()
