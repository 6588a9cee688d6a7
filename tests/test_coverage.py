"""Coverage as a number: what counts, what is measured, and the bars over every model that the zoo builds."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import types
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from normswap import modules
from normswap.plan import make_plan
from normswap.spec import NormSpec

ROOT = Path(__file__).resolve().parent.parent
LIB = (
    "coverage_figures", "coverage_model", "coverage_parity", "coverage_peers", "coverage_pool", "coverage_tables",
    "coverage_units", "coverage_zoo",
)  # fmt: skip

INSTALLED = {"torch": "2", "transformers": "5", "timm": None, "liger-kernel": None}


@pytest.fixture
def lib(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.SimpleNamespace]:
    """The modules that ``coverage.py`` is made of."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks" / "lib")
    yield types.SimpleNamespace(**{name.removeprefix("coverage_"): __import__(name) for name in LIB})
    for name in LIB:
        sys.modules.pop(name, None)


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ROOT / "benchmarks" / "coverage.py", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def norm(**given: Any) -> dict[str, Any]:
    """One class of norms of a model, as it is measured."""
    units = {
        name: {"worst": 1.0, "identical": 1.0, "failures": [], "originals": 0, "calls": 9}
        for name in ("float32", "float16", "bfloat16")
    }
    usual = {"class": "some.Norm", "action": "swap", "reason": "", "example": "norm", "count": 4, "liger": 0}
    usual |= {"hub": None, "contains_norms": False, "units": units if given.get("action", "swap") == "swap" else None}
    return usual | given


def record(*norms: dict[str, Any], **given: Any) -> dict[str, Any]:
    """One model, as it is measured."""
    parity = {"error": 0.0, "where": "", "outputs": 1, "same_nonfinite": True, "norms_reached": 4, "originals": 0}
    usual = {"type": "some", "model": "Some", "norms": list(norms), "others": [], "liger": ""}
    return usual | {"parity": parity | {"repeated": None, "passed": True}} | given


@pytest.mark.core
@pytest.mark.parametrize(
    ("given", "counts"),
    [
        ({}, True),
        ({"action": "refuse", "reason": "GroupNorm normalises over channels, not over the last dimension"}, False),
        ({"action": "refuse", "reason": "BatchNorm2d normalises over the batch or over positions"}, False),
        ({"action": "refuse", "reason": "it is made of other modules (norm)", "contains_norms": True}, False),
        ({"action": "refuse", "reason": "it is made of other modules (ln)"}, True),
        ({"action": "refuse", "reason": "a reason that nobody has thought of yet"}, True),
    ],
)
def test_a_refusal_counts_unless_it_says_that_this_is_no_norm_of_rows(
    lib: types.SimpleNamespace, given: dict[str, Any], counts: bool
) -> None:
    assert lib.figures.is_row_wise(norm(**given)) == counts
    share = lib.figures.summarise([record(norm(), norm(**given))], liger=False).share
    assert share == (1.0 if given.get("action", "swap") == "swap" or not counts else 0.5)


@pytest.mark.core
def test_every_bar_can_fail(lib: types.SimpleNamespace) -> None:
    def met(*records: dict[str, Any]) -> list[bool]:
        return [ok for _, ok, _ in lib.figures.bars(lib.figures.summarise(records, liger=False))]

    assert met(record(norm())) == [True] * 5
    refused = norm(action="refuse", reason="unknown", count=1)
    assert met(record(norm(count=199), refused)) == [True] * 5
    assert met(record(norm(count=198), refused)) == [False, True, True, True, True]
    outside = norm()
    outside["units"]["float16"]["failures"] = ["3 units"]
    assert met(record(outside)) == [True, False, True, True, True]
    assert met(record(norm(), norm(action="refuse", reason="", count=0), refused | {"reason": "", "count": 0}))[2]
    assert not met(record(norm(count=999), refused | {"reason": ""}))[2]
    assert met(record(norm()), {"type": "other", "crash": "it died"}) == [True, True, True, False, True]
    amiss = record(norm())["parity"] | {"passed": False}
    assert met(record(norm(), parity=amiss)) == [True, True, True, True, False]
    assert met(record(norm(), parity={"not_run": "no inputs"})) == [True, True, True, True, False]
    assert met({"type": "other", "error": "not built"}) == [False, False, True, True, False]


