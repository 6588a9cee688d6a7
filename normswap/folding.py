"""Decide for every norm of a model whether its gain can be folded into the linear maps that read it."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Hashable, Iterator, Mapping
from typing import Any, Literal

import torch
from torch import nn
from transformers import GenerationMixin, PreTrainedModel

from normswap.candidates import propose
from normswap.errors import ModelError
from normswap.flow import Reading, follow
from normswap.foldplan import Fold, FoldPlan
from normswap.modules import unswap
from normswap.plan import Decision, Plan
from normswap.spec import NormSpec
from normswap.weights import alike_key

__all__ = ["Tied", "make_fold_plan", "with_values"]

Tied = Literal["skip", "untie"]

# Long enough for every position to have neighbours, short enough for a forward without values to cost nothing.
_TOKENS = 8
# Arguments that are one of several ways to give the input itself, and the one that keeps a cache from being returned.
_MAIN = (
    "input_ids",
    "inputs_embeds",
    "pixel_values",
    "input_values",
    "input_features",
    "decoder_input_ids",
    "use_cache",
)
# Methods that generate, and what they read of a result that is a row.
_GENERATING = re.compile(r"generat|sample|_search|_decoding")
_ROWS = {"hidden_states", "last_hidden_state"}
# Past what code takes another path for: windows, blocks, first positions.
_LONG = 1300
# What is run with random weights where no forward without values succeeds.
_MOST_PARAMETERS = 100_000_000
_SMALL = 1 << 20
# What leaves a row as it is when nothing is trained.
_PASSING = (nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)


def make_fold_plan(model: nn.Module, plan: Plan, *, tied: Tied = "skip") -> FoldPlan:
    """Follow the data through one forward of the model, and decide norm by norm whether its gain can be folded.

    Nothing is computed where the model's code allows it: the forward runs on the meta device.

    Args:
        model: as its class builds it; its parameters may be on the meta device. It is not changed.
        plan: what `make_plan` found in it.
        tied: what is done with a norm that feeds a head tied to the embedding: ``"skip"`` leaves it, ``"untie"``
            folds it into a head of its own.

    Returns:
        The decision for each norm of the plan.

    Raises:
        ModelError: no input was found on which the forward runs.
    """
    norms = {decision.name: decision.spec for decision in plan.decisions if _is_norm(decision)}
    readings = _read(model, norms)
    hindrances = {**_shared_gains(model, norms), **_followed(model, norms)}
    return FoldPlan(
        tuple(
            _decide(decision, readings.get(decision.name), hindrances.get(decision.name, ""), tied)
            for decision in plan.decisions
        )
    )


def _is_norm(decision: Decision) -> bool:
    return decision.spec is not None or decision.of_rows


def _decide(decision: Decision, reading: Reading | None, hindrance: str, tied: Tied) -> Fold:
    spec = decision.spec
    consumers = () if reading is None else reading.consumers
    untie = reading is not None and bool(reading.looked_up)

    def refuse(reason: str) -> Fold:
        return Fold(decision.name, "refuse", reason, consumers, untie, "none", spec)

    if spec is None or reading is None or decision.action == "refuse":
        return refuse(decision.reason)
    if spec.gain == "none":
        return refuse("it has no gain, so there is nothing to fold")
    if spec.gain_position == "before":
        return refuse("its gain is applied before the row is normalised")
    if hindrance:
        return refuse(hindrance)
    if not reading.reached:
        return refuse("no forward that was tried comes by it")
    if reading.blockers:
        more = f" (and {len(reading.blockers) - 2} more)" if len(reading.blockers) > 2 else ""
        return refuse("; ".join(reading.blockers[:2]) + more)
    if not consumers:
        return refuse("no linear map reads it")
    if untie and tied == "skip":
        return refuse(f"{reading.looked_up[0]} is tied to the embedding; --tied untie would give the head its own")
    if not spec.bias:
        bias: Literal["none", "move", "keep"] = "none"
    else:
        moves = reading.plain and spec.gate is None and all(consumer.bias for consumer in consumers)
        bias = "move" if moves else "keep"
    return Fold(decision.name, "fold", "", consumers, untie, bias, spec)


def _shared_gains(model: nn.Module, norms: Mapping[str, NormSpec | None]) -> dict[str, str]:
    """Return the norms whose gain is that of a norm that computes something else, and the reason against folding."""
    holders: dict[int, dict[Hashable, str]] = {}
    keys: dict[str, tuple[int, Hashable]] = {}
    for name, spec in norms.items():
        if spec is not None and spec.gain_name is not None:
            module = model.get_submodule(name)
            gain, key = id(getattr(module, spec.gain_name)), alike_key(module, spec)
            holders.setdefault(gain, {}).setdefault(key, name)
            keys[name] = gain, key
    return {
        name: f"its gain is shared with {next(other for at, other in holders[gain].items() if at != key)}"
        for name, (gain, key) in keys.items()
        if len(holders[gain]) > 1
    }


def _followed(model: nn.Module, norms: Mapping[str, NormSpec | None]) -> dict[str, str]:
    """Return the norms that apply something to their result which a gain does not pass through."""
    found = {}
    for name, spec in norms.items():
        for child in () if spec is None else spec.then:
            module = model.get_submodule(name).get_submodule(child)
            if not isinstance(module, _PASSING):
                found[name] = f"it applies {type(module).__name__} to its result"
    return found


def _read(model: nn.Module, norms: Mapping[str, NormSpec | None]) -> dict[str, Reading]:
    subject = _without_values(model)
    try:
        return follow(subject, norms, _batches(subject), lambda batch: _variations(subject, batch), _watched(subject))
    except ModelError:
        real = with_values(model)
        if real is None:
            raise
    return follow(real, norms, _batches(real), lambda batch: _variations(real, batch), _watched(real))


def _batches(model: nn.Module) -> Iterator[dict[str, Any]]:
    parameters = inspect.signature(model.forward).parameters
    if all(one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD) for one in parameters.values()):
        raise ModelError(
            f"the forward of {type(model).__name__} does not say what it takes "
            f"({', '.join(map(str, parameters.values()))}); fold the model inside it, or merge an adapter first"
        )
    names = list(parameters)
    config = getattr(model, "config", None)
    for candidate in propose(model, config, names, [], 1, _TOKENS, 0):
        batch = dict(candidate.batches[0])
        # What a cache keeps would count as returned.
        if "use_cache" in names:
            batch["use_cache"] = False
        yield batch


def _variations(model: nn.Module, batch: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield arguments that may take other paths: a long text, one token, two rows, no mask, switches turned."""
    if all(value.dim() == 2 and not value.is_floating_point() for value in batch.values() if torch.is_tensor(value)):
        for change in (_longer, lambda ids: ids[:, :1], lambda ids: ids.repeat(2, 1)):
            yield {key: change(value) if torch.is_tensor(value) else value for key, value in batch.items()}
    parameters = inspect.signature(model.forward).parameters
    optional = [name for name in batch if name in parameters and parameters[name].default is None and name not in _MAIN]
    if optional:
        yield {key: value for key, value in batch.items() if key not in optional}
    if _generates_from_rows(model):
        yield {**batch, "output_hidden_states": True}
    for name, parameter in parameters.items():
        # What is asked for by these names is what a folded model is expected to give of itself.
        if isinstance(parameter.default, bool) and not name.startswith(("output_", "return_dict", "use_cache")):
            yield {**batch, name: not parameter.default}


