"""Distances row by row, and their spread, against plain formulas."""

from __future__ import annotations

import math

import pytest
import torch

from normswap import tokenwise
from normswap.stats import gap
from normswap.tokenwise import bootstrap_mean, compare_rows, in_blocks, ratio_over_blocks

pytestmark = pytest.mark.core


@pytest.mark.parametrize("noise", [1.0, 1e-2, 1e-6])
def test_divergence_is_that_of_torch(noise: float) -> None:
    torch.manual_seed(0)
    r = 3 * torch.randn(2, 5, 11)
    o = r + noise * torch.randn(2, 5, 11)
    found = compare_rows(r, o, logits=True)
    logs = r.double().log_softmax(-1), o.double().log_softmax(-1)
    expected = torch.nn.functional.kl_div(logs[1], logs[0], log_target=True, reduction="none").sum(-1).flatten()
    # The plain formula loses what lies 16 digits below 1; the figure does not.
    assert torch.allclose(found.kl, expected, rtol=1e-6, atol=2e-15)
    assert noise > 1e-3 or float(found.kl.min()) > 1e-16
    assert torch.equal(found.same, (r.argmax(-1) == o.argmax(-1)).flatten())
    assert torch.allclose(found.error, (o.double() - r.double()).square().sum(-1).flatten(), rtol=1e-12)
    assert torch.allclose(found.size, r.double().square().sum(-1).flatten(), rtol=1e-12)


def test_float32_is_as_good_for_half_precision_and_pieces_are_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    r = 3 * torch.randn(40, 1000)
    o = (r + 0.02 * torch.randn(40, 1000)).bfloat16()
    exact = compare_rows(r, o, logits=True)
    monkeypatch.setattr(tokenwise, "_FEW", 0)
    monkeypatch.setattr(tokenwise, "_CHUNK", 7000)
    found = compare_rows(r, o, logits=True, wide=False)
    assert len(found.kl) == len(found.error) == 40
    for name in ("kl", "error", "size"):
        assert torch.allclose(getattr(found, name), getattr(exact, name), rtol=1e-4)
    assert torch.equal(found.same, exact.same) and found.max_abs == pytest.approx(exact.max_abs, rel=1e-6)


def test_a_shift_of_all_logits_is_no_divergence() -> None:
    r = torch.randn(3, 50, generator=torch.Generator().manual_seed(0)).double()
    assert float(compare_rows(r, r + 200, logits=True).kl.abs().max()) < 1e-12


def test_nan_is_kept_and_masks_are_left_out() -> None:
    r = torch.tensor([[1.0, 2.0, -math.inf], [1.0, 2.0, -3e38]])
    clean = compare_rows(r, torch.tensor([[1.0, 2.5, -math.inf], [1.0, 2.5, -2e38]]), logits=True)
    assert clean.error.tolist() == [0.25, 0.25] and clean.size.tolist() == pytest.approx([5.0, 5.0])
    assert bool(clean.kl.isfinite().all()) and clean.nonfinite == 0
    spoiled = compare_rows(r, torch.tensor([[math.nan, 2.0, -math.inf], [1.0, 2.0, -3e38]]), logits=True)
    assert math.isnan(float(spoiled.error[0])) and math.isnan(float(spoiled.kl[0])) and math.isnan(spoiled.max_abs)
    assert spoiled.nonfinite == 2 and float(spoiled.error[1]) == 0
    both = gap(torch.tensor([math.nan, 2.0]), torch.tensor([1.0, 2.0]))
    assert math.isnan(both.error)


def test_outputs_without_rows_or_without_anything() -> None:
    assert compare_rows(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 3.0]), logits=False).error.tolist() == [1.0]
    assert len(compare_rows(torch.zeros(0, 4), torch.zeros(0, 4), logits=False).error) == 0
    assert compare_rows(torch.tensor(2.0), torch.tensor(5.0), logits=False).error.tolist() == [9.0]


def test_blocks_do_not_pass_from_one_sequence_to_the_next() -> None:
    sums = in_blocks([torch.ones(20), torch.ones(5)])
    assert sums.tolist() == [16.0, 4.0, 5.0]


def test_intervals_hold_the_mean_and_narrow_with_the_tokens() -> None:
    torch.manual_seed(0)
    few, many = ([torch.rand(tokens)] for tokens in (64, 4096))
    spans = []
    for values in (few, many):
        low, high = bootstrap_mean(values)
        assert low < float(values[0].mean()) < high
        spans.append(high - low)
    assert spans[1] < spans[0] / 4
    low, high = ratio_over_blocks(many, many, 200)
    assert low == high == 1.0
    assert all(math.isnan(end) for end in bootstrap_mean([torch.tensor([math.nan])]))
