"""Norms that are code and not modules: found by reading the classes that a model has."""

from __future__ import annotations

import inspect
import math
from types import FunctionType
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional as F
from torch.nn.functional import normalize

import normswap
from normswap import formulas, inline
from normswap.errors import NothingToPatchError
from normswap.inline import CodeNorm, find_code_norms
from normswap.plan import make_plan

pytestmark = pytest.mark.core


def rms_forward(x, eps=1e-6):
    variance = x.float().pow(2).mean(-1, keepdim=True)
    return x * torch.rsqrt(variance + eps)


def l2norm(x, dim=-1, eps=1e-6):
    return x * torch.rsqrt((x * x).sum(dim=dim, keepdim=True) + eps)


def magnitude(x):
    squares = torch.pow(x, 2)
    return torch.pow(torch.sum(squares, dim=-1, keepdim=True), 0.5)


def rule(query, key):
    return l2norm(query) @ l2norm(key).transpose(-1, -2)


def read_mean(self, x):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def read_sum(self, x):
    return x * (x * x).sum(dim=-1, keepdim=True).add(1e-6).rsqrt()


def read_sum_over_width(self, x):
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) / x.shape[-1] + 1e-6)


def read_power(self, x):
    return x * (torch.mean(x**2, dim=-1, keepdim=True) + 1e-6) ** -0.5


def read_square(self, x):
    return torch.square(x).mean(axis=-1, keepdim=True).sqrt().reciprocal() * x


def read_root(self, x):
    scale = (x.square().mean((-1,), keepdim=True) + 1e-6) ** 0.5
    return torch.div(x, scale)


def read_reciprocal(self, x):
    rms = torch.sqrt(torch.clamp(x.pow(2).mean(-1, keepdim=True), min=1e-6))
    return x * (1.0 / rms)


def read_norm(self, x):
    return x / x.norm(p=2, dim=-1, keepdim=True)


def read_vector_norm(self, x):
    x /= torch.linalg.vector_norm(x, dim=-1, keepdim=True) + 1e-6
    return x


def read_centred(self, x):
    mean = x.mean(-1, keepdim=True)
    centred = x - mean
    return centred / torch.sqrt(centred.pow(2).mean(-1, keepdim=True) + 1e-5)


def read_variance(self, x):
    if x.dim() > 2:
        for _ in range(2):
            x = (x - x.mean(-1, keepdim=True)) / (x.var(dim=-1, keepdim=True) + 1e-5) ** 0.5
    return x


def read_deviation(self, x):
    return (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-5)


def read_walrus(self, x):
    return x * torch.rsqrt(power + 1e-6) if (power := x.pow(2).mean(-1, keepdim=True)) is not None else x


def read_helper(self, x):
    return x / magnitude(x)


def call_rms_norm(self, x):
    return F.rms_norm(x, (x.shape[-1],), eps=1e-6)


def call_layer_norm(self, x):
    return torch.layer_norm(x, (x.shape[-1],))


def call_normalize(self, x):
    return normalize(x, p=2.0, dim=-1)


def call_function(self, x):
    return self.proj(rms_forward(x))


def call_deep(self, x):
    return rule(x, x)


FOUND = {
    read_mean: ("RMS", "Mixer.method", "inline code of Mixer.method"),
    read_sum: ("L2", "Mixer.method", "inline code of Mixer.method"),
    read_sum_over_width: ("RMS", "Mixer.method", "inline code of Mixer.method"),
    read_power: ("RMS", "Mixer.method", "inline code of Mixer.method"),
    read_square: ("RMS", "Mixer.method", "inline code of Mixer.method"),
    read_root: ("RMS", "Mixer.method", "inline code of Mixer.method"),
    read_reciprocal: ("RMS", "Mixer.method", "inline code of Mixer.method"),
    read_norm: ("L2", "Mixer.method", "inline code of Mixer.method"),
    read_vector_norm: ("L2", "Mixer.method", "inline code of Mixer.method"),
    read_centred: ("LayerNorm", "Mixer.method", "inline code of Mixer.method"),
    read_variance: ("LayerNorm", "Mixer.method", "inline code of Mixer.method"),
    read_deviation: ("LayerNorm", "Mixer.method", "inline code of Mixer.method"),
    read_walrus: ("RMS", "Mixer.method", "inline code of Mixer.method"),
    read_helper: ("L2", "Mixer.method", "inline code of Mixer.method"),
    call_rms_norm: ("RMS", "Mixer.method", "F.rms_norm() in Mixer.method"),
    call_layer_norm: ("LayerNorm", "Mixer.method", "torch.layer_norm() in Mixer.method"),
    call_normalize: ("L2", "Mixer.method", "normalize() in Mixer.method"),
    call_function: ("RMS", "rms_forward", "rms_forward() in Mixer.method"),
    call_deep: ("L2", "l2norm", "l2norm() in Mixer.method"),
}


