"""Cases for the norms, and what a right result is; shared by the tests and by the interpreter's process."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, TypeVar

import torch
from normswap_kernels.formula import Formula
from normswap_kernels.reference import exact, rounded
from torch import Tensor

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
EPS = 1e-6
HEADS = 3
GROUPS = 4

CHOICES: dict[str, tuple[Any, ...]] = {
    "kind": ("rms", "layer"),
    "width": (1, 2, 3, 64, 127, 128, 576, 1000, 4096, 8192, 16384, 20000, 65537),
    "rows": (0, 1, 7, 130),
    "structure": ("plain", "groups", "heads"),
    "layout": ("contiguous", "sliced", "transposed", "expanded"),
    "dtype": (FP32, FP16, BF16),
    "gain": (None, FP32, FP16, BF16),
    "offset": (0.0, 1.0),
    "bias": (None, FP32, BF16),
    "roundings": ("none", "middle", "product", "both"),
    "wide_out": (False, True),
    "partial": (False, True),
    "eps": (EPS, 0.5),
    "eps_position": ("inside", "outside", "clamp"),
    "reduction": ("mean", "sum"),
    "residual": (None, "same", "other"),
    "wide_sum": (False, True),
    "gate": ("none", "before", "after"),
    "gate_dtype": ("same", "other"),
    "activation": ("silu", "sigmoid"),
    "save": (False, True),
}

# Of an RMSNorm without gate: a rounding of its scale, which has grids of its own. eps keeps the scale within float16.
SCALED: dict[str, tuple[Any, ...]] = {
    "kind": ("rms",),
    "residual": (None,),
    "gate": ("none",),
    "eps": (1e-4, 0.5),
    "scale": (FP16, BF16),
}

# What an option needs to do anything: another option, and the choice of that one which leaves it idle.
NEEDS: dict[str, tuple[str, Any]] = {
    "offset": ("gain", None),
    "wide_sum": ("residual", None),
    "gate_dtype": ("gate", "none"),
    "activation": ("gate", "none"),
}


class Inputs(NamedTuple):
    """The tensors of one call, in the order of the implementations."""

    x: Tensor
    residual: Tensor | None
    gate: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


@dataclass(frozen=True)
class Case:
    """One call of a norm; ``width`` is the length of a row, of which a vector may hold several."""

    kind: str
    width: int
    rows: int
    structure: str = "plain"
    layout: str = "contiguous"
    dtype: torch.dtype = BF16
    gain: torch.dtype | None = None
    offset: float = 0.0
    bias: torch.dtype | None = None
    roundings: str = "none"
    scale: torch.dtype | None = None
    wide_out: bool = False
    partial: bool = False
    eps: float = EPS
    eps_position: str = "inside"
    reduction: str = "mean"
    residual: str | None = None
    wide_sum: bool = False
    gate: str = "none"
    gate_dtype: str = "same"
    activation: str = "silu"
    save: bool = False

    def __str__(self) -> str:
        shown = [self.kind, f"{self.rows}x{self.width}", self.structure, self.layout, _short(self.dtype)]
        shown.append(f"{'1+' if self.offset else ''}w.{_short(self.gain)}")
        shown += [f"b.{_short(self.bias)}", f"round.{self.roundings}"]
        shown += [f"scale.{_short(self.scale)}"] * (self.scale is not None)
        shown += ["fp32out"] * self.wide_out + ["partial"] * self.partial + ["save"] * self.save
        shown.append(f"{self.reduction}.{self.eps_position}.{self.eps:g}")
        if self.residual is not None:
            shown.append(f"add.{self.residual}{'.fp32sum' if self.wide_sum else ''}")
        if self.gate != "none":
            shown.append(f"{self.gate}.{self.activation}.{self.gate_dtype}")
        return "-".join(shown)

    @property
    def twice(self) -> bool:
        """Whether the normalised row is rounded before the gain."""
        return self.roundings in ("middle", "both")

    @property
    def out(self) -> torch.dtype:
        return FP32 if self.wide_out else self.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the input."""
        if self.structure == "heads":
            return self.rows, HEADS, self.width
        return self.rows, self.width * (GROUPS if self.structure == "groups" else 1)

    def formula(self) -> Formula:
        """Say in a formula what the case computes."""
        return Formula(
            self.kind,  # type: ignore[arg-type]
            self.eps,
            self.offset,
            self.dtype if self.twice else None,
            self.out if self.roundings in ("product", "both") else None,
            self.out,
            GROUPS if self.structure == "groups" else 1,
            max(1, self.width // 3) if self.partial else 0,
            self.eps_position,  # type: ignore[arg-type]
            self.reduction,  # type: ignore[arg-type]
            self.gate,  # type: ignore[arg-type]
            self.activation,  # type: ignore[arg-type]
            None if self.residual is None else FP32 if self.wide_sum else self._other(self.residual),
            self.scale,
        )

    def inputs(self) -> Inputs:
        """Make the inputs, the same in every process."""
        generator = torch.Generator().manual_seed(sum(map(ord, str(self))))
        rows, *inner = self.shape
        length = inner[0] * inner[-1] if len(inner) == 2 else inner[0]
        scale = torch.logspace(-2, 2, max(rows, 1)).unsqueeze(1)[:rows]

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        def arrange(t: Tensor, layout: str) -> Tensor:
            if layout == "sliced":
                t = torch.cat([t, torch.full((rows, 5), torch.nan, dtype=t.dtype)], 1)[:, :length]
            elif layout == "transposed":
                t = t.t().contiguous().t()
            return t.unflatten(1, inner) if len(inner) == 2 else t

        def parameter(dtype: torch.dtype | None) -> Tensor | None:
            return None if dtype is None else draw(*inner).to(dtype)

        if self.layout == "expanded":
            x = arrange((draw(1, length) + 0.5).to(self.dtype).expand(rows, length), self.layout)
        else:
            x = arrange(((draw(rows, length) + 0.5) * scale).to(self.dtype), self.layout)
        weight, bias = parameter(self.gain), parameter(self.bias)
        residual = gate = None
        if self.residual is not None:
            residual = arrange((draw(rows, length) * scale).to(self._other(self.residual)), self.layout)
        if self.gate != "none":
            # In the models a gate is often a slice of one projection, beside rows of their own.
            layout = "contiguous" if self.layout == "contiguous" else "sliced"
            gate = arrange(draw(rows, length).to(self._other(self.gate_dtype)), layout)
        return Inputs(x, residual, gate, weight, bias)

    def _other(self, choice: str) -> torch.dtype:
        if choice == "same":
            return self.dtype
        return BF16 if self.dtype == FP32 else FP32


AnyCase = TypeVar("AnyCase", bound=Case)


def covering_cases(
    most_elements: int = 2_000_000, choices: dict[str, tuple[Any, ...]] = CHOICES, case_type: type[AnyCase] = Case
) -> list[AnyCase]:
    """Choose cases so that every two choices of two options meet in one of them, where they can.

    Args:
        most_elements: of an input.
        choices: of each option of a case.
        case_type: what to make of them.
    """
    generator = random.Random(0)
    names = list(choices)

    def possible(pick: dict[str, int]) -> bool:
        values = {name: choices[name][index] for name, index in pick.items()}
        lengths = {"plain": 1, "groups": GROUPS, "heads": HEADS}
        size = values.get("rows", 0) * values.get("width", 0) * lengths[values.get("structure", "plain")]
        rms_alone = values.get("partial") or values.get("reduction") == "sum"
        return size <= most_elements and not (values.get("kind") == "layer" and rms_alone)

    def live(pick: dict[str, int]) -> dict[str, int]:
        idle = {
            option for option, (need, without) in NEEDS.items() if need in pick and choices[need][pick[need]] == without
        }
        return {name: index for name, index in pick.items() if name not in idle}

    def can_live(name: str) -> bool:
        need, without = NEEDS.get(name, (name, None))
        return name not in NEEDS or any(choice != without for choice in choices[need])

    todo = {
        ((a, i), (b, j))
        for a, b in itertools.combinations([name for name in names if can_live(name)], 2)
        for i, j in itertools.product(range(len(choices[a])), range(len(choices[b])))
        if possible({a: i, b: j}) and len(live({a: i, b: j})) == 2
    }
    cases: list[AnyCase] = []
    while todo:
        best: tuple[int, dict[str, int]] = (0, {})
        seed = dict(min(todo))
        for _ in range(60):
            pick = live({name: generator.randrange(len(choices[name])) for name in names} | seed)
            if possible(pick):
                covered = sum(pick.get(a) == i and pick.get(b) == j for (a, i), (b, j) in todo)
                best = max(best, (covered, pick), key=lambda entry: entry[0])
        pick = best[1]
        if not best[0]:
            raise ValueError(f"no case was found in which {seed} meet")
        todo = {pair for pair in todo if not all(pick.get(name) == index for name, index in pair)}
        if pick:
            cases.append(case_type(**{name: choices[name][index] for name, index in pick.items()}))
    assert {field.name for field in fields(case_type)} == {*names, "scale"}
    return cases


def public_cases(
    choices: dict[str, tuple[Any, ...]] = CHOICES, case_type: type[AnyCase] = Case, most_elements: int = 150_000
) -> list[AnyCase]:
    """Choose cases for each public operation by itself, of its own options, as `covering_cases` does for all at once.

    Args:
        choices: of each option of a case; the widths and numbers of rows are fewer than there.
        case_type: what to make of them.
        most_elements: of an input.
    """
    sizes = {"width": (1, 3, 64, 127, 128, 1000, 4096, 20000), "rows": (1, 7, 40)}
    plain = {"residual": (None,), "gate": ("none",)}
    usual = {"eps_position": ("inside",), "reduction": ("mean",), "partial": (False,)}
    added = {"residual": ("same", "other"), "gate": ("none",), "structure": ("plain", "heads"), **usual}
    gated = {"kind": ("rms",), "residual": (None,), "gate": ("before", "after"), "bias": (None,), **usual}
    # The moment of a LayerNorm is the mean of all.
    operations = [
        {"kind": ("rms",), **plain},
        {"kind": ("layer",), **plain, "reduction": ("mean",), "partial": (False,)},
        SCALED,
    ]
    operations += [{"kind": ("rms",), **added}, {"kind": ("layer",), **added}, gated]
    cases = [c for own in operations for c in covering_cases(most_elements, {**choices, **sizes, **own}, case_type)]
    return list({str(case): case for case in cases}.values())


def check(case: Case, result: Tensor, summed: Tensor | None = None) -> None:
    """Hold a result to the two bounds: the error budget against float64, and units against the oracle.

    The sum with the residual must be the oracle's bit for bit: one addition in float32 and one rounding.
    """
    formula, inputs = case.formula(), case.inputs()
    assert result.shape == inputs.x.shape
    assert result.dtype == case.out
    assert (summed is None) == (inputs.residual is None)
    if not case.rows:
        return
    if case.layout == "expanded" and case.residual is None and case.gate == "none":
        assert torch.equal(result, result[:1].expand_as(result))
        inputs, result = inputs._replace(x=inputs.x[:1]), result[:1]
    x, residual, gate, weight, bias = inputs
    truth, _ = exact(formula, x, weight, bias, residual=residual, gate=gate)
    oracle, total = rounded(formula, x, weight, bias, residual=residual, gate=gate)
    if summed is not None:
        assert summed.dtype == formula.sum_dtype
        assert torch.equal(summed, total), "the sum with the residual differs from the oracle's"
    cancelled = torch.zeros_like(truth)
    rounded_before = case.twice + (case.roundings in ("product", "both") and weight is not None)
    if rounded_before and bias is not None:
        # A unit of the product, which is rounded before the bias is added, can be many units of the sum.
        product, _ = exact(formula, x, weight, None, residual=residual, gate=gate)
        cancelled = 2 * torch.finfo(case.out).eps * product.abs()
    check_bounds(case.kind, result, oracle, truth, rounded_before + (case.scale is not None), cancelled)


def check_statistics(case: Case, scale: Tensor, mean: Tensor | None) -> None:
    """Hold the saved statistics, ``(rows, groups or heads)``, to a few roundings of float32."""
    formula, inputs = case.formula(), case.inputs()
    assert (mean is not None) == (case.kind == "layer")
    # A norm without gain, eps inside and all its roundings off is the row times its scale.
    _, v = exact(formula, inputs.x, residual=inputs.residual)
    if inputs.gate is not None and case.gate == "before":
        gate = inputs.gate.double()
        v = v * torch.sigmoid(gate) * (gate if case.activation == "silu" else 1.0)
    v = v.reshape(case.rows, -1, case.width)
    centre = v.mean(-1)
    if mean is not None:
        assert ((mean.double() - centre).abs() <= 16 * torch.finfo(FP32).eps * v.abs().mean(-1)).all()
        v = v - centre.unsqueeze(-1)
    moment = v[..., : formula.partial or None].square().sum(-1)
    if case.reduction == "mean":
        moment = moment / (formula.partial or case.width)
    below = {
        "inside": (moment + case.eps).sqrt(),
        "outside": moment.sqrt() + case.eps,
        "clamp": moment.sqrt().clamp_min(case.eps),
    }[case.eps_position]
    error = (scale.double() * below - 1).abs()
    assert (error <= 16 * torch.finfo(FP32).eps * (1 + centre.abs() / below)).all(), f"scale is off by {error.max()}"


def check_bounds(
    kind: str, result: Tensor, oracle: Tensor, truth: Tensor, rounded_before: int, cancelled: Tensor | float = 0.0
) -> None:
    """Hold ``result`` to the budget ``2 * (|oracle - truth| + one rounding)`` and to the unit bound.

    The unit bound is one unit for each rounding: ``rounded_before`` before the last, and the last.
    """
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
    assert most <= 1 + rounded_before, f"{kind}: {most} units from the oracle, at most {1 + rounded_before} allowed"
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
