"""Read one Python function and say which normalisations of rows it writes out. Nothing is run."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import FunctionType, ModuleType
from typing import Literal

import torch
from torch.nn import functional

__all__ = ["Formula", "Kind", "Reading", "read"]

Kind = Literal["RMS", "LayerNorm", "L2"]
_Stage = Literal["mean", "centred", "square", "power", "root"]

_WHOLE: dict[object, Kind] = {
    functional.rms_norm: "RMS",
    torch.rms_norm: "RMS",
    functional.layer_norm: "LayerNorm",
    torch.layer_norm: "LayerNorm",
    torch.native_layer_norm: "LayerNorm",
    functional.normalize: "L2",
}
_TENSOR_MODULES = (torch, torch.linalg, functional)
# Results that are another thing than their first operand, so that nothing is known of them.
_FORGETTING = {"matmul", "bmm", "mm", "einsum", "softmax", "argmax", "argmin", "max", "min", "amax", "amin", "item"}


@dataclass(frozen=True)
class Formula:
    """A normalisation that stands in a function's code.

    Attributes:
        kind: ``"RMS"``, ``"LayerNorm"`` or ``"L2"``.
        call: the library function that computes it, such as ``"F.normalize"``; None where it is written out.
    """

    kind: Kind
    call: str | None = None


@dataclass(frozen=True)
class _Value:
    """How far an expression has come from a row to the root of its mean square."""

    stage: _Stage
    kind: Kind


@dataclass(frozen=True)
class Reading:
    """What a function does.

    Attributes:
        formulas: the normalisations in it, in the order of the code, each once.
        returns: a sum or a mean of squares, or its root, where the function returns one.
    """

    formulas: tuple[Formula, ...] = ()
    returns: _Value | None = None


def read(function: FunctionType, returned: Callable[[FunctionType], _Value | None]) -> Reading:
    """Read a function's source.

    Args:
        function: a plain Python function.
        returned: says of another function what `Reading.returns` would say of it.

    Returns:
        What it does; nothing where its source cannot be had.
    """
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError, ValueError):
        return Reading()
    definition = next((n for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))), None)
    if definition is None:
        return Reading()
    reader = _Reader(function.__globals__, returned, _defaults(definition))
    reader.run(definition.body)
    return Reading(tuple(dict.fromkeys(reader.formulas)), reader.returns)


def _defaults(definition: ast.FunctionDef | ast.AsyncFunctionDef) -> dict[str, object]:
    """Return the constants that parameters default to: a ``dim=-1`` is the dim that is meant."""
    arguments = definition.args
    positional = [*arguments.posonlyargs, *arguments.args]
    pairs: list[tuple[ast.arg, ast.expr | None]] = [
        *zip(reversed(positional), reversed(arguments.defaults), strict=False),
        *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True),
    ]
    return {name.arg: number for name, value in pairs if value is not None and (number := _constant(value)) is not None}


def _constant(node: ast.expr) -> object:
    try:
        return ast.literal_eval(node)
    except ValueError:
        return None


class _Reader:
    """Follows values through the statements in their order; what branches is read one after the other."""

    def __init__(
        self,
        names: Mapping[str, object],
        returned: Callable[[FunctionType], _Value | None],
        defaults: dict[str, object],
    ) -> None:
        self._globals, self._returned, self._defaults = names, returned, defaults
        self._known: dict[str, _Value | None] = {}
        self.formulas: list[Formula] = []
        self.returns: _Value | None = None

    def run(self, body: list[ast.stmt]) -> None:
        for statement in body:
            self._statement(statement)

    def _statement(self, node: ast.stmt) -> None:
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            value = self._value(node.value)
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                self._known[ast.unparse(target)] = value
        elif isinstance(node, ast.AugAssign):
            spelled = ast.BinOp(node.target, node.op, node.value)
            self._known[ast.unparse(node.target)] = self._value(ast.copy_location(spelled, node))
        elif isinstance(node, ast.Return) and node.value is not None:
            value = self._value(node.value)
            self.returns = value if value and value.stage in ("power", "root") else self.returns
        else:
            for child in ast.iter_child_nodes(node):
                if isinstance(child, ast.stmt):
                    self._statement(child)
                elif isinstance(child, ast.expr):
                    self._value(child)
                else:
                    self.run([part for part in ast.iter_child_nodes(child) if isinstance(part, ast.stmt)])

    def _value(self, node: ast.expr) -> _Value | None:
        if isinstance(node, (ast.Name, ast.Attribute)):
            return self._known.get(ast.unparse(node))
        if isinstance(node, ast.BinOp):
            return self._operation(node, self._value(node.left), self._value(node.right))
        if isinstance(node, ast.Call):
            return self._call(node)
        if isinstance(node, (ast.UnaryOp, ast.Subscript)):
            return self._value(node.operand if isinstance(node, ast.UnaryOp) else node.value)
        if isinstance(node, ast.NamedExpr):
            value = self._known[node.target.id] = self._value(node.value)
            return value
        parts = [self._value(child) for child in _expressions(node)]
        return next((part for part in parts if part), None) if isinstance(node, ast.IfExp) else None

    def _operation(self, node: ast.BinOp, left: _Value | None, right: _Value | None) -> _Value | None:
        if isinstance(node.op, ast.Pow):
            exponent = _constant(node.right)
            return self._power(left, exponent if isinstance(exponent, (int, float)) else None)
        if isinstance(node.op, ast.Mult) and ast.unparse(node.left) == ast.unparse(node.right):
            return self._power(left, 2)
        if isinstance(node.op, ast.Div):
            return self._quotient(left, right)
        if isinstance(node.op, ast.Sub) and right and right.stage == "mean":
            return _Value("centred", "LayerNorm")
        if isinstance(node.op, (ast.Mult, ast.Add, ast.Sub)):
            return next((v for v in (left, right) if v and v.stage in ("power", "root")), None)
        return None

    def _quotient(self, left: _Value | None, right: _Value | None) -> _Value | None:
        if right and right.stage == "root":
            self.formulas.append(Formula(right.kind))
            return None
        if left and left.stage == "power" and left.kind == "L2":
            return replace(left, kind="RMS")
        return left if left and left.stage in ("power", "root") else None

    def _power(self, base: _Value | None, exponent: float | None) -> _Value | None:
        if exponent == 2:
            return _Value("square", "LayerNorm" if base and base.stage == "centred" else "RMS")
        if base and base.stage == "power" and exponent == 0.5:
            return replace(base, stage="root")
        if base and (base.stage, exponent) in (("power", -0.5), ("root", -1), ("root", -1.0)):
            self.formulas.append(Formula(base.kind))
        return None

    def _call(self, node: ast.Call) -> _Value | None:
        before = len(self.formulas)
        value = self._called(node)
        name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        if name in ("clamp_max", "minimum") or (name.startswith("clamp") and _keyword(node, "max")):
            # What a row is divided by at most, or not at all: it is clipped, not normalised.
            del self.formulas[before:]
        return value

    def _called(self, node: ast.Call) -> _Value | None:
        values = [self._value(argument) for argument in node.args]
        values += [self._value(keyword.value) for keyword in node.keywords if keyword.arg != "dim"]
        callee = self._resolve(node.func)
        if kind := _WHOLE.get(callee) if _hashable(callee) else None:
            if kind != "L2" or self._is_last(node, 2):
                self.formulas.append(Formula(kind, ast.unparse(node.func)))
            return None
        if isinstance(callee, FunctionType) and not _is_torch(callee):
            return self._returned(callee)
        if not isinstance(node.func, ast.Attribute):
            return None
        if isinstance(self._resolve(node.func.value), ModuleType) or self._is_torch_name(node.func.value):
            return self._method(node.func.attr, node, node.args[:1], values[0] if values else None, values[1:], 1)
        if ast.unparse(node.func.value) == "self":
            return None
        return self._method(node.func.attr, node, [node.func.value], self._value(node.func.value), values, 0)

    def _method(
        self,
        name: str,
        node: ast.Call,
        operand: list[ast.expr],
        value: _Value | None,
        others: list[_Value | None],
        skipped: int,
    ) -> _Value | None:
        """Read ``operand.name(...)``, or ``torch.name(operand, ...)`` with one argument skipped."""
        name = name.rstrip("_")
        arguments = node.args[skipped:]
        other = others[0] if others else None
        if name in ("pow", "float_power"):
            given = arguments[0] if arguments else _keyword(node, "exponent")
            exponent = None if given is None else _constant(given)
            return self._power(value, exponent if isinstance(exponent, (int, float)) else None)
        if name == "square":
            return self._power(value, 2)
        if name in ("rsqrt", "sqrt"):
            return self._power(value, -0.5 if name == "rsqrt" else 0.5)
        if name == "reciprocal":
            return self._power(value, -1)
        if name in ("mul", "multiply") and operand and arguments:
            return self._operation(ast.BinOp(operand[0], ast.Mult(), arguments[0]), value, other)
        if name in ("div", "divide", "true_divide"):
            return self._quotient(value, other)
        if name in ("mean", "sum", "var", "std", "norm", "vector_norm", "var_mean"):
            return self._reduction(name, node, value, skipped)
        if name in _FORGETTING:
            return None
        # Casts, views, clamps, an added eps: all that keeps what the operand was.
        return value or next((v for v in others if v and v.stage in ("power", "root")), None)

    def _reduction(self, name: str, node: ast.Call, value: _Value | None, skipped: int) -> _Value | None:
        first = skipped + (name in ("norm", "vector_norm"))
        if not self._is_last(node, first):
            return None
        if name in ("norm", "vector_norm"):
            order = _keyword(node, "p") or _keyword(node, "ord") or next(iter(node.args[skipped:first]), None)
            is_two = order is None or _constant(order) in (2, "fro")
            return _Value("root", "L2") if is_two else None
        if name in ("var", "std"):
            return _Value("power" if name == "var" else "root", "LayerNorm")
        if value and value.stage == "square":
            return _Value("power", "L2" if name == "sum" and value.kind == "RMS" else value.kind)
        return _Value("mean", "LayerNorm") if name == "mean" else None

    def _is_last(self, node: ast.Call, position: int) -> bool:
        """Whether the dim that a reduction is given is the last one alone."""
        given = _keyword(node, "dim") or _keyword(node, "axis") or next(iter(node.args[position:]), None)
        if given is None:
            return False
        dim = self._defaults.get(given.id) if isinstance(given, ast.Name) else _constant(given)
        return dim in (-1, [-1], (-1,))

    def _resolve(self, node: ast.expr) -> object:
        """Return what a dotted name stands for in the function's globals; None where that is not known."""
        if isinstance(node, ast.Name):
            return self._globals.get(node.id)
        if isinstance(node, ast.Attribute):
            owner = self._resolve(node.value)
            return getattr(owner, node.attr, None) if isinstance(owner, ModuleType) else None
        return None

    def _is_torch_name(self, node: ast.expr) -> bool:
        return self._resolve(node) in _TENSOR_MODULES


def _expressions(node: ast.AST) -> Iterator[ast.expr]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr):
            yield child
        elif isinstance(child, (ast.comprehension, ast.keyword)):
            yield from _expressions(child)


def _keyword(node: ast.Call, name: str) -> ast.expr | None:
    return next((keyword.value for keyword in node.keywords if keyword.arg == name), None)


def _hashable(value: object) -> bool:
    return getattr(type(value), "__hash__", None) is not None and callable(value)


def _is_torch(function: FunctionType) -> bool:
    return (function.__module__ or "").partition(".")[0] == "torch"
