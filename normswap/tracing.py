"""Watch one forward operation by operation: which weights read which channel of which norm, and what else does."""

from __future__ import annotations

import bisect
import contextlib
import math
from collections.abc import Collection, Hashable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from normswap import unreal
from normswap.escapes import kept, returned
from normswap.foldplan import along_result
from normswap.followed import EMBEDDING, UNREAD, Norm, Read, bias_words, meaning
from normswap.marks import ZERO, Blocked, Contraction, Mark, apply_op, contraction
from normswap.spec import NormSpec
from normswap.weights import Region, Weights, alike_key
from normswap.wrapping import original_class

__all__ = ["Tracer", "Unending"]

_VIEWS = {"view", "_unsafe_view", "reshape", "transpose", "t", "permute", "squeeze", "unsqueeze", "alias", "detach"}
_LOOKS = {
    *("view", "_unsafe_view", "reshape", "_reshape_alias", "transpose", "t", "permute", "squeeze", "unsqueeze"),
    *("alias", "detach", "slice", "select", "split", "split_with_sizes", "unbind", "expand", "as_strided"),
    *("sym_size", "sym_stride", "sym_numel", "is_nonzero", "lift_fresh", "diagonal", "unfold"),
}
# No forward that ends takes longer.
_MOST_STEPS = 3_000_000
_KNOWN = {"aten", "prim"}
# What they make has a tensor's shape and none of its values.
_SHAPES = {
    *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "new_empty", "new_zeros"),
    *("new_ones", "new_full", "new_empty_strided"),
}
_COPIES = {"_to_copy", "clone", "contiguous"}


class Unending(Exception):
    """A forward takes more steps than one of its kind should."""


