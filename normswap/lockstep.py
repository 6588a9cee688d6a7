"""Run several forwards through a model whose weights are on disk, so that each part is read once for all of them."""

from __future__ import annotations

import contextvars
import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from normswap.inputs import Output, run
from normswap.offloading import Stream, Unit, stream_of
from normswap.processes import gathered

__all__ = ["current", "forwards", "run_all"]

T = TypeVar("T")
_CURRENT: contextvars.ContextVar[int | None] = contextvars.ContextVar("normswap_sequence", default=None)
# Forwards that are under way at once: each has its activations in memory.
_TOGETHER = 32


def current() -> int | None:
    """Return the number of the batch whose forward is running, for hooks to ask; None outside of `forwards`."""
    return _CURRENT.get()


def forwards(
    model: nn.Module, batches: Sequence[dict[str, Any]], dtype: torch.dtype, device: torch.device | str
) -> Iterator[tuple[int, Output]]:
    """Run batches, as `normswap.inputs.run` does one by one.

    With a model of `normswap.offloading.load_streamed` the forwards go in lockstep: all through the first layer, then
    all through the second. Hooks fire as ever within one forward, in the order of its modules; but between two layers
    those of the other forwards fire. Which one it is, `current` tells. Only one forward runs at a time, in a thread of
    its own, with its own gradient mode, context variables and random numbers. Such a model is not asked to keep a cache
    of keys and values.

    Args:
        model: what to run, in memory or streamed.
        batches: keyword arguments of one forward each.
        dtype: as for `normswap.inputs.run`.
        device: likewise.

    Where several processes hold shares of the model (`normswap.processes`) each gets the whole outputs.

    Yields:
        Number and output of each batch, in order. What was yielded is not kept.

    Raises:
        ModelError: a forward raises.
        CheckpointError: the weights of a streamed model cannot be read.
    """
    if stream_of(model) is None:
        for index, batch in enumerate(batches):
            token = _CURRENT.set(index)
            try:
                output = gathered(run(model, batch, dtype, device))
            finally:
                _CURRENT.reset(token)
            yield index, output
            del output
        return
    spare = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    for start in range(0, len(batches), _TOGETHER):
        calls = [partial(run, model, {**spare, **batch}, dtype, device) for batch in batches[start : start + _TOGETHER]]
        yield from run_all(model, calls, start)


def run_all(model: nn.Module, calls: Sequence[Callable[[], T]], first: int = 0) -> Iterator[tuple[int, T]]:
    """Make calls that run a streamed model, each in a thread, one at a time, handing over where weights are needed.

    Where all that have not ended wait for weights, the first part of the model that one of them waits for is read,
    and all that wait for it go through. Calls that take other paths, or one part several times, make parts be read
    more often; none waits for another.

    Args:
        model: of `normswap.offloading.load_streamed`.
        calls: what to run; each calls the model once or several times.
        first: number of the first call.

    Yields:
        Number and result of each call, in order, each as soon as it and those before it have ended.

    Raises:
        BaseException: what a call raises; the others are abandoned.
    """
    stream = stream_of(model)
    if stream is None:
        raise ValueError(f"expected a streamed model, got a {type(model).__name__} in memory")
    if stream.gate is not None:
        raise RuntimeError("this model is running already; wait for its calls to end")
    crew = _Crew(stream, calls, first)
    stream.gate = crew
    try:
        yield from crew.results()
    finally:
        crew.abandon()
        stream.gate = None
        stream.close_all()


class _Abandoned(BaseException):
    """Unwinds a call that nobody waits for any more."""


class _Member:
    """One call and its thread."""

    def __init__(self, index: int, call: Callable[[], Any]) -> None:
        self.index, self.call = index, call
        self.turn = threading.Semaphore(0)
        self.wants: Unit | None = None
        self.ended = False
        self.result: Any = None
        self.error: BaseException | None = None
        self.thread: threading.Thread | None = None


