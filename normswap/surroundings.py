"""What a user may have set for torch as a whole, set aside while norms are tried."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["plain_surroundings"]


@contextmanager
def plain_surroundings(seed: int) -> Iterator[None]:
    """Run what is inside in float32 on the CPU, without gradients, inference mode, autocast or warnings, from a seed.

    Default dtype and device, random state and modes are those of before when it ends. (Tensors made in inference mode
    can be neither watched nor differentiated; odd dtypes make torch warn.)

    Args:
        seed: of the random state inside.
    """
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with (
            torch.device("cpu"),
            torch.inference_mode(False),
            torch.no_grad(),
            torch.autocast("cpu", enabled=False),
            torch.random.fork_rng(devices=[]),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            torch.manual_seed(seed)
            yield
    finally:
        torch.set_default_dtype(dtype)
