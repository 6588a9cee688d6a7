"""A small random model of the same class as a large one, that has a norm of every kind and a layer of every kind."""

from __future__ import annotations

import copy
import inspect
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from normswap.candidates import propose
from normswap.errors import ModelError
from normswap.inputs import run
from normswap.naming import name_pattern
from normswap.plan import Plan, make_plan
from normswap.quiet import first_line, quiet
from normswap.reducing import Indivisible, Recipe, layer_counts, recipes, reduce
from normswap.replica import original_class
from normswap.wrapping import has_own_forward

__all__ = ["Twin", "build_twin", "is_as_built", "small_twin", "structure", "twins"]

# A model below this number of parameters is its own twin; no twin may be larger than the other.
_SMALL = 2_000_000
_LARGEST = 60_000_000
# Sequences of few tokens show every dependence; each expert of a router is still met with near certainty.
_LENGTH = 40
_SEQUENCES = 2
_MOST_NOT_RUN = 2
_MOST_FAILURES = 3

Structure = frozenset[tuple[str, frozenset[Any]]]


@dataclass(frozen=True)
class Twin:
    """A small model of the class of another, with seeded random weights, on the CPU, in eval mode.

    Attributes:
        model: the model, in ``dtype``.
        batches: keyword arguments of a forward each, which together come by as many norms as any that were found.
        plan: what `normswap.plan.make_plan` says of it.
        dtype: float64, or float32 where its code does not run in float64.
        recipe: how its configuration was made smaller; None for the model's own configuration.
        experts: how its class computes experts by itself, where the twin loops over them instead; else None.
    """

    model: nn.Module
    batches: tuple[dict[str, Any], ...]
    plan: Plan
    dtype: torch.dtype
    recipe: Recipe | None
    experts: str | None = None

    def fold_plan(self, make_fold_plan: Callable[..., Any], tied: str) -> Any:
        """Call `make_fold_plan` on the twin as its class computes by itself, in the dtype that it does so in.

        Args:
            make_fold_plan: called with the model, its plan and ``tied``.
            tied: handed on.
        """
        if self.experts is None:
            return make_fold_plan(self.model, self.plan, tied=tied)
        # Its values are those of float32 numbers, so that nothing is lost.
        _set_experts(self.model.float(), self.experts)
        try:
            return make_fold_plan(self.model, self.plan, tied=tied)
        finally:
            _set_experts(self.model.double(), "eager")


def small_twin(model: nn.Module, config: Any = None, *, seed: int = 0) -> Twin:
    """Return the smallest twin that builds, runs, and shows every kind of layer of the model.

    Args:
        model: the model, of any size; its values are not read, so that it may lie on the meta device.
        config: its configuration; by default the model's own.
        seed: of weights and inputs.

    Raises:
        ModelError: no twin was found; the message has what the attempts failed on.
    """
    return next(twins(model, config, seed=seed))


def twins(model: nn.Module, config: Any = None, *, seed: int = 0) -> Iterator[Twin]:
    """Yield twins that build, run and have the model's structure, from small to large; for arguments see `small_twin`.

    Raises:
        ModelError: where there is not one.
    """
    cls = original_class(model)
    config = getattr(model, "config", None) if config is None else config
    if config is None:
        raise ModelError(f"expected a model with a configuration, got {cls.__name__} without: no twin can be built")
    size = sum(parameter.numel() for parameter in model.parameters())
    problems: list[str] = []
    count = 0
    candidates = _matching(cls, config, structure(model), problems) if size > _SMALL else ()
    own: tuple[None, ...] = (None,) if size <= _LARGEST else ()
    for recipe in _likely_first(cls, config, itertools.chain(candidates, own)):
        try:
            yield build_twin(cls, config, recipe, seed=seed)
            count += 1
        except ModelError as error:
            problems.append(str(error))
    if not count:
        told = "; ".join(dict.fromkeys(problems[-3:])) or "its numbers do not divide"
        raise ModelError(f"no small model of {cls.__name__} with the same structure builds and runs here: {told}")


def _likely_first(cls: type[nn.Module], config: Any, given: Iterable[Recipe | None]) -> Iterator[Recipe | None]:
    """Put off the recipes whose model does not run on plain text, and leave all but a few of those out.

    For a model that does not run at all, looking for inputs takes long.
    """
    names = inspect.signature(cls.forward).parameters
    later = []
    for recipe in given:
        if "input_ids" not in names or _runs_on_text(cls, config, recipe):
            yield recipe
        else:
            later.append(recipe)
    yield from later[:_MOST_NOT_RUN]


