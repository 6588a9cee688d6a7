"""What the peers reach: Liger-Kernel on a model instance, and the Hub's decorator on its classes."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import multiprocessing
import textwrap
import warnings
from multiprocessing.connection import Connection
from typing import Any

from torch import nn

__all__ = ["hub_layer", "liger", "liger_reaches"]

_DECORATOR = "use_kernel_forward_from_hub"


@functools.cache
def hub_layer(cls: type[nn.Module]) -> str | None:
    """Return the layer of the Hub that a class is marked for, by the decorator or by what the decorator leaves.

    The decorator leaves nothing where the ``kernels`` package is absent, so the source is read.
    """
    for base in cls.__mro__:
        if isinstance(left := vars(base).get("kernel_layer_name"), str):
            return left
        if base is nn.Module:
            break
        if (written := _decorated(base)) is not None:
            return written
    return None


def _decorated(cls: type) -> str | None:
    try:
        (node,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    except (OSError, TypeError, SyntaxError, ValueError):
        return None
    for decorator in node.decorator_list if isinstance(node, ast.ClassDef) else ():
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func).split(".")[-1] == _DECORATOR:
            name = decorator.args[0]
            return str(name.value) if isinstance(name, ast.Constant) else None
    return None


@functools.cache
def liger() -> Any:
    """Return Liger-Kernel's module that patches models, or None where it is not installed."""
    try:
        return importlib.import_module("liger_kernel.transformers.monkey_patch")
    except ImportError:
        return None


def liger_reaches(model: nn.Module, names: list[str]) -> tuple[list[str], str]:
    """Apply Liger-Kernel to a model in a process of its own, since it changes classes for good.

    Args:
        model: it stays as it is.
        names: the norms that matter.

    Returns:
        Those of ``names`` whose forward it replaced, and why it failed; empty where it did not, or where it does not
        know the type.
    """
    known = () if liger() is None else liger().MODEL_TYPE_TO_APPLY_LIGER_FN
    if getattr(getattr(model, "config", None), "model_type", None) not in known:
        return [], ""
    with warnings.catch_warnings():
        # The child only computes on this process's own memory; no thread is asked for anything.
        warnings.simplefilter("ignore", DeprecationWarning)
        context = multiprocessing.get_context("fork")
        here, there = context.Pipe(duplex=False)
        child = context.Process(target=_apply_liger, args=(model, names, there))
        child.start()
    there.close()
    try:
        replaced, failure = here.recv()
    except EOFError:
        replaced, failure = [], "the process died"
    child.join()
    return replaced, failure


def _apply_liger(model: nn.Module, names: list[str], connection: Connection) -> None:
    norms = {name: module for name, module in model.named_modules() if name in set(names)}
    before = {name: _code(module) for name, module in norms.items()}
    failure = ""
    try:
        liger()._apply_liger_kernel_to_instance(model)
    except BaseException as error:
        words = " ".join(str(error).split())[:120]
        failure = f"{type(error).__name__}: {words}"
    after = {name: _code(module) for name, module in model.named_modules() if name in norms}
    connection.send(([name for name, code in before.items() if after.get(name) is not code], failure))


def _code(module: nn.Module) -> Any:
    forward = module.forward
    return getattr(forward, "__func__", forward)
