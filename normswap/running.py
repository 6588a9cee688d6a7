"""Run one forward, and take the floating tensors of what comes out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from normswap.errors import ModelError

__all__ = ["Output", "device_of", "dtype_of", "output_of", "run"]


@dataclass(frozen=True)
class Output:
    """What a forward gave.

    Attributes:
        name: of the tensor that is compared first; see `output_of`.
        tensors: every floating tensor in the output, by name.
    """

    name: str
    tensors: dict[str, torch.Tensor]

    @property
    def main(self) -> torch.Tensor:
        """The tensor that is compared first."""
        return self.tensors[self.name]


@torch.no_grad()
def run(model: nn.Module, batch: dict[str, Any], dtype: torch.dtype, device: torch.device | str) -> Output:
    """Run one forward.

    Args:
        model: what to run.
        batch: keyword arguments; floating tensors are cast to ``dtype``.
        dtype: of the model.
        device: where the model is.

    Returns:
        What `output_of` finds in the result.

    Raises:
        ModelError: the forward raises.
    """
    device = torch.device(device)
    moved = {
        key: value.to(device, dtype if value.is_floating_point() else None) if torch.is_tensor(value) else value
        for key, value in batch.items()
    }
    # Some forwards draw numbers; both models must draw the same.
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        try:
            result = model(**moved)
        # Whatever a model's code raises on inputs that it was not made for.
        except Exception as error:
            words = (str(error).strip().splitlines() or [""])[0]
            raise ModelError(
                f"{type(model).__name__} does not run on {', '.join(batch)} in {dtype}: "
                f"{type(error).__name__}: {words[:200]}"
            ) from error
    return output_of(result)


def output_of(model_output: Any) -> Output:
    """Collect the floating tensors of an output, and choose the one that two runs are compared by first.

    Args:
        model_output: what a forward returned: a mapping, a tuple or a tensor.

    Returns:
        The tensors, and the first one's name: ``logits``, else ``last_hidden_state``, else the first floating tensor
        with at least two dimensions and more than one value.

    Raises:
        ModelError: there is none.
    """
    if isinstance(model_output, torch.Tensor):
        model_output = {"output": model_output}
    elif isinstance(model_output, (tuple, list)) and not hasattr(model_output, "keys"):
        model_output = {f"output[{index}]": value for index, value in enumerate(model_output)}
    if hasattr(model_output, "items"):
        found = dict(_tensors(model_output))
        for name in ("logits", "last_hidden_state"):
            if name in found:
                return Output(name, found)
        for name, tensor in found.items():
            if tensor.dim() >= 2 and tensor.numel() > 1:
                return Output(name, found)
    raise ModelError(f"expected a floating tensor in the model's output, got {type(model_output).__name__}")


def _tensors(output: Any) -> Iterator[tuple[str, torch.Tensor]]:
    for name, value in output.items():
        if isinstance(value, torch.Tensor):
            if value.is_floating_point():
                yield name, value
        elif isinstance(value, (tuple, list)):
            for index, entry in enumerate(value):
                if isinstance(entry, torch.Tensor) and entry.is_floating_point():
                    yield f"{name}[{index}]", entry
        elif hasattr(value, "items"):
            for inner, tensor in _tensors(value):
                yield f"{name}.{inner}", tensor


def dtype_of(model: nn.Module) -> torch.dtype:
    """Return the dtype of a model's first floating parameter; float32 without one."""
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)


def device_of(model: nn.Module) -> torch.device:
    """Return the device of a model's first parameter; the CPU without one."""
    return next((p.device for p in model.parameters()), torch.device("cpu"))
