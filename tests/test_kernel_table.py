"""The table of operations in kernels/README.md is what its script writes, and can say that something fails."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def table() -> ModuleType:
    spec = importlib.util.spec_from_file_location("kernel_table", ROOT / "tools" / "kernel_table.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_readme_counts_the_cases_that_there_are(table: ModuleType) -> None:
    pytest.importorskip("triton")
    aot = importlib.import_module("normswap_kernels.aot")
    files = sorted({f"tests/kernels/{file}.py" for file, _ in table.TESTS})
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *files]
    collected = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    found = re.findall(r"^tests/kernels/(\w+)\.py::(\w+)\[(.*)\]$", collected, re.MULTILINE)
    assert len(found) > 400
    tally = table.Tally()
    table.add_tests(tally, [(*names, True) for names in found])
    cases = [case.operation for case in aot.default_cases() for _ in aot.TARGETS]
    table.add_compiled(tally, [{"operation": name, "broken": []} for name in cases])
    text = table.README.read_text(encoding="utf-8")
    written = text.partition(table.BEGIN)[2].partition(table.END)[0].strip()
    assert written == table.render(tally), "run python tools/kernel_table.py"


def test_a_case_that_fails_is_shown(table: ModuleType) -> None:
    tally = table.Tally()
    case = "rms-7x64-plain-contiguous-bf16-w.bf16-b.none-round.none-mean.inside.1e-06"
    function = "test_kernel_agrees_with_the_oracle"
    outcomes = [("test_interpreter", function, case, True), ("test_interpreter", function, f"{case}-add.same", False)]
    table.add_tests(tally, outcomes)
    table.add_compiled(tally, [{"operation": "rms_norm backward", "broken": ["8 spilled"]}])
    rows = {line.split("`")[1]: line for line in table.render(tally).splitlines()[2:]}
    assert rows["rms_norm"] == "| `rms_norm` | - | yes | 1 | 1 of 1 fail | - |"
    assert rows["add_rms_norm"] == "| `add_rms_norm` | - | - | 1 of 1 fail | - | - |"
    assert rows["layer_norm"] == "| `layer_norm` | - | - | - | - | - |"