def _generates_from_rows(model: nn.Module) -> bool:
    """Whether the class generates in a way of its own that reads rows of a result, for a second decoder perhaps."""
    bases = {*GenerationMixin.__mro__, *PreTrainedModel.__mro__}
    for cls in type(model).__mro__:
        for name, value in vars(cls).items() if cls not in bases else ():
            code = getattr(inspect.unwrap(value) if callable(value) else value, "__code__", None)
            if code is not None and _GENERATING.search(name) and _ROWS & set(code.co_names):
                return True
    return False


def _watched(model: nn.Module) -> list[str]:
    """Name the models inside a model whose results such code may read."""
    if not _generates_from_rows(model):
        return []
    return [name for name, module in model.named_modules() if name and isinstance(module, PreTrainedModel)]


def _longer(ids: torch.Tensor) -> torch.Tensor:
    return ids.repeat(1, -(-_LONG // ids.shape[1]))[:, :_LONG]


def _without_values(model: nn.Module) -> nn.Module:
    """Return a copy on the meta device; what small buffers hold is kept."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(parameter.detach().to("meta"), requires_grad=False)
    for buffer in model.buffers():
        small = buffer.device.type == "cpu" and buffer.numel() <= _SMALL
        memo[id(buffer)] = buffer.detach() if small else buffer.detach().to("meta")
    return _unswapped(copy.deepcopy(model, memo))


def _unswapped(model: nn.Module) -> nn.Module:
    for module in model.modules():
        unswap(module)
    return model


def with_values(model: nn.Module) -> nn.Module | None:
    """Return a copy with random weights on the CPU; None for a model too large for it."""
    if sum(parameter.numel() for parameter in model.parameters()) > _MOST_PARAMETERS:
        return None
    generator = torch.Generator().manual_seed(0)
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        value = torch.empty(parameter.shape, dtype=torch.float32)
        value.normal_(0.0, 0.05, generator=generator)
        memo[id(parameter)] = nn.Parameter(value.to(parameter.dtype), requires_grad=False)
    if any(buffer.device.type == "meta" for buffer in model.buffers()):
        return None
    return _unswapped(copy.deepcopy(model, memo))
