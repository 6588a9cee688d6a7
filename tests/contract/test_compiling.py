"""torch.compile without a graph break and torch.export of whole patched models.

What is compiled without a cache is no core test: transformers 4 makes its masks then in code that dynamo fails on.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from contract_cases import IDS, assert_same, count_originals, inputs, logits, patched
from torch import nn

import normswap
from normswap import modules


@pytest.fixture(autouse=True)
def forgetful() -> Iterator[None]:
    """Compiled code of an earlier test is for other models."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.parametrize("family", ["llama", "mamba2"])
def test_a_whole_model_is_one_graph_with_the_fused_norms_in_it(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = patched(family)
    expected = logits(model)
    count = sum(1 for _ in modules.fused_norms(model))
    targets: list[str] = []

    def backend(graph: torch.fx.GraphModule, example: list[torch.Tensor]) -> torch.fx.GraphModule:
        targets.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    calls = count_originals(monkeypatch, model)
    compiled = torch.compile(model, fullgraph=True, dynamic=False, backend=backend)
    assert_same(logits(compiled), expected, family)
    assert sum("normswap" in target for target in targets) == count
    assert calls == []


def test_a_compiled_model_trains_to_the_same_gradients() -> None:
    model = patched("llama")
    ids = inputs(model, labels=IDS)
    model(**ids).loss.backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    torch.compile(model, fullgraph=True, backend="aot_eager")(**ids).loss.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-5, atol=1e-7)


@pytest.mark.core
def test_patch_and_unpatch_of_a_compiled_model_take_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    norm = nn.LayerNorm(16)
    nn.init.normal_(norm.weight)
    model = nn.Sequential(norm)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    x = torch.randn(3, 16)
    expected = compiled(x)
    normswap.patch(model)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert torch.equal(compiled(x), expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs + 1
    normswap.unpatch(model)
    assert torch.equal(compiled(x), expected)


@pytest.mark.core
@pytest.mark.parametrize("family", ["llama", "mamba2"])
def test_an_exported_model_computes_the_same_with_the_fused_norms(family: str) -> None:
    model = patched(family)
    expected = logits(model)
    given = inputs(model)
    with torch.no_grad():
        program = torch.export.export(model, (), given)
        got = program.module()(**given).logits
    assert_same(got, expected, family)
    fused = [node for node in program.graph.nodes if "normswap" in str(node.target)]
    assert len(fused) == sum(1 for _ in modules.fused_norms(model))
    assert program.state_dict.keys() == model.state_dict().keys()


@pytest.mark.core
def test_an_exported_model_takes_other_lengths() -> None:
    model = patched("llama")
    given = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS), "use_cache": False}
    length = torch.export.Dim("length", min=2, max=64)
    shapes = {"input_ids": {1: length}, "attention_mask": {1: length}, "use_cache": None}
    with torch.no_grad():
        program = torch.export.export(model, (), given, dynamic_shapes=shapes)
        given = {**given, "input_ids": IDS[:, :7], "attention_mask": torch.ones_like(IDS[:, :7])}
        assert torch.equal(program.module()(**given).logits, model(**given).logits)
