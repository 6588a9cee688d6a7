"""Follow the output of every norm through one forward of the real class, and find all that reads it."""

from __future__ import annotations

import bisect
import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from normswap import unreal
from normswap.errors import ModelError
from normswap.foldplan import Consumer, Piece
from normswap.marks import Blocked, Contraction, Mark, apply_op, contraction
from normswap.quiet import first_line, quiet
from normswap.spec import NormSpec
from normswap.weights import Region, Weights

__all__ = ["Reading", "follow"]

_VIEWS = {"view", "_unsafe_view", "reshape", "transpose", "t", "permute", "squeeze", "unsqueeze", "alias", "detach"}
_LOOKS = {
    *("view", "_unsafe_view", "reshape", "_reshape_alias", "transpose", "t", "permute", "squeeze", "unsqueeze"),
    *("alias", "detach", "slice", "select", "split", "split_with_sizes", "unbind", "expand", "as_strided"),
    *("sym_size", "sym_stride", "sym_numel", "is_nonzero", "lift_fresh", "diagonal", "unfold"),
}
# What they make has a tensor's shape and none of its values.
_SHAPES = {
    *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "new_empty", "new_zeros"),
    *("new_ones", "new_full", "new_empty_strided"),
}
_COPIES = {"_to_copy", "clone", "contiguous"}
# The code of a column that no product has read yet.
_UNREAD = -9
_EMBEDDING = "embedding"


@dataclass
class Reading:
    """What reads one norm's output.

    Attributes:
        consumers: the linear maps, sorted by name.
        blockers: what stands in the way of a fold, in words: operations that are not linear in the output, and
            weights that read something else as well.
        plain: whether every consumer gets the norm's rows as they are, so that a constant in them stays a constant.
        reached: whether the forward came by the norm at all.
        looked_up: consumers that are also an embedding's table.
    """

    consumers: tuple[Consumer, ...] = ()
    blockers: list[str] = field(default_factory=list)
    plain: bool = True
    reached: bool = False
    looked_up: tuple[str, ...] = ()


def follow(
    model: nn.Module, norms: Mapping[str, NormSpec | None], batches: Iterable[Mapping[str, Any]]
) -> dict[str, Reading]:
    """Run a forward and follow what each norm returns to everything that reads it.

    Elements that a norm returned are followed through operations that move them, multiply them by something else or
    add them to their like, until a product with a parameter (a consumer) or anything else (a blocker) reads them.

    Args:
        model: on the meta device (nothing is computed then, and every expert counts as hit) or on a real one.
        norms: the model's norms by name, with what they compute; None for one that is not understood.
        batches: keyword arguments of a forward each, on the CPU. They are tried in turn until every norm has been
            reached; what several of them show is taken together.

    Returns:
        A reading for each norm.

    Raises:
        ModelError: the model's code raises on all of them.
    """
    tracer = _Tracer(model, norms)
    errors: list[str] = []
    succeeded = False
    for batch in batches:
        try:
            with quiet(), torch.no_grad(), tracer.hooked(), _without_fast_path():
                tracer.run(batch)
            succeeded = True
        except Exception as error:  # whatever a model's code raises on inputs that it was not made for
            errors.append(f"{type(error).__name__}: {first_line(error)}")
        if succeeded and all(norm.reached for norm in tracer.norms):
            break
    if not succeeded:
        raise ModelError(
            f"found no inputs on which the data can be followed through {type(model).__name__}; tried {len(errors)}, "
            f"the first said: {errors[0] if errors else 'nothing to try'}"
        )
    return tracer.readings()


@contextlib.contextmanager
def _without_fast_path() -> Iterator[None]:
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


@dataclass(eq=False)
class _Norm:
    """A norm on the way, and what was found out about its output."""

    name: str
    module: nn.Module
    spec: NormSpec | None
    first: int = 0
    channels: int = 0
    blockers: dict[str, None] = field(default_factory=dict)
    plain: bool = True
    reached: bool = False


@dataclass
class _Read:
    """All products of one weight along one axis with marked tensors."""

    name: str
    axis: int
    codes: torch.Tensor
    parts: dict[tuple[int, ...], int] = field(default_factory=dict)
    biases: dict[int | None, None] = field(default_factory=dict)