class Tracer(TorchDispatchMode):
    def __init__(self, model: nn.Module, norms: Mapping[str, NormSpec | None], watched: Collection[str] = ()) -> None:
        super().__init__()
        parameters = list(model.parameters())
        self.unreal = bool(parameters) and parameters[0].device.type == "meta"
        self.dtype = next((p.dtype for p in parameters if p.is_floating_point()), torch.float32)
        self.weights = Weights(parameters)
        self.names: dict[int, str] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self.names.setdefault(id(parameter), name)
        self.model, self.watched = model, set(watched)
        self.modules = {id(module): name for name, module in model.named_modules()}
        self.stack: list[tuple[str, nn.Module]] = []
        self.inside = 0
        alike: dict[Hashable, Norm] = {}
        self.norm_at: dict[int, Norm] = {}
        for name, spec in norms.items():
            module = model.get_submodule(name)
            # What reads one of several norms of the same parameters reads the same channels.
            norm = alike.setdefault(alike_key(module, spec), Norm([], module, spec))
            norm.names.append(name)
            norm.waiting.add(id(module))
            self.norm_at[id(module)] = norm
        self.norms = list(alike.values())
        self.gains: dict[int, list[Norm]] = {}
        for norm in self.norms:
            for parameter in norm.module.parameters(recurse=False):
                self.gains.setdefault(id(parameter), []).append(norm)
        self.total = 0
        self.firsts: list[int] = []
        self.started: list[Norm] = []
        self.reads: dict[tuple[int, int], Read] = {}
        self.others: dict[int, dict[str, None]] = {}

        self.steps, self.most_steps = 0, _MOST_STEPS

    # The walk.

    @contextlib.contextmanager
    def hooked(self) -> Iterator[None]:
        handles = []
        try:
            for name, module in self.model.named_modules():
                norm = self.norm_at.get(id(module))
                handles.append(module.register_forward_pre_hook(self._entering(name, norm), with_kwargs=True))
                handles.append(module.register_forward_hook(self._leaving(name, norm), prepend=True, always_call=True))
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _entering(self, name: str, norm: Norm | None) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            self.stack.append((name, module))
            if norm is not None:
                with _disable_current_modes():
                    for value in tree_leaves((args, kwargs)):
                        self.block(value, f"another norm, {name}, reads it")
                self.inside += 1

        return hook

    def _leaving(self, name: str, norm: Norm | None) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            self.stack.pop()
            if name in self.watched:
                with _disable_current_modes():
                    for value in returned(output):
                        self.block(value, f"{name} returns it, and code beside the forward reads what {name} returns")
            if norm is not None:
                self.inside -= 1
                if not self.inside:
                    with _disable_current_modes():
                        norm.waiting.discard(id(module))
                        self.start(norm, output)

        return hook

    def run(self, batch: Mapping[str, Any], most_steps: int | None = None) -> None:
        """Run a forward, and take note of what leaves it.

        Args:
            batch: its keyword arguments.
            most_steps: operations after which it is given up.

        Raises:
            Exception: whatever the model's code raises.
        """
        self.stack, self.inside, self.steps = [], 0, 0
        self.most_steps = most_steps or _MOST_STEPS
        inputs = {key: self._as_input(value) for key, value in batch.items()}
        with self:
            output = self.model(**inputs)
        for value in returned(output):
            self.block(value, "the model returns it")
        for where, value in kept(self.model):
            self.block(value, f"it is kept as {where}")

    def _as_input(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return value
        # Known values stay known on the meta device too: code that looks at an image for padding finds something.
        return value.to(self.dtype)

    def start(self, norm: Norm, output: Any) -> None:
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
        try:
            output._normswap_mark = Mark(along_result(spec, codes, output).expand(output.shape))  # type: ignore[attr-defined]
        except RuntimeError:
            norm.blockers["its gain does not lie along the rows that it returns"] = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # An operation of another library may bear the name of one of torch's.
        name = func.overloadpacket.__name__
        known = func.namespace in _KNOWN or (func.namespace == "transformers" and "grouped_mm" in name)
        name = name if known else f"{func.namespace}::{name}"
        self.steps += 1
        if self.steps > self.most_steps:
            raise Unending(f"{type(self.model).__name__} takes more than {self.most_steps} steps")
        result = unreal.run(name, func, args, kwargs) if self.unreal else func(*args, **kwargs)
        self._follow(name, func, args, kwargs, result)
        return result

    def _follow(self, name: str, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
        if name in _COPIES and tensors and self.weights.owner(tensors[0]) is not None and _keeps_values(result):
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
            self.refuse(tensors, name)
            return
        if base == "copy" and base != name:
            self._write(name, args[0], args[1])
            return
        function = getattr(torch.ops.aten, base) if base != name else func
        if base == "_to_copy" and not _keeps_values(result):
            self.refuse(tensors, name)
            return
        try:
            marks = apply_op(base, function, args, kwargs, _mark_of)
        except Blocked:
            self.refuse(tensors, name)
            return
        outputs = result if isinstance(result, (list, tuple)) else [result]
        for output, mark in zip(outputs, marks if isinstance(marks, list) else [marks], strict=True):
            if isinstance(output, torch.Tensor):
                output._normswap_mark = mark  # type: ignore[attr-defined]

    def _write(self, name: str, target: torch.Tensor, source: Any) -> None:
        mark = _mark_of(source)
        if mark is None or target._base is not None or target.shape != source.shape:
            self.refuse([source, target], name)
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
            # The very same row, over and over.
            rows = rows[:1] if not rows.stride(0) else rows
            if not len(rows):
                # An expert without a token reads nothing.
                return True
            if rows.numel() and bool((rows == rows[:, :1]).all()) and rows.shape[-1] > 1:
                return self._mix(product, tensor, mark, dim, result)
            region = self.weights.find(other)
            if region is None or _mark_of(product.bias) is not None:
                return False
            # Rows of zeros, as a padding gives them, fit any column.
            codes = rows.amax(0)
            same, zero = rows == codes, rows == ZERO
            if not bool((same | zero).all()):
                return False
            plain = mark.plain and product.plain and bool(same.all())
            return self._consume(region, other_dim, codes, plain, product.bias, result)
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
        self, region: Region, dim: int, codes: torch.Tensor, plain: bool, bias: torch.Tensor | None, result: Any
    ) -> bool:
        axis, positions = region.positions(dim)
        parameter = region.parameter
        size = parameter.shape[axis]
        if axis < 0 or len(positions) != len(codes) or positions[-1] >= size:
            return False
        read = self.reads.get((id(parameter), axis))
        if read is None:
            fresh = torch.full((size,), UNREAD, dtype=torch.int32)
            read = self.reads[id(parameter), axis] = Read(self.name_of(parameter), axis, fresh)
        span = slice(positions.start, positions.stop, positions.step)
        before = read.codes[span]
        if not bool(((before == UNREAD) | (before == codes)).all()):
            for one in (before, codes):
                self.block_codes(one[(before != codes) & (before != UNREAD)], f"{read.name} reads other rows as well")
        read.codes[span] = codes
        read.parts[region.key] = region.volume
        owner = None if bias is None else self.weights.owner(bias)
        read.biases[None if owner is None else id(owner)] = None
        if bias is None and isinstance(result, torch.Tensor):
            result._normswap_product = read  # type: ignore[attr-defined]
        if owner is not None and self.inside == 0:
            self.others.setdefault(id(owner), {})[bias_words(read)] = None
        if not plain:
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
                self.others[id(owner)][bias_words(read)] = None

    def _note_reads(self, name: str, tensors: list[torch.Tensor]) -> None:
        for value in tensors:
            owner = self.weights.owner(value)
            if owner is None:
                continue
            if not self.inside:
                for norm in self.gains.get(id(owner), ()):
                    norm.blockers[f"its parameters are read outside it: {self.say(name)}"] = None
            self.others.setdefault(id(owner), {})[EMBEDDING if name == "embedding" else self.say(name)] = None

    # Words and results.

    def block(self, value: Any, reason: str) -> None:
        mark = _mark_of(value)
        if mark is not None:
            self.block_codes(mark.codes, reason)

    def block_codes(self, codes: torch.Tensor, reason: str) -> None:
        for norm in self.norms_of(codes):
            norm.blockers[reason] = None

    def norm_of(self, code: int) -> Norm | None:
        """The norm that a code stands for a channel of."""
        return self.started[bisect.bisect_right(self.firsts, code) - 1] if code >= 0 else None

    def norms_of(self, codes: torch.Tensor) -> list[Norm]:
        if not codes.numel():
            return []
        low, high = int(codes.amin()), int(codes.amax())
        if high < 0:
            return []
        last = bisect.bisect_right(self.firsts, high)
        if low >= self.firsts[last - 1]:
            return [self.started[last - 1]]
        found = {self.norm_of(code): None for code in codes.unique().tolist() if code >= 0}
        return [norm for norm in found if norm is not None]

    def say(self, name: str) -> str:
        where, module = self.stack[-1] if self.stack else ("", self.model)
        return f"{name.strip('_')} in {where or 'the model'} ({original_class(module).__name__})"

    def refuse(self, tensors: list[torch.Tensor], name: str) -> None:
        for value in tensors:
            self.block(value, f"{self.say(name)}: {meaning(name.strip('_'))}")

    def name_of(self, parameter: nn.Parameter) -> str:
        """The parameter's name in the module that runs, else its first one."""
        for where, module in reversed(self.stack[-1:]):
            for key, value in module._parameters.items():
                if value is parameter:
                    return f"{where}.{key}" if where else key
        return self.names[id(parameter)]


def _mark_of(value: Any) -> Mark | None:
    return getattr(value, "_normswap_mark", None) if isinstance(value, torch.Tensor) else None


def _keeps_values(copy: Any) -> bool:
    """Whether a copy has a dtype in which the values of a weight or a row are still themselves."""
    return isinstance(copy, torch.Tensor) and copy.is_floating_point() and copy.dtype.itemsize > 1
