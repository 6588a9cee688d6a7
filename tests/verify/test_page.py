"""The page as text: well formed, self-contained, escaped, named for a screen reader, small."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser
from pathlib import Path

import pytest
from example_reports import EXAMPLES, HOSTILE, big, failing, hostile, inconclusive, minimal, passing

import normswap
from normswap.evidence import LayerFigures
from normswap.heatmap import stacks_of
from normswap.page import to_fragment, to_html

pytestmark = pytest.mark.core

VOID = {"meta", "br", "link", "img", "hr", "input"}
# These may stand without an end in HTML, and in what is written here do not.
DRAWN = {"line", "path", "rect", "circle"}
FOLDER = Path(normswap.__file__).parent


class Reader(HTMLParser):
    """Collects elements with their attributes, their text, and the elements that they are in."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[int] = []
        self.elements: list[dict[str, str]] = []
        self.feed(text)
        self.close()
        assert self.open == [], [self.elements[at]["tag"] for at in self.open]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        parents = " ".join(self.elements[at]["tag"] for at in self.open)
        self.elements.append({"tag": tag, "text": "", "in": parents, **{key: value or "" for key, value in attrs}})
        if tag not in VOID:
            self.open.append(len(self.elements) - 1)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.elements[self.open[-1]]["tag"] == tag, f"</{tag}> ends <{self.elements[self.open[-1]]['tag']}>"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        for at in self.open:
            self.elements[at]["text"] += data

    def all(self, tag: str) -> list[dict[str, str]]:
        return [element for element in self.elements if element["tag"] == tag]


@cache
def page(name: str) -> str:
    return to_html(EXAMPLES[name]())


@cache
def read(name: str) -> Reader:
    return Reader(page(name))


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_page_is_whole_and_by_itself(name: str) -> None:
    text, found = page(name), read(name)
    assert text.startswith("<!DOCTYPE html>") and found.all("html")[0]["lang"] == "en"
    assert not {"script", "link", "img", "iframe", "object", "base", "form"} & {e["tag"] for e in found.elements}
    assert not [key for e in found.elements for key in e if key in ("src", "srcset", "action") or key.startswith("on")]
    assert all(e["href"].startswith("#") for e in found.elements if "href" in e)
    style = found.all("style")[0]["text"]
    assert not re.search(r"url\(|@import|expression|//", style)
    policy = next(e["content"] for e in found.all("meta") if e.get("http-equiv") == "Content-Security-Policy")
    assert "default-src 'none'" in policy
    text.encode("utf-8")


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_page_can_be_read_without_seeing_it(name: str) -> None:
    found = read(name)
    ids = [e["id"] for e in found.elements if "id" in e]
    assert len(ids) == len(set(ids))
    assert [len(found.all(tag)) for tag in ("main", "header", "nav", "h1")] == [1, 1, 1, 1]
    assert found.all("a")[0]["href"] == "#main" and "Skip" in found.all("a")[0]["text"]
    for e in found.elements:
        targets = f"{e.get('aria-labelledby', '')} {e.get('href', '')[1:]}".split()
        assert set(targets) <= set(ids), targets
    headings = [e["tag"] for e in found.elements if re.fullmatch("h[1-6]", e["tag"])]
    assert headings[0] == "h1" and set(headings[1:]) == {"h2"}
    assert all(e["text"].strip() for e in found.all("caption") + found.all("th") + found.all("h2"))
    assert len(found.all("caption")) == len(found.all("table"))
    assert all(e["scope"] in ("col", "row", "rowgroup") for e in found.all("th"))
    for drawing in found.all("svg"):
        assert drawing["role"] == "img" and drawing["aria-labelledby"]
    assert len(found.all("desc")) == len(found.all("svg")) == len(found.all("figure"))
    assert all(e["text"].strip() for e in found.all("desc"))
    # What scrolls can be reached, and its name is read.
    for e in found.elements:
        if e.get("class") == "scroll":
            assert e["tabindex"] == "0" and e["role"] == "region" and e["aria-label"]


