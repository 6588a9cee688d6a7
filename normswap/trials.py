"""Hold norms beside their originals on rows that the inputs may not bring."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from normswap.figures import Criterion
from normswap.gates import judge_norm
from normswap.meter import NormMeter, NormUnderTest, trial_inputs

__all__ = ["try_rows"]


@torch.no_grad()
def try_rows(
    norms: Sequence[NormUnderTest], dtype: torch.dtype, device: torch.device, criterion: Criterion
) -> list[str]:
    """Run each norm beside its original on the rows of `normswap.meter.trial_inputs`.

    One norm of each class and spec runs on all of them, the others on those that eps outweighs.

    Args:
        norms: of one model.
        dtype: of the rows.
        device: where the norms are.
        criterion: the bounds.

    Returns:
        The failures, in words.
    """
    failures, seen = [], set()
    for norm in norms:
        meter, key = NormMeter(norm.spec), (norm.spec, type(norm.module))
        for trial in trial_inputs(norm.spec, eps_alone=key in seen):
            arguments = {name: tensor.to(device, dtype) for name, tensor in trial.items()}
            x, gate = arguments[norm.spec.input_name], arguments.get(norm.spec.gate_name or "")
            expected, got = norm.original(**arguments), norm.swapped(**arguments)
            meter.add(x, norm.gain(), norm.bias(), expected, got, gate)
        seen.add(key)
        failures += judge_norm(f"{norm.name} on trial rows", meter, criterion)[1]
    return failures
