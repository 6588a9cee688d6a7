"""The map of a checkpoint against what transformers loads, over the zoo of tiny models."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from stored_oracle import mapped, scrambled, wrong
from tiny_checkpoints import saved

pytestmark = pytest.mark.zoo

LIB = Path(__file__).resolve().parents[2] / "benchmarks" / "lib"
ZOO = Path(__file__).resolve().parents[3] / "shared" / "zoo"
NAMED = """
    mixtral qwen3_moe deepseek_v3 gpt_oss llama4_text phimoe jamba qwen2_vl gemma3n_text bert gpt2 t5 minimax
    nemotron_h olmoe ernie4_5_moe qwen2_5_vl gemma4_text zamba2 longcat_flash phi3 gpt_neox bloom whisper
""".split()  # noqa: SIM905
QUICK = 12
SHARE = 5

# transformers writes over some of their values after it has loaded them: a padding token's row, a router's bias.
OVERWRITTEN = {"chinese_clip", "chinese_clip_text_model", "zaya"}
# Not rearrangements of whole axes.
OPAQUE = ("its conversion spreads an axis over several others",)


@pytest.fixture(scope="module")
def tiny() -> Iterator[Any]:
    sys.path.insert(0, str(LIB))
    try:
        import coverage_zoo

        yield coverage_zoo.load_zoo(ZOO)
    finally:
        sys.path.remove(str(LIB))
        sys.modules.pop("coverage_zoo", None)


def check(tiny: Any, model_type: str, folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            model = tiny.tiny_model(model_type)
        except Exception as error:
            pytest.skip(f"{model_type} is not built by this transformers: {str(error)[:80]}")
        saved(scrambled(model), folder)
        stored = mapped(folder)
        try:
            loaded, found = type(model).from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
        except Exception as error:  # an unfinished constructor, a file beside the weights that is not saved
            pytest.skip(f"transformers does not load what it saved of {model_type}: {str(error)[:80]}")
    assert set(stored.opaque.values()) <= set(OPAQUE)
    assert set(stored.by_parameter) | set(stored.opaque) | set(stored.missing) == set(loaded.state_dict())
    # What transformers computes instead of loading it, such as sine tables, it does not report.
    computed = set(stored.missing) - set(found["missing_keys"])
    assert all("embed_positions" in name for name in computed)
    assert set(found["missing_keys"]) <= set(stored.missing)
    # One class does not load all that it saves.
    assert bool(stored.unread) == bool(found["unexpected_keys"])
    if model_type not in OVERWRITTEN:
        assert wrong(stored, folder, loaded) == []


@pytest.mark.core
@pytest.mark.parametrize(
    "model_type", [pytest.param(name, marks=[pytest.mark.slow] if at >= QUICK else []) for at, name in enumerate(NAMED)]
)
def test_named_types_are_mapped_as_they_are_loaded(tiny: Any, model_type: str, tmp_path: Path) -> None:
    check(tiny, model_type, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(SHARE))
def test_a_share_of_all_types_is_mapped_as_it_is_loaded(tiny: Any, part: int, tmp_path: Path) -> None:
    """Every fifth of the types of the zoo, from another start in each of the parts."""
    skipped = {}
    types = sorted(tiny.CONFIG_MAPPING)[part::SHARE]
    for number, model_type in enumerate(types):
        try:
            check(tiny, model_type, tmp_path / str(number))
        except pytest.skip.Exception as reason:
            skipped[model_type] = str(reason)
    assert len(skipped) < len(types) / 5, skipped
