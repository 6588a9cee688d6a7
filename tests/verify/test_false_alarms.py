"""Two hundred right conversions of tiny models: none may be called wrong; a doubt goes where its advice is taken."""

from __future__ import annotations

from pathlib import Path

import another_order
import pytest
import right_conversions as right
import torch
from right_conversions import Conversion
from tiny_families import FAMILIES

import normswap
from normswap import execution

pytestmark = pytest.mark.slow

HALF, FULL = torch.bfloat16, torch.float32
MORE_TOKENS = 16384
# Kind, seed, dtype that is stored: 20 of each family.
KINDS: list[tuple[Conversion, int, torch.dtype]] = [
    *((right.swapped, seed, dtype) for seed in (1, 2, 3) for dtype in (HALF, FULL)),
    *((right.folded, seed, dtype) for seed in (1, 2) for dtype in (HALF, FULL)),
    *((right.folded_unrecorded, seed, dtype) for seed in (3, 4) for dtype in (HALF, FULL)),
    *((right.resharded, seed, dtype) for seed in (1,) for dtype in (HALF, FULL)),
    *((right.to_bfloat16, seed, FULL) for seed in (1, 2)),
    *((right.to_float16, seed, FULL) for seed in (1, 2)),
]


@pytest.fixture(autouse=True)
def summed_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it a swap on the CPU is the original to the last bit, and nothing could alarm."""
    monkeypatch.setitem(execution._OPERATIONS, "rms", another_order.rms_norm)
    monkeypatch.setitem(execution._OPERATIONS, "layer", another_order.layer_norm)


@pytest.mark.parametrize("family", FAMILIES)
def test_twenty_right_conversions_of_a_family_pass(family: str, tmp_path: Path) -> None:
    """10 families x 20 = 200."""
    alarms = {}
    for number, (conversion, seed, dtype) in enumerate(KINDS):
        source = FAMILIES[family].save(tmp_path / f"source{number}", dtype, seed)
        target = conversion(family, source, tmp_path / f"target{number}")
        report = normswap.verify(target, against=source)
        if report.verdict == "inconclusive" and all("give more tokens" in doubt for doubt in report.doubts):
            # A token that a rounding sends to another expert outweighs all others of so few.
            report = normswap.verify(target, against=source, tokens=MORE_TOKENS)
        if not report.passed or report.departs is not None:
            alarms[conversion.__name__, seed, dtype] = (report.failures, report.doubts, report.departs)
    assert len(KINDS) == 20
    assert alarms == {}