class _Tracer(TorchDispatchMode):
    def __init__(self, model: nn.Module, norms: Mapping[str, NormSpec | None]) -> None:
        super().__init__()
        parameters = list(model.parameters())
        self.unreal = bool(parameters) and parameters[0].device.type == "meta"
        self.dtype = next((p.dtype for p in parameters if p.is_floating_point()), torch.float32)
        self.weights = Weights(parameters)
        self.names: dict[int, str] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self.names.setdefault(id(parameter), name)
        self.model = model
        self.modules = {id(module): name for name, module in model.named_modules()}
        self.stack: list[tuple[str, nn.Module]] = []
        self.inside = 0
        self.norms: list[_Norm] = []
        for name, spec in norms.items():
            self.norms.append(_Norm(name, model.get_submodule(name), spec))
        self.gains: dict[int, list[_Norm]] = {}
        for norm in self.norms:
            for parameter in norm.module.parameters(recurse=False):
                self.gains.setdefault(id(parameter), []).append(norm)
        self.total = 0
        self.firsts: list[int] = []
        self.started: list[_Norm] = []
        self.reads: dict[tuple[int, int], _Read] = {}
        self.others: dict[int, dict[str, None]] = {}

    # The walk.

    @contextlib.contextmanager
    def hooked(self) -> Iterator[None]:
        handles = []
        norms = {id(norm.module): norm for norm in self.norms}
        try:
            for name, module in self.model.named_modules():
                norm = norms.get(id(module))
                handles.append(module.register_forward_pre_hook(self._entering(name, norm), with_kwargs=True))
                handles.append(module.register_forward_hook(self._leaving(norm), always_call=True))
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _entering(self, name: str, norm: _Norm | None) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            self.stack.append((name, module))
            if norm is not None:
                with _disable_current_modes():
                    for value in tree_leaves((args, kwargs)):
                        self.block(value, f"another norm, {name}, reads it")
                self.inside += 1

        return hook

    def _leaving(self, norm: _Norm | None) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            self.stack.pop()
            if norm is not None:
                self.inside -= 1
                if not self.inside:
                    with _disable_current_modes():
                        self.start(norm, output)

        return hook

    def run(self, batch: Mapping[str, Any]) -> None:
        self.stack, self.inside = [], 0
        inputs = {key: self._as_input(value) for key, value in batch.items()}
        with self:
            output = self.model(**inputs)
        for value in _returned(output):
            self.block(value, "the model returns it")

    def _as_input(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return value
        value = value.to(self.dtype)
        return value.to("meta") if self.unreal else value

    def start(self, norm: _Norm, output: Any) -> None:
        norm.reached = True
        if norm.spec is None or not isinstance(output, torch.Tensor):
            return
        spec = norm.spec
        gain = getattr(norm.module, spec.gain_name) if spec.gain_name else None
        shape = tuple(gain.shape) if gain is not None else (output.shape[1 if spec.axis == "channels" else -1],)
        count = math.prod(shape)
        if not norm.channels:
            norm.first, norm.channels = self.total, count
            self.total += count
            self.firsts.append(norm.first)
            self.started.append(norm)
        codes = torch.arange(norm.first, norm.first + count, dtype=torch.int32)
        if count == 1:
            codes = codes.reshape(())
        elif spec.axis == "channels":
            codes = codes.reshape(count, *(1,) * (output.dim() - 2))
        elif spec.heads > 1 and spec.joins == 1 and output.shape[-1] != count:
            codes = codes.reshape(spec.heads, -1)
        try:
            output._normswap_mark = Mark(codes.expand(output.shape))  # type: ignore[attr-defined]
        except RuntimeError:
            norm.blockers["its gain does not lie along the rows that it returns"] = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        result = unreal.run(name, func, args, kwargs) if self.unreal else func(*args, **kwargs)
        self._follow(name, func, args, kwargs, result)
        return result

    def _follow(self, name: str, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
        if name in _COPIES and tensors and self.weights.owner(tensors[0]) is not None:
            self.weights.note_copy(tensors[0], result)
            return
        marked = not self.inside and any(hasattr(value, "_normswap_mark") for value in tensors)
        product = contraction(name, args) if marked else None
        consumed = product is not None and self._contract(product, result)
        if marked and not consumed and name not in _SHAPES:
            self._step(name, func, args, kwargs, tensors, result)
        if name not in _LOOKS and name not in _SHAPES and not consumed:
            self._note_reads(name, tensors)
        self._follow_product(name, args, result)

    # What becomes of marks.

    def _step(self, name: str, func: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor], result: Any) -> None:
        base = name.removesuffix("_")
        if base != name and base not in ("copy", "mul", "div", "neg", "masked_fill"):
            for value in tensors:
                self.block(value, self.say(name))
            return
        if base == "copy" and base != name:
            self._write(args[0], args[1])
            return
        function = getattr(torch.ops.aten, base) if base != name else func
        try:
            marks = apply_op(base, function, args, kwargs, _mark_of)
        except Blocked:
            for value in tensors:
                self.block(value, self.say(name))
            return
        outputs = result if isinstance(result, (list, tuple)) else [result]
        for output, mark in zip(outputs, marks if isinstance(marks, list) else [marks], strict=True):
            if isinstance(output, torch.Tensor):
                output._normswap_mark = mark  # type: ignore[attr-defined]

    def _write(self, target: torch.Tensor, source: Any) -> None:
        mark = _mark_of(source)
        if mark is None or target._base is not None or target.shape != source.shape:
            self.block(source, self.say("copy_"))
            self.block(target, self.say("copy_"))
        else:
            target._normswap_mark = mark  # type: ignore[attr-defined]

    def _contract(self, product: Contraction, result: Any) -> bool:
        """Take note of a product of a marked tensor with a weight; False where it is none."""
        for (tensor, dim), (other, other_dim) in ((product.left, product.right), (product.right, product.left)):
            mark = _mark_of(tensor)
            if mark is None:
                continue
            if _mark_of(other) is not None:
                return False
            rows = mark.codes.movedim(dim, -1).reshape(-1, mark.codes.shape[dim])
            if rows.numel() and bool((rows == rows[:, :1]).all()) and rows.shape[-1] > 1:
                return self._mix(product, tensor, mark, dim, result)
            region = self.weights.find(other)
            if region is None or _mark_of(product.bias) is not None:
                return False
            if not bool((rows == rows[:1]).all()):
                return False
            return self._consume(region, other_dim, rows[0], mark, product.bias, result)
        return False

    def _mix(self, product: Contraction, tensor: torch.Tensor, mark: Mark, dim: int, result: torch.Tensor) -> bool:
        """Rows are mixed with one another, each channel for itself: attention over normed rows, for one."""
        if product.bias is not None or not isinstance(result, torch.Tensor):
            return False
        kept = mark.codes.select(dim, 0)
        kept = kept.unsqueeze(-1) if tensor is product.left[0] else kept.unsqueeze(-2)
        try:
            result._normswap_mark = Mark(kept.expand(result.shape), False)  # type: ignore[attr-defined]
        except RuntimeError:
            return False
        return True

    def _consume(
        self, region: Region, dim: int, codes: torch.Tensor, mark: Mark, bias: torch.Tensor | None, result: Any
    ) -> bool:
        axis, positions = region.positions(dim)
        parameter = region.parameter
        size = parameter.shape[axis]
        if len(positions) != len(codes) or positions[-1] >= size:
            return False
        read = self.reads.get((id(parameter), axis))
        if read is None:
            fresh = torch.full((size,), _UNREAD, dtype=torch.int32)
            read = self.reads[id(parameter), axis] = _Read(self.name_of(parameter), axis, fresh)
        span = slice(positions.start, positions.stop, positions.step)
        before = read.codes[span]
        if not bool(((before == _UNREAD) | (before == codes)).all()):
            for one in (before, codes):
                self.block_codes(one[(before != codes) & (before != _UNREAD)], f"{read.name} reads other rows as well")
        read.codes[span] = codes
        read.parts[region.key] = region.volume
        owner = None if bias is None else self.weights.owner(bias)
        read.biases[None if owner is None else id(owner)] = None
        if bias is None and isinstance(result, torch.Tensor):
            result._normswap_product = read  # type: ignore[attr-defined]
        if owner is not None and self.inside == 0:
            self.others.setdefault(id(owner), {})[_bias_words(read)] = None
        if not mark.plain:
            for norm in self.norms_of(codes):
                norm.plain = False
        return True

    def _follow_product(self, name: str, args: Any, result: Any) -> None:
        """Find the bias that is added to a product in a step of its own."""
        if not args or not isinstance(args[0], torch.Tensor) or not isinstance(result, torch.Tensor):
            return
        read = getattr(args[0], "_normswap_product", None)
        if read is None or args[0] is result:
            return
        if name in _VIEWS:
            result._normswap_product = read  # type: ignore[attr-defined]
        elif name == "add" and isinstance(args[1], torch.Tensor):
            owner = self.weights.owner(args[1])
            if owner is not None and args[1].dim() == 1:
                read.biases.pop(None, None)
                read.biases[id(owner)] = None
                self.others.setdefault(id(owner), {}).pop(self.say("add"), None)
                self.others[id(owner)][_bias_words(read)] = None

    def _note_reads(self, name: str, tensors: list[torch.Tensor]) -> None:
        for value in tensors:
            owner = self.weights.owner(value)
            if owner is None:
                continue
            if not self.inside:
                for norm in self.gains.get(id(owner), ()):
                    norm.blockers[f"its parameters are read outside it: {self.say(name)}"] = None
            self.others.setdefault(id(owner), {})[_EMBEDDING if name == "embedding" else self.say(name)] = None

    # Words and results.

    def block(self, value: Any, reason: str) -> None:
        mark = _mark_of(value)
        if mark is not None:
            self.block_codes(mark.codes, reason)

    def block_codes(self, codes: torch.Tensor, reason: str) -> None:
        for norm in self.norms_of(codes):
            norm.blockers[reason] = None

    def norms_of(self, codes: torch.Tensor) -> list[_Norm]:
        if not codes.numel():
            return []
        low, high = int(codes.amin()), int(codes.amax())
        if high < 0:
            return []
        last = bisect.bisect_right(self.firsts, high)
        if low >= self.firsts[last - 1]:
            return [self.started[last - 1]]
        places = {bisect.bisect_right(self.firsts, code) - 1 for code in codes.unique().tolist() if code >= 0}
        return [self.started[place] for place in sorted(places)]

    def say(self, name: str) -> str:
        where, module = self.stack[-1] if self.stack else ("", self.model)
        return f"{name.strip('_')} in {where or 'the model'} ({type(module).__name__})"

    def name_of(self, parameter: nn.Parameter) -> str:
        """The parameter's name in the module that runs, else its first one."""
        for where, module in reversed(self.stack[-1:]):
            for key, value in module._parameters.items():
                if value is parameter:
                    return f"{where}.{key}" if where else key
        return self.names[id(parameter)]

    def readings(self) -> dict[str, Reading]:
        consumers: dict[_Norm, list[Consumer]] = {norm: [] for norm in self.norms}
        looked_up: dict[_Norm, list[str]] = {norm: [] for norm in self.norms}
        sizes = {id(parameter): parameter.numel() for parameter in self.model.parameters()}
        for (identity, axis), read in self.reads.items():
            others = dict(self.others.get(identity, {}))
            table = others.pop(_EMBEDDING, 0) is None
            for norm, pieces in self._pieces(read).items():
                consumers[norm].append(Consumer(read.name, axis, tuple(pieces), self._bias_of(read)))
                if table:
                    looked_up[norm].append(read.name)
                if others:
                    norm.blockers[f"{read.name} also reads something else: {next(iter(others))}"] = None
                if any(key[0] == identity and key[1] != axis for key in self.reads):
                    norm.blockers[f"{read.name} is read along two of its dimensions"] = None
                if sum(read.parts.values()) < sizes[identity]:
                    norm.blockers[f"only a part of {read.name} reads it"] = None
        return {
            norm.name: Reading(
                tuple(sorted(consumers[norm], key=lambda consumer: (consumer.parameter, consumer.axis))),
                list(norm.blockers),
                norm.plain,
                norm.reached,
                tuple(looked_up[norm]),
            )
            for norm in self.norms
        }

    def _bias_of(self, read: _Read) -> str | None:
        """The parameter that is added to every one of the products and to nothing else."""
        only = next(iter(read.biases)) if len(read.biases) == 1 else None
        if only is None or set(self.others.get(only, {})) != {_bias_words(read)}:
            return None
        return self.names[only]

    def _pieces(self, read: _Read) -> dict[_Norm, list[Piece]]:
        found: dict[_Norm, list[Piece]] = {}
        for start, stop, code, step in _runs(read.codes.tolist()):
            norm = self.started[bisect.bisect_right(self.firsts, code) - 1]
            found.setdefault(norm, []).append(Piece(start, stop, code - norm.first, step))
        return found


def _bias_words(read: _Read) -> str:
    return f"bias of {read.name}"


def _runs(codes: list[int]) -> Iterator[tuple[int, int, int, Literal[0, 1]]]:
    """Yield runs of codes that grow by one, or that stay; start, stop, first code and step."""
    at = 0
    while at < len(codes):
        stop = at + 1
        step: Literal[0, 1] = 0 if stop < len(codes) and codes[stop] == codes[at] else 1
        while stop < len(codes) and codes[stop] == codes[stop - 1] + step:
            stop += 1
        if codes[at] >= 0:
            yield at, stop, codes[at], step
        at = stop


def _mark_of(value: Any) -> Mark | None:
    return getattr(value, "_normswap_mark", None) if isinstance(value, torch.Tensor) else None


def _returned(output: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a model's output; what a cache keeps for the next step is none."""
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from _returned(value)
    elif isinstance(output, (list, tuple)):
        for value in output:
            yield from _returned(value)
