"""What two models write greedily after the same prompts, one model in memory at a time."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from normswap.evidence import Generation
from normswap.generating import Continuation, continuations, judge_generation, next_logits, parted, prompts_of
from normswap.inputs import Inputs

__all__ = ["Writing"]


@dataclass
class Writing:
    """Gathers continuations, the original's first, and judges them.

    Attributes:
        inputs: whose beginnings are the prompts.
        tokens: how many are written after each; 0 for none.
        tokenizer: that tells their words; None for the ids alone.
        written: what each model wrote.
    """

    inputs: Inputs
    tokens: int = 0
    tokenizer: Any = None
    written: list[list[Continuation]] = field(default_factory=list)

    def write(self, model: nn.Module) -> None:
        """Let a model write, if anything is to be written."""
        if self.tokens:
            self.written.append(continuations(model, prompts_of(self.inputs), self.tokens))

    def judge(
        self, dtype: torch.dtype, reference: Callable[[], AbstractContextManager[nn.Module]]
    ) -> tuple[Generation | None, list[str]]:
        """Hold what the two wrote against each other.

        Args:
            dtype: that they are served in.
            reference: loads the reference; it is asked for only where they part.

        Returns:
            The figures, None where nothing was written; and the failures in words.
        """
        if not self.tokens:
            return None, []
        prompts = prompts_of(self.inputs)
        with reference() if parted(*self.written) else nullcontext() as model:

            def logits(prompt: int, ids: list[int]) -> torch.Tensor:
                assert model is not None
                return next_logits(model, prompts.batches[prompt], ids)

            original, converted = self.written
            return judge_generation(original, converted, logits, dtype, self.tokenizer)