def _runs_on_text(cls: type[nn.Module], config: Any, recipe: Recipe | None) -> bool:
    ids = torch.arange(4, 20).reshape(1, -1)
    try:
        model = _build(cls, _reduced(config, recipe), torch.device("cpu"))
        names = inspect.signature(model.forward).parameters
        with quiet():
            run(model, {n: ids for n in ("input_ids", "decoder_input_ids") if n in names}, torch.float32, "cpu")
    except (ModelError, Indivisible):
        return False
    return True


def _reduced(config: Any, recipe: Recipe | None) -> Any:
    return copy.deepcopy(config) if recipe is None else reduce(config, recipe)


def _matching(cls: type[nn.Module], config: Any, wanted: Structure, problems: list[str]) -> Iterator[Recipe]:
    """Yield the recipes whose model has the wanted structure and is small enough, judged on the meta device."""
    counts = layer_counts(config)
    enough = 0
    for recipe in recipes():
        failures = 0
        for layers in counts[enough:]:
            tried = replace(recipe, layers=layers)
            # Code that refuses a few of its layers may still take them all.
            if failures > _MOST_FAILURES and layers != counts[-1]:
                continue
            try:
                candidate = _build(cls, reduce(config, tried), torch.device("meta"))
            except (Indivisible, ModelError) as error:
                problems.append(str(error))
                failures += 1
                # What does not divide with few layers does not with more.
                if isinstance(error, Indivisible):
                    break
                continue
            if sum(parameter.numel() for parameter in candidate.parameters()) > _LARGEST:
                problems.append(f"with {layers} layers and {recipe.width or 'its own'} columns it is too large")
                break
            if structure(candidate) == wanted:
                # Fewer layers than this lack some kind at any width.
                enough = counts.index(layers)
                yield tried
                break
        else:
            problems.append(f"at a width of about {recipe.width} it is built otherwise")


def build_twin(cls: type[nn.Module], config: Any, recipe: Recipe | None, *, seed: int = 0) -> Twin:
    """Build one twin.

    Args:
        cls: class of the model.
        config: configuration of the large model.
        recipe: how to make it smaller; None for not at all.
        seed: of weights and inputs.

    Raises:
        ModelError: it does not build or run.
    """
    small = _reduced(config, recipe)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = _build(cls, small, torch.device("cpu"))
        with quiet():
            plan = make_plan(model)
        _randomise(model, plan, seed)
        batches = _batches(model, small, plan, seed)
        usual = getattr(getattr(model, "config", None), "_experts_implementation", None)
        dtype, loops = _widen(model, batches, usual)
        return Twin(model, batches, plan, dtype, recipe, usual if loops else None)


def _widen(model: nn.Module, batches: Iterable[dict[str, Any]], experts: str | None) -> tuple[torch.dtype, bool]:
    """Convert a model to float64, where it runs in it, if need be with a loop over its experts."""
    # Grouped products of experts are not there in float64; a loop over them computes the same.
    for loop in (False, True) if experts not in (None, "eager") else (False,):
        if loop:
            _set_experts(model, "eager")
        model.double()
        try:
            with quiet():
                for batch in batches:
                    run(model, batch, torch.float64, "cpu")
        except ModelError:
            continue
        return torch.float64, loop
    model.float()
    if experts is not None:
        _set_experts(model, experts)
    return torch.float32, False


def _batches(model: nn.Module, config: Any, plan: Plan, seed: int) -> tuple[dict[str, Any], ...]:
    """Find inputs that run, until every norm was come by."""
    waiting = {decision.name for decision in plan.decisions if decision.spec is not None}
    modules = {name: model.get_submodule(name) for name in waiting}
    hooks = [
        module.register_forward_hook(lambda *_, name=name: waiting.discard(name)) for name, module in modules.items()
    ]
    batches: list[dict[str, Any]] = []
    problems: list[str] = []
    names = list(inspect.signature(model.forward).parameters)
    try:
        for candidate in propose(model, config, names, [], _SEQUENCES, _LENGTH, seed):
            left = len(waiting)
            try:
                with quiet():
                    run(model, candidate.batches[0], torch.float32, "cpu")
            except ModelError as error:
                problems.append(str(error))
                continue
            if not batches or len(waiting) < left:
                batches += candidate.batches[: 1 if batches else _SEQUENCES]
            if not waiting:
                break
    finally:
        for hook in hooks:
            hook.remove()
    if not batches:
        raise ModelError(
            f"found no inputs that {type(model).__name__} runs on; tried {len(problems)}, the first said: "
            f"{problems[0] if problems else 'nothing to try'}"
        )
    return tuple(batches)


