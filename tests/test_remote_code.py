"""Models that bring their own code: folders with misleading names, through inspect, patch, convert and load."""

from __future__ import annotations

import copy
import json
import shutil
import sys
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import pytest
import torch
import transformers
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

import normswap
from normswap.cli import main
from normswap.errors import ModelError
from normswap.modules import fused_norms
from normswap.plan import Decision, Plan

pytestmark = pytest.mark.core

FOLDERS = ("misleading", "mixing", "impure", "picture")
CODE = Path(__file__).parent / "remote"


def auto(name: str) -> type:
    return AutoModel if name == "picture" else AutoModelForCausalLM


@pytest.fixture(scope="module")
def remote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folders with weights of their own, norms away from 1 and 0, and a cache for their code."""
    place = tmp_path_factory.mktemp("remote")
    with pytest.MonkeyPatch.context() as patching:
        patching.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(place / "modules"))
        patching.setattr(sys, "path", [*sys.path])
        for name in FOLDERS:
            folder = Path(shutil.copytree(CODE / name, place / name))
            torch.manual_seed(0)
            config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
            model = auto(name).from_config(config, trust_remote_code=True)
            tensors = {key: value.clone() for key, value in model.state_dict().items()}
            for key, value in tensors.items():
                # A running variance may not be negative.
                if value.is_floating_point() and "variance" not in key and "running_var" not in key:
                    value += 0.2 * torch.randn(value.shape)
            save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        yield place


@lru_cache
def plan_of(folder: Path) -> Plan:
    return normswap.inspect(folder, trust_remote_code=True).plan


def decisions(folder: Path) -> dict[str, Decision]:
    """Of the last layer or of the model, by the last part of their names."""
    return {decision.name.rpartition(".")[2]: decision for decision in plan_of(folder).decisions}


def output(model: nn.Module, name: str) -> torch.Tensor:
    torch.manual_seed(1)
    with torch.no_grad():
        if name == "picture":
            return model(torch.randn(2, 3, 32, 32, dtype=model.dtype)).last_hidden_state
        return model(torch.randint(0, 96, (2, 24))).logits


def test_what_a_norm_computes_counts_and_not_its_name(remote: Path) -> None:
    found = decisions(remote / "misleading")
    assert {name: (d.action, d.spec and (d.spec.kind, d.spec.gain, d.spec.gain_name)) for name, d in found.items()} == {
        "before": ("swap", ("layer", "w", "weight")),
        "between": ("swap", ("rms", "w", "gamma")),
        "after": ("swap", ("rms", "1+w", "weight")),
        "final": ("swap", ("rms", "w", "gain")),
        "norm": ("refuse", None),
    }
    assert found["before"].spec.bias_name == "shift" and found["before"].spec.eps == 3e-5
    assert found["between"].spec.cast == "before_gain" and found["after"].spec.cast == "after_gain"
    assert found["norm"].reason.startswith("it does not normalise")


def test_a_gate_may_come_first_and_a_function_is_told(remote: Path) -> None:
    found = decisions(remote / "mixing")
    assert {name: decision.action for name, decision in found.items()} == {"blend": "swap", "heads": "swap"}
    blend, heads = found["blend"].spec, found["heads"].spec
    assert (blend.gate, blend.gate_position, blend.gate_name, blend.input_name) == ("silu", "after", "gate", "x")
    assert (heads.heads, heads.width, heads.cast) == (4, 8, "before_gain")
    (code,) = plan_of(remote / "mixing").functions
    assert (code.name, code.count, code.kind, code.reason) == (
        "layers.*", 2, "L2", "not a module: unit() in Mixer.forward"
    )  # fmt: skip


def test_a_norm_that_does_something_else_besides_is_refused_with_the_reason(remote: Path) -> None:
    plan, found = plan_of(remote / "impure"), decisions(remote / "impure")
    assert [decision.name for decision in plan.swaps] == ["layers.0.plain", "layers.1.plain"]
    assert found["pair"].reason == "it returns a tuple, not one tensor"
    assert found["in_place"].reason == "it changes its input in place"
    assert found["noisy"].reason == "it computes something else in training mode"
    # Under a name that tells nothing: told by their code where nothing else tells of them.
    told = {one.name.rpartition(".")[2]: one.reason for one in plan.functions}
    told |= {name: decision.reason for name, decision in found.items()}
    assert {"twin", "halving", "fuse", "counter"} <= told.keys()
    assert told["fuse"] == "in a module that cannot be called as a norm: inline code of Fuse.normed"


def test_channels_first_rows_are_norms_too(remote: Path) -> None:
    found = decisions(remote / "picture")
    spec = found["contrast"].spec
    assert {name: decision.action for name, decision in found.items()} == {
        "contrast": "swap",
        "norm": "swap",
        "statistics": "refuse",
    }
    assert (spec.kind, spec.axis, spec.width, spec.bias_name) == ("layer", "channels", 24, "bias")
    assert not found["statistics"].of_rows


@pytest.mark.parametrize("name", FOLDERS)
def test_a_loaded_model_is_patched_with_parity(remote: Path, name: str) -> None:
    model = auto(name).from_pretrained(remote / name, trust_remote_code=True, dtype=torch.float32).eval()
    plain = copy.deepcopy(model)
    normswap.patch(model)
    assert len(list(fused_norms(model))) == len(plan_of(remote / name).swaps)
    for dtype, close in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        expected, got = output(plain.to(dtype), name), output(model.to(dtype), name)
        assert got.dtype == expected.dtype
        assert float((got - expected).norm()) <= close * float(expected.norm())


@pytest.mark.parametrize("name", FOLDERS)
def test_a_checkpoint_is_converted_and_loaded_with_its_code(remote: Path, name: str, tmp_path: Path) -> None:
    out = tmp_path / f"{name}-out"
    arguments = ["patch", str(remote / name), "-o", str(out), "--trust-remote-code"]
    arguments += ["--dtype", "bfloat16", "--json", str(tmp_path / "r.json")]
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 0, done.output
    assert done.output.startswith("PASS")
    assert (out / f"modeling_{name}.py").read_bytes() == (CODE / name / f"modeling_{name}.py").read_bytes()
    before, after = (load_file(folder / "model.safetensors") for folder in (remote / name, out))
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
    measured = json.loads((tmp_path / "r.json").read_text())
    assert measured["verdict"] == "pass" and all(norm["passed"] for norm in measured["norms"])
    model = normswap.load(out, trust_remote_code=True)
    assert len(list(fused_norms(model))) == len(measured["norms"]) == len(plan_of(remote / name).swaps)
    plain = auto(name).from_pretrained(out, trust_remote_code=True, dtype=torch.float32).eval()
    assert not list(fused_norms(plain))
    expected = output(plain, name)
    assert float((output(model, name) - expected).norm()) <= 1e-5 * float(expected.norm())


@pytest.mark.parametrize("name", FOLDERS)
def test_code_that_is_not_trusted_is_not_run(remote: Path, name: str, tmp_path: Path) -> None:
    for command in (["inspect"], ["patch", "-o", str(tmp_path / "out")], ["verify"]):
        done = CliRunner().invoke(main, [*command, str(remote / name)])
        assert done.exit_code == 2 and len(done.output.splitlines()) == 1
        assert "defined by Python code in the checkpoint; read that code and, if you trust it" in done.output
        assert "--trust-remote-code" in done.output
    assert not (tmp_path / "out").exists()
    with pytest.raises(ModelError, match="trust_remote_code=True"):
        normswap.load(remote / name)
