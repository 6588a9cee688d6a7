"""Training with swapped norms: the curve of the original, step by step, and gains that move or stay as they should."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Mamba2Config,
    Mamba2ForCausalLM,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
)

import normswap
from normswap import modules

pytestmark = pytest.mark.core

STEPS = 200
VOCABULARY = 64
SIZES = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
ATTENTION = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}


def llama() -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**SIZES, **ATTENTION, num_key_value_heads=1))


def gemma2() -> PreTrainedModel:
    """Sandwich norms: the branch is normalised before it is added to the residual stream."""
    return Gemma2ForCausalLM(Gemma2Config(**SIZES, **ATTENTION, num_key_value_heads=1, head_dim=16))


def gpt2() -> PreTrainedModel:
    config = GPT2Config(**SIZES, n_embd=32, n_layer=2, n_head=2, n_positions=32)
    return GPT2LMHeadModel(config)


def mamba2() -> PreTrainedModel:
    """A gated norm in each mixer."""
    config = Mamba2Config(
        **SIZES, hidden_size=32, num_hidden_layers=2, num_heads=4, head_dim=16, state_size=8, n_groups=1, chunk_size=8
    )
    return Mamba2ForCausalLM(config)


MODELS: dict[str, tuple[Callable[[], PreTrainedModel], int]] = {
    "llama": (llama, 5),
    "gemma2": (gemma2, 9),
    "gpt2": (gpt2, 5),
    "mamba2": (mamba2, 5),
}


def fresh(kind: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    torch.manual_seed(0)
    model = MODELS[kind][0]().to(dtype)
    # Dropout would draw the same numbers in both runs; without it nothing but the norms is compared.
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model.train()


def swapped(model: PreTrainedModel, kind: str) -> PreTrainedModel:
    normswap.patch(model)
    assert len(list(modules.fused_norms(model))) == MODELS[kind][1]
    return model


def batches() -> Tensor:
    """Sequences that can be learnt: steps of a fixed size through the vocabulary, a size for each sequence."""
    generator = torch.Generator().manual_seed(1)
    start = torch.randint(VOCABULARY, (STEPS, 4, 1), generator=generator)
    stride = torch.randint(1, 5, (STEPS, 4, 1), generator=generator)
    return (start + stride * torch.arange(16)) % VOCABULARY


def train(model: PreTrainedModel, steps: int = STEPS, lr: float = 3e-3) -> Tensor:
    """Return the loss of each step, float64."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)
    losses = []
    for batch in batches()[:steps]:
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return torch.tensor(losses, dtype=torch.float64)


def gains(model: nn.Module) -> dict[str, Tensor]:
    return {
        f"{name}.{spec.gain_name}": getattr(module, spec.gain_name) for name, module, spec in modules.fused_norms(model)
    }


@pytest.mark.parametrize("kind", MODELS)
def test_float32_losses_agree_at_every_step_and_gains_move(kind: str) -> None:
    expected = train(fresh(kind))
    model = swapped(fresh(kind), kind)
    before = {name: gain.detach().clone() for name, gain in gains(model).items()}
    got = train(model)
    assert expected[-20:].mean() < 0.7 * expected[:20].mean()
    off = ((got - expected).abs() / expected).max()
    assert off <= 1e-4, f"the curves are {off:.1e} apart"
    for name, gain in gains(model).items():
        assert gain.grad is not None and gain.grad.isfinite().all() and gain.grad.abs().max() > 0, name
        assert (gain.detach() - before[name]).abs().max() > 1e-2, name


