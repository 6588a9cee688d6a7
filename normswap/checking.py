"""Hold a swap to the unit bound on the spot, before a model is changed."""

from __future__ import annotations

import torch
from torch import nn

from normswap.errors import ParityError
from normswap.figures import Criterion
from normswap.gates import judge_norm
from normswap.meter import NormMeter, trial_inputs
from normswap.modules import original_forward, swap, unswap
from normswap.replica import Replica
from normswap.spec import NormSpec
from normswap.surroundings import plain_surroundings
from normswap.wrapping import plain_state

__all__ = ["check_swap"]


def check_swap(module: nn.Module, name: str, spec: NormSpec, backend: str) -> None:
    """Run original and fused implementation side by side on the module's device; neither is changed.

    A private copy runs in the module's dtype, with the module's own values and with random ones of trained models'
    sizes: rows of ordinary size, far above it, and where eps outweighs the row; one row, a few, and some hundred.

    Raises:
        ParityError: they differ by more than the unit bound; the message names the norm and the distance.
    """
    state = plain_state(module)
    tensors = [t for t in (*state["_parameters"].values(), *state["_buffers"].values()) if t is not None]
    dtype = tensors[0].dtype if tensors else torch.float32
    loaded = bool(tensors) and not any(tensor.is_meta for tensor in tensors)
    device = tensors[0].device if loaded else torch.device("cpu")
    replica = Replica(module, device)
    with plain_surroundings(0), torch.autocast(device.type, enabled=False):
        for own in (True, False) if loaded else (False,):
            if own:
                replica.adopt(module)
            else:
                replica.randomise(dtype, wide=True)
            meter = NormMeter(spec)
            given: dict[str, None] = {}
            for trial in trial_inputs(spec):
                arguments = {name: tensor.to(device, dtype) for name, tensor in trial.items()}
                x, gate = arguments[spec.input_name], arguments.get(spec.gate_name or "")
                expected = original_forward(replica.module, **arguments)
                swap(replica.module, spec, backend)
                got = replica.module(**arguments)
                unswap(replica.module)
                meter.add(x, replica.get(spec.gain_name), replica.get(spec.bias_name), expected, got, gate)
                given[str(tuple(x.shape))] = None
            _, failures = judge_norm(name, meter, Criterion())
            if failures:
                raise ParityError(
                    f"{name} ({replica.cls.__name__}): expected backend {backend!r} to stay within the unit bound of "
                    f"the original in {dtype}, got {'; '.join(failures)} on rows of shapes {', '.join(given)}; "
                    "nothing was changed"
                )
