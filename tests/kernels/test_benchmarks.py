"""The benchmarks measure, check what they measure, and say where they did not."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

FOLDER = Path(__file__).resolve().parent.parent.parent / "benchmarks"


def run(script: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, FOLDER / script, *arguments], capture_output=True, text=True, check=False)


@pytest.fixture
def lib(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ModuleType]]:
    """The modules that ``kernels.py`` is made of."""
    monkeypatch.syspath_prepend(FOLDER / "lib")
    names = ("bench_cases", "bench_check", "bench_peers", "bench_report", "bench_timing")
    yield {name: __import__(name) for name in names}
    for name in names:
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any], Path]:
    """One small run over every operation: what it printed, its JSON, and where its plot is."""
    folder = tmp_path_factory.mktemp("figures")
    arguments = ["--device", "cpu", "--shape", "16x1024", "--dtype", "bfloat16", "--samples", "3"]
    arguments += ["--peer", "transformers", "formula", "functional", "quack"]
    done = run("kernels.py", *arguments, "--json", folder / "figures.json", "--plot", folder / "figures.png")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, json.loads((folder / "figures.json").read_text()), folder / "figures.png"


def test_every_operation_is_measured_and_right(figures: Any, lib: dict[str, ModuleType]) -> None:
    _, data, _ = figures
    wanted = {(op.name, direction) for op in lib["bench_cases"].OPERATIONS for direction in op.directions}
    assert {(r["operation"], r["direction"]) for r in data["results"]} == wanted and data["not_measured"] == {}
    for r in data["results"]:
        assert r["verdict"] in ("right", "other rounding"), r
        assert r["share_of_copy"] == pytest.approx(r["copy_us"] / r["ours_us"])
        assert r["gigabytes_per_second"] == pytest.approx(r["least_bytes"] / r["ours_us"] / 1e3)
        timed = {name: peer for name, peer in r["peers"].items() if peer["us"] is not None}
        assert timed, "a case without any peer"
        assert all(peer["ratio"] == pytest.approx(peer["us"] / r["ours_us"]) for peer in timed.values())
        assert all(peer["reason"] for name, peer in r["peers"].items() if name not in timed)
        assert all(peer["verdict"] != "wrong" for peer in timed.values()), r


def test_the_bar_is_printed_first_and_not_claimed_on_a_cpu(figures: Any) -> None:
    printed, data, _ = figures
    lines = printed.splitlines()
    assert lines[1].startswith("forward at 0.92 of the copy's bandwidth") and lines[2].startswith("backward at 0.85")
    assert len(data["bar"]) == 4 and all("not judged" in bar["verdict"] for bar in data["bar"])
    assert {"cpu", "torch", "triton", "transformers"} <= data["machine"].keys()


def test_a_plot_is_written_or_missed_in_one_line(figures: Any) -> None:
    printed, _, plot = figures
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        assert "no plot: matplotlib is not installed" in printed
    else:
        assert plot.read_bytes().startswith(b"\x89PNG")


def test_nothing_measured_is_nothing_written(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    done = run("kernels.py", "--device", "cpu", "--budget", "0", "--shape", "1x64", "--json", path)
    assert done.returncode == 2 and not path.exists()
    assert "nothing was measured, so nothing is written" in done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_an_error() -> None:
    done = run("kernels.py", "--device", "cuda")
    assert done.returncode == 2 and "torch sees no GPU here" in done.stderr


@pytest.mark.parametrize(
    ("command", "said"),
    (
        ("kernels.py --device cpu --shape 3by4", "argument --shape: expected ROWSxWIDTH such as 2048x4096, got '3by4'"),
        ("kernels.py --device cpu --shape 0x4", "argument --shape: expected ROWSxWIDTH such as 2048x4096, got '0x4'"),
        ("kernels.py --device cpu --samples 0", "argument --samples: expected a whole number of at least 1, got '0'"),
        ("cpu_load.py --operation nope", "argument --operation: invalid choice: 'nope' (choose from "),
        ("cpu_load.py --shape abc", "argument --shape: expected ROWSxWIDTH such as 2048x4096, got 'abc'"),
        ("cpu_load.py --rounds 0", "argument --rounds: expected a whole number of at least 1, got '0'"),
        ("launch.py --samples 0", "argument --samples: expected a whole number of at least 1, got '0'"),
        ("launch.py --samples few", "argument --samples: expected a whole number of at least 1, got 'few'"),
    ),
)
def test_a_bad_argument_is_said_to_be_one(command: str, said: str) -> None:
    done = run(*command.split())
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    # Some versions of Python quote each choice, others none.
    assert said.replace("'", "") in done.stderr.replace("'", "") and not done.stdout


def test_the_load_is_measured_for_the_shapes_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "load.json"
    arguments = ["--operation", "rms_norm", "--shape", "2x64", "1x32", "--rounds", "1", "--json", path]
    done = run("cpu_load.py", *arguments)
    assert done.returncode == 0, done.stderr
    results = json.loads(path.read_text())["results"]
    assert [(r["rows"], r["width"], r["loaded"]) for r in results] == 2 * [
        (rows, width, loaded) for rows, width in ((2, 64), (1, 32)) for loaded in (False, True)
    ]


def test_what_is_wrong_is_marked(lib: dict[str, ModuleType]) -> None:
    cases, oracle = lib["bench_cases"], lib["bench_check"].Oracle
    by_name = {op.name: op for op in cases.OPERATIONS}
    for name in ("rms_norm", "add_layer_norm", "gated grouped", "quant int8", "quant fp8"):
        case = cases.Case(by_name[name], "forward", torch.bfloat16, 8, 256)
        inputs, gradients = cases.draw(case, torch.device("cpu"))
        results = cases.ours(case)(inputs)
        results = results if isinstance(results, tuple) else (results,)
        judge = oracle(case, inputs, gradients).judge
        assert judge(results) == "right", name
        off = [results[0].float(), *results[1:]]
        off[0][3, 7] += 0.1 * off[0][3].abs().max()
        assert judge([off[0].to(results[0].dtype), *off[1:]]) == "wrong", name
        if len(results) == 2:
            assert judge([results[0], results[1] * 1.02]) == "wrong", name
    case = cases.Case(by_name["rms_norm"], "forward", torch.bfloat16, 8, 256)
    inputs, gradients = cases.draw(case, torch.device("cpu"))
    once = torch.nn.functional.rms_norm(inputs.x.float(), (256,), inputs.weight.float(), cases.EPS)
    assert oracle(case, inputs, gradients).judge([once.bfloat16()]) == "other rounding"
    assert oracle(case, inputs, gradients).judge([(once * 1.01).bfloat16()]) == "wrong"
    assert oracle(case, inputs, gradients).judge([torch.full_like(once, torch.nan)]) == "wrong"


def test_wrong_gradients_are_marked(lib: dict[str, ModuleType]) -> None:
    cases, oracle = lib["bench_cases"], lib["bench_check"].Oracle
    for op in cases.OPERATIONS:
        if "backward" not in op.directions:
            continue
        case = cases.Case(op, "backward", torch.float32, 70, 256)
        inputs, gradients = cases.draw(case, torch.device("cpu"))
        results = cases.ours(case)(inputs)
        wanted = inputs.differentiable()
        found = torch.autograd.grad(results, wanted, gradients)
        judge = oracle(case, inputs, gradients).judge
        assert judge(found) in ("right", "other rounding"), op.name
        for k in range(len(found)):
            assert judge([t * 1.01 if i == k else t for i, t in enumerate(found)]) == "wrong", (op.name, k)


def test_the_bar_fails_where_one_case_is_slow(lib: dict[str, ModuleType]) -> None:
    report = lib["bench_report"]

    def result(share: float, ratio: float, verdict: str = "right") -> Any:
        peers = {"peer": report.Peer(us=1.0, ratio=ratio, verdict=verdict)}
        where = "rms_norm", "forward", "bfloat16", 4096, 4096, 1
        return report.Result(*where, 1.0, 1.0, share, share, "right", peers)

    gpu = torch.device("cuda")
    assert "NOT met in 1 of 2; least 0.900" in report.bars([result(0.95, 2), result(0.9, 2)], gpu)[0][1]
    said = dict(report.bars([result(0.95, 2)], gpu))
    assert said["ahead of every peer at every shape"].startswith("met in 1 of 1")
    assert said["backward at 0.85 of it"] == "not measured"
    # Nobody is beaten by what is wrong.
    assert report.bars([result(0.95, 0.5, "wrong")], gpu)[3][1] == "not measured"


def test_launches_are_measured_without_a_gpu(tmp_path: Path) -> None:
    path = tmp_path / "launch.json"
    done = run("launch.py", "--samples", "5", "--json", path)
    assert done.returncode in (0, 1), done.stderr
    data = json.loads(path.read_text())
    assert {"rms_norm", "layer_norm", "rms_norm_quant to int8"} <= {r["operation"] for r in data["results"]}
    assert all(min(r["bare_us"], r["allocated_us"], r["ours_us"], r["ratio"]) > 0 for r in data["results"])


def test_planning_and_channels_are_measured(tmp_path: Path) -> None:
    planned, channels = tmp_path / "planned.json", tmp_path / "channels.json"
    done = run("planning.py", "--samples", "1", "--json", planned)
    assert done.returncode in (0, 1), done.stderr
    norms = {name: found["norms"] for name, found in json.loads(planned.read_text())["results"].items()}
    assert norms == {"Llama 70B": 161, "Qwen3-MoE 235B": 377}
    done = run("channels.py", "--samples", "1", "--json", channels)
    assert done.returncode == 0, done.stderr
    found = json.loads(channels.read_text())
    assert len(found) == 18 and sum(entry["own_code"] for entry in found) == 6
