import math

import pytest
import torch

from normswap.stats import bootstrap_ratio, chance_of_as_many, gap, relative, ulp_distance, ulp_size

pytestmark = pytest.mark.core


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_neighbours_are_one_unit_apart(dtype):
    x = torch.tensor([1.0, -1.0, 0.0, 3.7, -1e-4, 100.0, torch.finfo(dtype).tiny], dtype=dtype)
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    up = (x.view(bits) + 1).view(dtype)
    assert ulp_distance(x, up).tolist() == [1.0] * x.numel()
    assert ulp_distance(x, x).tolist() == [0.0] * x.numel()
    assert torch.equal((up.double() - x.double()).abs(), ulp_size(x, dtype))


def test_zeros_are_equal_and_signs_are_far():
    tiny = torch.tensor([2**-24], dtype=torch.float16)
    assert ulp_distance(torch.tensor([0.0]), torch.tensor([-0.0])).item() == 0
    assert ulp_distance(tiny, -tiny).item() == 2


def test_nan_is_infinitely_far_from_anything_else():
    a, b = torch.tensor([math.nan, math.nan, 1.0]), torch.tensor([math.nan, 1.0, math.nan])
    assert ulp_distance(a, b).tolist() == [0.0, math.inf, math.inf]
    assert ulp_distance(a, b, torch.ones(3)).tolist() == [0.0, math.inf, math.inf]


def test_at_measures_by_the_larger_term():
    a, b = torch.tensor([1e-7]), torch.tensor([2e-7])
    assert ulp_distance(a, b).item() > 1e6
    assert ulp_distance(a, b, torch.tensor([1.0])).item() < 1


def test_a_ratio_has_its_interval():
    ratio, low, high = bootstrap_ratio([1.0, 4.0, 2.0, 1.5], [1.0, 1.0, 2.0, 1.5])
    assert ratio == pytest.approx((8.5 / 5.5) ** 0.5)
    assert low < ratio < high
    assert bootstrap_ratio([1.0, 4.0], [1.0, 4.0]) == (1.0, 1.0, 1.0)
    assert bootstrap_ratio([1.0, 4.0, 2.0], [2.0, 1.0, 3.0]) == bootstrap_ratio([1.0, 4.0, 2.0], [2.0, 1.0, 3.0])


def test_ratios_of_nothing():
    assert bootstrap_ratio([0.0, 0.0], [0.0, 0.0]) == (1.0, 1.0, 1.0)
    assert bootstrap_ratio([1.0], [0.0])[0] == math.inf
    assert all(math.isnan(value) for value in bootstrap_ratio([math.nan, 1.0], [1.0, 1.0]))
    assert math.isnan(bootstrap_ratio([], [])[0])


def test_nan_makes_a_gap_nan_and_masks_are_left_out():
    clean = torch.tensor([1.0, 2.0, -3e38])
    found = gap(torch.tensor([1.0, 2.5, -2e38]), clean)
    assert (found.error, found.size, found.max_abs, found.nonfinite) == (0.25, 5.0, 0.5, 0)
    for other in ([1.0, math.nan, -3e38], [1.0, 2.0, math.nan]):
        found = gap(torch.tensor(other), clean)
        assert math.isnan(found.error) and math.isnan(found.max_abs) and found.nonfinite == 1


@pytest.mark.parametrize(("count", "expected"), [(1, 1e-4), (2, 1.9), (10, 1.9), (10, 10.0), (3, 0.0)])
def test_the_chance_of_as_many_is_the_tail_of_poisson(count, expected):
    head = sum(math.exp(-expected) * expected**k / math.factorial(k) for k in range(count))
    assert chance_of_as_many(count, expected) == pytest.approx(1 - head, abs=1e-12)
    assert chance_of_as_many(0, expected) == 1.0


def test_relative_errors():
    assert relative([1.0, 3.0], [8.0, 8.0]) == 0.5
    assert relative([0.0], [0.0]) == 0.0
    assert math.isnan(relative([1.0], [0.0])) and math.isnan(relative([math.nan], [1.0]))
