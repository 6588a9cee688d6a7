"""What all tests share: one device, skips in one place, poisoned memory, the trained checkpoints."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# Before anything imports huggingface_hub, which reads it once: no test reaches for the Hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch

# torch lists its factory functions once, when a device context is first entered: before they are poisoned below.
with torch.device("meta"):
    torch.empty(0)

# Tiny tensors gain nothing from a second thread, and on a busy machine threads that wait for each other cost most.
torch.set_num_threads(1)

ROOT = Path(__file__).resolve().parent.parent
SHARED = ROOT.parent / "shared"
LONGEST = (
    "test_coverage.py",
    "test_interpreter_backward.py",
    "test_trained_faults.py",
    "test_false_alarms.py",
    "test_trained_folds.py",
    "test_interpreter.py",
    "test_stored_zoo.py",
    "test_examples.py",
    "test_convert_benchmark.py",
)
"""Files that take minutes. They come first, lest one process work on the last of them while the other has none."""
UNAVAILABLE = 3
"""Exit code of ``tools/checkpoints.py`` where pip cannot get a package."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest files first, and turn markers into skips, so that no test has to ask what there is."""
    items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))
    skips = []
    if not torch.cuda.is_available():
        skips.append(("gpu", pytest.mark.skip(reason="needs a GPU, and torch finds none")))
    if not (SHARED / "zoo").is_dir():
        skips.append(("zoo", pytest.mark.skip(reason=f"needs the configs of {SHARED / 'zoo'}, which is absent")))
    for item in items:
        for marker, skip in skips:
            if marker in item.keywords:
                item.add_marker(skip)


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The GPU if there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def all_cores() -> Iterator[None]:
    """As many threads as there are cores, for a test that runs a model of some size."""
    before = torch.get_num_threads()
    torch.set_num_threads(os.cpu_count() or 1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Every test starts from the same random state, whatever ran before it."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="module")
def no_other_checkpoints_code() -> None:
    """Code that checkpoints bring along is imported as one package from one cache, once; each file has its own."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformers_modules"]:
        del sys.modules[name]


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uninitialised memory that the package asks for is full of NaN, so that an unwritten lane cannot pass."""
    for owner, name in (
        (torch, "empty"),
        (torch, "empty_like"),
        (torch, "empty_strided"),
        (torch.Tensor, "new_empty"),
        (torch.Tensor, "new_empty_strided"),
    ):
        monkeypatch.setattr(owner, name, _poisoning(getattr(owner, name)))


def _poisoning(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def poisoning(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = allocate(*args, **kwargs)
        # The compiler cannot trace a look at the caller's frame.
        if torch.compiler.is_compiling():
            return tensor
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if caller.partition(".")[0] in ("normswap", "normswap_kernels") and tensor.is_floating_point():
            tensor.detach().fill_(float("nan"))
        return tensor

    return poisoning


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder beside the clone with the configs and checkpoints that are no part of it."""
    if not SHARED.is_dir():
        pytest.skip(f"needs {SHARED}, which is absent")
    return SHARED


@pytest.fixture(scope="session")
def zoo() -> Path:
    """Configs of many model types; tests that use it are marked ``zoo``."""
    return SHARED / "zoo"


@pytest.fixture(scope="session")
def stories260k() -> Path:
    """A trained Llama of 260 thousand parameters, float32."""
    folder = SHARED / "checkpoints" / "stories260k"
    if not folder.is_dir():
        pytest.skip(f"needs {folder}, which is absent")
    return folder


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct: Llama, 61 RMSNorms, bf16."""
    return _fetched("smollm2")


@pytest.fixture(scope="session")
def minilm() -> Path:
    """all-MiniLM-L6-v2: BERT, 13 LayerNorms, float32."""
    return _fetched("minilm")


@pytest.fixture(scope="session")
def rxnmapper() -> Path:
    """rxnmapper: ALBERT, one layer shared twelve times, 4 LayerNorms, float32, a pickled checkpoint."""
    return _fetched("rxnmapper")


def _fetched(name: str) -> Path:
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "checkpoints.py", name], capture_output=True, text=True, cwd=ROOT
    )
    if done.returncode == UNAVAILABLE:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip())
