"""Cases for the norms, and what a right result is; shared by the tests and by the interpreter's process."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, fields
from typing import Any

import torch
from normswap_kernels.reference import exact, rounded
from torch import Tensor

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
EPS = 1e-6

CHOICES: dict[str, tuple[Any, ...]] = {
    "width": (1, 2, 3, 64, 127, 128, 576, 1000, 4096, 8192, 16384, 65537),
    "rows": (0, 1, 7, 300),
    "layout": ("contiguous", "sliced", "transposed", "expanded"),
    "dtype": (FP32, FP16, BF16),
    "gain": (None, FP32, FP16, BF16),
    "offset": (0.0, 1.0),
    "bias": (None, FP32, BF16),
    "twice": (False, True),
    "wide_out": (False, True),
}


@dataclass(frozen=True)
class Case:
    """One call of a norm."""

    kind: str
    width: int
    rows: int
    layout: str
    dtype: torch.dtype
    gain: torch.dtype | None
    offset: float
    bias: torch.dtype | None
    twice: bool
    wide_out: bool

    def __str__(self) -> str:
        shown = [self.kind, f"{self.rows}x{self.width}", self.layout, _short(self.dtype)]
        shown.append(f"{'1+' if self.offset else ''}w.{_short(self.gain)}")
        shown += [f"b.{_short(self.bias)}", "twice" if self.twice else "once"]
        return "-".join(shown + ["fp32out"] * self.wide_out)

    @property
    def middle(self) -> torch.dtype | None:
        return self.dtype if self.twice else None

    @property
    def out(self) -> torch.dtype:
        return FP32 if self.wide_out else self.dtype

    def inputs(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Make the inputs, the same in every process."""
        generator = torch.Generator().manual_seed(sum(map(ord, str(self))))

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        scale = torch.logspace(-2, 2, max(self.rows, 1)).unsqueeze(1)[: self.rows]
        if self.layout == "expanded":
            x = (draw(1, self.width) + 0.5).to(self.dtype).expand(self.rows, self.width)
        else:
            x = ((draw(self.rows, self.width) + 0.5) * scale).to(self.dtype)
            if self.layout == "sliced":
                x = torch.cat([x, torch.full((self.rows, 5), torch.nan, dtype=self.dtype)], 1)[:, : self.width]
            elif self.layout == "transposed":
                x = x.t().contiguous().t()
        gain = None if self.gain is None else draw(self.width).to(self.gain)
        bias = None if self.bias is None else draw(self.width).to(self.bias)
        return x, gain, bias

    def call(self, operation: Any, backend: str) -> Tensor:
        """Call ``rms_norm`` or ``layer_norm`` on the case's inputs."""
        result: Tensor = operation(
            *self.inputs(),
            eps=EPS,
            offset=self.offset,
            round_dtype=self.middle,
            out_dtype=self.out,
            backend=backend,
        )
        return result


def covering_cases(kind: str, most_elements: int = 5_000_000) -> list[Case]:
    """Choose cases so that every two choices of two options meet in one of them, where they fit the size."""
    generator = random.Random(0)
    names = list(CHOICES)

    def fits(values: dict[str, Any]) -> bool:
        return values["rows"] * values["width"] <= most_elements

    todo = {
        ((a, i), (b, j))
        for a, b in itertools.combinations(names, 2)
        for i, j in itertools.product(range(len(CHOICES[a])), range(len(CHOICES[b])))
        if {a, b} != {"rows", "width"} or fits({a: CHOICES[a][i], b: CHOICES[b][j]})
    }
    cases: list[Case] = []
    while todo:
        best: tuple[int, dict[str, int]] = (-1, {})
        seed = min(todo)
        for _ in range(30):
            pick = {name: generator.randrange(len(CHOICES[name])) for name in names} | dict(seed)
            if not fits({name: CHOICES[name][pick[name]] for name in ("rows", "width")}):
                continue
            covered = sum(pick[a] == i and pick[b] == j for (a, i), (b, j) in todo)
            best = max(best, (covered, pick), key=lambda entry: entry[0])
        pick = best[1]
        if not pick:
            continue
        todo = {pair for pair in todo if not all(pick[name] == value for name, value in pair)}
        cases.append(Case(kind, **{name: CHOICES[name][pick[name]] for name in names}))
    assert {field.name for field in fields(Case)} == {"kind", *names}
    return cases


def check(case: Case, result: Tensor) -> None:
    """Hold a result to the two bounds: the error budget against float64, and units against the oracle."""
    x, gain, bias = case.inputs()
    assert result.shape == x.shape
    assert result.dtype == case.out
    if not case.rows:
        return
    if case.layout == "expanded":
        assert torch.equal(result, result[:1].expand_as(result))
        x, result = x[:1], result[:1]
    options = {"eps": EPS, "offset": case.offset}
    truth = exact(case.kind, x, gain, bias, **options)
    oracle = rounded(case.kind, x, gain, bias, round_dtype=case.middle, out_dtype=case.out, **options)
    cancelled = torch.zeros_like(truth)
    if case.twice and bias is not None:
        # A unit of the product, which is rounded before the bias is added, can be many units of the sum.
        cancelled = 2 * torch.finfo(case.out).eps * (truth - bias.double()).abs()
    check_bounds(case.kind, result, oracle, truth, case.twice, cancelled)


def check_bounds(
    kind: str, result: Tensor, oracle: Tensor, truth: Tensor, twice: bool, cancelled: Tensor | float = 0.0
) -> None:
    """Hold ``result`` to the budget ``2 * (|oracle - truth| + one rounding)`` and to the unit bound."""
    assert torch.isfinite(result).all(), "the result is not finite where the oracle is"
    out = result.dtype
    own = (oracle.double() - truth).abs().amax(-1, keepdim=True)
    # Sums in another order differ by a few roundings of float32, whatever the output.
    order = 8 * torch.finfo(FP32).eps * truth.abs().amax(-1, keepdim=True)
    budget = 2 * (own + torch.finfo(out).eps / 2 * truth.abs() + order)
    excess = ((result.double() - truth).abs() - budget).max().item()
    assert excess <= 0, f"{kind}: the error passes its budget by {excess:.3g}"
    if out == FP32:
        return
    distance = ulps(result, oracle)
    # Beside a cancelled bias a unit of the result is smaller than float32 resolves.
    counted = (result.double() - oracle.double()).abs() > order + cancelled
    most = int((distance * counted).max())
    assert most <= 1 + twice, f"{kind}: {most} units from the oracle, at most {1 + twice} allowed"
    different = int((distance > 0).sum())
    share = 1e-4 if out == BF16 else 1e-3
    allowed = max(2, int(share * result.numel()))
    assert different <= allowed, f"{kind}: {different} of {result.numel()} elements differ, {allowed} allowed"


def ulps(a: Tensor, b: Tensor) -> Tensor:
    """Count the representable numbers between two tensors of one 16-bit dtype."""

    def ordered(t: Tensor) -> Tensor:
        bits = t.contiguous().view(torch.int16).int()
        return torch.where(bits < 0, -32768 - bits, bits)

    return (ordered(a) - ordered(b)).abs()


def _short(dtype: torch.dtype | None) -> str:
    return {None: "none", FP32: "fp32", FP16: "fp16", BF16: "bf16"}[dtype]
