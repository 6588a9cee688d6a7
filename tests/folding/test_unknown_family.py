"""A family that nobody has heard of, with code and names of its own, is folded by what its code computes."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

import normswap
from normswap.folding import make_fold_plan
from normswap.foldplan import Fold
from normswap.plan import make_plan

pytestmark = pytest.mark.core

CONFIG = {
    "architectures": ["QuarryForCausalLM"],
    "auto_map": {
        "AutoConfig": "configuration_quarry.QuarryConfig",
        "AutoModelForCausalLM": "modeling_quarry.QuarryForCausalLM",
    },
    "model_type": "quarry_of_the_tests",
    "breadth": 32,
    "storeys": 2,
    "vocab_size": 96,
}
CONFIGURATION = """
from transformers import PretrainedConfig


class QuarryConfig(PretrainedConfig):
    model_type = "quarry_of_the_tests"

    def __init__(self, breadth=32, storeys=2, workers=5, vocab_size=96, **kwargs):
        self.breadth, self.storeys, self.workers, self.vocab_size = breadth, storeys, workers, vocab_size
        super().__init__(**kwargs)
"""
MODELING = '''
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from .configuration_quarry import QuarryConfig


class Grain(nn.Module):
    """Root mean square, times one plus what is learned."""

    def __init__(self, breadth):
        super().__init__()
        self.swell = nn.Parameter(torch.zeros(breadth))

    def forward(self, x):
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (wide * (1.0 + self.swell.float())).to(x.dtype)


class Plane(nn.Module):
    """Mean and variance, times and plus what is learned."""

    def __init__(self, breadth):
        super().__init__()
        self.slope = nn.Parameter(torch.ones(breadth))
        self.shift = nn.Parameter(torch.zeros(breadth))

    def forward(self, x):
        return nn.functional.layer_norm(x, self.slope.shape, self.slope, self.shift, 1e-5)


class Glance(nn.Module):
    """Attention: one matrix for everything, its rows the inputs."""

    def __init__(self, breadth):
        super().__init__()
        self.lens = nn.Parameter(torch.randn(breadth, 3 * breadth) * 0.2)
        self.back = nn.Linear(breadth, breadth, bias=False)

    def forward(self, x):
        seeker, sign, load = torch.matmul(x, self.lens).unflatten(-1, (3, 4, -1)).unbind(-3)
        weights = torch.einsum("bqhd,bkhd->bhqk", seeker, sign) * seeker.shape[-1] ** -0.5
        far = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        weights = weights.masked_fill(far, float("-inf")).softmax(-1)
        return self.back(torch.einsum("bhqk,bkhd->bqhd", weights, load).flatten(-2))


class Worker(nn.Module):
    def __init__(self, breadth):
        super().__init__()
        self.pick, self.lift = nn.Linear(breadth, 24, bias=False), nn.Linear(breadth, 24)
        self.drop = nn.Linear(24, breadth)

    def forward(self, x):
        return self.drop(torch.tanh(self.pick(x)) * self.lift(x))


class Crew(nn.Module):
    """Two of several workers for each row, chosen by a matrix that is nobody's layer."""

    def __init__(self, breadth, workers):
        super().__init__()
        self.compass = nn.Parameter(torch.randn(workers, breadth) * 0.2)
        self.workers = nn.ModuleList([Worker(breadth) for _ in range(workers)])

    def forward(self, x):
        rows = x.reshape(-1, x.shape[-1])
        share, chosen = (rows @ self.compass.T).softmax(-1).topk(2, -1)
        total = torch.zeros_like(rows)
        for number, worker in enumerate(self.workers):
            row, place = torch.where(chosen == number)
            if row.numel() == 0:
                continue
            total.index_add_(0, row, worker(rows[row]) * share[row, place, None])
        return total.reshape(x.shape)


