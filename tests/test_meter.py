import pytest
import torch
import torch.nn.functional as F

from normswap.figures import Criterion
from normswap.gates import judge_norm
from normswap.meter import NormMeter, NormUnderTest, watching
from normswap.spec import NormSpec

pytestmark = pytest.mark.core

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def other_order(spec, x, gain, bias):
    """The same norm in float32 with its statistics summed in float64."""
    wide = x.double()
    mean = wide.mean(-1, keepdim=True) if spec.kind == "layer" else 0.0
    rstd = torch.rsqrt((wide - mean).pow(2).mean(-1, keepdim=True) + spec.eps).float()
    n = (x.float() - (mean.float() if spec.kind == "layer" else 0.0)) * rstd * gain.float()
    return (n if bias is None else n + bias.float()).to(x.dtype)


def rows(dtype, mean=0.0, width=96, count=4096, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = (torch.randn(count, width, generator=g) + mean).to(dtype)
    gain = (torch.rand(width, generator=g) * 2 + 0.2).to(dtype)
    return x, gain, torch.randn(width, generator=g).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mean", [0.0, 3.0, 30.0])
@pytest.mark.parametrize("bias", [True, False])
def test_a_right_layer_norm_passes_however_much_it_cancels(dtype, mean, bias):
    x, gain, shift = rows(dtype, mean)
    spec = NormSpec("layer", 96, 1e-5, bias=bias, bias_name="bias" if bias else None)
    shift = shift if bias else None
    meter = NormMeter(spec)
    meter.add(x, gain, shift, F.layer_norm(x, (96,), gain, shift, 1e-5), other_order(spec, x, gain, shift))
    figures, failures = judge_norm("n", meter, Criterion())
    assert failures == []
    assert figures.passed


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_rms_norm_has_the_plain_bounds(dtype):
    x, gain, _ = rows(dtype)
    spec = NormSpec("rms", 96, 1e-5)
    meter = NormMeter(spec)
    meter.add(x, gain, None, spec.compute(x, gain, None), other_order(spec, x, gain, None))
    figures, failures = judge_norm("n", meter, Criterion())
    assert failures == []
    assert meter.cancellation == pytest.approx(1.0)
    expected = {torch.bfloat16: 0.9999, torch.float16: 0.999, torch.float32: None}[dtype]
    assert figures.bound_identical == (None if expected is None else pytest.approx(expected))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_wrong_eps_or_bias_is_far_off(dtype):
    x, gain, shift = rows(dtype, mean=3.0)
    spec = NormSpec("layer", 96, 1e-5, bias=True, bias_name="bias")
    truth = F.layer_norm(x, (96,), gain, shift, 1e-5)
    for wrong in (F.layer_norm(x, (96,), gain, shift, 1e-1), F.layer_norm(x, (96,), gain, shift * 1.02, 1e-5)):
        meter = NormMeter(spec)
        meter.add(x, gain, shift, truth, wrong)
        assert judge_norm("n", meter, Criterion())[1]


def test_a_float32_gain_on_a_half_input_is_judged_by_the_half_rounding():
    x, gain, _ = rows(torch.bfloat16)
    gain = gain.float() + 0.001
    spec = NormSpec("rms", 96, 1e-5, cast="before_gain", out="promote")
    truth = spec.compute(x, gain, None)
    assert truth.dtype == torch.float32
    n = x.double() * torch.rsqrt(x.double().pow(2).mean(-1, keepdim=True) + 1e-5)
    right, wrong = n.bfloat16() * gain, n.float() * gain
    for swapped, passes in ((right, True), (wrong, False)):
        meter = NormMeter(spec)
        meter.add(x, gain, None, truth, swapped)
        assert (judge_norm("n", meter, Criterion())[1] == []) is passes
    assert meter.max_ulp <= 1


def test_another_dtype_or_shape_is_a_failure_in_words():
    x, gain, _ = rows(torch.bfloat16)
    spec = NormSpec("rms", 96, 1e-5)
    meter = NormMeter(spec)
    meter.add(x, gain, None, spec.compute(x, gain, None), spec.compute(x, gain, None).float())
    figures, failures = judge_norm("n", meter, Criterion())
    assert figures.passed is False
    assert "returned torch.float32 (4096, 96) where the original returns torch.bfloat16" in failures[0]


def test_large_calls_are_sampled_and_hooks_are_removed():
    norm = torch.nn.LayerNorm(512)
    spec = NormSpec("layer", 512, 1e-5, bias=True, bias_name="bias")
    under_test = NormUnderTest("n", spec, norm, norm.forward, lambda: norm.weight, lambda: norm.bias)
    with watching([under_test]) as meters, torch.no_grad():
        norm(torch.randn(2, 2048, 512))
        norm(input=torch.randn(3, 512))
    assert meters["n"].calls == 2
    assert meters["n"].elements == 2**18 + 3 * 512
    assert meters["n"].max_ulp == 0
    assert not norm._forward_hooks


def test_a_norm_that_returns_a_tuple_is_a_failure():
    class Odd(torch.nn.LayerNorm):
        def forward(self, x):
            return super().forward(x), x

    norm = Odd(8)
    spec = NormSpec("layer", 8, 1e-5, bias=True, bias_name="bias")
    with watching([NormUnderTest("n", spec, norm, norm.forward, lambda: None, lambda: None)]) as meters:
        norm(torch.randn(2, 8))
    assert "returned tuple" in judge_norm("n", meters["n"], Criterion())[1][0]


def test_rows_that_come_again_are_compared_once():
    norm = torch.nn.LayerNorm(16)
    spec = NormSpec("layer", 16, 1e-5, bias=True, bias_name="bias")
    under_test = NormUnderTest("n", spec, norm, norm.forward, lambda: norm.weight, lambda: norm.bias)
    x = torch.randn(5, 16)
    with watching([under_test]) as meters, torch.no_grad():
        norm(x.repeat(3, 1))
        norm(torch.cat([x[:2], torch.randn(4, 16)]))
        norm(x)
    assert (meters["n"].calls, meters["n"].elements) == (3, (5 + 4) * 16)


def judged(elements, differing):
    meter = NormMeter(NormSpec("rms", 64, 1e-6), calls=1, elements=elements, dtype=torch.bfloat16, max_ulp=1.0)
    meter.identical = elements - differing
    meter.sum_cancellation = float(elements)
    return judge_norm("n", meter, Criterion())[1]


def test_few_elements_fail_only_for_what_chance_does_not_explain():
    """Measured: 2 of 19,200 in a right norm, where 99.99% of them would allow 1.9; a wrong cast order: 26%."""
    assert judged(19_200, 2) == []
    assert judged(19_200, 10) == [
        "norms: n: share of bit-identical elements 99.9479% below 99.9900%: 10 of 19200 elements differ, more than "
        "chance explains"
    ]
    assert judged(1_000_000, 100) == []
    assert judged(1_000_000, 140) != []
    assert judged(100, 26) != []


def test_a_rounded_product_that_the_bias_cancels_is_judged_by_the_product():
    """DeBERTa's class rounds the row, the product and the sum: one unit of the product is many of the sum."""
    spec = NormSpec("layer", 4, 1e-7, bias=True, cast="before_gain", out="promote", bias_name="bias")
    x = torch.tensor([[-1.0, 0.5, 1.5, 0.25]]).half()
    gain, zero = torch.full((4,), 1.37).half(), torch.zeros(4).half()
    product = spec.compute(x, gain, zero)
    bias = (-product[0] * (1 + 2**-9)).half()
    original = spec.compute(x, gain, bias)
    swapped = (torch.nextafter(product, torch.full_like(product, 9.0)).float() + bias.float()).half()
    meter = NormMeter(spec)
    meter.add(x, gain, bias, original, swapped)
    assert 0 < meter.max_ulp <= 1