def nudged(model: PreTrainedModel, seed: int) -> PreTrainedModel:
    """Move one weight in a hundred by one unit in its last place: as much as any rounding may."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            chosen = torch.rand(parameter.shape, generator=generator) < 0.01
            up = torch.nextafter(parameter, torch.full_like(parameter, torch.inf))
            parameter.copy_(torch.where(chosen, up, parameter))
    return model


def apart(one: Tensor, other: Tensor) -> float:
    """Root mean square of the distance of two curves, each averaged over 20 steps."""
    one, other = (curve.unfold(0, 20, 1).mean(-1) for curve in (one, other))
    return float((one - other).pow(2).mean().sqrt())


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind == "gpt2" else pytest.mark.slow) for kind in MODELS]
)
def test_bfloat16_curves_lie_within_the_spread_from_run_to_run(kind: str) -> None:
    """The spread is that of four runs of the original whose weights differ in the last place.

    On average over the four the swapped run must be no farther away than the two that are farthest apart.
    """
    runs = [train(fresh(kind, torch.bfloat16))]
    runs += [train(nudged(fresh(kind, torch.bfloat16), seed)) for seed in range(3)]
    spread = max(apart(one, other) for one in runs for other in runs)
    got = train(swapped(fresh(kind, torch.bfloat16), kind))
    assert sum(apart(got, run) for run in runs) / len(runs) <= spread
    # What is wrong by 2% would not have passed.
    wrong = swapped(fresh(kind, torch.bfloat16), kind)
    for _, norm, _ in list(modules.fused_norms(wrong)):
        norm.register_forward_hook(lambda module, arguments, result: 1.02 * result)
    disturbed = train(wrong)
    assert sum(apart(disturbed, run) for run in runs) / len(runs) > spread


@pytest.mark.parametrize("kind", MODELS)
def test_frozen_gains_stay_frozen(kind: str) -> None:
    def frozen(model: PreTrainedModel) -> PreTrainedModel:
        for name, parameter in model.named_parameters():
            if "norm" in name or ".ln_" in name:
                parameter.requires_grad_(False)
        return model

    expected = train(frozen(fresh(kind)), steps=10)
    model = frozen(swapped(fresh(kind), kind))
    before = {name: gain.detach().clone() for name, gain in gains(model).items()}
    assert len(before) == MODELS[kind][1]
    got = train(model, steps=10)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=0.0)
    for name, gain in gains(model).items():
        assert not gain.requires_grad and gain.grad is None, name
        assert torch.equal(gain, before[name]), name


def test_only_gains_are_trained() -> None:
    """As in tuning of norms alone: the gradient reaches them through what is frozen."""
    names = set(gains(swapped(fresh("gemma2"), "gemma2")))

    def bared(model: PreTrainedModel) -> PreTrainedModel:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in names)
        return model

    expected = train(bared(fresh("gemma2")), steps=20)
    model = bared(swapped(fresh("gemma2"), "gemma2"))
    torch.testing.assert_close(train(model, steps=20), expected, rtol=1e-5, atol=0.0)
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None) == (name in names), name
    # Gemma's gains start from zero.
    assert all(gain.detach().abs().max() > 1e-2 for gain in gains(model).values())


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_the_trainer_groups_and_trains_alike(kind: str, tmp_path: Path) -> None:
    """Weight decay leaves out norms by class and by name; a group too many would show in the losses."""
    data = [{"input_ids": row, "labels": row} for row in batches()[:10].flatten(0, 1)]

    def trained(model: PreTrainedModel) -> tuple[set[str], list[float]]:
        options = TrainingArguments(
            output_dir=str(tmp_path),
            max_steps=10,
            per_device_train_batch_size=4,
            learning_rate=3e-3,
            weight_decay=0.5,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            dataloader_pin_memory=False,
        )
        trainer = Trainer(model=model, args=options, train_dataset=data)
        decayed = set(trainer.get_decay_parameter_names(model))
        trainer.train()
        return decayed, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    decayed, expected = trained(fresh(kind))
    also_decayed, got = trained(swapped(fresh(kind), kind))
    assert also_decayed == decayed
    assert not decayed & set(gains(swapped(fresh(kind), kind)))
    assert len(got) == 10
    # The log rounds.
    torch.testing.assert_close(torch.tensor(got), torch.tensor(expected), rtol=1e-4, atol=1e-4)


def test_a_copy_trains_like_its_original() -> None:
    model = swapped(fresh("gemma2"), "gemma2")
    twin = copy.deepcopy(model)
    assert torch.equal(train(model, steps=5), train(twin, steps=5))
