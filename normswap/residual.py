"""The residual stream, layer by layer: where a converted model departs from its original."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from normswap.evidence import LayerFigures
from normswap.figures import Criterion
from normswap.stacking import Group
from normswap.stats import bootstrap_ratio, relative

__all__ = ["Layer", "Stream", "Sums", "judge_layers", "layers_of"]

# What is kept of the reference's stream, in numbers: 64 Mi of float32 are 256 MiB.
_KEPT = 1 << 26
_FEWEST_ROWS = 4
# Of a layer's error, what the layer before it has, if it is no error of its own.
_INHERITED = 0.5
# What a row's squared size counts for at least, of the median row's: rows may be zero.
_SMALLEST = 1e-6


@dataclass(frozen=True)
class Layer:
    """One layer of a model: an entry of a list of modules.

    Attributes:
        name: its name in the model.
        stack: the list's.
        index: its place there.
    """

    name: str
    stack: str
    index: int


def layers_of(model: nn.Module) -> list[tuple[Layer, nn.Module]]:
    """List the layers of a model with their modules: the entries of every list of modules that no other layer holds.

    Entries are counted that have children of their own, so that lists of projections or of heads are none.
    """
    found: list[tuple[Layer, nn.Module]] = []
    inside: tuple[str, ...] = ()
    for stack, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or stack.startswith(inside or ("\0",)):
            continue
        entries = [(index, entry) for index, entry in enumerate(module) if any(True for _ in entry.children())]
        found += [(Layer(f"{stack}.{index}", stack, index), entry) for index, entry in entries]
        inside = (*inside, f"{stack}.")
    return found


# Of one layer and one sequence: squared relative errors of its rows, how many rows.
_Sums = tuple[float, float]
Sums = dict[str, dict[int, _Sums]]
Current = Callable[[], Group]


@dataclass
class Stream:
    """Keeps one run's residual stream, and holds others against it.

    Rows (tokens) are kept evenly, as many as fit into `most` numbers for all layers.

    Attributes:
        sequences: how many there are.
        kept: by layer, by sequence: what each call gave, ``(rows, width)``.
        order: names of the layers, in the order of their first call.
        most: numbers that are kept in all.
        folded: layers that were not compared, as what they return is the result of a norm that was folded: to the norm.
    """

    sequences: int
    kept: dict[str, dict[int, list[torch.Tensor]]] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)
    rows: int | None = None
    most: int = _KEPT
    folded: dict[str, str] = field(default_factory=dict)

    @contextmanager
    def keeping(self, model: nn.Module, current: Current) -> Iterator[None]:
        """Keep what the layers of a model give inside the ``with`` block.

        Args:
            model: that is run.
            current: which sequences are running.
        """
        layers = layers_of(model)

        def keep(layer: Layer, rows: list[torch.Tensor]) -> None:
            if layer.name not in self.kept:
                self.kept[layer.name] = {}
                self.order.append(layer.name)
            for sequence, row in zip(current().members, rows, strict=False):
                self.kept[layer.name].setdefault(sequence, []).append(self._pick(row, len(layers)).clone())

        with self._hooked(layers, keep, current):
            yield

    @contextmanager
    def comparing(self, model: nn.Module, current: Current, folded: Collection[str] = ()) -> Iterator[Sums]:
        """Hold what the layers of a model give inside the ``with`` block against what was kept.

        A layer that returns the result of a folded norm, as after a LayerNorm that ends it, gives something else than
        its original, rightly, since the gain is where the result is read. It is not compared.

        Args:
            model: that is run.
            current: which sequences are running.
            folded: names of the norms that were folded in it.

        Yields:
            By layer, by sequence: the sum of the rows' squared relative errors, and how many rows there were; filled as
            the model runs. A layer that gives another shape than was kept has NaN.
        """
        layers = layers_of(model)
        found: Sums = {}
        calls: dict[tuple[str, int], int] = {}

        def compare(layer: Layer, rows: list[torch.Tensor]) -> None:
            for sequence, row in zip(current().members, rows, strict=False):
                key = layer.name, sequence
                call = calls[key] = calls.get(key, -1) + 1
                kept = self.kept.get(layer.name, {}).get(sequence, [])
                sums = found.setdefault(layer.name, {})
                before = sums.get(sequence, (0.0, 0.0))
                got = self._pick(row, len(layers))
                if call >= len(kept) or kept[call].shape != got.shape:
                    sums[sequence] = float("nan"), before[1]
                    continue
                error, rows_held = _row_errors(got.double(), kept[call].double())
                sums[sequence] = before[0] + error, before[1] + rows_held

        with _results_of(model, folded) as results, self._hooked(layers, compare, current, results):
            yield found

    @contextmanager
    def _hooked(
        self,
        layers: list[tuple[Layer, nn.Module]],
        take: Callable[[Layer, list[torch.Tensor]], None],
        current: Current,
        results: Mapping[str, weakref.ref[torch.Tensor]] = MappingProxyType({}),
    ) -> Iterator[None]:
        def hook_of(layer: Layer) -> Callable[..., None]:
            def hook(module: nn.Module, args: Any, output: Any) -> None:
                stream = _stream_of(output)
                norm = next((name for name, result in results.items() if result() is stream), None)
                if stream is not None and norm is not None:
                    self.folded[layer.name] = norm
                elif stream is not None:
                    take(layer, _by_sequence(stream.detach(), current()))

            return hook

        handles = [module.register_forward_hook(hook_of(layer)) for layer, module in layers]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _pick(self, row: torch.Tensor, layers: int) -> torch.Tensor:
        """Return some rows of one sequence, evenly spaced, ``(rows, width)``."""
        row = row.reshape(-1, row.shape[-1])
        if self.rows is None:
            self.rows = max(_FEWEST_ROWS, self.most // max(1, layers * self.sequences * row.shape[-1]))
        count = min(len(row), self.rows)
        if count == len(row):
            return row
        return row[torch.linspace(0, len(row) - 1, count, dtype=torch.float64, device=row.device).round().long()]


@contextmanager
def _results_of(model: nn.Module, names: Collection[str]) -> Iterator[dict[str, weakref.ref[torch.Tensor]]]:
    """Follow what some modules return inside the ``with`` block.

    Yields:
        By name: the last result, as long as anybody else holds it.
    """
    results: dict[str, weakref.ref[torch.Tensor]] = {}

    def hook_of(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if isinstance(output, torch.Tensor):
                results[name] = weakref.ref(output)

        return hook

    handles = [module.register_forward_hook(hook_of(name)) for name, module in model.named_modules() if name in names]
    try:
        yield results
    finally:
        for handle in handles:
            handle.remove()


def _row_errors(got: torch.Tensor, expected: torch.Tensor) -> tuple[float, int]:
    """Sum the squared relative errors of rows ``(rows, width)``, each over its own size, and count the rows.

    The norms that read the stream bring every row to one size. Over the size of all rows together, one token that is a
    hundred times as large as the others, which trained models have, would hide what the others show.
    """
    sizes = expected.square().sum(-1)
    some = sizes[sizes > 0]
    floor = _SMALLEST * float(some.median()) if some.numel() else 1.0
    return float(((got - expected).square().sum(-1) / sizes.clamp(min=floor)).sum()), len(sizes)


def _stream_of(output: Any) -> torch.Tensor | None:
    """The hidden states in what a layer returned; None where there are none."""
    if isinstance(output, torch.Tensor):
        return output if output.is_floating_point() and output.dim() >= 2 else None
    values = output.values() if hasattr(output, "values") else output if isinstance(output, (tuple, list)) else ()
    for value in values:
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() >= 2:
            return value
    return None


def _by_sequence(stream: torch.Tensor, group: Group) -> list[torch.Tensor]:
    """Cut a layer's result into its sequences; what cannot be cut goes whole to the first, unless it has padding."""
    rows = group.cut(stream)
    if rows is None:
        return [stream] if group.valid is None else []
    return rows


