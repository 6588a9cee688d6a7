"""The page in a browser: no errors, every drawing in its place, nothing over the edge, light, dark and on paper."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from example_reports import EXAMPLES, failing

from normswap.page import to_fragment, to_html

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

pytestmark = pytest.mark.skipif(BROWSER is None, reason="needs Chromium (Debian's chromium), and none is on the PATH")

POLICY = re.compile(r'<meta http-equiv="Content-Security-Policy"[^>]*>\n?')
# What a script finds in the page; it is put into a copy of it, since the page itself lets none run.
PROBE = """
<script>
const errors = [];
addEventListener('error', event => errors.push(String(event.message)));
addEventListener('load', () => {
  document.querySelectorAll('details').forEach(one => { one.open = true; });
  // A window is never narrower than 500 units; a page can be made so.
  if (location.hash) document.documentElement.style.width = location.hash.slice(1) + 'px';
  // Words of one line keep some room between them; lines have some within.
  const near = 2, lap = 3;
  const drawings = [...document.querySelectorAll('svg')].map(svg => {
    const frame = svg.viewBox.baseVal, words = [...svg.querySelectorAll('text')];
    const boxes = words.map(word => [word.textContent, word.getBBox()]);
    const outside = boxes.filter(([_, b]) => b.x < -1 || b.y < -1 || b.x + b.width > frame.width + 1 ||
      b.y + b.height > frame.height + 1).map(([text]) => text);
    const over = [];
    boxes.forEach(([one, a], at) => boxes.slice(at + 1).forEach(([other, b]) => {
      if (a.x < b.x + b.width + near && b.x < a.x + a.width + near &&
          a.y + lap < b.y + b.height && b.y + lap < a.y + a.height)
        over.push([one, other]);
    }));
    const inner = svg.getBBox(), place = svg.getBoundingClientRect();
    return {name: svg.querySelector('title').textContent, width: place.width, height: place.height,
            drawn: [inner.width, inner.height], words: words.length, outside, over};
  });
  const free = [...document.querySelectorAll('body *')].filter(one => !one.closest('.scroll > *, .hidden'));
  const edge = Math.max(...free.map(one => one.getBoundingClientRect().right));
  const found = {errors, drawings, edge, screen: innerWidth, page: document.documentElement.scrollWidth,
    ground: getComputedStyle(document.body).backgroundColor, ink: getComputedStyle(document.body).color,
    dark: matchMedia('(prefers-color-scheme: dark)').matches};
  const out = document.createElement('pre');
  out.id = 'probe';
  out.textContent = btoa(unescape(encodeURIComponent(JSON.stringify(found))));
  document.body.append(out);
});
</script>
"""
Run = Callable[..., tuple[str, list[str]]]


@pytest.fixture(scope="module")
def browse(tmp_path_factory: pytest.TempPathFactory) -> Run:
    profile = tmp_path_factory.mktemp("profile")

    def run(file: Path, *options: str, width: int = 1000, height: int = 900, dark: bool = False, at: str = ""):
        scheme = 0 if dark else 1
        command = [
            str(BROWSER), "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run",
            "--disable-background-networking", f"--user-data-dir={profile}", "--enable-logging=stderr",
            f"--blink-settings=preferredColorScheme={scheme}", f"--window-size={width},{height}", *options,
            f"{file.as_uri()}{at}",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, timeout=180, check=True)
        log = done.stderr.decode("utf-8", "replace").splitlines()
        return done.stdout.decode("utf-8", "replace"), [line for line in log if "CONSOLE" in line]

    return run


def probe(browse: Run, folder: Path, text: str, **options: Any) -> dict[str, Any]:
    """Open a copy of a page that a script may look at, and return what it finds."""
    copy = folder / "probe.html"
    copy.write_text(POLICY.sub("", text).replace("</body>", f"{PROBE}</body>"), encoding="utf-8")
    dom, console = browse(copy, "--dump-dom", **options)
    assert console == []
    encoded = re.search(r'<pre id="probe">([^<]+)</pre>', dom)
    assert encoded is not None
    return json.loads(base64.b64decode(encoded[1]))


@pytest.mark.parametrize("name", ["minimal", "pass", "inconclusive"])
def test_a_page_opens_without_a_word(name: str, browse: Run, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    file.write_text(to_html(EXAMPLES[name]()), encoding="utf-8")
    dom, console = browse(file, "--dump-dom")
    assert console == []
    assert dom.count("<svg") == (0 if name == "minimal" else 3)


def test_the_log_tells_what_goes_wrong(browse: Run, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    file.write_text(to_html(failing()).replace("</body>", "<script>1</script></body>"), encoding="utf-8")
    assert "Content Security Policy" in " ".join(browse(file, "--dump-dom")[1])


@pytest.mark.parametrize(
    ("name", "width"),
    [
        ("big", 360),
        ("hostile", 360),
        ("fail", 900),
        ("hostile", 1400),
        ("stacks", 900),
        *(
            pytest.param(name, width, marks=pytest.mark.slow)
            for name in ("pass", "fail", "inconclusive", "big", "stacks", "hostile")
            for width in (320, 360, 600, 900, 1400)
        ),
    ],
)
def test_drawings_have_size_and_words_their_room(name: str, width: int, browse: Run, tmp_path: Path) -> None:
    found = probe(browse, tmp_path, to_html(EXAMPLES[name]()), width=width, at=f"#{width}")
    assert found["errors"] == [] and found["screen"] == max(500, width)
    # Nothing is wider than the screen but what scrolls by itself.
    assert found["page"] <= found["screen"] and found["edge"] <= width
    assert len(found["drawings"]) == 3
    for drawing in found["drawings"]:
        assert drawing["width"] >= 700 and drawing["height"] > 100, drawing["name"]
        assert min(drawing["drawn"]) > 80 and drawing["words"] > 10, drawing["name"]
        assert drawing["outside"] == [], drawing["name"]
        assert drawing["over"] == [], drawing["name"]


def test_the_scheme_of_the_reader_is_kept(browse: Run, tmp_path: Path) -> None:
    light, dark = (probe(browse, tmp_path, to_html(failing()), dark=dark) for dark in (False, True))
    assert (light["dark"], dark["dark"]) == (False, True)
    assert (light["ground"], light["ink"]) == ("rgb(255, 255, 255)", "rgb(28, 33, 38)")
    assert (dark["ground"], dark["ink"]) == ("rgb(21, 24, 28)", "rgb(228, 232, 236)")


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_a_picture_of_it_is_not_blank(dark: bool, browse: Run, tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    file, shot = tmp_path / "report.html", tmp_path / "report.png"
    file.write_text(to_html(failing()), encoding="utf-8")
    browse(file, f"--screenshot={shot}", dark=dark, height=2400)
    with image.open(shot) as opened:
        picture = opened.convert("RGB")
    ground = (21, 24, 28) if dark else (255, 255, 255)
    assert picture.size == (1000, 2400) and picture.getpixel((1, 1)) == ground
    # Every part of the page has something on it.
    for top in range(0, 2400, 400):
        part = picture.crop((0, top, 1000, top + 400))
        colors = part.getcolors(maxcolors=1 << 20)
        assert sum(count for count, color in colors if color != ground) > 4000
    assert len(picture.getcolors(maxcolors=1 << 20)) > 200


def test_paper_holds_the_drawings(browse: Run, tmp_path: Path) -> None:
    file, paper = tmp_path / "report.html", tmp_path / "report.pdf"
    file.write_text(to_html(EXAMPLES["big"]()), encoding="utf-8")
    browse(file, f"--print-to-pdf={paper}", "--no-pdf-header-footer", dark=True)
    data = paper.read_bytes()
    assert data.startswith(b"%PDF")
    streams = []
    for packed in re.findall(rb"stream\r?\n(.*?)endstream", data, re.DOTALL):
        try:
            streams.append(zlib.decompressobj().decompress(packed))
        except zlib.error:
            continue
    drawn = b"\n".join(stream for stream in streams if b" Tf" in stream)
    assert len(re.findall(rb"T[jJ]\b", drawn)) > 500
    # The 471 cells of the map, the marks and the bars are painted.
    assert len(re.findall(rb"\nf\*?\s", drawn)) > 471
    pages = len(re.findall(rb"/Type /Page\b", data))
    assert 3 <= pages <= 12


def test_a_fragment_leaves_the_notebook_as_it_was(browse: Run, tmp_path: Path) -> None:
    around = '<!DOCTYPE html><html><meta charset="utf-8"><body style="background:rgb(1,2,3);color:rgb(4,5,6)">'
    text = f"{around}<table><tr><td>mine</td></tr></table>{to_fragment(failing())}</body></html>"
    found = probe(browse, tmp_path, text, width=900)
    assert (found["ground"], found["ink"]) == ("rgb(1, 2, 3)", "rgb(4, 5, 6)")
    (drawing,) = found["drawings"]
    assert drawing["width"] > 600 and drawing["outside"] == drawing["over"] == []