@pytest.mark.core
def test_the_peers_are_counted_over_the_same_norms(lib: types.SimpleNamespace) -> None:
    batch = norm(action="refuse", reason="BatchNorm1d normalises over the batch", liger=1, hub="RMSNorm")
    records = [
        record(norm(liger=3, hub="RMSNorm"), norm(hub="MLP"), batch),
        record(norm(hub="RMSNormGated"), type="b", liger="ImportError: gone"),
        record(norm(), type="c"),
    ]
    figures = lib.figures.summarise(records, liger=True)
    assert figures.hub == (2, 8)
    assert figures.liger == (1, 3, {"b": "ImportError: gone"})
    assert lib.figures.summarise(records, liger=False).liger is None
    text = lib.tables.summary(lib.figures.summarise(records, liger=False), INSTALLED)
    assert "not installed" in text and "8 (50.0%)" in text


@pytest.mark.core
def test_a_norm_is_within_the_unit_bound_and_a_wrong_spec_is_not(lib: types.SimpleNamespace) -> None:
    layer = nn.LayerNorm(48)
    nn.init.normal_(layer.weight)
    spec = make_plan(layer).swaps[0].spec
    assert spec is not None
    units = lib.units.measure_units(layer, spec)
    assert units.keys() == {"float32", "float16", "bfloat16"}
    assert all(not found.failures and found.originals == 0 < found.calls for found in units.values())
    wrong = lib.units.measure_units(layer, replace(spec, eps=2e-5))
    assert all(found.failures for found in wrong.values())
    assert not isinstance(layer, modules.FusedNorm) and layer.weight.dtype == torch.float32


@pytest.mark.core
def test_a_call_that_goes_back_to_the_original_is_counted(lib: types.SimpleNamespace) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.LayerNorm(8))
    for at in (1, 2):
        modules.swap(model[at], NormSpec("layer", 8, 1e-5, bias=True, bias_name="bias", input_name="input"), "auto")
    forward = nn.LayerNorm.forward
    with lib.units.counting_originals([model[1], model[2]]) as called:
        model(torch.randn(3, 8))
        nn.LayerNorm(8)(torch.randn(3, 8))
        assert called == []
        model.double()(torch.randn(3, 8, dtype=torch.float64))
        assert called == [model[1], model[2]]
    assert nn.LayerNorm.forward is forward


@pytest.mark.core
def test_outputs_are_compared_one_by_one_and_nan_with_nan(lib: types.SimpleNamespace) -> None:
    nested = {"logits": torch.ones(2), "states": (torch.ones(3), {"deep": torch.ones(1)}), "ids": torch.ones(1).long()}
    floats = dict(lib.parity.floats(nested))
    assert floats.keys() == {"logits", "states.0", "states.1.deep"}
    compare = lib.parity.compare
    assert compare(floats, floats) == (0.0, "", True)
    error, where, same = compare(floats | {"states.0": torch.tensor([1.0, 1.0, 1.003])}, floats)
    assert error == pytest.approx(0.003 / 3**0.5, rel=1e-3) and where == "states.0" and same
    nan, inf = torch.tensor([float("nan"), 1.0]), torch.tensor([float("inf"), 1.0])
    assert compare({"a": nan}, {"a": nan}) == (0.0, "", True)
    assert not compare({"a": nan}, {"a": inf})[2] and not compare({"a": torch.ones(2)}, {"a": nan})[2]
    assert compare({}, floats)[0] == compare({"logits": torch.ones(3)}, {"logits": torch.ones(2)})[0] == float("inf")


class Small(nn.Module):
    """A model with a named input and two outputs, one of which draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.unused = nn.LayerNorm(16)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"noise": x + torch.randn_like(x), "y": self.norm(x)}


@pytest.mark.core
def test_a_whole_model_is_run_before_and_after_and_left_as_it_was(lib: types.SimpleNamespace) -> None:
    model, inputs = Small().eval(), {"x": torch.randn(2, 5, 16)}
    plan = make_plan(model)
    parity = lib.parity.measure_parity(model, plan, inputs)
    assert parity.passed and parity.error < 1e-6 and parity.outputs == 2 and parity.repeated is None
    assert (parity.norms_reached, parity.originals) == (1, 0)
    assert list(modules.fused_norms(model)) == []
    (spec,) = {decision.spec for decision in plan.swaps}
    wrong = replace(plan, decisions=tuple(replace(d, spec=replace(spec, eps=0.01)) for d in plan.decisions))
    parity = lib.parity.measure_parity(model, wrong, inputs)
    assert not parity.passed and parity.error > 1e-4 and parity.where == "y" and parity.repeated == 0.0
    assert list(modules.fused_norms(model)) == []


class Clip(nn.Module):
    """Divides each row by its size, whatever it is called."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / x.norm(dim=-1, keepdim=True)


