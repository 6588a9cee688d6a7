"""What is compiled ahead of time: each operation, as its launches on rows of a width and of some dtypes.

An operation is a function ``(width, dtype, gain, device) -> launches``. It builds what the public operation of its name
would launch, on meta tensors. `OPERATIONS` names them all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .backends import kernels
from .formula import Formula
from .launch import Device, Launch

# No number of groups or of parts, so that rows are known by their number.
ROWS = 5003
GROUPS = 8

WITHOUT_GAIN = ("rms_norm scale", "l2_norm")


@dataclass(frozen=True)
class Case:
    """One operation on rows of one width.

    Attributes:
        operation: one of `OPERATIONS`.
        width: length of a row; the rows lie densely.
        dtype: of the rows.
        gain: dtype of the parameters.
    """

    operation: str
    width: int
    dtype: torch.dtype = torch.bfloat16
    gain: torch.dtype = torch.bfloat16

    def launches(self, device: Device) -> list[Launch]:
        """Return what is launched."""
        return OPERATIONS[self.operation](self.width, self.dtype, self.gain, device)


def make_rows(width: int, dtype: torch.dtype, groups: int = 1) -> Tensor:
    """Make rows of no memory, ``(ROWS, groups, width)``."""
    return torch.empty(ROWS, groups, width, dtype=dtype, device="meta")


def make_parameter(width: int, dtype: torch.dtype, groups: int = 1) -> Tensor:
    """Make a gain or a bias of no memory, ``(groups, width)``."""
    return torch.empty(groups, width, dtype=dtype, device="meta")


def make_statistics(groups: int = 1) -> Tensor:
    """Make a number for each row, of no memory, ``(ROWS, groups)``."""
    return torch.empty(ROWS, groups, device="meta")


def formulas(width: int, dtype: torch.dtype, gain: torch.dtype) -> dict[str, Formula]:
    """Return the formula of each operation that does not quantize, as in the models: Llama's, GPT-2's, Mamba's."""
    out = torch.promote_types(dtype, gain)
    plain = Formula("rms", 1e-6, 0.0, dtype, None, out)
    layer = Formula("layer", 1e-5, 0.0, None, None, dtype)
    gated = Formula("rms", 1e-6, 0.0, None, None, dtype)
    return {
        "rms_norm": plain,
        "layer_norm": layer,
        "add_rms_norm": plain._replace(sum_dtype=dtype),
        "add_layer_norm": layer._replace(sum_dtype=dtype),
        "gated_rms_norm before": gated._replace(gate_position="before"),
        "gated_rms_norm after": gated._replace(gate_position="after", round_dtype=dtype, product_dtype=dtype),
        "rms_norm grouped": gated._replace(groups=GROUPS),
        "rms_norm per head": plain,
        "rms_norm partial": plain._replace(partial=max(1, width // 4)),
        "rms_norm scale": gated._replace(scale_dtype=dtype),
        "l2_norm": gated._replace(eps_position="clamp", reduction="sum"),
    }


def _forward(name: str, save: bool) -> Callable[[int, torch.dtype, torch.dtype, Device], list[Launch]]:
    def launches(width: int, dtype: torch.dtype, gain: torch.dtype, device: Device) -> list[Launch]:
        formula = formulas(width, dtype, gain)[name]
        groups = GROUPS if name in ("rms_norm grouped", "rms_norm per head") else 1
        rows = make_rows(width, dtype, groups)
        launch = kernels("norm_forward").prepare(
            formula,
            rows,
            None if formula.sum_dtype is None else make_rows(width, dtype, groups),
            None if formula.gate_position == "none" else make_rows(width, dtype, groups),
            None if name in WITHOUT_GAIN else make_parameter(width, gain, groups),
            make_parameter(width, gain, groups) if formula.kind == "layer" else None,
            make_rows(width, formula.out_dtype, groups),
            None if formula.sum_dtype is None else make_rows(width, formula.sum_dtype, groups),
            make_statistics(groups) if save else None,
            make_statistics(groups) if save and formula.kind == "layer" else None,
            device,
        )
        return [launch]

    return launches


def _backward(name: str) -> Callable[[int, torch.dtype, torch.dtype, Device], list[Launch]]:
    def launches(width: int, dtype: torch.dtype, gain: torch.dtype, device: Device) -> list[Launch]:
        formula = formulas(width, dtype, gain)[name]
        groups = GROUPS if name in ("rms_norm grouped", "rms_norm per head") else 1
        gated, summing = formula.gate_position != "none", formula.sum_dtype is not None
        prepared: list[Launch] = kernels("norm_backward").prepare(
            formula,
            make_rows(width, formula.out_dtype, groups),
            make_rows(width, dtype, groups) if summing else None,
            make_rows(width, dtype, groups),
            make_rows(width, dtype, groups) if gated else None,
            None if name in WITHOUT_GAIN else make_parameter(width, gain, groups),
            make_statistics(groups),
            make_statistics(groups) if formula.kind == "layer" else None,
            make_rows(width, dtype, groups),
            make_rows(width, dtype, groups) if gated else None,
            None if name in WITHOUT_GAIN else make_parameter(width, gain, groups),
            make_parameter(width, gain, groups) if formula.kind == "layer" else None,
            device,
        )
        return prepared

    return launches


def _quantizing(to: torch.dtype) -> Callable[[int, torch.dtype, torch.dtype, Device], list[Launch]]:
    def launches(width: int, dtype: torch.dtype, gain: torch.dtype, device: Device) -> list[Launch]:
        formula = Formula("rms", 1e-6, 0.0, dtype, None, dtype)
        rows, values = make_rows(width, dtype), make_rows(width, to)
        launch = kernels("norm_quant").prepare(
            formula, rows, make_parameter(width, gain), None, values, make_statistics(), device
        )
        return [launch]

    return launches


OPERATIONS: dict[str, Callable[[int, torch.dtype, torch.dtype, Device], list[Launch]]] = {
    **{name: _forward(name, save=False) for name in formulas(1, torch.float32, torch.float32)},
    "rms_norm saving": _forward("rms_norm", save=True),
    "layer_norm saving": _forward("layer_norm", save=True),
    "rms_norm_quant int8": _quantizing(torch.int8),
    "rms_norm_quant fp8": _quantizing(torch.float8_e4m3fn),
    **{f"{name} backward": _backward(name) for name in formulas(1, torch.float32, torch.float32)},
}
"""What is launched for each operation, by name."""


def default_cases() -> Iterator[Case]:
    """Yield the cases of the report: every operation at every kind of width in bf16, and in every dtype at 4096."""
    for operation in OPERATIONS:
        plain = operation.removesuffix(" backward") in ("rms_norm", "layer_norm")
        for width in (128, 1024, 4096, 8192, 16384, 65536):
            if plain or width not in (1024, 8192):
                yield Case(operation, width)
        for dtype, gain in (
            (torch.float16, torch.float16),
            (torch.float32, torch.float32),
            (torch.bfloat16, torch.float32),
        ):
            yield Case(operation, 4096, dtype, gain)
