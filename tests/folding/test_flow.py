"""Who reads a norm's output: every kind of reader on models written for it, on the meta device and with values."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from normswap.errors import ModelError
from normswap.flow import Reading, follow
from normswap.folding import make_fold_plan
from normswap.foldplan import Piece
from normswap.plan import make_plan
from normswap.spec import NormSpec

pytestmark = pytest.mark.core

WIDTH = 8


@torch.library.custom_op("normswap_tests::linear", mutates_args=())
def rounding_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Not what its name says."""
    return F.linear(x.round(), weight)


@rounding_linear.register_fake
def _(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


class Reader(nn.Module):
    """An embedding, a norm, and what a function does with its output and some weights."""

    def __init__(self, read: Callable[[Reader, torch.Tensor, torch.Tensor], Any], **weights: tuple[int, ...]) -> None:
        super().__init__()
        self.table = nn.Embedding(11, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.other = nn.LayerNorm(WIDTH)
        for name, shape in weights.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape)))
        self.read = read

    def forward(self, ids: torch.Tensor) -> Any:
        hidden = self.table(ids)
        return self.read(self, self.norm(hidden), hidden)


@cache
def layer_norm() -> NormSpec | None:
    """What the norms of all these models compute."""
    return make_plan(nn.Sequential(nn.LayerNorm(WIDTH))).decisions[0].spec


def reading(model: nn.Module, *, device: str, norm: str = "norm") -> Reading:
    model = model.to(device) if device == "meta" else model
    norms = {name: layer_norm() for name, module in model.named_modules() if isinstance(module, nn.LayerNorm)}
    return follow(model, norms, [{"ids": torch.arange(6).reshape(2, 3)}])[norm]


def whole(channels: int = WIDTH, start: int = 0) -> tuple[Piece, ...]:
    return (Piece(start, start + channels, 0),)


@pytest.fixture(params=["meta", "cpu"])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


CONSUMERS: dict[
    str, tuple[Callable[..., Any], dict[str, tuple[int, ...]], list[tuple[str, int, tuple[Piece, ...]]]]
] = {
    "linear": (lambda m, n, h: F.linear(n, m.w), {"w": (5, WIDTH)}, [("w", 1, whole())]),
    "addmm": (
        lambda m, n, h: torch.addmm(m.b, n.view(-1, WIDTH), m.w),
        {"w": (WIDTH, 5), "b": (5,)},
        [("w", 0, whole())],
    ),
    "matmul of a transposed weight": (lambda m, n, h: n @ m.w.T, {"w": (5, WIDTH)}, [("w", 1, whole())]),
    "einsum": (lambda m, n, h: torch.einsum("bsh,ehi->bsei", n, m.w), {"w": (3, WIDTH, 5)}, [("w", 1, whole())]),
    "bmm of repeated rows": (
        lambda m, n, h: torch.bmm(n.reshape(1, -1, WIDTH).repeat(3, 1, 1), m.w),
        {"w": (3, WIDTH, 5)},
        [("w", 1, whole())],
    ),
    "a weight on the left": (lambda m, n, h: m.w @ n.transpose(1, 2), {"w": (5, WIDTH)}, [("w", 1, whole())]),
    "a loop over a stack": (
        lambda m, n, h: sum(F.linear(n[:, :1], m.w[expert]) for expert in range(3)),
        {"w": (3, 5, WIDTH)},
        [("w", 2, whole())],
    ),
    "halves of a fused weight": (
        lambda m, n, h: [F.linear(n, part) for part in m.w.chunk(2)],
        {"w": (6, WIDTH)},
        [("w", 1, whole())],
    ),
    "a weight that is cast": (
        lambda m, n, h: F.linear(n.double(), m.w.double()),
        {"w": (5, WIDTH)},
        [("w", 1, whole())],
    ),
    "several rows as one": (
        lambda m, n, h: F.linear(n[:, :2].reshape(2, -1), m.w),
        {"w": (5, 2 * WIDTH)},
        [("w", 1, (Piece(0, WIDTH, 0), Piece(WIDTH, 2 * WIDTH, 0)))],
    ),
    "columns of a concatenation": (
        lambda m, n, h: F.linear(torch.cat([h, n], -1), m.w),
        {"w": (5, 2 * WIDTH)},
        [("w", 1, whole(start=WIDTH))],
    ),
    "a slice of the row": (
        lambda m, n, h: F.linear(n[..., 2:6], m.w),
        {"w": (5, 4)},
        [("w", 1, (Piece(0, 4, 2),))],
    ),
    "a convolution along the tokens": (
        lambda m, n, h: F.conv1d(n.transpose(1, 2), m.w, padding=1),
        {"w": (5, WIDTH, 3)},
        [("w", 1, whole())],
    ),
    "rows scaled one by one": (
        lambda m, n, h: F.linear(n * h.sigmoid().mean(-1, keepdim=True) / 3, m.w),
        {"w": (5, WIDTH)},
        [("w", 1, whole())],
    ),
    "mixed with the row before": (
        lambda m, n, h: F.linear(n * m.mix + F.pad(n, (0, 0, 1, -1)) * (1 - m.mix), m.w),
        {"w": (5, WIDTH), "mix": (WIDTH,)},
        [("w", 1, whole())],
    ),
    "rows that attention mixes": (
        lambda m, n, h: F.linear(torch.softmax(h @ h.transpose(1, 2), -1) @ n, m.w),
        {"w": (5, WIDTH)},
        [("w", 1, whole())],
    ),
    "two weights": (
        lambda m, n, h: (F.linear(n, m.v), F.linear(n, m.w)),
        {"w": (5, WIDTH), "v": (4, WIDTH)},
        [("v", 1, whole()), ("w", 1, whole())],
    ),
}