@pytest.mark.core
def test_what_behaves_like_a_norm_and_is_in_no_plan_is_missed(lib: types.SimpleNamespace) -> None:
    block = nn.Sequential(nn.LayerNorm(16), nn.Softmax(-1))
    model = nn.ModuleDict({"body": nn.Sequential(nn.Linear(16, 16), Clip(), nn.Sequential(Clip()), block)})
    model.forward = lambda x: model["body"](x)
    plan = make_plan(model)
    decided = replace(plan, decisions=tuple(d for d in plan.decisions if d.cls == "LayerNorm"))
    found = lib.parity.scale_invariant(model, decided, {"x": torch.randn(3, 16)})
    assert found == [model["body"][1], model["body"][2][0]]
    others = [
        {"class": "some.Clip", "count": 2, "behaves": True},
        {"class": "some.Block", "count": 1, "behaves": False},
    ]
    figures = lib.figures.summarise([record(norm(), others=others)], liger=False)
    assert (figures.swapped, figures.norms, figures.others) == (4, 6, {"some.Block": 1})
    assert [(entry.cls, entry.count, entry.kind) for entry in figures.refused] == [("some.Clip", 2, "")]
    assert "in no plan" in lib.tables.summary(figures, INSTALLED)


@pytest.mark.core
def test_the_mark_of_the_hub_is_read_from_the_class_or_its_source(
    lib: types.SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "marked_norms.py").write_text(
        "from torch import nn\n\ndef use_kernel_forward_from_hub(name):\n    return lambda cls: cls\n\n"
        "@use_kernel_forward_from_hub('RMSNorm')\nclass Marked(nn.Module):\n    pass\n\n"
        "class Child(Marked):\n    pass\n\nclass Plain(nn.Module):\n    pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    marked = __import__("marked_norms")
    assert lib.peers.hub_layer(marked.Marked) == lib.peers.hub_layer(marked.Child) == "RMSNorm"
    assert lib.peers.hub_layer(marked.Plain) is None and lib.peers.hub_layer(nn.LayerNorm) is None
    assert lib.peers.hub_layer(type("Left", (nn.Module,), {"kernel_layer_name": "LayerNorm"})) == "LayerNorm"
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    assert lib.peers.hub_layer(LlamaRMSNorm) == "RMSNorm"


@pytest.mark.core
def test_liger_is_applied_elsewhere_and_what_it_replaced_is_counted(
    lib: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Sequential(nn.LayerNorm(8), nn.LayerNorm(8), nn.Linear(8, 8))
    model.config = types.SimpleNamespace(model_type="known")

    def apply(model: nn.Sequential) -> None:
        model[0].forward = types.MethodType(lambda self, x: x, model[0])
        model[2].forward = types.MethodType(lambda self, x: x, model[2])

    def fail(model: nn.Sequential) -> None:
        apply(model)
        raise ImportError("no such name")

    def liger(applied: Any) -> Any:
        there = types.SimpleNamespace(
            MODEL_TYPE_TO_APPLY_LIGER_FN={"known": None}, _apply_liger_kernel_to_instance=applied
        )
        return lambda: there

    monkeypatch.setattr(lib.peers, "liger", liger(apply))
    assert lib.peers.liger_reaches(model, ["0", "1"]) == (["0"], "")
    assert "forward" not in vars(model[0])
    monkeypatch.setattr(lib.peers, "liger", liger(fail))
    assert lib.peers.liger_reaches(model, ["0", "1"]) == (["0"], "ImportError: no such name")
    monkeypatch.setattr(lib.peers, "liger", liger(lambda model: os._exit(9)))
    assert lib.peers.liger_reaches(model, ["0", "1"]) == ([], "the process died")
    model.config.model_type = "unknown"
    assert lib.peers.liger_reaches(model, ["0", "1"]) == ([], "")


@pytest.mark.core
def test_a_process_that_dies_costs_one_model(lib: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    script = (
        "import json, os, sys\n"
        "for line in sys.stdin:\n"
        "    name = line.strip()\n"
        "    if name == 'bad': os._exit(9)\n"
        "    if name == 'slow': sys.stdin.readline()\n"
        "    print(json.dumps({'type': name, 'pid': os.getpid()}), flush=True)\n"
    )
    start = lib.pool._Worker.__init__
    monkeypatch.setattr(lib.pool._Worker, "__init__", lambda self, command: start(self, [sys.executable, "-c", script]))
    monkeypatch.setattr(lib.pool, "PATIENCE_S", 1)
    done = []
    found = {r["type"]: r for r in lib.pool.walk(["a", "bad", "b", "slow", "c"], Path("zoo"), 1, done.append)}
    assert done == [1, 2, 3, 4, 5] and found.keys() == {"a", "bad", "b", "slow", "c"}
    assert "died" in found["bad"]["crash"] and "silent" in found["slow"]["crash"]
    assert len({found[name]["pid"] for name in "abc"}) == 3


@pytest.mark.core
def test_a_generated_part_is_put_between_its_markers(lib: types.SimpleNamespace, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{lib.tables.BEGIN}\nold\n{lib.tables.END}\nafter\n")
    for text in ("new", "newer"):
        lib.tables.put_between_markers(page, text)
        assert page.read_text() == f"before\n{lib.tables.BEGIN}\n{text}\n{lib.tables.END}\nafter\n"
    page.write_text(f"{lib.tables.END} {lib.tables.BEGIN}")
    with pytest.raises(ValueError, match="expected the markers"):
        lib.tables.put_between_markers(page, "new")


def test_the_readme_and_the_page_say_the_same(lib: types.SimpleNamespace) -> None:
    part = written(lib)
    page = (ROOT / "docs" / "coverage.md").read_text(encoding="utf-8")
    assert part.partition("\n\nNorms of rows that are refused")[0] in page, f"run {lib.tables.COMMAND}"


def written(lib: types.SimpleNamespace) -> str:
    """The generated part of the README."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    return readme.partition(lib.tables.BEGIN)[2].partition(lib.tables.END)[0].strip()


def test_an_absent_zoo_and_an_unknown_type_are_said(tmp_path: Path) -> None:
    done = run("--zoo", tmp_path / "nowhere")
    assert done.returncode == 2 and "expected a zoo with tiny.py" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.zoo
@pytest.mark.core
def test_a_few_models_are_walked_and_the_bars_hold(zoo: Path, tmp_path: Path) -> None:
    file = tmp_path / "coverage.json"
    asked = ["llama", "gpt2", "t5", "nosuch"]
    done = run("--zoo", zoo, "--type", *asked)
    assert done.returncode == 2 and "got nosuch" in done.stderr
    done = run("--zoo", zoo, "--type", *asked[:3], "--check", "--json", file)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "NOT met" not in done.stdout and done.stdout.count("met ") >= 5
    records = {found["type"]: found for found in json.loads(file.read_text())["records"]}
    assert records.keys() == set(asked[:3])
    (llama,) = records["llama"]["norms"]
    assert llama["class"].endswith(".LlamaRMSNorm") and llama["action"] == "swap" and llama["hub"] == "RMSNorm"
    assert records["llama"]["parity"]["norms_reached"] == llama["count"]
    assert {name for name in records if records[name]["parity"]["passed"]} == set(asked[:3])
    again = run("--zoo", zoo / "nowhere", "--read", file)
    assert again.returncode == 0 and again.stdout == done.stdout


@pytest.mark.zoo
@pytest.mark.core
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_norm_of_every_model(zoo: Path, lib: types.SimpleNamespace) -> None:
    """The bars, over all that the zoo builds; some ten minutes on two cores, four where transformers is of series 4."""
    known = lib.zoo.names(lib.zoo.load_zoo(zoo))
    records = list(lib.pool.walk(known, zoo, os.cpu_count() or 1))
    figures = lib.figures.summarise(records, liger=False)
    print("\n".join(lib.tables.screen(figures)))
    missed = [f"{demand}: {said}" for demand, met, said in lib.figures.bars(figures) if not met]
    assert missed == [], "\n".join(lib.tables.screen(figures))
    assert len(figures.unbuilt) < 0.2 * figures.known and figures.ran > 0.75 * figures.types
    if transformers.__version__ in written(lib):
        said = re.search(r"\| ([0-9,]+) \((\d+\.\d+%)\)", written(lib))
        assert said is not None and said[2] == f"{figures.share:.2%}", f"run {lib.tables.COMMAND}"