class Press(nn.Module):
    """Two neighbouring rows become one, which stands in for both."""

    def __init__(self, breadth):
        super().__init__()
        self.smooth = Plane(breadth)
        self.squeeze = nn.Linear(2 * breadth, breadth)

    def forward(self, x):
        pairs = self.smooth(x).reshape(x.shape[0], x.shape[1] // 2, -1)
        return self.squeeze(pairs).repeat_interleave(2, 1)


class Storey(nn.Module):
    def __init__(self, breadth, workers):
        super().__init__()
        self.before, self.glance, self.behind = Grain(breadth), Glance(breadth), Grain(breadth)
        self.between, self.crew = Grain(breadth), Crew(breadth, workers)

    def forward(self, x):
        x = x + self.behind(self.glance(self.before(x)))
        return x + self.crew(self.between(x))


class QuarryForCausalLM(PreTrainedModel):
    config_class = QuarryConfig

    def __init__(self, config):
        super().__init__(config)
        self.words = nn.Embedding(config.vocab_size, config.breadth)
        self.storeys = nn.ModuleList([Storey(config.breadth, config.workers) for _ in range(config.storeys)])
        self.press = Press(config.breadth)
        self.summit = Grain(config.breadth)
        self.speech = nn.Linear(config.breadth, config.vocab_size, bias=False)
        self.post_init()

    def _init_weights(self, module):
        pass

    def forward(self, input_ids, attention_mask=None):
        x = self.words(input_ids)
        for storey in self.storeys:
            x = storey(x)
        x = x + self.press(x)
        return CausalLMOutput(logits=self.speech(self.summit(x)))
'''
IDS = torch.arange(3, 51).reshape(2, 24)


@pytest.fixture(scope="module")
def quarry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A checkpoint of it, gains and biases away from 1 and 0, and a cache for its code."""
    place = tmp_path_factory.mktemp("quarry")
    folder = place / "quarry"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "configuration_quarry.py").write_text(CONFIGURATION)
    (folder / "modeling_quarry.py").write_text(MODELING)
    with pytest.MonkeyPatch.context() as patching:
        patching.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(place / "modules"))
        patching.setattr(sys, "path", [*sys.path])
        torch.manual_seed(0)
        config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=True)
        tensors = {key: value + 0.2 * torch.randn(value.shape) for key, value in model.state_dict().items()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        yield folder


def load(folder: Path) -> nn.Module:
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32)
    return model.eval()


@torch.no_grad()
def logits(model: nn.Module) -> torch.Tensor:
    return model(IDS).logits.double()


def moved(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got - expected).norm() / expected.norm())


def decisions(model: nn.Module) -> dict[str, Fold]:
    return make_fold_plan(model, make_plan(model)).by_name()


def test_who_reads_what_is_found_under_any_name(quarry: Path) -> None:
    model = load(quarry)
    found = decisions(model)
    crew = {"compass", *(f"workers.{n}.{part}.weight" for n in range(5) for part in ("pick", "lift"))}
    wanted = {
        "storeys.1.before": {"storeys.1.glance.lens"},
        "storeys.1.between": {f"storeys.1.crew.{name}" for name in crew},
        "press.smooth": {"press.squeeze.weight"},
        "summit": {"speech.weight"},
    }
    assert {name: set(found[name].parameters) for name in wanted} == wanted
    assert {name: found[name].action for name in wanted} == dict.fromkeys(wanted, "fold")
    assert found["storeys.0.behind"].action == "refuse"
    assert "add in storeys.0 (Storey)" in found["storeys.0.behind"].reason
    (lens,), (squeeze,) = found["storeys.1.before"].consumers, found["press.smooth"].consumers
    assert lens.axis == 0 and squeeze.axis == 1
    assert squeeze.spread(torch.arange(32.0), 64, 1.0).tolist() == [*range(32), *range(32)]
    assert found["press.smooth"].bias == "move" and squeeze.bias == "press.squeeze.bias"


def test_it_is_folded_with_its_code(quarry: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    normswap.convert(quarry, out, fold=True, trust_remote_code=True)
    before, after = load_file(quarry / "model.safetensors"), load_file(out / "model.safetensors")
    assert before.keys() == after.keys()
    for name in ("storeys.0.before.swell", "storeys.1.between.swell", "summit.swell", "press.smooth.shift"):
        assert before[name].any() and not after[name].any()
    assert torch.equal(after["press.smooth.slope"], torch.ones(32))
    for name in ("storeys.0.behind.swell", "words.weight", "storeys.1.crew.workers.2.drop.weight"):
        assert torch.equal(after[name], before[name])
    original, folded = load(quarry), load(out)
    expected = logits(original)
    assert moved(logits(folded), expected) <= 1e-5
    for name in ("storeys.0.before", "storeys.1.between", "summit"):
        with torch.no_grad():
            kept = original.get_submodule(name).swell.clone()
            original.get_submodule(name).swell.zero_()
            assert moved(logits(original), expected) > 1e-2
            original.get_submodule(name).swell.copy_(kept)
