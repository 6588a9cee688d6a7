"""Reports say nothing where nothing was measured, and name figures by the words of the documentation."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import asdict, replace

import pytest
from example_reports import EXAMPLES, minimal, passing

from normswap.evidence import Fault
from normswap.figures import Control, Criterion, Exact, ParityReport, Served
from normswap.gates import judge_exact
from normswap.gatetable import gate_table
from normswap.page import to_html
from normswap.power import power_of
from normswap.report import render
from normswap.stats import Gap
from normswap.summary import to_markdown
from normswap.tables import bound_table, fault_table, token_table

pytestmark = pytest.mark.core
FORMS: dict[str, Callable[[ParityReport], str]] = {
    "page": to_html,
    "terminal": lambda report: render(report, verbose=True),
    "markdown": to_markdown,
}


def encoder() -> ParityReport:
    """Without logits: errors alone."""
    return replace(
        passing(),
        output={"name": "last_hidden_state", "shape": [1, 256, 64], "others": []},
        logits=Served(0.0121, 0.0122, 1.004, (0.981, 1.026), max_abs=0.31, ratio_interval_tokens=(0.992, 1.015)),
    )


def images() -> ParityReport:
    """One distribution an image, of too few numbers for a ratio."""
    return replace(
        passing(),
        output={"name": "logits", "shape": [1, 2], "others": []},
        logits=replace(passing().logits, tokens=8, ratio=1.4, judges=False),
    )


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", [*EXAMPLES, "encoder", "images"])
def test_no_interval_is_made_of_dashes(name: str, form: str) -> None:
    report = {"encoder": encoder, "images": images, **EXAMPLES}[name]()
    assert not re.search(r"- to -|nan to nan|NaN to NaN", FORMS[form](report))


def test_what_was_not_measured_has_no_row() -> None:
    words = [row[0] for row in token_table(encoder()).rows]
    assert words and not [row for row in token_table(encoder()).rows if row[1] == "-"]
    assert not [word for word in words if "KL" in word or "top-1" in word or "rounding" in word]
    assert token_table(minimal()).rows == []
    for write in FORMS.values():
        assert "not measured" in write(minimal()).lower()
    assert '<h2 id="tokens-h">Outputs</h2>' in to_html(encoder())


def test_a_distribution_of_an_image_is_no_token() -> None:
    words = " ".join(row[0] for row in token_table(images()).rows)
    assert "token" not in words and "nats a distribution" in words
    assert "8 distributions" in to_html(images())


@pytest.mark.parametrize("form", FORMS)
def test_a_ratio_that_does_not_judge_has_no_bound(form: str) -> None:
    rows = gate_table(images()).rows
    at = next(at for at, row in enumerate(rows) if row[0] == "served")
    assert rows[at] == ["served", "note", "error, converted / original", "1.4", ""]
    assert "too few numbers" in FORMS[form](images())
    assert "served" not in render(images(), quiet=True)


def test_a_figure_that_is_no_number_is_said_once() -> None:
    """No fault can be seen in what is NaN anyway: it fails, and is in no doubt besides."""
    control = Control("model.norm", 1.02, math.nan, False)
    exact, failures, doubts = judge_exact([{"logits": Gap(math.nan, 1.0, math.nan, 1)}], "logits", control, Criterion())
    assert failures == ["exact: error is no number"] and doubts == []
    (fault,) = power_of([], exact).faults
    assert fault.detected is None


def test_a_share_of_elements_is_no_unit() -> None:
    fault = Fault("cast order swapped", "model.norm", "norms", 0.735, 0.9999, True)
    (row,) = fault_table(replace(passing(), power=power_of([fault], Exact(0.0, 1e-5, None)))).rows
    assert row[4:6] == ["73.5000%", "99.9900%"]


def test_every_bound_is_explained() -> None:
    table = bound_table(Criterion())
    assert [row[0] for row in table.rows] == list(asdict(Criterion())) and all(row[2] for row in table.rows)


def test_a_model_that_is_held_against_itself_says_so() -> None:
    report = replace(passing(), checkpoint="a", against="a", tensors=None)
    for form in ("page", "terminal"):
        assert "a against itself, its norms as they are" in FORMS[form](report)
    # Two modules have the names of their classes.
    assert "Llama against Llama" in render(replace(passing(), checkpoint="Llama", against="Llama"))


@pytest.mark.parametrize("name", EXAMPLES)
def test_internal_names_stay_inside(name: str) -> None:
    text = render(EXAMPLES[name]()) + to_markdown(EXAMPLES[name]())
    assert not re.search(r"max_ulp|max ulp|bit_identical_fraction|kl_ratio|ratio_interval", text)
