"""Classes of transformers and the call that stands for each: ``python transformers_cases.py BACKEND`` checks all."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from norm_cases import ulps
from normswap_kernels import gated_rms_norm, layer_norm, rms_norm
from torch import Tensor, nn

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class Case(NamedTuple):
    """One class.

    Attributes:
        model: the folder of transformers' models that has it.
        build: makes a module from the class.
        shape: of an input; a second tensor of this shape is the gate.
        call: the operation with the module's own attributes.
        gated: whether the module takes a gate.
        roundings: how often the class rounds to its narrow dtype: the units that it may differ by.
    """

    model: str
    build: Callable[[Any], nn.Module]
    shape: tuple[int, ...]
    call: Callable[..., Tensor]
    gated: bool = False
    roundings: int = 1


def _promoted(norm: Any, x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, norm.weight.dtype)


def _llama(n: Any, x: Tensor, _: Tensor, **k: Any) -> Tensor:
    return rms_norm(x, n.weight, eps=n.variance_epsilon, round_dtype=x.dtype, out_dtype=_promoted(n, x), **k)


def _mamba(n: Any, x: Tensor, gate: Tensor, **k: Any) -> Tensor:
    return gated_rms_norm(
        x,
        gate,
        n.weight,
        eps=n.variance_epsilon,
        gate_position="before",
        groups=x.size(-1) // n.group_size,
        round_dtype=x.dtype,
        out_dtype=_promoted(n, x),
        **k,
    )


def _falcon(n: Any, x: Tensor, gate: Tensor, **k: Any) -> Tensor:
    position = "after" if n.norm_before_gate else "before"
    return gated_rms_norm(
        x, gate, n.weight, eps=n.variance_epsilon, gate_position=position, groups=n.n_groups, out_dtype=x.dtype, **k
    )


def _qwen(n: Any, x: Tensor, gate: Tensor, **k: Any) -> Tensor:
    return gated_rms_norm(
        x, gate, n.weight, eps=n.variance_epsilon, round_dtype=x.dtype, product_dtype=_promoted(n, x), **k
    )


def _kimi(n: Any, x: Tensor, gate: Tensor, **k: Any) -> Tensor:
    return gated_rms_norm(x, gate, n.weight, eps=n.variance_epsilon, activation="sigmoid", **k)


def _grouped(n: Any, x: Tensor, _: Tensor, **k: Any) -> Tensor:
    return rms_norm(x, n.weight, eps=n.eps, offset=1.0, groups=x.size(-1) // n.group_size, **k)


def _gemma(n: Any, x: Tensor, _: Tensor, **k: Any) -> Tensor:
    return rms_norm(x, n.weight, eps=n.eps, offset=1.0, **k)


def _once(n: Any, x: Tensor, _: Tensor, **k: Any) -> Tensor:
    return rms_norm(x, n.weight, eps=n.variance_epsilon, **k)


def _cohere(n: Any, x: Tensor, _: Tensor, **k: Any) -> Tensor:
    return layer_norm(x, n.weight, eps=n.variance_epsilon, **k)


def _deberta(n: Any, x: Tensor, _: Tensor, **k: Any) -> Tensor:
    options = {"round_dtype": x.dtype, "out_dtype": _promoted(n, x)}
    return layer_norm(x, n.weight, n.bias, eps=n.variance_epsilon, **options, **k)


def _chameleon(n: Any, x: Tensor, _: Tensor, **k: Any) -> Tensor:
    return layer_norm(x, n.weight, n.bias, eps=1e-5, round_dtype=x.dtype, out_dtype=_promoted(n, x), **k)


def _l2(n: Any, x: Tensor, _: Tensor, **k: Any) -> Tensor:
    return rms_norm(x, eps=n.eps, reduction="sum", **k)


def _unweighted(n: Any, x: Tensor, _: Tensor, **k: Any) -> Tensor:
    return rms_norm(x, eps=n.eps, scale_dtype=x.dtype, **k)


def _layer(n: Any, x: Tensor, _: Tensor, **k: Any) -> Tensor:
    return layer_norm(x, n.weight, n.bias, eps=n.eps, **k)


CASES: dict[str, Case] = {
    "LlamaRMSNorm": Case("llama", lambda c: c(96), (5, 96), _llama, roundings=2),
    "T5LayerNorm": Case("t5", lambda c: c(96), (5, 96), _llama, roundings=2),
    "Gemma3RMSNorm": Case("gemma3", lambda c: c(96), (5, 96), _gemma),
    "Olmo2RMSNorm": Case("olmo2", lambda c: c(96), (5, 96), _once),
    "NemotronHRMSNorm": Case("nemotron_h", lambda c: c(96), (5, 96), _once),
    "Qwen4ExpTextRMSNorm": Case("qwen4_exp", lambda c: c(96, group_size=24), (2, 5, 96), _grouped),
    "DoryL2Norm": Case("dory", lambda c: c(), (2, 5, 96), _l2),
    "DeepseekV4UnweightedRMSNorm": Case("deepseek_v4", lambda c: c(), (2, 5, 96), _unweighted, roundings=2),
    "Glm5NextTextUnweightedRMSNorm": Case("glm5_next", lambda c: c(), (2, 5, 96), _unweighted, roundings=2),
    "CohereLayerNorm": Case("cohere", lambda c: c((6, 32)), (2, 5, 6, 32), _cohere),
    "ChameleonLayerNorm": Case(
        "chameleon",
        lambda c: c((6, 32)),
        (2, 5, 6, 32),
        _chameleon,
        roundings=3,
    ),
    "DebertaLayerNorm": Case("deberta", lambda c: c(96), (2, 5, 96), _deberta, roundings=3),
    "MambaRMSNormGated": Case("mamba2", lambda c: c(96, group_size=48), (2, 5, 96), _mamba, True, 2),
    "Zamba2RMSNormGated": Case("zamba2", lambda c: c(96, group_size=24), (2, 5, 96), _mamba, True, 2),
    "NemotronHRMSNormGated": Case("nemotron_h", lambda c: c(96, group_size=32), (2, 5, 96), _mamba, True, 2),
    "FalconH1RMSNormGated": Case("falcon_h1", lambda c: c(96, n_groups=2), (2, 5, 96), _falcon, True),
    "FalconH1RMSNormGated (gate before)": Case(
        "falcon_h1", lambda c: c(96, n_groups=3, norm_before_gate=False), (2, 5, 96), _falcon, True
    ),
    "Qwen3NextRMSNormGated": Case("qwen3_next", lambda c: c(96), (5, 96), _qwen, True, 3),
    "KimiLinearRMSNormGated": Case("kimi_linear", lambda c: c(96), (5, 96), _kimi, True),
    "BailingHybridRMSNormGated": Case("bailing_hybrid", lambda c: c(96), (5, 96), _kimi, True),
}


def find(name: str) -> Any:
    """Return the class of a case; None where this transformers has none."""
    try:
        module = importlib.import_module(f"transformers.models.{CASES[name].model}.modeling_{CASES[name].model}")
    except ImportError:
        return None
    return getattr(module, name.split()[0], None)


def exists(name: str) -> bool:
    """Whether this transformers has the class, with the options of the case: some came to a class later."""
    cls = find(name)
    if cls is None:
        return False
    try:
        CASES[name].build(cls)
    except TypeError:
        return False
    return True


def check(name: str, dtype: torch.dtype, backend: str) -> None:
    """Hold an operation to the unit bound beside the class, with gains of its own dtype and of float32."""
    case = CASES[name]
    for gain_dtype in dict.fromkeys((dtype, torch.float32)):
        torch.manual_seed(0)
        norm = case.build(find(name)).eval().requires_grad_(False)
        for parameter in norm.parameters():
            nn.init.normal_(parameter, 0.5, 0.5)
        norm = norm.to(gain_dtype)
        shape = (200 if backend == "cpu" else 24, *case.shape[1:])
        x, gate = 3 * torch.randn(shape), torch.randn(shape)
        x, gate = x.to(dtype), gate.to(dtype)
        if "Chameleon" in name and gain_dtype != dtype:
            continue
        with torch.no_grad():
            expected = norm(x, gate) if case.gated else norm(x)
            got = case.call(norm, x, gate, backend=backend)
        assert got.dtype == expected.dtype and got.shape == expected.shape, f"{name}: {got.dtype} {tuple(got.shape)}"
        if got.dtype == torch.float32:
            # Another order of the sum moves float32's last digits; a wider result of a narrow input has its rounding.
            rounding = 8 * torch.finfo(torch.float32).eps if dtype == torch.float32 else 2 * torch.finfo(dtype).eps
            torch.testing.assert_close(got, expected, rtol=rounding, atol=rounding)
            continue
        # Units of a result beside which a bias cancelled are not what was rounded.
        scale = expected.float().abs().amax(-1, keepdim=True) * torch.finfo(dtype).eps
        counted = (got.float() - expected.float()).abs() > scale * (case.roundings == 3)
        distance = ulps(got, expected)
        assert int((distance * counted).max()) <= min(case.roundings, 2), f"{name}: {int(distance.max())} units"
        different = int((distance > 0).sum())
        allowed = max(2, got.numel() * (1e-4 if dtype == torch.bfloat16 else 1e-3) * case.roundings)
        assert different <= allowed, f"{name}: {different} of {got.numel()} elements differ"


if __name__ == "__main__":
    for case_name in CASES:
        for case_dtype in DTYPES:
            if exists(case_name):
                check(case_name, case_dtype, sys.argv[1])
            print(case_name, case_dtype)
