"""A right plan is proved; a plan with a reader too few, too many or wrong is refused, and the norm is named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_checkpoints import tiny_bert, tiny_llama
from torch import nn
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel, MixtralConfig, MixtralForCausalLM, PreTrainedModel

from normswap.errors import ModelError
from normswap.folding import make_fold_plan
from normswap.foldplan import Consumer, Fold, FoldPlan, Piece
from normswap.foldproof import prove, prove_by_twin
from normswap.plan import Plan, make_plan

pytestmark = pytest.mark.core

IDS = torch.arange(3, 35).reshape(1, -1)
D = 16
WHOLE = (Piece(0, D, 0),)


class Norm(nn.Module):
    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.rand(D) + 0.5)
        self.shift = nn.Parameter(torch.randn(D)) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.gain
        return y if self.shift is None else y + self.shift


class Mixture(nn.Module):
    """A router, experts one by one, a shared expert, and a merger that reads two rows at once."""

    def __init__(self, bias: bool = False, masked: bool = False) -> None:
        super().__init__()
        self.before = Norm(bias)
        self.router = nn.Linear(D, 4, bias=bias)
        self.experts = nn.ModuleList(nn.Linear(D, D, bias=bias) for _ in range(4))
        self.shared = nn.Linear(D, D, bias=bias)
        self.after = Norm()
        self.merger = nn.Linear(2 * D, D)
        self.masked = masked
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2 or name.endswith("bias"):
                nn.init.normal_(parameter, std=0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.before(x)
        if self.masked:
            y = y * torch.tensor([1.0, 0.0], dtype=y.dtype).repeat(y.shape[1] // 2)[:, None]
        best = self.router(y).topk(2)
        chosen = torch.zeros_like(best.values[..., :1]).expand(*y.shape[:-1], 4).scatter(-1, best.indices, 1.0)
        for number, expert in enumerate(self.experts):
            x = x + chosen[..., number : number + 1] * F.silu(expert(y))
        x = x + F.silu(self.shared(y))
        return self.merger(self.after(x).reshape(x.shape[0], -1, 2 * D))


BATCHES = [{"x": torch.randn(1, 64, D, generator=torch.Generator().manual_seed(seed))} for seed in (1, 2)]


def plan_of(model: nn.Module, readers: dict[str, tuple[Consumer, ...]], bias: Any = "none") -> FoldPlan:
    specs = {decision.name: decision.spec for decision in make_plan(model).decisions}
    return FoldPlan(
        tuple(
            Fold(name, "fold", "", consumers, False, bias if name == "before" else "none", specs[name])
            for name, consumers in readers.items()
        )
    )


def mixture_plan(
    model: Mixture, *, leave: str = "", merged: tuple[Piece, ...] = (Piece(0, D, 0), Piece(D, 2 * D, 0)), bias: Any = ""
) -> FoldPlan:
    names = ["router", *(f"experts.{number}" for number in range(4)), "shared"]
    readers = [
        Consumer(f"{name}.weight", 1, WHOLE, f"{name}.bias" if model.shared.bias is not None else None)
        for name in names
        if name != leave
    ]
    after = (Consumer("merger.weight", 1, merged, "merger.bias"),)
    return plan_of(model, {"before": tuple(readers), "after": after}, bias or "none")


def test_a_mixture_of_experts_and_a_merger_of_rows_are_proved() -> None:
    model = Mixture().double()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    assert prove(model, mixture_plan(model), BATCHES) == {}
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("leave", ["router", "experts.2", "shared"])
def test_a_reader_too_few_is_caught_and_only_that_norm_is_named(leave: str) -> None:
    model = Mixture().double()
    reasons = prove(model, mixture_plan(model, leave=leave), BATCHES)
    assert list(reasons) == ["before"]
    assert "the model's output moves by" in reasons["before"]


@pytest.mark.parametrize("merged", [(Piece(0, D, 0),), (Piece(D, 2 * D, 0),), (Piece(0, D, 0), Piece(D, D + 1, 0))])
def test_wrong_columns_are_caught(merged: tuple[Piece, ...]) -> None:
    model = Mixture().double()
    assert list(prove(model, mixture_plan(model, merged=merged), BATCHES)) == ["after"]


def test_columns_that_the_weight_does_not_have_are_refused() -> None:
    model = Mixture().double()
    reasons = prove(model, mixture_plan(model, merged=(Piece(0, 3 * D, 0),)), BATCHES)
    assert reasons == {"after": "merger.weight has 32 columns, and the norm 16 channels"}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_bias_moves_or_is_kept(dtype: torch.dtype) -> None:
    model = Mixture(bias=True).to(dtype)
    if dtype == torch.float64:
        assert prove(model, mixture_plan(model, bias="move"), BATCHES) == {}
    assert prove(model, mixture_plan(model, bias="keep"), BATCHES) == {}


def test_a_bias_that_does_not_reach_every_row_cannot_move() -> None:
    model = Mixture(bias=True, masked=True).double()
    assert prove(model, mixture_plan(model, bias="keep"), BATCHES) == {}
    reasons = prove(model, mixture_plan(model, bias="move"), BATCHES)
    assert list(reasons) == ["before"]
    assert "moved" in reasons["before"]


def test_what_the_output_does_not_depend_on_is_not_proved() -> None:
    class Idle(Mixture):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.router(self.before(x))
            return self.merger(self.after(x).reshape(x.shape[0], -1, 2 * D))

    model = Idle().double()
    plan = plan_of(model, {"before": (Consumer("router.weight", 1, WHOLE),)})
    assert "does not depend on its gain" in prove(model, plan, BATCHES)["before"]
    spare = mixture_plan(model).by_name()["after"]
    more = replace(spare, consumers=(*spare.consumers, Consumer("shared.weight", 1, WHOLE)))
    assert "does not depend on shared.weight" in prove(model, FoldPlan((more,)), BATCHES)["after"]


def test_a_model_that_draws_numbers_of_its_own_proves_nothing() -> None:
    class Noisy(Mixture):
        count = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count += 1
            return super().forward(x) + self.count

    model = Noisy().double()
    with pytest.raises(ModelError, match="gives other numbers when it is run again"):
        prove(model, mixture_plan(model), BATCHES)


def test_two_wrong_folds_are_named_and_the_right_ones_are_not() -> None:
    model = tiny_llama().double()
    plan = make_fold_plan(model, make_plan(model))
    assert len(plan.folds) == 5 and prove(model, plan) == {}
    wrong = {"model.layers.0.input_layernorm": 0, "model.layers.1.post_attention_layernorm": 1}
    folds = tuple(
        replace(fold, consumers=fold.consumers[1:]) if fold.name in wrong else fold for fold in plan.decisions
    )
    assert set(prove(model, FoldPlan(folds))) == wrong.keys()


def test_a_reader_too_many_is_caught() -> None:
    model = tiny_llama().double()
    plan = make_fold_plan(model, make_plan(model))
    name = "model.layers.0.input_layernorm"
    more = Consumer("model.layers.0.mlp.gate_proj.weight", 1, (Piece(0, 32, 0),))
    folds = tuple(replace(f, consumers=(*f.consumers, more)) if f.name == name else f for f in plan.decisions)
    assert list(prove(model, FoldPlan(folds))) == [name]


def test_a_norm_that_is_added_to_the_residual_is_caught() -> None:
    model = tiny_bert().double()
    (decision,) = [d for d in make_plan(model).decisions if d.name == "bert.encoder.layer.0.attention.output.LayerNorm"]
    reader = Consumer("bert.encoder.layer.0.intermediate.dense.weight", 1, (Piece(0, 32, 0),))
    fold = Fold(decision.name, "fold", "", (reader,), False, "keep", decision.spec)
    assert list(prove(model, FoldPlan((fold,)))) == [decision.name]


def tiny_mixtral() -> PreTrainedModel:
    config = MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=4, attn_implementation="eager",
    )  # fmt: skip
    return MixtralForCausalLM(config).eval()


@pytest.mark.parametrize("part", ["gate.weight", "experts"])
def test_a_stack_of_experts_needs_its_router_and_all_its_parameters(part: str) -> None:
    model = tiny_mixtral()
    plan = make_fold_plan(model, make_plan(model))
    name = "model.layers.0.post_attention_layernorm"
    assert prove(model, plan) == {}
    folds = tuple(
        replace(f, consumers=tuple(c for c in f.consumers if part not in c.parameter)) if f.name == name else f
        for f in plan.decisions
    )
    assert list(prove(model, FoldPlan(folds))) == [name]


def tiny_gpt2() -> PreTrainedModel:
    config = GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=2, n_positions=64, bos_token_id=1, eos_token_id=2)
    return GPT2LMHeadModel(config).eval()


def test_a_tied_head_is_untied_for_the_proof_and_tied_afterwards() -> None:
    model = tiny_gpt2().double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "ln_" in name:
                parameter.copy_(torch.rand(parameter.shape) + 0.5)
    plan = make_fold_plan(model, make_plan(model), tied="untie")
    assert plan.by_name()["transformer.ln_f"].untie
    assert plan.by_name()["transformer.h.0.ln_1"].bias == "move"
    assert prove(model, plan) == {}
    assert model.lm_head.weight is model.transformer.wte.weight
    tied = tuple(replace(fold, untie=False) for fold in plan.folds)
    assert list(prove(model, FoldPlan(tied))) == ["transformer.ln_f"]


def planned(drop: str = "") -> Callable[..., FoldPlan]:
    """The function that plans folds, or one that overlooks a reader."""

    def make(model: nn.Module, plan: Plan, *, tied: Any = "skip") -> FoldPlan:
        found = make_fold_plan(model, plan, tied=tied)
        return FoldPlan(
            tuple(
                replace(f, consumers=tuple(c for c in f.consumers if not drop or drop not in c.parameter))
                for f in found.decisions
            )
        )

    return make


def large() -> PreTrainedModel:
    with torch.device("meta"):
        return tiny_llama(hidden_size=1024, intermediate_size=2048, num_hidden_layers=8, num_attention_heads=16).eval()


def test_a_large_model_is_proved_by_its_twin_without_any_values() -> None:
    model = large()
    plan = make_fold_plan(model, make_plan(model))
    assert len(plan.folds) == 17
    assert prove_by_twin(model, plan, make_fold_plan) == {}


def test_a_reader_that_is_overlooked_in_both_is_caught_by_the_twin() -> None:
    model, careless = large(), planned(drop="up_proj")
    reasons = prove_by_twin(model, careless(model, make_plan(model)), careless)
    assert set(reasons) == {f"model.layers.{number}.post_attention_layernorm" for number in range(8)}
    assert all("something else reads it" in reason for reason in reasons.values())


def test_a_fold_without_a_counterpart_is_not_proved() -> None:
    model = large()
    plan = planned(drop="q_proj")(model, make_plan(model))
    reasons = prove_by_twin(model, plan, make_fold_plan)
    assert set(reasons) == {f"model.layers.{number}.input_layernorm" for number in range(8)}
    assert all("has no fold of these consumers" in reason for reason in reasons.values())
