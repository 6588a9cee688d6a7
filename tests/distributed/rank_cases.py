"""What the scripts share that run on every rank: tiny models, the counting of originals, and the writing of results."""

from __future__ import annotations

import functools
import json
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from tiny_checkpoints import disturb_norms, tiny_llama
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import Gemma2Config, Gemma2ForCausalLM, GPT2Config, GPT2LMHeadModel, PreTrainedModel
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

from normswap import modules

Case = Callable[[DeviceMesh], None]
RANKS = 2
ORIGINALS = (
    LlamaRMSNorm,
    Gemma2RMSNorm,
    Qwen3RMSNorm,
    Qwen3NextRMSNormGated,
    CohereLayerNorm,
    nn.LayerNorm,
    nn.RMSNorm,
)
NORMS = {"llama": 5, "gemma2": 9, "gpt2": 5}
"""How many norms a tiny model has."""


def tiny(kind: str) -> PreTrainedModel:
    """Two layers with disturbed gains, alike on every rank."""
    if kind == "llama":
        return tiny_llama(num_key_value_heads=2)
    torch.manual_seed(0)
    if kind == "gemma2":
        config = Gemma2Config(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=16,
        )
        return disturb_norms(Gemma2ForCausalLM(config))
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=2, n_positions=64))
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.LayerNorm):
                for parameter in module.parameters():
                    parameter.add_(0.3 * torch.randn(parameter.shape))
    return model.eval()


def layers_of(model: PreTrainedModel) -> nn.ModuleList:
    """Return the layers of a tiny model."""
    return model.transformer.h if isinstance(model, GPT2LMHeadModel) else model.model.layers


def norms_of(model: nn.Module) -> list[nn.Module]:
    """Return the norms of a tiny model, by their classes."""
    return [module for module in model.modules() if isinstance(module, ORIGINALS)]


def tokens() -> Tensor:
    """Four sequences of ten tokens; each rank of a data-parallel run takes two of them."""
    return torch.randint(64, (4, 10), generator=torch.Generator().manual_seed(1))


def mine(batch: Tensor) -> Tensor:
    """Return this rank's part of a batch."""
    return batch.chunk(RANKS)[dist.get_rank()]


def step(model: nn.Module, batch: Tensor) -> Tensor:
    """Run forward and backward on a batch; return the logits."""
    result = model(input_ids=batch, labels=batch, use_cache=False)
    result.loss.backward()
    return whole(result.logits.detach())


def whole(tensor: Tensor) -> Tensor:
    """Gather what is distributed."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return the whole gradient of each parameter, by the name that it has without a wrapper around the model."""
    found = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, f"{name} has no gradient"
        found[name.removeprefix("module.")] = whole(parameter.grad)
    return found


def check_close(got: Tensor, expected: Tensor, what: str, bound: float = 1e-5) -> None:
    """Compare relative to the size of what is expected."""
    assert got.shape == expected.shape, f"{what}: {tuple(got.shape)}, expected {tuple(expected.shape)}"
    got, expected = got.detach(), expected.detach()
    error = float((got - expected).norm()) / max(float(expected.norm()), 1e-12)
    assert error <= bound, f"{what}: off by {error:.1e}"


def check_step(model: nn.Module, kind: str, *, data_parallel: bool = True) -> None:
    """Hold a step of a model to the same step of the model that is neither patched nor distributed."""
    alone, batch = tiny(kind), tokens()
    expected = step(alone, batch)
    got = step(model, mine(batch) if data_parallel else batch)
    check_close(got, mine(expected) if data_parallel else expected, "logits")
    wanted, found = gradients(alone), gradients(model)
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        check_close(found[name], gradient, f"gradient of {name}")


def check_fused_step(model: nn.Module, kind: str, *, data_parallel: bool = True) -> None:
    """The same, and that every norm is swapped and no original runs."""
    assert len(list(modules.fused_norms(model))) == NORMS[kind]
    batch = tokens()
    with counting() as calls, torch.no_grad():
        model(input_ids=mine(batch) if data_parallel else batch, use_cache=False)
    assert calls == []
    check_step(model, kind, data_parallel=data_parallel)


@contextmanager
def counting() -> Iterator[list[str]]:
    """Give the class names of the originals whose forward is called."""
    calls: list[str] = []
    before = {cls: cls.forward for cls in ORIGINALS}
    for cls, forward in before.items():
        cls.forward = _counted(forward, cls.__name__, calls)
    try:
        yield calls
    finally:
        for cls, forward in before.items():
            cls.forward = forward


def _counted(forward: Callable[..., Tensor], name: str, calls: list[str]) -> Callable[..., Tensor]:
    @functools.wraps(forward)
    def counted(self: nn.Module, *args: object, **kwargs: object) -> Tensor:
        calls.append(name)
        return forward(self, *args, **kwargs)

    return counted


def main(cases: dict[str, Case]) -> None:
    """Run the cases on this rank, and write for each what went wrong, or nothing."""
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    mesh = init_device_mesh("cpu", (RANKS,))
    results: dict[str, str] = {}
    for name, case in cases.items():
        torch.manual_seed(0)
        try:
            case(mesh)
            results[name] = ""
        except Exception:
            results[name] = traceback.format_exc()
        (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(results))
        # A rank that failed in the middle leaves the other waiting; from there on nothing is to be trusted.
        dist.monitored_barrier(timeout=timedelta(seconds=60))
    dist.destroy_process_group()
