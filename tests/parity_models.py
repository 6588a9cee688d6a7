"""A tiny Llama and wrong and right conversions of it, for the tests of parity."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from normswap.inputs import Inputs, make_inputs
from normswap.parity import Criterion, NormUnderTest, ParityReport, measure
from normswap.spec import NormSpec


class Swapped(nn.Module):
    """A right swap of a Llama norm, with another order of summation; faults are put in by its attributes."""

    def __init__(self, original: LlamaRMSNorm) -> None:
        super().__init__()
        self.original = original
        self.eps = original.variance_epsilon
        self.offset = 0.0
        self.scale = 1.0
        self.gain_first = False
        self.spoil: float | None = None

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        x = hidden_states
        wide = x.double()
        n = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        gain = (self.original.weight.double() + self.offset) * self.scale
        out = ((n if self.gain_first else n.to(x.dtype).double()) * gain).to(x.dtype)
        if self.spoil is not None:
            out[..., 0, 0] = self.spoil
        return out


def llama(seed: int = 0) -> LlamaForCausalLM:
    """A tiny Llama whose gains are not 1 and whose first norm sees a small input, so that eps matters."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, LlamaRMSNorm):
                module.weight.add_(0.3 * torch.randn(module.weight.shape))
    return model


class Pair:
    """Loaders of an original and of its conversion, and the norms of the latter."""

    def __init__(self, fault: Callable[[list[Swapped]], None] | None = None, seed: int = 0) -> None:
        self.model = llama(seed)
        self.fault = fault
        self.loaded: list[tuple[str, torch.dtype]] = []
        self.last: nn.Module | None = None

    def original(self, dtype: torch.dtype) -> nn.Module:
        self.loaded.append(("original", dtype))
        return copy.deepcopy(self.model).to(dtype)

    def converted(self, dtype: torch.dtype) -> nn.Module:
        self.loaded.append(("converted", dtype))
        model = copy.deepcopy(self.model).to(dtype)
        swapped = []
        for name, module in list(model.named_modules()):
            if isinstance(module, LlamaRMSNorm):
                parent, _, leaf = name.rpartition(".")
                swapped.append(Swapped(module))
                setattr(model.get_submodule(parent), leaf, swapped[-1])
        if self.fault is not None:
            self.fault(swapped)
        self.last = model
        return model

    @staticmethod
    def norms(model: nn.Module) -> list[NormUnderTest]:
        return [
            NormUnderTest(
                name=name,
                spec=NormSpec(
                    "rms",
                    module.original.weight.shape[0],
                    module.original.variance_epsilon,
                    cast="before_gain",
                    out="promote",
                    input_name="hidden_states",
                ),
                module=module,
                original=module.original.forward,
                gain=lambda module=module: module.original.weight,  # type: ignore[misc]
                bias=lambda: None,
            )
            for name, module in model.named_modules()
            if isinstance(module, Swapped)
        ]

    def inputs(self, **options: int) -> Inputs:
        return make_inputs(self.model, self.model.config, **options)  # type: ignore[arg-type]

    def measure(
        self,
        dtype: torch.dtype = torch.bfloat16,
        inputs: Inputs | None = None,
        criterion: Criterion | None = None,
    ) -> ParityReport:
        return measure(
            self.original,
            self.converted,
            self.norms,
            inputs or self.inputs(),
            dtype=dtype,
            device="cpu",
            backend="cpu",
            criterion=criterion,
        )
