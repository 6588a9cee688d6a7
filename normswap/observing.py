"""Run a model in several ways and keep all that it gives: other inputs, padding, and a step with its cache."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from normswap.errors import ModelError
from normswap.inputs import output_of, run
from normswap.quiet import quiet

__all__ = ["Views", "distance"]

Outputs = dict[str, torch.Tensor]


class Views:
    """The ways in which a model is run, each of which succeeded once on the model as it was.

    Attributes:
        baseline: every floating tensor that came out, by view and name.
        narrow: whether a floating tensor narrower than float64 arose inside the first forward.
        repeats: whether a second run gave the very same again.
    """

    def __init__(self, model: nn.Module, batches: Iterable[Mapping[str, Any]]) -> None:
        """Find out which ways of running work.

        Args:
            model: on the CPU.
            batches: keyword arguments of one forward each; the first has to run.

        Raises:
            ModelError: the first does not run, or gives nothing finite.
        """
        self._model = model
        given = [dict(batch) for batch in batches]
        self._views: dict[str, Callable[[], Outputs]] = {}
        self.baseline: dict[str, Outputs] = {}
        with _Narrow() as narrow:
            self._add("first", self._forward(given[0]))
        self.narrow = narrow.seen
        if not self.baseline:
            # Once more, for the error that tells why.
            self._forward(given[0])()
            raise ModelError(f"{type(model).__name__} gives no finite number on its inputs")
        self._add_others(given)
        self.repeats = all(distance(self.baseline, outputs) == 0.0 for outputs in self.each())

    def each(self) -> Iterator[dict[str, Outputs]]:
        """Run one view after the other, and yield what each gives."""
        for name, view in self._views.items():
            yield {name: view()}

    def _add(self, name: str, view: Callable[[], Outputs]) -> bool:
        try:
            outputs = view()
        # Padding or a cache is not for every model, and each says so in its own way.
        except Exception:
            return False
        if not any(bool(tensor.isfinite().any()) for tensor in outputs.values()):
            return False
        self._views[name] = view
        self.baseline[name] = outputs
        return True

    def _add_others(self, given: list[dict[str, Any]]) -> None:
        for at, batch in enumerate(given[1:], 1):
            self._add(f"inputs {at}", self._forward(batch))
        names = set(inspect.signature(self._model.forward).parameters)
        # The last first: it is another than the one of the first view, where there is another.
        for side, columns in (("left", slice(None, 3)), ("right", slice(-3, None))):
            any(self._add(f"padding on the {side}", self._padded(batch, columns)) for batch in given[::-1])
        if "use_cache" in names:
            any(self._add("a step with the cache", self._step(batch, names)) for batch in given[::-1])

    def _padded(self, batch: dict[str, Any], columns: slice) -> Callable[[], Outputs]:
        mask = batch.get("attention_mask")

        def view() -> Outputs:
            if not isinstance(mask, torch.Tensor) or mask.dim() != 2 or mask.shape[1] <= 4:
                raise ModelError("it has no mask of tokens")
            padded = mask.clone()
            padded[:, columns] = 0
            return self._forward({**batch, "attention_mask": padded})()

        return view

    def _forward(self, batch: dict[str, Any]) -> Callable[[], Outputs]:
        dtype = next((p.dtype for p in self._model.parameters() if p.is_floating_point()), torch.float32)

        def view() -> Outputs:
            with quiet():
                return run(self._model, batch, dtype, "cpu").tensors

        return view

    def _step(self, batch: dict[str, Any], names: set[str]) -> Callable[[], Outputs]:
        """All tokens but the last fill the cache, from which the last one is computed."""
        key = "decoder_input_ids" if "decoder_input_ids" in batch else "input_ids"
        ids = batch.get(key, torch.zeros(1, 0, dtype=torch.long))
        dtype = next((p.dtype for p in self._model.parameters() if p.is_floating_point()), torch.float32)
        moved = {k: v.to(dtype) if torch.is_tensor(v) and v.is_floating_point() else v for k, v in batch.items()}
        moved["use_cache"] = True
        before, after = {**moved, key: ids[:, :-1]}, {**moved, key: ids[:, -1:]}
        if key == "input_ids":
            mask = batch.get("attention_mask")
            if isinstance(mask, torch.Tensor):
                before["attention_mask"] = mask[:, :-1]
            for name in ("pixel_values", "input_features", "token_type_ids", "mm_token_type_ids"):
                after.pop(name, None)
            before = {k: v[:, :-1] if k.endswith("token_type_ids") else v for k, v in before.items()}

        @torch.no_grad()
        def view() -> Outputs:
            with quiet(), torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                filled = self._model(**before)
                kept = {name: value for name, value in filled.items() if name in names and "hidden" not in name}
                caches = {name: value for name, value in kept.items() if not torch.is_tensor(value)}
                if not caches:
                    raise ModelError("it gives no cache")
                return output_of(self._model(**after, **caches)).tensors

        return view


def distance(expected: Mapping[str, Outputs], got: Mapping[str, Outputs]) -> float:
    """Return the largest difference of one output tensor, relative to its largest value; infinite for another pattern.

    Values that are not finite have to be the same in both.
    """
    worst = 0.0
    for view, outputs in got.items():
        if outputs.keys() != expected[view].keys():
            return float("inf")
        for name, tensor in outputs.items():
            wanted = expected[view][name]
            finite = wanted.isfinite()
            if tensor.shape != wanted.shape or not torch.equal(finite, tensor.isfinite()):
                return float("inf")
            if not torch.equal(wanted[~finite].nan_to_num(0.0), tensor[~finite].nan_to_num(0.0)):
                return float("inf")
            a, b = wanted[finite].double(), tensor[finite].double()
            if a.numel():
                gap, size = float((a - b).abs().max()), float(a.abs().max())
                worst = max(worst, gap / size if size else (float("inf") if gap else 0.0))
    return worst


class _Narrow(TorchDispatchMode):
    """Notes whether a floating tensor narrower than float64 arises."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != torch.float64:
                self.seen = True
        return result