@pytest.mark.parametrize("name", ["pass", "fail", "big"])
def test_every_section_is_there_and_each_drawing_has_its_data(name: str) -> None:
    found = read(name)
    assert [e["id"] for e in found.all("section")] == [
        "gates", "compared", "layers", "norms", "units", "tokens", "generation", "controls", "pairs", "criterion",
        "environment", "inputs", "notes", "words", "again",
    ]  # fmt: skip
    assert len(found.all("figure")) == 3
    assert sum("figure" in e["in"] for e in found.all("details")) == 3
    report = EXAMPLES[name]()
    assert report.command == found.all("pre")[0]["text"]
    norms = next(e for e in found.all("details") if "norms" in e["text"][:40])
    assert all(norm.name in norms["text"] for norm in report.norms)


def test_the_largest_page_is_small() -> None:
    assert len(page("big").encode("utf-8")) < 2_000_000
    assert len(big().norms) == 471 and len(big().layers) == 94


def test_the_verdict_comes_first_with_its_reasons() -> None:
    for name, sign in (("pass", "✓ PASS"), ("fail", "✗ FAIL"), ("inconclusive", "? INCONCLUSIVE")):
        found = read(name)
        assert found.all("h1")[0]["text"].startswith(sign)
        reasons = [e["text"] for e in found.all("li") if "header" in e["in"]]
        report = EXAMPLES[name]()
        assert reasons == [*report.failures, *report.doubts]
    assert "? doubt" in page("inconclusive").replace('<span aria-hidden="true">?</span>', "?")


def test_the_layer_that_departs_is_marked_and_named() -> None:
    (plot,) = [e for e in read("fail").all("svg") if e["aria-labelledby"].startswith("layers")]
    assert "departs: model.layers.4" in plot["text"] and "The first that departs is model.layers.4." in plot["text"]
    assert 'class="departs"' in page("fail") and '<line class="departs"' not in page("pass")


def test_marks_stand_where_the_figures_are() -> None:
    """A decade is as high as the next one, and the worse model is drawn above the better one."""
    report = replace(
        minimal(),
        layers=[
            LayerFigures("m.0", "m", 0, error_exact=1e-6, error_original=1e-3, error_converted=1e-2),
            LayerFigures("m.1", "m", 1, error_exact=0.0, error_original=1e-4, error_converted=float("nan")),
            LayerFigures("m.2", "m", 2, error_exact=None, error_original=1e-5, error_converted=1e-5),
        ],
    )
    text = to_html(report)
    circles = [float(y) for y in re.findall(r'<circle cx="[\d.]+" cy="([\d.]+)" r="[\d.]+"><title>m', text)]
    boxes = [float(y) for y in re.findall(r'<rect x="[\d.]+" y="([\d.]+)" [^>]+><title>m', text)]
    assert circles[1] - circles[0] == pytest.approx(circles[2] - circles[1], abs=0.2)
    assert boxes[0] < circles[0] and boxes[1] < boxes[0] and abs(boxes[2] - circles[2]) < 5
    assert ">NaN, inf<" in text and ">0</text>" in text
    # The line of the exact error ends where there is no figure.
    assert re.search(r'class="line exact" d="M[\d. ]+L[\d. ]+"', text)


def test_a_line_is_broken_between_stacks_and_where_a_figure_is_missing() -> None:
    errors = [1e-3, None, 1e-3, 1e-3]
    layers = [LayerFigures(f"a.{at}", "a", at, error_original=error) for at, error in enumerate(errors)]
    layers += [LayerFigures(f"b.{at}", "b", at, error_original=1e-3) for at in range(2)]
    text = to_html(replace(minimal(), layers=layers))
    assert re.search(r'class="line original" d="M[\d. ]+M[\d. ]+L[\d. ]+M[\d. ]+L[\d. ]+"', text)
    assert "layer of a<" in text and "layer of b<" in text and 'class="line converted"' not in text


def test_norms_find_their_place_by_layer() -> None:
    report = failing()
    names = ["vision.blocks.3.norm1", "model.layers.2.experts.7.norm", "model.layers.2.experts.8.norm", "norm", "a.0"]
    norms = [replace(report.norms[0], name=name, max_ulp=float(at)) for at, name in enumerate(names)]
    stacks = stacks_of(norms, report.layers)
    found = {(s.name, kind, at): norm.name for s in stacks for kind, row in s.rows.items() for at, norm in row.items()}
    assert found == {
        ("vision.blocks", "norm1", 3): "vision.blocks.3.norm1",
        # Of several in one place the worst is shown.
        ("model.layers", "experts.*.norm", 2): "model.layers.2.experts.8.norm",
        ("a", "(itself)", 0): "a.0",
        ("", "norm", 0): "norm",
    }
    assert stacks[-1].name == ""
    layers = [LayerFigures("stages.1.blocks.0", "stages.1.blocks", 0)]
    (stack,) = stacks_of([replace(norms[0], name="stages.1.blocks.0.norm1")], layers)
    assert (stack.name, list(stack.rows)) == ("stages.1.blocks", ["norm1"])


