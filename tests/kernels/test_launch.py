"""The way from an operation to the launch of its kernel, with a driver that does nothing in the place of a GPU's."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parent.parent.parent / "benchmarks"

# Calls on inputs for which Triton compiles anew, and on such for which it does not: how many went by its own way?
RECOMPILED = """
import json, sys
sys.path.insert(0, sys.argv[1])
import launch, torch
from triton.runtime.jit import JITFunction
from normswap_kernels import rms_norm

asked, before = [], JITFunction.run
JITFunction.run = lambda self, *a, **k: asked.append(1) or before(self, *a, **k)

def call(x, weight, **options):
    asked.clear()
    rms_norm(x, weight, eps=1e-6, backend="triton", **options)
    return len(asked)

with torch.no_grad(), launch.launching():
    x, weight = torch.randn(4, 64), torch.randn(64)
    shifted = torch.randn(4 * 64 + 1)[1:].view(4, 64)
    wide = torch.randn(4, 96)
    figures = {
        "first": call(x, weight),
        "again": call(x, weight),
        "other rows": call(torch.randn(9, 64), torch.randn(64)),
        "unaligned": call(shifted, weight),
        "unaligned again": call(shifted.clone().resize_(4 * 64 + 1)[1:].view(4, 64), weight),
        "dtype of the gain": call(x, weight.bfloat16()),
        "dtype of the input": call(x.half(), weight),
        "dtype of the result": call(x, weight, out_dtype=torch.bfloat16),
        "no gain": call(x, None),
        "strided": call(wide[:, :64], weight),
        "strided again": call(wide[:, 16:80], weight),
        "other strides": call(torch.randn(4, 80)[:, :64], weight),
        "option": call(x, weight, offset=1.0),
        "eps": call(x, weight),
    }
print(json.dumps(figures))
"""


def test_triton_is_asked_once_for_each_specialization() -> None:
    done = subprocess.run(
        [sys.executable, "-c", RECOMPILED, str(BENCHMARKS)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    known = {"again", "other rows", "unaligned again", "strided again", "eps"}
    assert json.loads(done.stdout) == {name: int(name not in known) for name in json.loads(done.stdout)}


# What the launcher gets when Triton has launched, and when the short way has.
RECEIVED = """
import json, sys
sys.path.insert(0, sys.argv[1])
import launch, torch
from normswap_kernels import add_layer_norm, gated_rms_norm, rms_norm, rms_norm_quant

received = []
launch.StubDriver.launcher_cls = lambda self, source, metadata: lambda *arguments: received.append(arguments)

def shown(value):
    if isinstance(value, torch.Tensor):
        return [str(value.dtype), list(value.shape), value.is_contiguous()]
    if isinstance(value, tuple):
        return [shown(each) for each in value]
    # Metadata and hooks are made anew for each launch.
    return repr(value) if isinstance(value, (bool, int, float, str, type(None))) else type(value).__name__

with torch.no_grad(), launch.launching():
    x, other, weight = torch.randn(4, 64), torch.randn(4, 64), torch.randn(64)
    calls = {
        "rms_norm": lambda: rms_norm(x, weight, eps=1e-6, backend="triton"),
        "strided": lambda: rms_norm(torch.randn(4, 96)[:, :64], None, eps=1e-6, groups=2, backend="triton"),
        "gated": lambda: gated_rms_norm(x, other, weight, eps=1e-6, backend="triton"),
        "add_layer_norm": lambda: add_layer_norm(x, other, weight, weight, eps=1e-5, backend="triton"),
        "quant": lambda: rms_norm_quant(x, weight, eps=1e-6, backend="triton"),
    }
    found = {}
    for name, call in calls.items():
        received.clear()
        call(), call(), call()
        found[name] = [shown(arguments) for arguments in received]
print(json.dumps(found))
"""


MOST_CALLS = 75
CALLED = """
import json, sys
sys.path.insert(0, sys.argv[1])
from launch import count_calls, launching, operations
import torch
with torch.no_grad(), launching() as device:
    print(json.dumps({name: count_calls(call) for name, call in operations(device).items()}))
"""


def test_the_short_way_gives_the_launcher_what_triton_gives_it() -> None:
    done = subprocess.run(
        [sys.executable, "-c", RECEIVED, str(BENCHMARKS)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    for name, (by_triton, *by_us) in json.loads(done.stdout).items():
        assert len(by_us) == 2 and len(by_triton) > 20, name
        assert all(arguments == by_triton for arguments in by_us), f"{name}: {by_us[0]} in place of {by_triton}"


def test_the_way_to_a_launch_is_short() -> None:
    """No clock is asserted (`benchmarks/launch.py` has it): calls are what takes long in Python."""
    done = subprocess.run([sys.executable, "-c", CALLED, str(BENCHMARKS)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    counted = json.loads(done.stdout)
    assert len(counted) >= 9 and all(calls > 20 for calls in counted.values())
    assert {name: calls for name, calls in counted.items() if calls > MOST_CALLS} == {}
