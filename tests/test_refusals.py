"""docs/refusals.md has every reason that can be given, and none that cannot."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import handwritten
import pytest
import torch
from torch import nn

import normswap
from normswap.plan import make_plan

pytestmark = pytest.mark.core

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = (ROOT / "docs" / "refusals.md").read_text(encoding="utf-8")
HEADINGS = re.findall(r"^### `(.+)`$", DOCUMENT, re.MULTILINE)
REFUSING = ("Unfit", "Refusal")
SOURCES = sorted((ROOT / "normswap").glob("*.py"))


def parsed() -> Iterator[ast.AST]:
    for file in SOURCES:
        yield from ast.walk(ast.parse(file.read_text(encoding="utf-8")))


def refusing_names() -> set[str]:
    """`Unfit`, `Refusal` and what is derived from them."""
    derived = {
        node.name
        for node in parsed()
        if isinstance(node, ast.ClassDef) and any(ast.unparse(base) in REFUSING for base in node.bases)
    }
    return {*REFUSING, *derived}


def templates(node: ast.expr) -> Iterator[str]:
    """Yield the texts that an expression can be, with … for what is filled in."""
    if isinstance(node, ast.IfExp):
        yield from templates(node.body)
        yield from templates(node.orelse)
    elif isinstance(node, ast.Constant):
        yield node.value
    elif isinstance(node, ast.JoinedStr):
        parts = [part.value if isinstance(part, ast.Constant) else "…" for part in node.values]
        yield re.sub("…+", "…", "".join(map(str, parts)))
    elif not (isinstance(node, ast.Call) and ast.unparse(node.func) == "str"):
        # The text of an exception that is handed on was one of these already.
        raise AssertionError(f"line {node.lineno}: expected the reason itself, got {ast.unparse(node)}")


def given_reasons() -> set[str]:
    found: set[str] = set()
    names = refusing_names()
    for node in parsed():
        if not isinstance(node, ast.Call) or not node.args:
            continue
        if isinstance(node.func, ast.Name) and node.func.id in names:
            found |= set(templates(node.args[0]))
        elif ast.unparse(node.func) == "Decision" and ast.unparse(node.args[2]) == "'refuse'":
            found |= set(templates(node.args[3])) if isinstance(node.args[3], ast.Constant) else set()
    return found


def leads_of_code() -> set[str]:
    """How `inline` begins the reasons of norms that are code."""
    (lead,) = [
        node.value
        for node in ast.walk(ast.parse((ROOT / "normswap" / "inline.py").read_text(encoding="utf-8")))
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "lead"
    ]
    return {f"{text}: …" for text in templates(lead)}


def test_every_reason_is_documented() -> None:
    reasons = given_reasons()
    assert len(reasons) > 20 and "it changes its input in place" in reasons
    assert sorted((reasons | leads_of_code()) - set(HEADINGS)) == []


def test_no_reason_is_documented_that_is_not_given() -> None:
    assert sorted(set(HEADINGS) - given_reasons() - leads_of_code()) == []
    assert len(HEADINGS) == len(set(HEADINGS))


def test_every_entry_says_what_to_do_and_gives_an_example() -> None:
    for entry in re.split(r"^### ", DOCUMENT, flags=re.MULTILINE)[1:]:
        entry = re.split(r"^## ", entry, flags=re.MULTILINE)[0]
        text = " ".join(entry.split())
        assert "*To do:*" in text and "*Example:*" in text, entry.splitlines()[0]


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64))


class MaximumNorm(Weighted):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / x.abs().amax(-1, keepdim=True) * self.weight


class TanhGatedNorm(Weighted):
    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return nn.functional.rms_norm(x, x.shape[-1:], self.weight) * gate.tanh()


class AttributeNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.ones(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.rms_norm(x, x.shape[-1:]) * self.scale


class RootNorm(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


@pytest.mark.parametrize(
    ("module", "heading"),
    [
        (nn.GroupNorm(2, 8), "… normalises over channels, not over the last dimension"),
        (nn.BatchNorm1d(8), "… normalises over the batch or over positions, not over the last dimension"),
        (nn.LayerNorm((4, 8)), "it normalises over … dimensions"),
        (handwritten.SequenceNorm(), "its rows are not independent of each other"),
        (handwritten.NoNorm(), "it does not normalise: its output changes with the scale of its input"),
        (MaximumNorm(), "it is neither RMSNorm nor LayerNorm over the last dimension"),
        (TanhGatedNorm(), "it is no norm with a gate by silu or sigmoid of its second argument"),
        (handwritten.TupleNorm(), "it returns a …, not one tensor"),
        (RootNorm(), "it returns the shape … for …"),
        (AttributeNorm(), "it holds the tensor … outside its parameters and buffers"),
        (handwritten.ExpNorm(), "its gain is neither w nor 1 + w of a parameter (… normalisation)"),
        (handwritten.MutatingNorm(), "it changes its input in place"),
        (handwritten.CountingNorm(), "it changes its own attributes or buffers when it runs"),
        (handwritten.DropoutNorm(), "it computes something else in training mode"),
        (handwritten.DetachedNorm(), "its gradients are not those of its formula"),
        (handwritten.LoneRowNorm(), "it computes something else on an input of shape …"),
        (handwritten.ForgivingNorm(), "it treats zeros, infinities or NaN in its input in a way of its own"),
        (handwritten.ClippingNorm(), "the formula found for it is not proved (…)"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_the_examples_are_refused_with_the_reason_that_is_documented(module: nn.Module, heading: str) -> None:
    assert heading in HEADINGS
    (decision,) = make_plan(nn.Sequential(module)).refusals
    pattern = "(.+)".join(map(re.escape, heading.split("…")))
    assert re.fullmatch(pattern, decision.reason), decision.reason


def test_what_the_user_chose_is_documented() -> None:
    model = nn.ModuleDict({"a": nn.LayerNorm(8), "b": nn.LayerNorm(8), "c": nn.LayerNorm(8)})
    plan = normswap.inspect(model, include=["a", "b"], exclude="b").plan
    assert {decision.reason for decision in plan.refusals} <= set(HEADINGS)
    assert len(plan.swaps) == 1