@pytest.mark.parametrize("case", CONSUMERS)
def test_every_kind_of_linear_reader_is_found(case: str, device: str) -> None:
    read, weights, expected = CONSUMERS[case]
    found = reading(Reader(read, **weights), device=device)
    assert found.blockers == [] and found.reached
    assert [(one.parameter, one.axis, one.pieces) for one in found.consumers] == expected


BLOCKERS: dict[str, tuple[Callable[..., Any], str]] = {
    "a sum with the stream": (
        lambda m, n, h: F.linear(n, m.w) + F.linear(n + h, m.w), "add in the model (Reader): it is added",
    ),
    "another norm": (lambda m, n, h: F.linear(m.other(n), m.w), "another norm, other, reads it"),
    "an activation": (lambda m, n, h: F.linear(F.silu(n), m.w), "silu in the model"),
    "its own square": (lambda m, n, h: F.linear(n * n, m.w), "multiplied with itself"),
    "scores of attention": (lambda m, n, h: n @ n.transpose(1, 2), "bmm in the model (Reader): it is multiplied with"),
    "a sum over channels": (lambda m, n, h: F.linear(n, m.w) * n.sum(-1, keepdim=True), "sum in the model"),
    "a rotation": (lambda m, n, h: F.linear(n + n.roll(1, -1), m.w), "add in the model"),
    "the model's result": (lambda m, n, h: {"logits": F.linear(n, m.w), "last": n}, "the model returns it"),
    "a weight that also reads the stream": (
        lambda m, n, h: F.linear(n, m.w) + F.linear(h, m.w), "w also reads something else, by mm in the model",
    ),
    "a weight that reads two norms": (
        lambda m, n, h: F.linear(n, m.w) + F.linear(m.other(h), m.w), "w reads other rows as well",
    ),
    "a part of a weight": (lambda m, n, h: F.linear(n, m.w[:2]), "only a part of w reads it"),
    "a weight that is computed": (lambda m, n, h: F.linear(n, m.w * 2), "mm in the model"),
    "its gain read outside": (
        lambda m, n, h: F.linear(n, m.w) * m.norm.weight.sum(), "its parameters are read outside it: sum in the model",
    ),
    "written into a buffer": (
        lambda m, n, h: F.linear(torch.zeros_like(h).index_add_(0, torch.arange(2), n), m.w), "index_add in the model",
    ),
    "kept on the module": (
        lambda m, n, h: [setattr(m, "features", [n]), F.linear(n, m.w)][1], "it is kept as features",
    ),
    "returned in an object": (
        lambda m, n, h: {"logits": F.linear(n, m.w), "more": SimpleNamespace(rows=n)}, "the model returns it",
    ),
    "rounded to integers": (lambda m, n, h: F.linear(n.to(torch.int32).float(), m.w), "to_copy in the model"),
    "a weight rounded to integers": (lambda m, n, h: F.linear(n, m.w.to(torch.int8).float()), "mm in the model"),
    "an operation of another library": (lambda m, n, h: torch.ops.normswap_tests.linear(n, m.w), "linear in the model"),
    "divided by": (lambda m, n, h: F.linear(h / n, m.w), "div in the model"),
}  # fmt: skip


