"""What was measured, where, and whether the bar is met: a table, JSON, a plot."""

from __future__ import annotations

import importlib.metadata
import math
import os
import platform
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from bench_check import WRONG

FORWARD_BAR, BACKWARD_BAR = 0.92, 0.85
LARGE = 4096
DECODE_ROWS = 64
PACKAGES = ("torch", "triton", "transformers", "liger-kernel", "quack-kernels", "kernels", "numpy")


@dataclass
class Peer:
    """One contender beside ours: its time and whether it is right, or why there is none."""

    us: float | None = None
    ratio: float | None = None
    verdict: str | None = None
    reason: str | None = None


@dataclass
class Result:
    """One case: microseconds a call, and ours beside the device's own copy and the peers.

    Attributes:
        operation: name of the operation.
        direction: ``"forward"`` or ``"backward"``.
        dtype: of the inputs.
        rows: number of rows.
        width: length of a row.
        least_bytes: bytes that have to be moved.
        ours_us: time of ours.
        gigabytes_per_second: least bytes by that time.
        copy_us: time of a copy that moves as many bytes.
        share_of_copy: the copy's time by ours.
        verdict: whether ours agrees with the oracle.
        peers: by name; the ratio is the peer's time by ours, above 1 where ours is faster.
    """

    operation: str
    direction: str
    dtype: str
    rows: int
    width: int
    least_bytes: int
    ours_us: float
    gigabytes_per_second: float
    copy_us: float
    share_of_copy: float
    verdict: str
    peers: dict[str, Peer] = field(default_factory=dict)

    @property
    def best_peer(self) -> float:
        """Return the smallest ratio of a peer that is not wrong; infinity without one."""
        ratios = [p.ratio for p in self.peers.values() if p.ratio is not None and p.verdict != WRONG]
        return min(ratios, default=math.inf)


def machine(device: torch.device) -> dict[str, Any]:
    """Name the hardware, the driver and the versions."""
    found: dict[str, Any] = {"system": platform.platform(), "python": platform.python_version()}
    found["cpu"], found["cores"], found["threads"] = _cpu_name(), os.cpu_count(), torch.get_num_threads()
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "gpu": properties.name,
            "gpu_memory_bytes": properties.total_memory,
            "multiprocessors": properties.multi_processor_count,
            "capability": f"{properties.major}.{properties.minor}",
            "driver": _driver(),
            "runtime": torch.version.cuda or torch.version.hip,
        }
    else:
        found["load"] = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def bars(results: list[Result], device: torch.device) -> list[tuple[str, str]]:
    """Say of each bar what it demands, and whether it is met."""
    large = [r for r in results if r.rows >= LARGE and r.width >= LARGE]
    demands: list[tuple[str, list[tuple[float, Result]], float]] = [
        (
            f"forward at {FORWARD_BAR} of the copy's bandwidth from {LARGE} x {LARGE} up",
            [(r.share_of_copy, r) for r in large if r.direction == "forward"],
            FORWARD_BAR,
        ),
        (
            f"backward at {BACKWARD_BAR} of it",
            [(r.share_of_copy, r) for r in large if r.direction == "backward"],
            BACKWARD_BAR,
        ),
        (
            f"up to {DECODE_ROWS} rows no slower than the best peer",
            [(r.best_peer, r) for r in results if r.rows <= DECODE_ROWS and r.best_peer < math.inf],
            1.0,
        ),
        (
            "ahead of every peer at every shape",
            [(r.best_peer, r) for r in results if r.best_peer < math.inf],
            1.0,
        ),
    ]
    said = []
    for demand, figures, least in demands:
        if device.type != "cuda":
            verdict = "not judged: the bar is for a GPU"
        elif not figures:
            verdict = "not measured"
        else:
            failed = [entry for entry in figures if entry[0] < least]
            worst, at = min(figures, key=lambda entry: entry[0])
            verdict = f"{'NOT met' if failed else 'met'} in {len(figures) - len(failed)} of {len(figures)}"
            verdict += f"; least {worst:.3f} ({at.operation} {at.direction} {at.dtype} {at.rows}x{at.width})"
        said.append((demand, verdict))
    return said


def table(results: list[Result]) -> list[str]:
    """Return the lines of the table."""
    names = list(dict.fromkeys(name for r in results for name in r.peers))
    head = f"{'operation':21}{'':9}{'dtype':9}{'rows':>8}{'width':>7}{'us':>10}{'GB/s':>8}{'of copy':>8}"
    lines = [head + "".join(f"{name:>13}" for name in names)]
    for r in results:
        line = f"{r.operation:21}{r.direction:9}{r.dtype:9}{r.rows:8}{r.width:7}{r.ours_us:10.1f}"
        line += f"{r.gigabytes_per_second:8.1f}{r.share_of_copy:8.3f}"
        for name in names:
            peer = r.peers.get(name, Peer())
            mark = {"other rounding": "~", WRONG: "!"}.get(peer.verdict or "", "")
            line += f"{'-' if peer.ratio is None else f'{peer.ratio:.2f}x{mark}':>13}"
        lines.append(line + ("" if r.verdict == "right" else f"  ours: {r.verdict}"))
    lines.append(
        "x: the peer's time by ours; ~ rounds elsewhere than the original, ! gives wrong results, - none there"
    )
    return lines


def plot(results: list[Result], where: str, path: Path) -> str | None:
    """Write heat maps of the share of the copy's bandwidth and of the lead over the best peer.

    Returns:
        Why there is no plot, or None.
    """
    try:
        import matplotlib
    except ImportError:
        return "no plot: matplotlib is not installed (pip install matplotlib)"
    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = list(dict.fromkeys((r.direction, r.dtype) for r in results))
    figure, axes = pyplot.subplots(len(panels), 2, figsize=(15, 1 + 4 * len(panels)), squeeze=False)
    for line, panel in enumerate(panels):
        shown = [r for r in results if (r.direction, r.dtype) == panel]
        operations = list(dict.fromkeys(r.operation for r in shown))
        shapes = list(dict.fromkeys((r.rows, r.width) for r in shown))
        for column, title in enumerate(("share of the copy's bandwidth", "best peer's time by ours")):
            axis = axes[line][column]
            values = [[math.nan] * len(shapes) for _ in operations]
            for r in shown:
                value = r.best_peer if column else r.share_of_copy
                values[operations.index(r.operation)][shapes.index((r.rows, r.width))] = value
            axis.imshow(values, aspect="auto", cmap="RdYlGn", vmin=0.5 if column else 0, vmax=2 if column else 1)
            for y, row in enumerate(values):
                for x, value in enumerate(row):
                    if math.isfinite(value):
                        axis.text(x, y, f"{value:.2f}", ha="center", va="center", fontsize=8)
            axis.set_xticks(range(len(shapes)), [f"{rows}x{width}" for rows, width in shapes], rotation=30, fontsize=8)
            axis.set_yticks(range(len(operations)), operations, fontsize=8)
            axis.set_title(f"{' '.join(panel)}: {title}", fontsize=9)
    figure.suptitle(where)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return None


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _driver() -> str | None:
    """Return the version of NVIDIA's driver, where its tool says."""
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.splitlines()[0].strip() if done.stdout.strip() else None