def test_a_norm_beyond_its_bound_is_told_by_more_than_its_colour() -> None:
    text = page("fail")
    (map_,) = re.findall(r"<svg[^>]*norms-plot.*?</svg>", text, re.DOTALL)
    assert map_.count('class="failed"') == map_.count('class="corner"') == 1 + 2
    assert "model.layers.4.input_layernorm: 24, beyond its bound" in map_
    assert "model.layers.4.post_attention_layernorm" in read("fail").all("desc")[1]["text"]
    assert ">24</text>" in map_ and ">N</text>" in map_
    assert ">&gt;</text>" in page("stacks")
    assert ">-</text>" in page("big") and "not reached</title>" in page("big")


@pytest.mark.parametrize("write", [to_html, to_fragment], ids=["page", "fragment"])
def test_no_name_is_markup(write: object) -> None:
    text = write(hostile())  # type: ignore[operator]
    found = Reader(text)
    assert not found.all("script")
    assert not [e for e in found.elements if "onload" in e]
    assert HOSTILE.split("|")[0] in found.elements[0]["text"]
    assert "\x1b" not in text and "\u202e" not in text
    assert "<script" not in text and "&amp;amp;" in text


def test_a_surrogate_can_be_written() -> None:
    report = replace(passing(), checkpoint="a\udc80b")
    assert "a\\udc80b" in to_html(report).encode("utf-8").decode("utf-8")


def test_a_fragment_is_short_and_keeps_its_styles_to_itself() -> None:
    report = failing()
    text = report._repr_html_()
    assert text == to_fragment(report) and len(text) < 40_000
    found = Reader(text)
    assert {"html", "body", "main", "h1"}.isdisjoint(e["tag"] for e in found.elements)
    assert found.elements[0]["class"] == "normswap-report"
    assert "✗ FAIL" in found.elements[0]["text"] and len(found.all("svg")) == 1 and len(found.all("table")) == 1
    style = re.sub(r"\{[^}]*\}", "{}", found.all("style")[0]["text"])
    selectors = [one.strip() for group in style.split("{}") for one in group.split(",") if one.strip()]
    assert selectors and all(one.startswith(".normswap-report") for one in selectors)
    other = {e["id"] for e in Reader(to_fragment(inconclusive())).elements if "id" in e}
    assert other.isdisjoint(e["id"] for e in found.elements if "id" in e)


def colors(scheme: str) -> dict[str, str]:
    style = (FOLDER / "page.css").read_text(encoding="utf-8")
    light, dark = style.split("@media screen and (prefers-color-scheme: dark)")
    found = dict(re.findall(r"--(\w+): (#[0-9a-f]+)", light))
    return found | dict(re.findall(r"--(\w+): (#[0-9a-f]+)", dark)) if scheme == "dark" else found


def luminance(color: str) -> float:
    digits = color[1:] if len(color) == 7 else "".join(2 * digit for digit in color[1:])
    parts = [int(digits[at : at + 2], 16) / 255 for at in (0, 2, 4)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_and_marks_stand_out_from_their_ground(scheme: str) -> None:
    """By the ratios that WCAG asks for: 4.5 for text, 3 for marks."""
    color = colors(scheme)
    texts = [(name, ground) for name in ("ink", "muted", "ok", "bad", "doubt", "link") for ground in ("ground", "soft")]
    texts += [(f"t{step}", f"h{step}") for step in range(6)]
    marks = [(name, "ground") for name in ("original", "converted", "exact", "bad")]
    assert color["ground"] == {"light": "#fff", "dark": "#15181c"}[scheme]
    for least, pairs in ((4.5, texts), (3.0, marks)):
        for front, back in pairs:
            high, low = sorted((luminance(color[front]), luminance(color[back])), reverse=True)
            assert (high + 0.05) / (low + 0.05) >= least, (front, back)
