"""What transformers does with several processes: ``tp_plan="auto"`` and its own FSDP, norms swapped after loading."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from rank_cases import NORMS, Case, check_close, check_fused_step, counting, tiny, tokens
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import normswap
from normswap import modules
from normswap.errors import NothingToPatchError

RECENT = int(transformers.__version__.split(".")[0]) >= 5


def loaded(model: PreTrainedModel, **options: object) -> PreTrainedModel:
    """Save a model on one rank and load it on all."""
    folder = Path(sys.argv[1]) / type(model).__name__
    if dist.get_rank() == 0 and not folder.exists():
        model.save_pretrained(folder)
    dist.barrier()
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options).eval()


def auto_plan(_: DeviceMesh, kind: str) -> None:
    """Linears are divided, the residual stream and its norms are not."""
    model = loaded(tiny(kind), tp_plan="auto")
    assert any(hasattr(parameter, "placements") for parameter in model.parameters())
    normswap.patch(model)
    check_fused_step(model, kind, data_parallel=False)
    normswap.unpatch(model)
    with counting() as calls, torch.no_grad():
        model(input_ids=tokens(), use_cache=False)
    assert len(calls) == NORMS[kind]


def norms_of_heads(_: DeviceMesh) -> None:
    """Where the plan replaces the forward of the norms of queries and keys, these are refused in words."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
    )
    alone = Qwen3ForCausalLM(config).eval()
    expected = alone(input_ids=tokens(), use_cache=False).logits
    model = loaded(alone, tp_plan="auto")
    plan = normswap.inspect(model).plan
    assert [decision.name for decision in plan.refusals] == [
        f"model.layers.{layer}.self_attn.{name}_norm" for layer in range(2) for name in "qk"
    ]
    assert {decision.reason for decision in plan.refusals} == {"its forward was replaced on the instance"}
    normswap.patch(model)
    assert len(list(modules.fused_norms(model))) == 5
    with counting() as calls:
        result = model(input_ids=tokens(), use_cache=False).logits
    # The refused ones run by a reference that the plan took before the counting.
    assert calls == []
    check_close(result.detach(), expected.detach(), "logits")


def own_fsdp(_: DeviceMesh) -> None:
    """transformers shards the model by FSDP2 while it loads it."""
    from transformers.distributed import DistributedConfig

    model = loaded(tiny("llama"), distributed_config=DistributedConfig(fsdp_size=2))
    assert all(hasattr(parameter, "placements") for parameter in model.parameters())
    check_fused_step(normswap.patch(model), "llama")


def own_sequence_parallel(mesh: DeviceMesh) -> None:
    """transformers' own style replaces the forward: a swap that is there stays, one that comes later is refused."""
    from transformers.distributed.tensor_parallel import SequenceParallel

    x, grad = torch.randn(4, 6, 8), torch.randn(4, 6, 8)
    norm = LlamaRMSNorm(8)
    with torch.no_grad():
        norm.weight.add_(0.3 * torch.randn(8))
    expected = norm(x)
    expected.backward(grad)
    wanted = norm.weight.grad
    late, early = LlamaRMSNorm(8), LlamaRMSNorm(8)
    early.load_state_dict(norm.state_dict())
    normswap.patch(early)
    for module in (early, late):
        SequenceParallel().install_forward(module, mesh)
    here = distribute_tensor(x, mesh, [Shard(1)]).to_local()
    with counting() as calls:
        y = early(here)
    assert calls == []
    check_close(y.detach(), distribute_tensor(expected.detach(), mesh, [Shard(1)]).to_local(), "result")
    y.backward(distribute_tensor(grad, mesh, [Shard(1)]).to_local())
    check_close(early.weight.grad.full_tensor(), wanted, "gradient of the gain")
    normswap.unpatch(early)
    check_close(early(here).detach(), y.detach(), "result after unpatch")
    try:
        normswap.patch(nn.ModuleList([late]))
    except NothingToPatchError as error:
        assert "its forward was replaced on the instance" in str(error)
    else:
        raise AssertionError("swapped below a forward that calls the original")


CASES: dict[str, Case] = {f"auto_plan[{kind}]": functools.partial(auto_plan, kind=kind) for kind in ("llama", "gemma2")}
if RECENT:
    CASES |= {case.__name__: case for case in (norms_of_heads, own_fsdp, own_sequence_parallel)}