def _set_experts(model: nn.Module, experts: str) -> None:
    change = getattr(model, "set_experts_implementation", None)
    if change is not None:
        with quiet():
            change(experts)


def _build(cls: type[nn.Module], config: Any, device: torch.device) -> nn.Module:
    # The twin is for the CPU, where not every implementation that was asked for runs.
    for name in ("_attn_implementation_internal", "_experts_implementation_internal"):
        if hasattr(config, name):
            setattr(config, name, None)
    make = getattr(cls, "_from_config", cls)
    try:
        with quiet(), device:
            model: nn.Module = make(config, dtype=torch.float32) if make is not cls else cls(config)
    # Whatever a model's code raises on numbers that it was not made for.
    except Exception as error:
        raise ModelError(f"{cls.__name__} does not build ({type(error).__name__}: {first_line(error)})") from error
    return model.eval()


def is_as_built(model: nn.Module, config: Any) -> bool:
    """Whether a model has the modules that its class builds from the configuration, with the forwards of their classes.

    Args:
        model: of any size; its parameters may be on the meta device.
        config: its configuration.
    """
    if any(has_own_forward(module) for module in model.modules()):
        return False
    try:
        built = _build(original_class(model), copy.deepcopy(config), torch.device("meta"))
    except ModelError:
        return False
    return _classes(built) == _classes(model)


def _classes(model: nn.Module) -> dict[str, type[nn.Module]]:
    return {name: original_class(module) for name, module in model.named_modules(remove_duplicate=False)}


def structure(model: nn.Module) -> Structure:
    """Describe what kinds of layers a model has: equal for two models that differ in sizes and repetitions only.

    A layer, or any other numbered module, is told by the classes, parameters and switches (attributes that are a bool
    or a string) of all modules in it.

    Returns:
        Pairs of a name pattern and one kind of module under it.
    """
    blocks: dict[str, set[Any]] = {"": set()}
    for name, module in model.named_modules(remove_duplicate=False):
        parts = name.split(".")
        numbered = [at + 1 for at, part in enumerate(parts) if part.isdigit()]
        if numbered and numbered[-1] == len(parts):
            blocks.setdefault(name, set())
        switches = frozenset(
            (key, value)
            for key, value in vars(module).items()
            if isinstance(value, (bool, str)) and key != "training" and not key.startswith("_")
        )
        shapes = frozenset((key, None if p is None else p.dim()) for key, p in module._parameters.items())
        for at in numbered or [0]:
            inner = name_pattern(".".join(parts[at:])) if numbered else name
            blocks[".".join(parts[:at]) if numbered else ""].add((inner, type(module), shapes, switches))
    return frozenset((name_pattern(name), frozenset(kinds)) for name, kinds in blocks.items())


@torch.no_grad()
def _randomise(model: nn.Module, plan: Plan, seed: int) -> None:
    """Give every parameter random values with which activations keep their size and nothing is switched off."""
    generator = torch.Generator().manual_seed(seed)
    done = set()
    for decision in plan.decisions:
        if decision.spec is None:
            continue
        module = model.get_submodule(decision.name)
        for name, offset in ((decision.spec.gain_name, decision.spec.offset), (decision.spec.bias_name, None)):
            parameter = None if name is None else getattr(module, name, None)
            if isinstance(parameter, nn.Parameter) and parameter not in done:
                # Few bits, so that adding 1 and rescaling by powers of two are exact.
                draw = torch.randint(32, 128, parameter.shape, generator=generator) / 64
                parameter.copy_((draw - 1) / 2 if offset is None else draw - offset)
                done.add(parameter)
    for parameter in model.parameters():
        if parameter not in done and parameter.is_floating_point():
            parameter.copy_(_drawn(parameter, generator))


def _drawn(parameter: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    noise = torch.randn(parameter.shape, generator=generator)
    if parameter.dim() >= 2 and max(parameter.shape[1:]) > 1:
        fan = max(parameter.shape[1:]) if parameter.dim() == 3 else math.prod(parameter.shape[1:])
        return noise / math.sqrt(fan)
    start = parameter.nan_to_num(0.0, 0.0, 0.0).clamp(-1e3, 1e3)
    if start.numel() == 0 or start.abs().max() < 0.05:
        return 0.2 * noise + (0.5 if parameter.numel() == 1 else 0.0)
    return start * (1 + 0.1 * noise) + 0.1 * noise
