"""FSDP2 and DDP: norms swapped before and after sharding, against the model that is neither swapped nor sharded."""

from __future__ import annotations

import functools

import torch
from rank_cases import (
    NORMS,
    Case,
    check_close,
    check_fused_step,
    check_step,
    counting,
    layers_of,
    mine,
    norms_of,
    tiny,
    tokens,
    whole,
)
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import normswap
from normswap import modules

SHARDINGS = ("whole", "layers", "norms")


def shard(model: nn.Module, how: str, mesh: DeviceMesh, **options: object) -> nn.Module:
    if how == "norms":
        for norm in norms_of(model):
            fully_shard(norm, mesh=mesh, **options)
    if how != "whole":
        for layer in layers_of(model):
            fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def patched_before(mesh: DeviceMesh, kind: str, how: str) -> None:
    check_fused_step(shard(normswap.patch(tiny(kind)), how, mesh), kind)


def patched_after(mesh: DeviceMesh, kind: str, how: str) -> None:
    model = shard(tiny(kind), how, mesh)
    parameters = dict(model.named_parameters())
    assert normswap.patch(model) is model
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    check_fused_step(model, kind)


def unpatched_after(mesh: DeviceMesh, kind: str, how: str) -> None:
    """What was patched before sharding is put back after it, and patched once more."""
    model = shard(normswap.patch(tiny(kind)), how, mesh)
    normswap.unpatch(model)
    assert list(modules.fused_norms(model)) == []
    with counting() as calls:
        check_step(model, kind)
    # Half of the calls are those of the model that is compared with.
    assert len(calls) == 2 * NORMS[kind]
    model.zero_grad()
    check_fused_step(normswap.patch(model), kind)


def patched_twice(mesh: DeviceMesh) -> None:
    model = normswap.patch(shard(normswap.patch(tiny("llama")), "norms", mesh))
    check_fused_step(model, "llama")


def trains_alike(mesh: DeviceMesh) -> None:
    """Some steps of the optimizer on sharded parameters, swapped and not."""
    losses = []
    for patched in (False, True):
        model = shard(tiny("gemma2"), "layers", mesh).train()
        if patched:
            normswap.patch(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses.append([])
        for _ in range(5):
            loss = model(input_ids=mine(tokens()), labels=mine(tokens()), use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(loss.detach())
    expected, got = map(torch.stack, losses)
    assert float(expected[0] - expected[-1]) > 0.5
    check_close(got, expected, "losses")


def mixed_precision(mesh: DeviceMesh) -> None:
    """Parameters that FSDP casts to bfloat16 on the way to the norm."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    logits = []
    for patched in (False, True):
        model = shard(tiny("llama"), "norms", mesh, mp_policy=policy)
        if patched:
            normswap.patch(model)
        with counting() as calls, torch.no_grad():
            logits.append(model(input_ids=mine(tokens()), use_cache=False).logits)
        assert len(calls) == (0 if patched else NORMS["llama"])
    assert logits[0].dtype == logits[1].dtype == torch.bfloat16
    # As far as two roundings of bfloat16 are apart.
    check_close(logits[1].float(), logits[0].float(), "logits", bound=2**-8)


def state_dicts(mesh: DeviceMesh) -> None:
    """A sharded, swapped model gives and takes the state of the plain one, under the same keys."""
    alone = tiny("llama")
    model = shard(normswap.patch(tiny("llama")), "norms", mesh)
    full = StateDictOptions(full_state_dict=True)
    given = get_model_state_dict(model, options=full)
    assert list(given) == list(alone.state_dict())
    assert all(torch.equal(given[name], value) for name, value in alone.state_dict().items())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    set_model_state_dict(model, alone.state_dict(), options=full)
    check_fused_step(model, "llama")


def from_the_meta_device(mesh: DeviceMesh) -> None:
    """Patched and sharded before there are weights, as large models are built."""
    alone = tiny("llama")
    with torch.device("meta"):
        model = type(alone)(alone.config)
    model = shard(normswap.patch(model), "layers", mesh).eval()
    model.to_empty(device="cpu")
    buffers = dict(alone.named_buffers())
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])
    set_model_state_dict(model, alone.state_dict(), options=StateDictOptions(full_state_dict=True))
    check_fused_step(model, "llama")


def ddp_before(mesh: DeviceMesh) -> None:
    check_fused_step(DistributedDataParallel(normswap.patch(tiny("gemma2"))), "gemma2")


def ddp_after(mesh: DeviceMesh) -> None:
    model = DistributedDataParallel(tiny("gpt2"))
    normswap.patch(model)
    check_fused_step(model, "gpt2")


def frozen_gains(mesh: DeviceMesh) -> None:
    """FSDP shards frozen gains beside trained ones; they stay without gradient."""
    model = normswap.patch(tiny("llama"))
    for norm in norms_of(model):
        norm.weight.requires_grad_(False)
    shard(model, "layers", mesh)
    before = {name: whole(p.detach()).clone() for name, p in model.named_parameters() if not p.requires_grad}
    assert len(before) == NORMS["llama"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(input_ids=mine(tokens()), labels=mine(tokens()), use_cache=False).loss.backward()
    optimizer.step()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is None) == (name in before)
        if name in before:
            assert torch.equal(whole(parameter.detach()), before[name])


CASES: dict[str, Case] = {
    f"{case.__name__}[{kind}-{how}]": functools.partial(case, kind=kind, how=how)
    for case in (patched_before, patched_after, unpatched_after)
    for kind in NORMS
    for how in (SHARDINGS if kind == "llama" else SHARDINGS[1:])
}
for _case in (
    patched_twice,
    trains_alike,
    mixed_precision,
    state_dicts,
    from_the_meta_device,
    ddp_before,
    ddp_after,
    frozen_gains,
):
    CASES[_case.__name__] = _case
