"""Libraries that would disturb everything else if they lay among the installed packages, for the tests of them.

``make venv`` installs them into a folder of the environment that is on nobody's path: with torchao in sight
transformers prints warnings, and beside the torchvision that timm asks for it does not import at all if that was
built for another torch.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest
import transformers.modeling_utils  # noqa: F401  (decides what is installed before anything more comes into sight)

FOLDER = Path(sys.prefix) / "aside"
_TORCHVISION = ("", ".datasets", ".ops", ".ops.misc", ".transforms", ".transforms.functional", ".utils")
_DATASETS = ("", ".formatting", ".formatting.formatting")


def bring(*names: str) -> ModuleType:
    """Import modules from that folder, or from where they are installed; skip where they are absent.

    Args:
        names: qualified names of modules.

    Returns:
        The first of them.
    """
    try:
        with _in_sight():
            modules = [importlib.import_module(name) for name in names]
    except ModuleNotFoundError as error:
        pytest.skip(f"needs {error.name}, which is neither installed nor in {FOLDER}")
    return modules[0]


def bring_timm() -> ModuleType:
    """Import timm, beside the real torchvision where there is one that works, else beside a stand-in."""
    with _standing_in("torchvision", _TORCHVISION):
        return bring("timm", "timm.layers", "timm.models.convnext", "timm.models.swin_transformer")


def bring_llmcompressor() -> ModuleType:
    """Import llm-compressor, beside a stand-in for datasets where that is absent: recipes without data need none."""
    with _standing_in("datasets", _DATASETS):
        return bring("llmcompressor", "llmcompressor.modifiers.quantization")


@contextmanager
def _in_sight() -> Iterator[None]:
    sys.path.append(str(FOLDER))
    try:
        with warnings.catch_warnings():
            # What libraries say about each other and about the machine when they are imported.
            warnings.simplefilter("ignore")
            yield
    finally:
        sys.path.remove(str(FOLDER))


@contextmanager
def _standing_in(library: str, modules: tuple[str, ...]) -> Iterator[None]:
    """Let imports of a library succeed whose classes are named and not used."""
    try:
        importlib.import_module(library)
    # What a library of another build raises is a matter of the build.
    except Exception:
        for name in [name for name in sys.modules if name.partition(".")[0] == library]:
            del sys.modules[name]
        stand_ins = {f"{library}{name}": _StandIn(f"{library}{name}") for name in modules}
        sys.modules.update(stand_ins)
        for name, stand_in in stand_ins.items():
            parent, _, child = name.rpartition(".")
            if parent:
                setattr(stand_ins[parent], child, stand_in)
        try:
            yield
        finally:
            for name in stand_ins:
                sys.modules.pop(name, None)
    else:
        yield


class _Name(type):
    """A class whose every attribute is its own name, as an enumeration's members are."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"


class _StandIn(ModuleType):
    """A module that has a class under every name."""

    __path__: tuple[str, ...] = ()

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Name(name, (), {})