class _Crew:
    """The calls of one `run_all`. Whoever has the turn runs, and nobody else; the caller is one of them."""

    def __init__(self, stream: Stream, calls: Sequence[Callable[[], Any]], first: int) -> None:
        self._stream = stream
        self._members = [_Member(first + number, call) for number, call in enumerate(calls)]
        self._main = threading.Semaphore(0)
        self._here = threading.local()
        self._open: Unit | None = None
        self._inside: dict[int, int] = {}
        self._kept: dict[int, Unit] = {}
        self._abandoned = False
        self._fault: BaseException | None = None

    def results(self) -> Iterator[tuple[int, Any]]:
        """Run the calls; yield each result."""
        grad = torch.is_grad_enabled()
        for member in self._members:
            context = contextvars.copy_context()
            work = partial(context.run, self._work, member, grad)
            member.thread = threading.Thread(target=work, name=f"forward {member.index}", daemon=True)
            member.thread.start()
        for member in self._members:
            while not member.ended:
                self._rest(self._main)
                failed = next((one.error for one in self._members if one.error is not None), None)
                if failed is not None:
                    raise self._fault or failed
            result, member.result = member.result, None
            yield member.index, result
            del result

    def abandon(self) -> None:
        """End the threads that have not ended, and wait for them."""
        self._abandoned = True
        for member in self._members:
            member.turn.release()
        for member in self._members:
            if member.thread is not None:
                member.thread.join()

    def enter(self, unit: Unit) -> None:
        """Wait until it is this call's turn to go through a unit, and have it read where it is not there."""
        member: _Member | None = getattr(self._here, "member", None)
        if member is None:
            # The caller runs the model itself, between two results.
            self._stream.open(unit)
            return
        if unit is not self._open:
            member.wants = unit
            self._rest(member.turn)
            member.wants = None
            if unit is not self._open:
                self._turn_to(unit)
        self._inside[unit.order] = self._inside.get(unit.order, 0) + 1

    def leave(self, unit: Unit) -> None:
        """Let go of a unit that is not the one that all go through, once nobody is inside."""
        if getattr(self._here, "member", None) is None:
            self._stream.close(unit)
            return
        self._inside[unit.order] = max(0, self._inside.get(unit.order, 0) - 1)
        self._sweep()

    def _turn_to(self, unit: Unit) -> None:
        self._open = None
        self._sweep()
        if unit.order not in self._kept:
            try:
                self._stream.open(unit)
            except BaseException as error:
                # As it is, not as the failure of a forward that it becomes on its way.
                self._fault = error
                raise
            self._kept[unit.order] = unit
        self._open = unit

    def _sweep(self) -> None:
        for order, unit in list(self._kept.items()):
            if unit is not self._open and not self._inside.get(order):
                del self._kept[order]
                self._stream.close(unit)

    def _work(self, member: _Member, grad: bool) -> None:
        self._here.member = member
        _CURRENT.set(member.index)
        try:
            member.turn.acquire()
            if self._abandoned:
                return
            with torch.set_grad_enabled(grad):
                member.result = member.call()
        except _Abandoned:
            return
        except BaseException as error:
            member.error = error
        member.ended = True
        self._main.release()

    def _rest(self, turn: threading.Semaphore) -> None:
        """Give the turn to the next, and wait for it to come back."""
        state = self._random()
        following = self._next()
        (self._main if following is None else following.turn).release()
        turn.acquire()
        if self._abandoned:
            raise _Abandoned
        torch.set_rng_state(state[0])
        if len(state) > 1:
            torch.cuda.set_rng_state(state[1], self._stream.device)

    def _random(self) -> list[torch.Tensor]:
        device = self._stream.device
        return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]

    def _next(self) -> _Member | None:
        """Choose whose turn it is: who can go on as it is, else who is behind."""
        alive = [member for member in self._members if not member.ended]
        ready = next((one for one in alive if one.wants is None or one.wants is self._open), None)
        return ready or min(alive, key=lambda one: one.wants.order if one.wants else -1, default=None)
