"""Which gains can be folded, model type by model type, and is every fold right?

Every model that the zoo builds is planned, and all its folds are carried out at once by hand, in float64 where its
code runs in it: all floating-point outputs have to stay, and have to move when the gains are dropped instead. The
readers of refused norms are tried in the same way, to find refusals that are too careful.

    python benchmarks/folding.py [--zoo FOLDER] [--jobs N] [--type NAME ...] [--json FILE] [--check]

With --check the exit code is 1 where a fold is wrong or a plan fails.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Else this folder's kernels.py is taken for the package of that name.
sys.path.remove(str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "kernels" / "torch-ext"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent / "lib"))

from bench_arguments import count
from coverage_pool import walk
from coverage_zoo import load_zoo, names
from folding_sweep import serve

ZOO = Path(__file__).resolve().parent.parent.parent / "shared" / "zoo"


def table(found: Sequence[dict[str, Any]]) -> str:
    """Return one line for each type, what disagrees below it, and the refusals by reason."""
    lines = [f"{'type':32} {'norms':>5} {'folds':>5} {'error':>8} {'control':>8} {'dtype':8} {'s':>5}"]
    for one in sorted(found, key=lambda one: one["type"]):
        for kind in ("absent", "crash", "untried"):
            if kind in one:
                lines.append(f"{one['type']:32} {kind}: {one[kind]}")
        if "error" in one:
            control = "" if one["control"] is None else f"{one['control']:.2g}"
            lines.append(
                f"{one['type']:32} {one['norms']:5} {one['folds']:5} {one['error']:8.1e} {control:>8} "
                f"{one['dtype']:8} {one['seconds']:5.1f}"
            )
            lines += [f"    WRONG {name}: {error:.2g}" for name, error in one["wrong"].items()]
            lines += [f"    dropped unseen: {pattern}" for pattern in one["unseen"]]
            lines += [f"    too careful: {pattern}: {reason}" for pattern, reason in one["careful"].items()]
    return "\n".join([*lines, "", *reasons(found)])


def reasons(found: Sequence[dict[str, Any]]) -> list[str]:
    """Count refused patterns by the first words of their reasons."""
    counted = Counter(reason.split(",")[0].split(" in ")[0] for one in found for _, reason in one.get("refused", ()))
    return [f"{number:6} {reason}" for reason, number in counted.most_common()]


def main() -> None:
    """Parse, walk, print and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--zoo", type=Path, default=ZOO, help=f"folder that holds tiny.py (default: {ZOO})")
    parser.add_argument("--jobs", type=count, default=1, help="processes at a time")
    parser.add_argument("--type", nargs="+", help="only these model types and variants")
    parser.add_argument("--json", type=Path, help="file for everything that was measured")
    parser.add_argument("--check", action="store_true", help="exit with 1 where a fold is wrong or a plan fails")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.zoo)
        return
    try:
        known = names(load_zoo(options.zoo))
    except FileNotFoundError as error:
        parser.error(str(error))
    if unknown := set(options.type or ()) - set(known):
        parser.error(f"expected model types of this transformers, got {', '.join(sorted(unknown))}")
    asked, start = options.type or known, time.monotonic()

    def progress(done: int) -> None:
        if sys.stderr.isatty() or done % 50 == 0:
            print(f"{done} of {len(asked)} models, {time.monotonic() - start:.0f} s", file=sys.stderr)

    found = list(walk(asked, options.zoo, options.jobs, progress, script=Path(__file__).resolve()))
    print(table(found))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    if options.check and any("crash" in one or one.get("wrong") for one in found):
        sys.exit(1)


if __name__ == "__main__":
    main()
