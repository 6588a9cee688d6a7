"""The committed schema says what a report's data are, and nothing that they are not."""

from __future__ import annotations

import copy
import dataclasses
import json
import typing
from pathlib import Path
from typing import Any

import pytest
import torch
from example_reports import EXAMPLES, failing
from parity_models import Pair

import normswap
from normswap import evidence, figures
from normswap.manifest import parity_entry

jsonschema = pytest.importorskip("jsonschema")

pytestmark = pytest.mark.core

FILE = Path(normswap.__file__).with_name("report.schema.json")
SCHEMA: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
CLASSES = [
    cls
    for module in (evidence, figures)
    for cls in vars(module).values()
    if isinstance(cls, type) and dataclasses.is_dataclass(cls) and cls.__module__ == module.__name__
]


@pytest.fixture(scope="module")
def validator() -> Any:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    return jsonschema.Draft202012Validator(SCHEMA)


def problems(validator: Any, report: figures.ParityReport) -> list[str]:
    # Through text and back, as a reader gets it.
    data = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(data)]


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_kind_of_report_is_valid(name: str, validator: Any) -> None:
    assert problems(validator, EXAMPLES[name]()) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_measured_report_is_valid(dtype: torch.dtype, validator: Any) -> None:
    pair = Pair()
    report = pair.measure(dtype, pair.inputs(sequences=2, length=64))
    assert report.layers and problems(validator, report) == []


@pytest.mark.parametrize("name", EXAMPLES)
def test_what_a_manifest_keeps_is_a_report_without_its_long_lists(name: str, validator: Any) -> None:
    report = EXAMPLES[name]()
    kept = parity_entry(report)
    assert list(validator.iter_errors(kept)) == []
    assert kept["verdict"] == report.verdict and kept["departs"] == report.departs
    assert [norm["max_ulp"] for norm in kept["norms"]] == [norm["max_ulp"] for norm in report.to_dict()["norms"]]
    # A few lines a norm, and as much again for all else.
    assert len(json.dumps(kept, indent=2)) < 600 * len(report.norms) + 20_000


def test_the_schema_has_every_field_and_no_other() -> None:
    root = SCHEMA["properties"].keys() - {"schema", "verdict"}
    defined = {"ParityReport": root} | {name: part["properties"].keys() for name, part in SCHEMA["$defs"].items()}
    defined["Criterion"] -= {"text"}
    assert defined == {cls.__name__: {field.name for field in dataclasses.fields(cls)} for cls in CLASSES}


def test_figures_may_be_absent_and_what_must_be_there_may_not() -> None:
    """A figure that is not finite is null in the data, whatever its annotation says."""
    for cls in CLASSES:
        part = SCHEMA if cls is figures.ParityReport else SCHEMA["$defs"][cls.__name__]
        for name, kind in typing.get_type_hints(cls).items():
            expected = part["properties"][name].get("type", [])
            if kind in (float, float | None):
                assert set(expected) == {"number", "null"}, f"{cls.__name__}.{name}"
            elif kind in (int, str, bool):
                assert expected == {int: "integer", str: "string", bool: "boolean"}[kind], f"{cls.__name__}.{name}"


def test_the_schema_is_strict_and_says_what_each_entry_is() -> None:
    for part in (SCHEMA, *SCHEMA["$defs"].values()):
        assert part["additionalProperties"] is False
        assert set(part["required"]) == part["properties"].keys()
        for name, entry in part["properties"].items():
            assert "description" in entry, name
    assert SCHEMA["properties"]["schema"]["const"] == figures.SCHEMA


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["schema"], figures.SCHEMA + 1),
        (["verdict"], "maybe"),
        (["failures"], None),
        (["exact", "error"], "3"),
        (["norms", 0, "histogram", 0], 0.5),
        (["logits", "ratio_interval"], [1.0]),
        (["tensors", "changes", 0, "kind"], "new"),
        (["tensors", "surprise"], 1),
        (["surprise"], 1),
        (["inputs", "sequences"], "8"),
    ],
    ids=lambda value: ".".join(map(str, value)) if isinstance(value, list) else "",
)
def test_a_drift_is_seen(path: list[Any], value: Any, validator: Any) -> None:
    data = copy.deepcopy(failing().to_dict())
    place: Any = data
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    assert not validator.is_valid(data)
    *_, last = path
    if last in ("failures", "verdict"):
        del place[last]
        assert not validator.is_valid(data)
