"""Write the table of kernels/README.md from what was run just now: which operation is proved, where, by how many cases.

    python tools/kernel_table.py [--check]

It runs the tests of the kernels in the interpreter and of the CPU implementation, and compiles every kernel ahead of
time for every target: some ten minutes. A cell counts the cases that held, or says how many did not. With --check it
writes nothing and exits with 1 where the README says something else.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "kernels" / "README.md"
BEGIN, END = "<!-- table: python tools/kernel_table.py -->", "<!-- end of table -->"

# Of a test file: the column, and the function whose cases count.
TESTS = {
    ("test_interpreter", "test_kernel_agrees_with_the_oracle"): "interpreter",
    ("test_interpreter", "test_quantizing_is_the_norm_and_then_the_oracles_quantization"): "interpreter",
    ("test_interpreter_backward", "test_gradients_agree_with_the_oracles"): "interpreter backward",
    ("test_cpu", "test_agrees_with_the_oracle"): "cpu",
    ("test_cpu", "test_quantizes_as_the_oracle_does"): "cpu",
    ("test_cpu_backward", "test_gradients_are_within_the_budget"): "cpu backward",
}

# An operation and whether the id of a case is one of it.
Matches = Callable[[set[str]], bool]
OPERATIONS: dict[str, Matches] = {
    "rms_norm": lambda parts: "rms" in parts and not parts & {"residual", "gate"},
    "layer_norm": lambda parts: "layer" in parts and not parts & {"residual", "gate"},
    "add_rms_norm": lambda parts: {"rms", "residual"} <= parts,
    "add_layer_norm": lambda parts: {"layer", "residual"} <= parts,
    "gated_rms_norm before": lambda parts: "before" in parts,
    "gated_rms_norm after": lambda parts: "after" in parts,
    "rms_norm grouped": lambda parts: "groups" in parts,
    "rms_norm per head": lambda parts: "heads" in parts,
    "rms_norm partial": lambda parts: "partial" in parts,
    "rms_norm scale": lambda parts: "scale" in parts,
    "l2_norm": lambda parts: {"sum", "clamp"} <= parts,
    "rms_norm_quant int8": lambda parts: "int8" in parts,
    "rms_norm_quant fp8": lambda parts: "float8_e4m3fn" in parts,
}


def parts_of(case: str) -> set[str]:
    """Split the id of a case into what it says; a residual and a gate under those names, whatever their kind."""
    parts = set(re.split(r"[-.]", case))
    if "add" in parts:
        parts.add("residual")
    if parts & {"before", "after"}:
        parts.add("gate")
    return parts


class Tally:
    """How many cases of an operation held in a column, and how many did not."""

    def __init__(self) -> None:
        self.held: dict[tuple[str, str], int] = {}
        self.failed: dict[tuple[str, str], int] = {}

    def add(self, operation: str, column: str, held: bool) -> None:
        counts = self.held if held else self.failed
        counts[operation, column] = counts.get((operation, column), 0) + 1

    def show(self, operation: str, column: str) -> str:
        held, failed = (counts.get((operation, column), 0) for counts in (self.held, self.failed))
        if not held and not failed:
            return "-"
        return f"{failed} of {held + failed} fail" if failed else str(held)


def add_tests(tally: Tally, outcomes: Iterable[tuple[str, str, str, bool]]) -> None:
    """Count outcomes of tests: file, function, id of the case, and whether it held."""
    for file, function, case, held in outcomes:
        column = TESTS.get((file, function))
        if column is None:
            continue
        parts = parts_of(case)
        quantized = "quant" in function
        for operation, matches in OPERATIONS.items():
            if operation.startswith("rms_norm_quant") == quantized and matches(parts):
                tally.add(operation, column, held)


def add_compiled(tally: Tally, results: Iterable[dict[str, object]]) -> None:
    """Count what was compiled: it held where no bound is broken."""
    for result in results:
        name = str(result["operation"])
        operation = name.removesuffix(" backward").removesuffix(" saving")
        column = "compiled backward" if name.endswith("backward") else "compiled"
        tally.add(operation, column, not result["broken"])


def render(tally: Tally) -> str:
    """Write the table as markdown."""
    lines = [
        "| operation | forward | backward | in the interpreter | compiled ahead of time | on the CPU |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for operation in OPERATIONS:
        cells = [
            " + ".join(shown for end in ("", " backward") if (shown := tally.show(operation, column + end)) != "-")
            or "-"
            for column in ("interpreter", "compiled", "cpu")
        ]
        has = ["yes" if tally.show(operation, f"compiled{end}") != "-" else "-" for end in ("", " backward")]
        lines.append(f"| {' | '.join((f'`{operation}`', *has, *cells))} |")
    return "\n".join(lines)


def run_tests() -> list[tuple[str, str, str, bool]]:
    """Run the tests that count; returns their outcomes."""
    files = sorted({f"tests/kernels/{file}.py" for file, _ in TESTS})
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-m",
            "not slow",
            "-p",
            "no:cacheprovider",
            f"--junitxml={report}",
            *files,
        ]
        subprocess.run(command, cwd=ROOT, check=False)
        found = []
        for case in ElementTree.parse(report).iter("testcase"):
            function, _, identity = str(case.get("name")).partition("[")
            file = str(case.get("classname")).rpartition(".")[2]
            if case.find("skipped") is None:
                found.append(
                    (
                        file,
                        function,
                        identity.rstrip("]"),
                        all(case.find(mark) is None for mark in ("failure", "error")),
                    )
                )
    return found


def compile_all() -> list[dict[str, object]]:
    """Compile every kernel for every target; returns the figures."""
    done = subprocess.run(
        [sys.executable, "-m", "normswap_kernels.aot", "--json", "-"], cwd=ROOT, check=False, stdout=subprocess.PIPE
    )
    found: list[dict[str, object]] = json.loads(done.stdout)
    return found


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    tally = Tally()
    add_tests(tally, run_tests())
    add_compiled(tally, compile_all())
    table = render(tally)
    print(table)
    text = README.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    written = f"{before}{BEGIN}\n{table}\n{END}{after}"
    if options.check:
        return int(written != text)
    README.write_text(written, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
