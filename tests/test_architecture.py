"""Who may import whom, and what no file may hold. Reads the sources; imports nothing."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TOOL = ROOT / "normswap"
KERNELS = ROOT / "kernels" / "torch-ext" / "normswap_kernels"
FOLDERS = ("normswap", "kernels", "tests", "examples", "tools", "benchmarks", ".ci")
GENERATED = {"__pycache__", "build"}
WRITTEN = {"", ".md", ".py", ".sh", ".toml", ".txt", ".yaml"}

TOP = {"cli", "api"}
MIDDLE = {"plan", "folding", "recentering", "parity", "checkpoint"}
ABOVE_FOUNDATION = TOP | MIDDLE | {"modules", "patching", "measuring", "loading", "report"}
FOUNDATION = {"spec", "probe", "flow", "errors"}
ALLOWED_IN_KERNELS = {"torch", "triton", *sys.stdlib_module_names}
HOST = re.compile(r"://|\bwww\.|[a-z0-9-]\.(?:com|org|net|io|co|ai)\b(?![.(\w])", re.IGNORECASE)


def imports(file: Path) -> Iterator[str]:
    """Yield the absolute dotted name of each import that runs, deferred ones too; not those for type checkers only."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    skipped = {id(child) for node in ast.walk(tree) if is_type_checking(node) for child in ast.walk(node)}
    package = "normswap" if file.is_relative_to(TOOL) else "normswap_kernels"
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = f"{package}.{node.module or ''}".rstrip(".") if node.level else node.module or ""
            # `from package import module` names the module in the alias.
            yield from (f"{base}.{alias.name}" for alias in node.names)


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def modules_of(folder: Path) -> dict[str, Path]:
    return {file.stem: file for file in sorted(folder.glob("*.py"))}


def graph_of(folder: Path) -> dict[str, set[str]]:
    """Return which modules of its own package each module imports."""
    modules = modules_of(folder)
    return {
        name: {
            part
            for imported in imports(file)
            if imported.startswith(f"{folder.name}.") and (part := imported.split(".")[1]) in modules
        }
        for name, file in modules.items()
    }


def reach(graph: dict[str, set[str]], start: str) -> set[str]:
    found: set[str] = set()
    waiting = [start]
    while waiting:
        for name in graph[waiting.pop()] - found:
            found.add(name)
            waiting.append(name)
    return found


def is_kernel_file(file: Path) -> bool:
    """Whether it defines a kernel that is launched; files of shared jitted helpers are none."""
    return any(
        isinstance(node, ast.FunctionDef)
        and node.name.endswith("_kernel")
        and any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
    )


def sources() -> list[Path]:
    nested = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*"))
    files = (path for path in [*ROOT.iterdir(), *nested] if path.suffix in WRITTEN and path.is_file())
    return sorted(path for path in files if not GENERATED & set(path.relative_to(ROOT).parts))


def test_the_walk_sees_the_packages() -> None:
    assert {"api", "cli", "modules", "probe", "spec"} <= graph_of(TOOL).keys()
    assert {"spec", "probe"} <= graph_of(TOOL)["plan"]
    kernel_files = {name for name, file in modules_of(KERNELS).items() if is_kernel_file(file)}
    assert kernel_files >= {"norm_forward", "norm_backward_rows", "norm_backward_columns", "norm_quant"}


@pytest.mark.parametrize("folder", [TOOL, KERNELS], ids=lambda folder: folder.name)
def test_no_module_imports_itself_by_way_of_others(folder: Path) -> None:
    graph = graph_of(folder)
    assert [name for name in graph if name in reach(graph, name)] == []


def test_nothing_imports_the_command_line_and_only_it_imports_the_story() -> None:
    graph = graph_of(TOOL)
    assert [name for name, used in graph.items() if "cli" in used and name != "__main__"] == []
    assert [name for name, used in graph.items() if "api" in used] == ["cli"]


def test_the_middle_does_not_know_the_top() -> None:
    graph = graph_of(TOOL)
    for name in MIDDLE & graph.keys():
        assert not reach(graph, name) & (TOP | {"patching", "measuring", "report"}), name


def test_the_foundation_does_not_know_what_stands_on_it() -> None:
    graph = graph_of(TOOL)
    for name in FOUNDATION & graph.keys():
        assert not reach(graph, name) & ABOVE_FOUNDATION, name
    assert graph["errors"] == graph["spec"] == set()


def test_only_the_swap_imports_the_kernels() -> None:
    users = {name for name, file in modules_of(TOOL).items() for used in imports(file) if "normswap_kernels" in used}
    assert users == {"execution"}


def test_kernels_import_torch_triton_and_themselves() -> None:
    for file in KERNELS.glob("*.py"):
        foreign = {name.split(".")[0] for name in imports(file)} - ALLOWED_IN_KERNELS - {"normswap_kernels"}
        assert not foreign, file.name
        written = re.findall(r"^\s*(?:from|import) normswap_kernels", file.read_text(encoding="utf-8"), re.MULTILINE)
        assert not written, f"{file.name} imports its own package by name; the Hub loads it under another"


def test_no_implementation_knows_the_oracle() -> None:
    assert [name for name, used in graph_of(KERNELS).items() if "reference" in used] == []


def test_a_kernel_file_imports_neither_another_nor_the_oracle() -> None:
    kernel_files = {name for name, file in modules_of(KERNELS).items() if is_kernel_file(file)}
    graph = graph_of(KERNELS)
    for name in kernel_files:
        assert not reach(graph, name) & (kernel_files | {"reference"}), name


@pytest.mark.parametrize("folder", [TOOL, KERNELS], ids=lambda folder: folder.name)
def test_no_module_bears_the_name_of_a_public_function(folder: Path) -> None:
    tree = ast.parse((folder / "__init__.py").read_text(encoding="utf-8"))
    (public,) = [
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    functions = {name for name in public if name.islower() and not name.startswith("_")}
    # A module that is itself public bears its own name.
    relative = [node for node in tree.body if isinstance(node, ast.ImportFrom) and not node.module]
    exported = {alias.name for node in relative for alias in node.names}
    assert not (functions - exported) & modules_of(folder).keys()


def test_kernels_folder_is_no_package() -> None:
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_no_file_names_a_network_host() -> None:
    # The text of the licence is not ours to change.
    named = [
        f"{file.relative_to(ROOT)}:{number}: {line.strip()}"
        for file in sources()
        if file.name != "LICENSE" and file != Path(__file__)
        for number, line in enumerate(file.read_text(encoding="utf-8", errors="replace").splitlines(), 1)
        if HOST.search(line)
    ]
    assert named == []


def test_no_file_is_long() -> None:
    lengths = {file: len(file.read_text(encoding="utf-8").splitlines()) for file in sources() if file.suffix == ".py"}
    assert {file.name: length for file, length in lengths.items() if length > 400} == {}


def test_no_two_files_of_the_tests_share_a_name() -> None:
    """Their folders are no packages: of two modules of one name the first that is imported would be both."""
    names = [path.name for path in (ROOT / "tests").rglob("*.py") if path.name != "conftest.py"]
    assert sorted(name for name in names if names.count(name) > 1) == []
