"""Write the JSON Schema of a report from the classes that it is made of and their docstrings.

    python tools/report_schema.py

Run it after a field was added; `tests/verify/test_schema.py` fails until then. A change that a reader of the former
schema would misread raises `normswap.figures.SCHEMA` too.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import types
import typing
from pathlib import Path
from typing import Any

import normswap
from normswap import evidence, figures

FILE = Path(normswap.__file__).with_name("report.schema.json")
TEXT = {"type": "string"}
TEXTS = {"type": "array", "items": TEXT}
COUNTS = {"type": "array", "items": {"type": "integer"}}
# What annotations do not tell.
KINDS = ["missing", "extra", "shape", "dtype", "folded", "tied", "nonfinite", "changed"]
MORE: dict[tuple[str, str], dict[str, Any]] = {
    ("TensorChange", "kind"): {"enum": KINDS},
    ("ParityReport", "inputs"): {
        "properties": {
            "kind": TEXT,
            "sequences": {"type": "integer"},
            "length": {"type": "integer"},
            "description": TEXT,
        }
    },
    ("ParityReport", "output"): {"properties": {"name": TEXT, "shape": COUNTS, "others": TEXTS}},
}
FIRST: dict[str, dict[str, Any]] = {
    "Criterion": {"text": {"description": "The criterion in words.", **TEXT}},
    "ParityReport": {
        "schema": {"description": "Version of this schema.", "const": figures.SCHEMA},
        "verdict": {
            "description": "`fail` where there are failures, else `inconclusive` where there are doubts, else `pass`.",
            "enum": ["pass", "fail", "inconclusive"],
        },
    },
}


def described(cls: type) -> dict[str, str]:
    """Return what a class's docstring says of each attribute."""
    found: dict[str, str] = {}
    name = ""
    for line in (inspect.getdoc(cls) or "").partition("Attributes:")[2].splitlines():
        if entry := re.match(r"    (\w+): (.*)", line):
            name = entry[1]
            found[name] = entry[2]
        elif name:
            found[name] = f"{found[name]} {line.strip()}".strip()
    return {name: in_json(text[0].upper() + text[1:]) for name, text in found.items()}


def in_json(text: str) -> str:
    """Say in JSON's words what is said in Python's."""
    return re.sub(r"\bNone\b", "null", text.replace("``", "`"))


def closed(properties: dict[str, Any]) -> dict[str, Any]:
    """Return an object with these properties, all of them, and no others."""
    return {"properties": properties, "required": list(properties), "additionalProperties": False}


def schema_of(kind: Any, defined: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a type; classes go to the definitions."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        (other,) = (one for one in inner if one is not type(None))
        found = schema_of(other, defined)
        if "type" not in found:
            return {"anyOf": [found, {"type": "null"}]}
        own = found["type"] if isinstance(found["type"], list) else [found["type"]]
        return {**found, "type": [*own, *({"null"} - set(own))]}
    if origin is list:
        return {"type": "array", "items": schema_of(inner[0], defined)}
    if origin is tuple:
        items = [schema_of(one, defined) for one in inner]
        return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}
    if origin is dict:
        return {"type": "object"} if inner[1] is Any else {"type": "object", "additionalProperties": TEXT}
    if dataclasses.is_dataclass(kind):
        if kind.__name__ not in defined:
            defined[kind.__name__] = {}
            defined[kind.__name__] = schema_of_class(kind, defined)  # type: ignore[arg-type]
        return {"$ref": f"#/$defs/{kind.__name__}"}
    # A figure that is not finite is null.
    simple = {bool: "boolean", int: "integer", str: "string", float: ["number", "null"]}
    return {"type": simple[kind]} if kind in simple else {}


def schema_of_class(cls: type, defined: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of an object with the fields of a class."""
    words, properties = described(cls), dict(FIRST.get(cls.__name__, {}))
    kinds = typing.get_type_hints(cls, {**vars(evidence), **vars(figures)})
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        entry = schema_of(kinds[field.name], defined)
        more = MORE.get((cls.__name__, field.name), {})
        entry |= closed(more["properties"]) if "properties" in more else more
        properties[field.name] = {"description": words[field.name], **entry}
    first = (inspect.getdoc(cls) or "").split("\n\n")[0]
    return {"description": in_json(" ".join(first.split())), "type": "object", **closed(properties)}


def main() -> None:
    """Write the file."""
    defined: dict[str, Any] = {}
    root = schema_of_class(figures.ParityReport, defined)
    comment = "JSON Schema, draft 2020-12. A figure that is not finite is null."
    schema = {"$comment": comment, "title": "normswap parity report", **root, "$defs": dict(sorted(defined.items()))}
    FILE.write_text(json.dumps(schema, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
