"""What is shipped, and what importing it costs."""

from __future__ import annotations

import ast
import resource
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import normswap

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {"normswap": ROOT / "normswap", "normswap_kernels": ROOT / "kernels" / "torch-ext" / "normswap_kernels"}
HEAVY = ("torch", "transformers", "triton", "numpy", "safetensors", "huggingface_hub")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this tree, built from a copy so that the tree stays clean."""
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    for name in ("normswap", "kernels"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__", "build"))
    run("-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index", "-w", out, tree, cwd=tree)
    (built,) = out.iterdir()
    return built


def test_wheel_holds_exactly_the_two_packages(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    metadata = f"normswap-{normswap.__version__}.dist-info"
    assert {name.partition("/")[0] for name in names} == {*PACKAGES, metadata}
    assert f"{metadata}/licenses/LICENSE" in names
    shipped = {name for name in names if not name.startswith(metadata)}
    wanted = {
        f"{package}/{path.relative_to(folder).as_posix()}"
        for package, folder in PACKAGES.items()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert shipped == wanted


def test_wheel_works_where_the_tree_is_not(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    printed = run(
        "-c",
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import torch, normswap, normswap_kernels\n"
        "print(normswap.__file__); print(normswap_kernels.__file__)\n"
        "print(normswap.patch(torch.nn.Sequential(torch.nn.LayerNorm(8)))[0])",
        cwd=tmp_path,
    ).splitlines()
    assert Path(printed[0]).is_relative_to(tmp_path) and Path(printed[1]).is_relative_to(tmp_path)
    assert "normswap=" in printed[2]


def test_import_is_lean() -> None:
    assert loaded_by("import normswap") == []
    assert loaded_by("import normswap.errors") == []


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_command_line_answers_at_once(option: str) -> None:
    statement = f"from normswap.cli import main; main([{option!r}], standalone_mode=False)"
    assert loaded_by(statement) == []
    seconds = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        run("-c", statement)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(seconds) < 0.3


@pytest.mark.core
def test_public_names_exist() -> None:
    assert len(normswap.__all__) == len(set(normswap.__all__))
    for name in normswap.__all__:
        assert getattr(normswap, name) is not None


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'normswap' has no attribute 'patsh'"):
        _ = normswap.patsh


def test_type_checkers_see_the_lazy_names() -> None:
    tree = ast.parse((ROOT / "normswap" / "__init__.py").read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    seen = {alias.name for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert seen == set(normswap.__all__) - {"__version__"}


def loaded_by(statement: str) -> list[str]:
    """Return which of the heavy packages a fresh interpreter holds after a statement."""
    printed = run("-c", f"{statement}\nimport sys; print(*[name for name in {HEAVY!r} if name in sys.modules])")
    return printed.splitlines()[-1].split()


def run(*arguments: str | Path, cwd: Path = ROOT) -> str:
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
