"""How many of all norms are swapped, and do they and their models compute the same?

Every model that the zoo builds is walked: the norms that are found, swapped, and refused with what reason; each
distinct swapped norm beside its own original in float32, float16 and bfloat16, in units in the last place; and the
whole model before and after the swap in float32, on all its floating-point outputs, where inputs are found. The same
norms are counted that Liger-Kernel replaces (where it is installed) and that carry the decorator of the Hub.

A norm counts that normalises each row of its input over one axis: the last one, heads or groups of it, or the channels
of an image; with a gate or without. What the recogniser refuses as something else (a norm over the batch or over
positions, a scale, a block whose inner norm counts itself) is listed and not counted; every other refusal counts
against the share.

    python benchmarks/coverage.py [--zoo FOLDER] [--jobs N] [--type NAME ...] [--read FILE] [--json FILE] [--write]
        [--check]

With --read nothing is measured, and the figures are those of a file of --json. With --write the summary goes into
README.md and the table of all model types into docs/coverage.md; with --check the exit code is 1 where a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Else this folder's kernels.py is taken for the package of that name.
sys.path.remove(str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "kernels" / "torch-ext"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent / "lib"))

from bench_arguments import count
from coverage_figures import bars, summarise
from coverage_model import serve
from coverage_pool import walk
from coverage_tables import page, put_between_markers, screen, summary, versions
from coverage_zoo import load_zoo, names

ROOT = Path(__file__).resolve().parent.parent
ZOO = ROOT.parent / "shared" / "zoo"


def measure(zoo: Path, asked: Sequence[str] | None, jobs: int) -> list[dict[str, Any]]:
    """Walk the models that are asked for, or all.

    Raises:
        FileNotFoundError: there is no zoo.
        ValueError: a name is not one of its models.
    """
    known, start = names(load_zoo(zoo)), time.monotonic()
    if unknown := set(asked or ()) - set(known):
        raise ValueError(f"expected model types of this transformers, got {', '.join(sorted(unknown))}")
    asked = asked or known

    def progress(done: int) -> None:
        if sys.stderr.isatty() or done % 50 == 0:
            print(f"{done} of {len(asked)} models, {time.monotonic() - start:.0f} s", file=sys.stderr)

    return list(walk(asked, zoo, jobs, progress))


def main() -> None:
    """Parse, walk, print and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--zoo", type=Path, default=ZOO, help=f"folder that holds tiny.py (default: {ZOO})")
    parser.add_argument("--jobs", type=count, default=1, help="processes at a time")
    parser.add_argument("--type", nargs="+", help="only these model types and variants")
    parser.add_argument("--read", type=Path, help="file that --json wrote, to take the figures from")
    parser.add_argument("--json", type=Path, help="file for everything that was measured")
    parser.add_argument("--write", action="store_true", help="write README.md and docs/coverage.md")
    parser.add_argument("--check", action="store_true", help="exit with 1 where a bar is not met")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.zoo)
        return
    if options.read:
        data = json.loads(options.read.read_text(encoding="utf-8"))
    elif options.zoo == ZOO and not ZOO.is_dir() and not options.check and not options.write:
        print(f"not measured: the zoo of tiny models is not at {ZOO}; name it with --zoo")
        return
    else:
        try:
            data = {"versions": versions(), "records": measure(options.zoo, options.type, options.jobs)}
        except (FileNotFoundError, ValueError) as error:
            parser.error(str(error))
    records, installed = data["records"], data["versions"]
    figures = summarise(records, liger=installed["liger-kernel"] is not None)
    print("\n".join(screen(figures)))
    if options.json:
        options.json.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    if options.write:
        put_between_markers(ROOT / "README.md", summary(figures, installed))
        (ROOT / "docs").mkdir(exist_ok=True)
        (ROOT / "docs" / "coverage.md").write_text(page(figures, records, installed), encoding="utf-8")
    if options.check and not all(met for _, met, _ in bars(figures)):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