def call_module(self, x):
    return self.norm(x) + x / self.std(x, dim=-1) + self.inner.norm(x)


def scale_scores(self, x):
    return torch.softmax(x @ x.transpose(-1, -2) * x.shape[-1] ** -0.5 / math.sqrt(8), -1)


def over_positions(self, x):
    return (
        x / x.norm(dim=1, keepdim=True) + normalize(x, dim=0) + x * torch.rsqrt(x.pow(2).mean((-2, -1), keepdim=True))
    )


def over_all(self, x):
    return x / (x.pow(2).mean().sqrt() + 1e-6) + x / x.norm()


def take_length(self, x):
    return x.norm(dim=-1), x.pow(2).mean(-1).sqrt(), x.std(-1)


def clip(self, x):
    return x * (self.most / (x.norm(dim=-1, keepdim=True) + 1e-6)).clamp(max=1.0)


def rescale(self, x):
    return x.var(-1, keepdim=True) * x + x.mean(-1, keepdim=True) / x.shape[-1] ** 0.5


def first_norm(self, x):
    return x / x.norm(p=1, dim=-1, keepdim=True)


def batch_statistics(self, x):
    return (x - self.running_mean) * (self.running_var + 1e-5).rsqrt()


NOT_FOUND = [
    call_module,
    scale_scores,
    over_positions,
    over_all,
    take_length,
    clip,
    rescale,
    first_norm,
    batch_statistics,
]


def model_with(method: FunctionType) -> nn.Module:
    def __init__(self):
        nn.Module.__init__(self)
        self.proj = nn.Identity()

    mixer = type("Mixer", (nn.Module,), {"__init__": __init__, "method": method})
    return nn.ModuleDict({"layers": nn.ModuleList([mixer(), mixer()])})


@pytest.mark.parametrize("method", FOUND, ids=lambda method: method.__name__)
def test_code_that_normalises_rows_is_found(method: FunctionType) -> None:
    kind, function, where = FOUND[method]
    assert find_code_norms(model_with(method), set()) == (
        CodeNorm("layers.*", "Mixer", function, kind, f"not a module: {where}", 2),
    )


@pytest.mark.parametrize("method", NOT_FOUND, ids=lambda method: method.__name__)
def test_code_that_does_not_is_left(method: FunctionType) -> None:
    assert find_code_norms(model_with(method), set()) == ()


def test_setting_up_a_model_is_not_running_it() -> None:
    mixer = type("Mixer", (nn.Module,), {"_init_weights": read_mean, "reset_parameters": read_norm})
    assert find_code_norms(mixer(), set()) == ()


def test_bases_static_methods_and_functions_on_the_instance_are_read() -> None:
    class Base(nn.Module):
        @staticmethod
        def scaled(x):
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True))

        @classmethod
        def of_class(cls, x):
            return F.layer_norm(x, (8,))

        def hidden(self, x):
            return x / x.norm(dim=-1, keepdim=True)

    class Mixer(Base):
        def __init__(self) -> None:
            super().__init__()
            self.run = rule
            self.proj = nn.Identity()

        def hidden(self, x):
            return x

    found = {(one.function, one.kind, one.reason) for one in find_code_norms(Mixer(), set())}
    assert found == {
        ("Mixer.scaled", "RMS", "not a module: inline code of Mixer.scaled"),
        ("Mixer.of_class", "LayerNorm", "not a module: F.layer_norm() in Mixer.of_class"),
        ("l2norm", "L2", "not a module: l2norm() in Mixer.run"),
    }


def test_code_without_a_source_shows_nothing() -> None:
    scope: dict[str, Any] = {"torch": torch}
    exec("def method(self, x):\n    return x * torch.rsqrt(x.pow(2).mean(-1))", scope)
    assert find_code_norms(model_with(scope["method"]), set()) == ()
    assert find_code_norms(model_with(torch.rsqrt), set()) == ()