def judge_layers(
    model_layers: Sequence[Layer],
    order: Sequence[str],
    exact: Sums | None,
    original: Sums | None,
    converted: Sums | None,
    criterion: Criterion,
    *,
    bound: float,
    served_failed: bool,
    folded: Mapping[str, str] = MappingProxyType({}),
) -> list[LayerFigures]:
    """Put what was found of each layer into figures.

    Args:
        model_layers: what `layers_of` found.
        order: names in the order that they ran.
        exact: sums of the converted model against the original, both in float32; None where that was not run.
        original: sums of the original as served, against the reference; None without a reference.
        converted: the same of the converted model.
        criterion: the bounds.
        bound: of the relative error in float32.
        served_failed: whether the gate ``served`` failed; single layers scatter too much to say so by themselves.
        folded: layers that return the result of a folded norm, and the norm.
    """
    by_name = {layer.name: layer for layer in model_layers}
    figures = []
    for name in order:
        layer = by_name[name]
        error_exact = None if exact is None else _error(exact.get(name))
        error_original = None if original is None else _error(original.get(name))
        error_converted = None if converted is None else _error(converted.get(name))
        ratio = interval = None
        departs = error_exact is not None and not error_exact <= bound
        if original is not None and converted is not None and name in original and name in converted:
            shared = sorted(original[name].keys() & converted[name].keys())
            over, under = ([sums[name][at][0] for at in shared] for sums in (converted, original))
            ratio, low, high = bootstrap_ratio(over, under, criterion.bootstrap)
            interval = low, high
            beyond = not (low <= criterion.ratio_interval_low and ratio <= criterion.ratio_max)
            departs = departs or (served_failed and beyond)
        figures.append(
            LayerFigures(
                name,
                layer.stack,
                layer.index,
                error_exact,
                error_original,
                error_converted,
                ratio,
                interval,
                departs,
                folded.get(name),
            )
        )
    return _led_up_to(figures, bound)


def _led_up_to(figures: list[LayerFigures], bound: float) -> list[LayerFigures]:
    """Mark also the layers before the first that departs whose error in float32 it mostly inherits.

    Where some channels outweigh all others, what goes wrong in one layer may pass the bound layers later.
    """
    at = next((place for place, figure in enumerate(figures) if (figure.error_exact or 0.0) > bound), 0)
    while at and (before := figures[at - 1].error_exact) and before >= _INHERITED * (figures[at].error_exact or 0.0):
        at -= 1
        figures[at] = replace(figures[at], departs=True)
    return figures


def _error(sums: dict[int, _Sums] | None) -> float | None:
    if not sums:
        return None
    return relative([error for error, _ in sums.values()], [size for _, size in sums.values()])
