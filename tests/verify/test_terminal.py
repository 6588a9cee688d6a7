"""Reports on a terminal: the verdict first, nothing too wide, nothing that a name could do to the screen."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from example_reports import EXAMPLES, big, failing, hostile, inconclusive, passing

from normswap.evidence import PairFigures
from normswap.report import render

pytestmark = pytest.mark.core

FORMS = {"short": {}, "verbose": {"verbose": True}, "quiet": {"quiet": True}}
ESCAPE = re.compile(r"\x1b\[\d+m")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", EXAMPLES)
def test_every_form_of_every_report_keeps_to_the_page(name: str, form: str) -> None:
    report = EXAMPLES[name]()
    text = render(report, **FORMS[form])
    lines = text.splitlines()
    assert max(map(len, lines)) <= (84 if form == "short" else 100)
    assert all(line == line.rstrip() for line in lines)
    assert lines[0].startswith(report.verdict.upper())
    assert text.isprintable() or set(filter(lambda letter: not letter.isprintable(), text)) == {"\n"}
    painted = render(report, color=True, **FORMS[form])
    assert painted != text and ESCAPE.sub("", painted) == text


@pytest.mark.parametrize(("name", "lines"), [("pass", 35), ("minimal", 16), ("inconclusive", 37), ("fail", 50)])
def test_the_short_form_fits_a_screen(name: str, lines: int) -> None:
    assert len(render(EXAMPLES[name]()).splitlines()) <= lines


def test_what_departs_what_changed_and_what_would_be_seen_stand_in_the_short_form() -> None:
    lines = render(failing()).splitlines()
    for words in (
        "the first that departs is model.layers.4 (exact 0.03, ratio 1.9)",
        "60 gains folded into 210 linears, unknown change in 2 tensors",
        "a gain 0.0032% off would be seen in model.layers.3.input_layernorm",
        "files altered since conversion",
        "./smollm2-folded against smollm2-135m-instruct",
    ):
        assert any(words in line for line in lines), words
    state = {line.split()[0]: line.split()[1] for line in lines if re.match(r"[a-z]+ +(ok|FAIL|doubt)", line)}
    assert state == dict.fromkeys(state, "FAIL") | {"power": "ok"}
    assert {"tensors", "folds", "exact", "norms", "served", "layers", "generation"} < state.keys()


def test_a_doubt_is_told_with_what_to_change() -> None:
    text = render(inconclusive())
    assert text.startswith("INCONCLUSIVE") and "--tokens 4096" in text
    assert re.search(r"^power +doubt", text, re.MULTILINE) and re.search(r"^exact +ok", text, re.MULTILINE)


def test_an_interval_of_few_sequences_says_so() -> None:
    assert "rest on 3 sequences only, 8 wanted" in render(inconclusive())
    one = replace(inconclusive(), inputs={**inconclusive().inputs, "sequences": 1})
    assert "rest on 1 sequence only, 8 wanted" in render(one)
    assert "wanted" not in render(passing())


def test_verbose_lists_everything() -> None:
    report = big()
    text = render(report, verbose=True)
    assert report.tensors is not None
    for name in [norm.name for norm in report.norms] + [layer.name for layer in report.layers]:
        assert name in text
    assert text.count("gate_up_proj.weight") == len(report.tensors.changes)
    assert "criterion" in text and "criterion" not in render(report)
    assert all(fault.kind in text for fault in report.power.faults)


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("pass", "PASS  served: 95% interval of error, converted / original, from 0.981 <= 1.05"),
        ("big", "FAIL  norms: model.layers.40.input_layernorm: 6 units in the last place off, above 1"),
        ("minimal", "PASS"),
    ],
)
def test_quiet_is_the_verdict_and_the_worst_figure(name: str, line: str) -> None:
    assert render(EXAMPLES[name](), quiet=True) == line


def test_nothing_is_left_out_of_what_was_done_to_the_tensors() -> None:
    told = "weights.bin instead of safetensors, tied tensors written out: " + ", ".join(f"head.{n}" for n in range(12))
    tensors = passing().tensors
    assert tensors is not None
    words = " ".join(render(replace(passing(), tensors=replace(tensors, summary=told))).split())
    assert told in words


def test_a_setting_that_leaves_it_open_is_no_ok() -> None:
    report = replace(passing(), doubts=["settings: max_position_embeddings differ"])
    assert any(re.match("tensors +doubt ", line) for line in render(report).splitlines())


def test_folded_norms_keep_their_names_in_the_table_of_readers() -> None:
    pair = PairFigures(
        "model.layers.0.input_layernorm", [f"model.layers.0.self_attn.{n}.weight" for n in "qkv"], 0, 1, True
    )
    lines = render(replace(passing(), pairs=[pair]), verbose=True).splitlines()
    assert any(re.match(rf"ok +{pair.norm} +3 +0 ", line) for line in lines)


def test_quiet_names_the_first_failure_and_counts_the_rest() -> None:
    assert render(failing(), quiet=True).endswith("(and 7 more)")
    assert "power: with the cast order swapped" in render(inconclusive(), quiet=True)
    near = replace(passing(), exact=replace(passing().exact, error=9.9e-6))
    assert render(near, quiet=True) == "PASS  exact: error 9.9e-06 <= 1e-05"


def test_what_rounding_the_weights_explains_takes_the_place_of_the_ratio() -> None:
    served = replace(passing().logits, ratio=1.4, ratio_interval=(1.3, 1.5), error_weights=0.011, ratio_explained=1.02)
    report = replace(passing(), logits=served)
    lines = render(report, verbose=True).splitlines()
    (ratio,) = (line for line in lines if line.startswith("served") and "error, converted / original" in line)
    (explained,) = (line for line in lines if "over what rounding explains" in line)
    assert ratio.endswith("1.4") and re.search(r"1\.02 +<= 1\.25$", explained)
    assert any("of rounding the stored weights alone" in line and "0.011" in line for line in lines)
    assert render(report, quiet=True) == "PASS  served: error, over what rounding explains, 1.02 <= 1.25"


def test_names_cannot_reach_the_terminal() -> None:
    text = render(hostile(), verbose=True)
    assert "\x1b" not in text and "\u202e" not in text
    assert "\\x1b[31m" in text and "\\u202e" in text