class Block(nn.Module):
    """One norm that is a module, one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(16)
        self.proj = nn.Linear(16, 16)

    def forward(self, x):
        return self.norm(x) + rms_forward(self.proj(x))


def test_a_plan_has_them_beside_its_decisions_and_swaps_none() -> None:
    model = nn.Sequential(Block(), Block())
    found = (CodeNorm("*", "Block", "rms_forward", "RMS", "not a module: rms_forward() in Block.forward", 2),)
    plan = make_plan(model)
    assert [decision.name for decision in plan.decisions] == ["0.norm", "1.norm"]
    assert plan.functions == found
    assert normswap.inspect(model).to_dict()["functions"] == [
        {
            "name": "*",
            "class": "Block",
            "function": "rms_forward",
            "kind": "RMS",
            "count": 2,
            "reason": "not a module: rms_forward() in Block.forward",
        }
    ]
    normswap.patch(model)
    assert [decision.name for decision in make_plan(model).swaps] == ["0.norm", "1.norm"]
    assert make_plan(model).functions == found


def test_a_norm_that_is_a_module_is_no_code() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(16))

        def forward(self, x):
            return rms_forward(x) * self.weight

    model = nn.Sequential(Scale())
    for plan in (make_plan(model), make_plan(normswap.patch(model))):
        assert len(plan.swaps) == 1 and plan.functions == ()


def test_a_module_that_normalises_and_returns_something_else_is_told() -> None:
    class Pair(nn.Module):
        def forward(self, x):
            return rms_forward(x), x

    (found,) = make_plan(nn.Sequential(Pair())).functions
    assert found.reason == "in a module that cannot be called as a norm: rms_forward() in Pair.forward"


def test_a_model_with_nothing_but_code_says_so() -> None:
    with pytest.raises(NothingToPatchError, match=r"found none \(.*not a module: rms_forward\(\) in Mixer"):
        normswap.patch(model_with(call_function))


def on_meta(name: str, **sizes: Any) -> nn.Module:
    cls = getattr(transformers, name, None)
    if cls is None:
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    with torch.device("meta"):
        return cls._from_config(cls.config_class(**sizes))


@pytest.mark.parametrize(
    ("name", "sizes", "expected"),
    [
        ("LlamaForCausalLM", {}, set()),
        ("BertModel", {}, set()),
        ("MixtralModel", {"num_hidden_layers": 2}, set()),
        ("Qwen3NextModel", {"num_hidden_layers": 4, "num_experts": 4}, {("layers.*.linear_attn", "L2", 3)}),
        ("Swinv2Model", {}, {("encoder.layers.*.blocks.*.attention.self", "L2", 12)}),
        ("CLIPModel", {}, {("", "L2", 1)}),
        ("Gemma3nTextModel", {"num_hidden_layers": 2, "num_kv_shared_layers": 0}, {("", "RMS", 1)}),
    ],
)
def test_models_of_transformers(name: str, sizes: dict[str, Any], expected: set[tuple[str, str, int]]) -> None:
    model = on_meta(name, **sizes)
    norms = {type(module) for module in model.modules() if "Norm" in type(module).__name__}
    assert {(one.name, one.kind, one.count) for one in find_code_norms(model, norms)} == expected


def test_falcon_mamba_has_a_function_in_transformers_4_and_modules_in_5() -> None:
    try:
        model = on_meta("FalconMambaModel", num_hidden_layers=2)
    except AssertionError as error:
        # transformers 4 asks the package kernels for a build beside a CPU torch, and it has none.
        pytest.skip(f"transformers {transformers.__version__} does not build it here: {error}")
    norms = {type(module) for module in model.modules() if "Norm" in type(module).__name__}
    found = [(one.name, one.function, one.kind) for one in find_code_norms(model, norms)]
    before = [("layers.*.mixer", "rms_forward", "RMS")]
    assert found == (before if transformers.__version__ < "5" else [])


def test_each_function_is_read_once_and_one_that_cannot_normalise_never(monkeypatch: pytest.MonkeyPatch) -> None:
    llama = on_meta("LlamaForCausalLM", num_hidden_layers=80)
    read: list[FunctionType] = []
    genuine = inspect.getsource
    monkeypatch.setattr(formulas.inspect, "getsource", lambda function: read.append(function) or genuine(function))
    inline._reading.cache_clear()
    inline._reached.cache_clear()
    find_code_norms(llama, {type(llama.model.norm)})
    # It calls something that is named norm, which only its source can tell from a tensor's.
    assert [function.__qualname__ for function in read] == ["LlamaModel.forward"]
    read.clear()
    model = nn.ModuleDict({str(at): model_with(call_function) for at in range(8)})
    find_code_norms(model, set())
    assert read == [rms_forward]
