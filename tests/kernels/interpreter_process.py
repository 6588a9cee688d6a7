"""Run cases in Triton's interpreter, in a process of its own: ``python interpreter_process.py RESULTS [slow]``.

Triton decides at its import whether it interprets, so the process that compiles kernels in the tests cannot. The
results go to a file by the name of the case; a case that raised leaves its traceback there instead.
"""

from __future__ import annotations

import sys
import traceback
from typing import Any

import normswap_kernels
import torch
from norm_cases import Case, covering_cases
from normswap_kernels import layer_norm, rms_norm

OPERATIONS = {"rms": rms_norm, "layer": layer_norm}

# The case of the grid that is too large for every run: the widest rows, most of them.
SLOW_CASES = [
    Case(kind, 65537, 300, "contiguous", torch.bfloat16, torch.bfloat16, 0.0, None, kind == "rms", False)
    for kind in OPERATIONS
]


def special_values() -> torch.Tensor:
    """Give float32 numbers that are hard to round to bfloat16: ties, neighbours of ties, denormals, NaNs, limits."""
    high = torch.tensor([0, 1, 0x3F80, 0x3F81, 0x7F7F, 0x7F80, 0x0080, 0x007F, 0x4049, 0xFF7F - 65536, 0x8001 - 65536])
    low = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    bits = (high[:, None] * 65536 + low).flatten()
    random = torch.randint(-(2**31), 2**31, (4096,), generator=torch.Generator().manual_seed(0))
    return torch.cat([bits, random]).to(torch.int32).view(torch.float32)


def rounded_by_kernel(values: torch.Tensor) -> torch.Tensor:
    """Round float32 to bfloat16 with the kernels' own helper."""
    import triton
    import triton.language as tl
    from normswap_kernels.epilogue import round_to

    @triton.jit
    def _round_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + at, mask=at < n, other=0.0)
        tl.store(y_ptr + at, round_to(x, tl.bfloat16, True), mask=at < n)

    _round_kernel.fn.__globals__["round_to"] = round_to
    _round_kernel.fn.__globals__["tl"] = tl
    out = torch.full(values.shape, 7.0, dtype=torch.bfloat16)
    _round_kernel[(triton.cdiv(values.numel(), 1024),)](values, out, values.numel(), 1024)
    return out


def batch_invariance() -> dict[str, bool]:
    """Say for each norm whether rows come out the same alone, in a batch, and beside NaN and infinity."""
    found = {}
    for name, operation in OPERATIONS.items():
        for width in (3, 128, 1000, 20000):
            x = torch.randn(37, width, generator=torch.Generator().manual_seed(width))
            batch = operation(x, eps=1e-6, backend="interpret")
            alone = torch.cat([operation(x[i : i + 1], eps=1e-6, backend="interpret") for i in range(len(x))])
            x[1], x[3] = torch.nan, torch.inf
            beside = operation(x, eps=1e-6, backend="interpret")
            keep = [i for i in range(len(x)) if i not in (1, 3)]
            same = torch.equal(batch, alone) and torch.equal(batch[keep], beside[keep])
            found[f"{name}-{width}"] = same and bool(beside[[1, 3]].isnan().any(-1).all())
    return found


def main() -> None:
    # The first use of the backend is what switches the interpreter on.
    assert normswap_kernels.check_backend("interpret", "cpu") == "interpret"
    cases = SLOW_CASES if "slow" in sys.argv else [c for kind in OPERATIONS for c in covering_cases(kind)]
    results: dict[str, Any] = {}
    empty = torch.empty

    def poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
        made = empty(*args, **kwargs)
        return made.fill_(torch.nan) if made.is_floating_point() else made

    torch.empty = poisoned
    for case in cases:
        try:
            results[str(case)] = case.call(OPERATIONS[case.kind], "interpret")
        except Exception:
            results[str(case)] = traceback.format_exc()
    torch.empty = empty
    if "slow" not in sys.argv:
        results["rounding"] = rounded_by_kernel(special_values())
        results["invariance"] = batch_invariance()
        try:
            rms_norm(torch.ones(1, 4), eps=1e-6, backend="triton")
        except normswap_kernels.BackendUnavailable as error:
            results["explicit triton"] = str(error)
    torch.save(results, sys.argv[1])


if __name__ == "__main__":
    main()
