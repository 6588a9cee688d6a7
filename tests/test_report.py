import dataclasses
import math
import re

import pytest
import torch
from parity_models import Pair

from normswap.report import render

pytestmark = pytest.mark.core


@pytest.fixture(scope="module")
def report():
    return Pair().measure(torch.bfloat16)


def test_the_verdict_comes_first_and_everything_fits(report):
    text = render(report)
    lines = text.splitlines()
    assert lines[0] == "PASS  parity of logits, bfloat16 on cpu, backend cpu"
    assert all(len(line) <= 100 for line in lines)
    assert all(line == line.rstrip() for line in lines)
    for word in ("exact", "norms", "served", "layers", "power", "environment", "inputs", "5 of 5", "<= 1e-05"):
        assert word in text
    assert "criterion" in render(report, verbose=True)
    assert "8 sequences of 256 seeded token ids" in text
    assert f"torch {torch.__version__}".split("+")[0] in " ".join(text.split())
    assert "\x1b" not in text


def test_colours_are_only_colours(report):
    painted = render(report, color=True)
    assert painted.startswith("\x1b[32mPASS\x1b[0m")
    assert re.sub(r"\x1b\[\d+m", "", painted) == render(report)


def test_failures_are_named_and_cut_short_unless_asked(report):
    failures = [f"norms: layer.{i}: 9 units in the last place off, above 2" for i in range(9)]
    failed = dataclasses.replace(report, failures=failures)
    text = render(failed)
    assert text.startswith("FAIL") and "- norms: layer.0: 9 units in the last place off, above 2" in text
    assert "and 4 more" in text and "layer.8" not in text
    assert "layer.8" in render(failed, verbose=True)
    gate = next(line for line in text.splitlines() if line.startswith("norms"))
    assert "FAIL" in gate


def test_long_names_give_way_in_their_middle(report):
    norm = dataclasses.replace(report.norms[0], name="model." + "very_long_name." * 12 + "end")
    text = render(dataclasses.replace(report, norms=[norm]), verbose=True)
    assert all(len(line) <= 100 for line in text.splitlines())
    assert "…" in text and "end" in text


def test_what_is_missing_or_no_number_is_said(report):
    nan = dataclasses.replace(report.logits, ratio=math.nan, ratio_interval=(math.nan, math.nan))
    assert "NaN" in render(dataclasses.replace(report, logits=nan))
    none = dataclasses.replace(report.logits, **{f.name: None for f in dataclasses.fields(report.logits)})
    text = render(dataclasses.replace(report, logits=dataclasses.replace(none, judges=True), norms=[]))
    assert "not measured" in text and "- to -" not in text