@pytest.mark.parametrize("case", BLOCKERS)
def test_what_is_not_linear_in_the_row_is_named(case: str, device: str) -> None:
    read, words = BLOCKERS[case]
    found = reading(Reader(read, w=(WIDTH, WIDTH)), device=device)
    assert any(words in blocker for blocker in found.blockers), found.blockers


def test_a_bias_is_known_whether_it_is_part_of_the_product_or_added_after_it(device: str) -> None:
    for read in (
        lambda m, n, h: F.linear(n, m.w, m.b),
        lambda m, n, h: (n @ m.w.T) + m.b,
        lambda m, n, h: torch.addmm(m.b, n.view(-1, WIDTH), m.w.T),
    ):
        found = reading(Reader(read, w=(5, WIDTH), b=(5,)), device=device)
        assert [one.bias for one in found.consumers] == ["b"] and found.plain
    shared = reading(
        Reader(lambda m, n, h: F.linear(n, m.w, m.b) + F.linear(h, m.v, m.b), w=(5, WIDTH), v=(5, WIDTH), b=(5,)),
        device=device,
    )
    assert [one.bias for one in shared.consumers] == [None]


def test_a_constant_stays_a_constant_only_where_rows_arrive_as_they_are(device: str) -> None:
    bent = reading(Reader(lambda m, n, h: F.linear(n * m.mix, m.w), w=(5, WIDTH), mix=(WIDTH,)), device=device)
    padded = reading(Reader(lambda m, n, h: F.linear(F.pad(n, (0, 0, 1, 0)), m.w), w=(5, WIDTH)), device=device)
    moved = reading(Reader(lambda m, n, h: F.linear(n.transpose(0, 1)[1:], m.w), w=(5, WIDTH)), device=device)
    assert bent.blockers == padded.blockers == moved.blockers == []
    assert (bent.plain, padded.plain, moved.plain) == (False, False, True)


def test_an_embedding_that_is_the_head_is_told(device: str) -> None:
    found = reading(Reader(lambda m, n, h: F.linear(n, m.table.weight)), device=device)
    assert found.blockers == [] and found.looked_up == ("table.weight",)


def test_one_norm_with_readers_in_several_calls_has_them_all(device: str) -> None:
    def read(model: Reader, n: torch.Tensor, hidden: torch.Tensor) -> Any:
        return F.linear(n, model.w), F.linear(model.norm(hidden + 1), model.v)

    found = reading(Reader(read, w=(5, WIDTH), v=(4, WIDTH)), device=device)
    assert [one.parameter for one in found.consumers] == ["v", "w"] and found.blockers == []


