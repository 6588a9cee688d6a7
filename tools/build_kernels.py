"""Lay out the kernels as the Hugging Face ``kernels`` loader expects them, with nothing to compile and no network.

For each backend of ``kernels/build.toml`` it writes ``build/torch-<backend>/``: the package's files, ``metadata.json``,
and ``_ops.py`` with a namespace of its own for torch's operations, so that several builds and the installed package
can be loaded in one process.

    python tools/build_kernels.py [--output FOLDER]
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PROJECT = Path(__file__).resolve().parent.parent / "kernels"

OPS = '''"""The namespace of this build's operations."""

import torch

ops = torch.ops.{namespace}


def add_op_namespace_prefix(op_name: str) -> str:
    """Return the full name of an operation."""
    return f"{namespace}::{{op_name}}"
'''


def build(output: Path) -> list[Path]:
    """Lay out every variant.

    Args:
        output: folder that ``build`` is put in; variants that it holds already are replaced.

    Returns:
        The folders of the variants.

    Raises:
        ValueError: ``build.toml`` asks for what this tool does not do.
    """
    general = _read_general()
    package = PROJECT / "torch-ext" / general["name"].replace("-", "_")
    files = {
        path.relative_to(package).as_posix(): path.read_bytes()
        for path in sorted(package.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }
    variants = []
    (output / "build").mkdir(parents=True, exist_ok=True)
    for backend in general["backends"]:
        variant = output / "build" / f"torch-{backend}"
        with tempfile.TemporaryDirectory(dir=output / "build") as folder:
            _write(Path(folder), files, general, backend)
            shutil.rmtree(variant, ignore_errors=True)
            shutil.copytree(folder, variant)
        variants.append(variant)
    return variants


def _read_general() -> dict[str, Any]:
    settings = tomllib.loads((PROJECT / "build.toml").read_text(encoding="utf-8"))
    unknown = settings.keys() - {"general", "torch-noarch"}
    if unknown or "torch-noarch" not in settings:
        raise ValueError(
            f"expected build.toml to hold general and torch-noarch, got {', '.join(settings)}: "
            "kernels that need compiling need kernel-builder"
        )
    general: dict[str, Any] = settings["general"]
    return general


def _write(folder: Path, files: dict[str, bytes], general: dict[str, Any], backend: str) -> None:
    """Write one variant; the same sources give the same bytes."""
    contents = hashlib.sha256(b"".join(name.encode() + b"\0" + data for name, data in files.items())).hexdigest()[:12]
    namespace = f"_{general['name'].replace('-', '_')}_{backend}_{contents}"
    files = {**files, "_ops.py": OPS.format(namespace=namespace).encode()}
    metadata = {
        "id": namespace,
        "name": general["name"],
        "version": general["version"],
        "license": general["license"],
        "python-depends": [],
        "backend": {"type": backend},
        "digest": {
            "algorithm": "sha256",
            "files": {
                name: base64.b64encode(hashlib.sha256(data).digest()).decode() for name, data in sorted(files.items())
            },
        },
    }
    files["metadata.json"] = (json.dumps(metadata, indent=2) + "\n").encode()
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=PROJECT, help="default: kernels/")
    for variant in build(parser.parse_args().output):
        print(variant)


if __name__ == "__main__":
    main()