def test_a_norm_that_is_not_called_is_not_reached(device: str) -> None:
    model = Reader(lambda m, n, h: F.linear(n, m.w), w=(5, WIDTH))
    assert not reading(model, device=device, norm="other").reached


def test_experts_that_no_token_hits_count_on_the_meta_device() -> None:
    def read(model: Reader, n: torch.Tensor, hidden: torch.Tensor) -> Any:
        rows, total = n.reshape(-1, WIDTH), torch.zeros(6, 5)
        chosen = F.one_hot(F.linear(rows, model.router).argmax(-1), 4).T
        for expert in (chosen.sum(-1) > 0).nonzero():
            at = torch.where(chosen[expert.item()])[0]
            total = total.index_add(0, at, F.linear(rows[at], model.w[expert.item()]))
        return total

    found = reading(Reader(read, router=(4, WIDTH), w=(4, 5, WIDTH)), device="meta")
    assert [one.parameter for one in found.consumers] == ["router", "w"] and found.blockers == []


def test_a_packed_attention_reads_with_all_its_rows(device: str) -> None:
    class Packed(Reader):
        def __init__(self) -> None:
            super().__init__(lambda m, n, h: m.attention(n, n, n)[0])
            self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    found = reading(Packed().eval(), device=device)
    assert [(one.parameter, one.bias) for one in found.consumers] == [
        ("attention.in_proj_weight", "attention.in_proj_bias"),
    ]
    assert found.blockers == [] and found.plain


def test_what_a_hook_makes_of_the_row_is_followed(device: str) -> None:
    model = Reader(lambda m, n, h: F.linear(n, m.w), w=(5, WIDTH))
    model.norm.register_forward_hook(lambda module, args, output: output + args[0])
    assert any("add in the model" in blocker for blocker in reading(model, device=device).blockers)


class Branching(nn.Module):
    """A model that takes other paths for long inputs, without a mask, and when asked."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.table = nn.Embedding(60, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 60)
        self.path = path

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, features: bool = False
    ) -> Any:
        row = self.norm(self.table(input_ids))
        taken = {
            "long": row.shape[1] > 512,
            "one token": row.shape[1] == 1,
            "two rows": row.shape[0] == 2,
            "unmasked": attention_mask is None,
            "asked": features,
            "never": False,
        }
        return self.head(row + self.table(input_ids) if taken[self.path] else row)


@pytest.mark.parametrize("path", ["long", "one token", "two rows", "unmasked", "asked", "never"])
def test_paths_that_other_arguments_take_are_walked_too(path: str) -> None:
    model = Branching(path).eval()
    found = make_fold_plan(model, make_plan(model)).decisions[0]
    assert (found.action == "fold") == (path == "never"), found.reason
    assert path == "never" or "it is added to something else" in found.reason


def test_a_forward_that_says_nothing_of_its_arguments_is_told() -> None:
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Branching("never")

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return self.inner(*args, **kwargs)

    model = Wrapper().eval()
    with pytest.raises(ModelError, match=r"does not say what it takes .*fold the model inside it"):
        make_fold_plan(model, make_plan(model))


class TwoDecoders(nn.Module):
    """A model whose generate hands hidden states to something else."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm, self.head = nn.Embedding(60, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 60)

    def forward(self, input_ids: torch.Tensor, output_hidden_states: bool = False) -> Any:
        row = self.norm(self.table(input_ids))
        return SimpleNamespace(logits=self.head(row), hidden_states=(row,) if output_hidden_states else None)

    def generate(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Read the last row of the forward."""
        return self(input_ids, output_hidden_states=True).hidden_states[-1].argmax(-1)


def test_rows_that_another_method_reads_are_left() -> None:
    model = TwoDecoders().eval()
    assert make_fold_plan(model, make_plan(model)).decisions[0].reason == "the model returns it"
    del TwoDecoders.generate
    assert make_fold_plan(model, make_plan(model)).decisions[0].action == "fold"
