"""Greedy continuations of two models, and whether they part where the served arithmetic could not tell."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, GenerationMixin

from normswap.errors import ModelError, UsageError
from normswap.evidence import Divergence, Generation
from normswap.inputs import Inputs, run
from normswap.quiet import first_line, quiet
from normswap.running import device_of, dtype_of
from normswap.stats import ulp_size

__all__ = [
    "Continuation",
    "check_generates",
    "continuations",
    "judge_generation",
    "next_logits",
    "parted",
    "prompts_of",
]

# Likeliest entries of each step that are kept: enough to measure the rounding errors of logits by.
_KEPT = 64
# Of the difference of two logits, in standard deviations of its rounding error.
_DEVIATIONS = 3.0


@dataclass(frozen=True)
class Continuation:
    """What one model writes after one prompt.

    Attributes:
        ids: the new tokens.
        top_ids: (tokens, kept) int64, the likeliest entries at each step.
        top_logits: (tokens, kept) float32, their logits.
    """

    ids: list[int]
    top_ids: torch.Tensor
    top_logits: torch.Tensor


def prompts_of(inputs: Inputs, tokens: int = 24) -> Inputs:
    """Return what continuations begin with.

    Args:
        inputs: sequences that the model runs on.
        tokens: of a prompt that is text alone. With images or sounds, and in an encoder, all that there is is kept; a
            decoder begins with its first token.

    Returns:
        The beginnings of the sequences, in their order, without padding.
    """

    def cut(name: str, value: Any, decoder: bool) -> Any:
        if not torch.is_tensor(value) or value.dim() != 2:
            return value
        if decoder:
            return value[:, :1] if name.startswith("decoder_") else value
        return value[:, :tokens] if inputs.kind in ("text", "ids") else value

    batches = [
        {name: cut(name, value, "decoder_input_ids" in batch) for name, value in batch.items() if name != "use_cache"}
        for batch in inputs.batches
    ]
    return replace(inputs, batches=batches, length=min(tokens, inputs.length), padded=[])


def continuations(model: nn.Module, prompts: Inputs, tokens: int) -> list[Continuation]:
    """Let a model continue prompts, each time with the likeliest token.

    Nothing ends a continuation before its length, and no penalty, forced or suppressed token of the model's generation
    config has a part in it, so that two models are compared by their logits alone.

    Args:
        model: a transformers model that can generate.
        prompts: what `prompts_of` gave.
        tokens: how many new tokens.

    Returns:
        One continuation of that many tokens a prompt, in their order.

    Raises:
        UsageError: the model does not generate text.
        ModelError: it fails to.
    """
    check_generates(model)
    if not {"input_ids", "decoder_input_ids"} & prompts.batches[0].keys():
        raise ModelError(
            f"expected token ids for {type(model).__name__} to go on from, got {', '.join(prompts.batches[0])}"
        )
    found: list[Continuation] = []
    for group in prompts.groups():
        ids, top_ids, top_logits = _generate(model, group.batch, tokens)
        rows = range(len(group.members))
        found += [Continuation(ids[row].tolist(), top_ids[row], top_logits[row]) for row in rows]
    return found


def check_generates(model: nn.Module, tokens: int = 0) -> None:
    """Refuse a model that does not generate text, or not so much of it.

    Args:
        model: any.
        tokens: that it is to write after a prompt.

    Raises:
        UsageError: it does not, or has no positions for so many.
    """
    positions = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    if isinstance(positions, int) and tokens >= positions:
        raise UsageError(
            f"expected fewer than {positions} tokens to be generated, the positions of {type(model).__name__}, got "
            f"{tokens}"
        )
    able = getattr(model, "can_generate", None)
    if not callable(able) or not able() or not isinstance(model, GenerationMixin):
        raise UsageError(
            f"expected a model that generates text, got {type(model).__name__}, which does not; leave generation out"
        )


@torch.no_grad()
def next_logits(model: nn.Module, prompt: dict[str, Any], ids: Sequence[int]) -> torch.Tensor:
    """Return a model's logits for the token after a prompt and what was written since.

    Args:
        model: any that runs on the prompt.
        prompt: of `prompts_of`, one sequence.
        ids: the new tokens so far.

    Returns:
        (vocabulary,) float32, or float64 of a model in float64, on the CPU.

    Raises:
        ModelError: the model does not run.
    """
    batch = dict(prompt)
    reader = "decoder_input_ids" if "decoder_input_ids" in batch else "input_ids"
    given = batch[reader]
    new = torch.tensor([list(ids)], dtype=given.dtype)
    for name, value in prompt.items():
        # What runs along with the ids goes on with them: masks with ones, types with zeros.
        if torch.is_tensor(value) and value.shape == given.shape and _reads_along(name, reader):
            more = new if name == reader else torch.full_like(new, int("mask" in name))
            batch[name] = torch.cat([value, more.to(value.dtype)], 1)
    output = run(model, batch, dtype_of(model), device_of(model))
    if output.name != "logits":
        raise ModelError(f"expected logits of {type(model).__name__}, got {output.name}")
    logits = output.main[0, -1].cpu()
    return logits if logits.dtype == torch.float64 else logits.float()


def parted(original: Sequence[Continuation], converted: Sequence[Continuation]) -> list[tuple[int, int]]:
    """Return where continuations part: numbers of the prompts, and how many new tokens are the same before."""
    found = []
    for prompt, (a, b) in enumerate(zip(original, converted, strict=True)):
        place = next((at for at, (left, right) in enumerate(zip(a.ids, b.ids, strict=True)) if left != right), None)
        if place is not None:
            found.append((prompt, place))
    return found


def judge_generation(
    original: Sequence[Continuation],
    converted: Sequence[Continuation],
    reference_logits: Callable[[int, list[int]], torch.Tensor],
    dtype: torch.dtype,
    tokenizer: Any = None,
) -> tuple[Generation, list[str]]:
    """Compare greedy continuations; where two part, ask the reference by how much one token is the better.

    A parting is a tie, and no fault, where the reference prefers the original's token by no more than what the served
    arithmetic cannot tell apart there: the largest of one unit in the last place of the two logits, the error that the
    original itself has in their difference, and three standard deviations of the error that it has in the difference
    of two logits, as its likeliest 64 show them.

    Args:
        original: continuations of the original as served.
        converted: those of the converted model, of the same prompts.
        reference_logits: gives the reference's logits (vocabulary,) after a prompt, by number, and the new tokens;
            asked only where two part.
        dtype: that the models are served in.
        tokenizer: the checkpoint's, for words; None without.

    Returns:
        The figures, and the failures in words.
    """
    divergences, failures = [], []
    for prompt, place in parted(original, converted):
        a, b = original[prompt], converted[prompt]
        reference = reference_logits(prompt, a.ids[:place]).double().cpu()
        one = _divergence(prompt, place, a, b.ids[place], reference, dtype, tokenizer)
        divergences.append(one)
        if not one.tie:
            left, right = one.words or (str(one.original), str(one.converted))
            failures.append(
                f"generation: prompt {prompt + 1} parts after {place} tokens: {right!r} in place of {left!r}, which "
                f"the reference prefers by {one.margin:.3g}; {str(dtype).removeprefix('torch.')} can tell "
                f"{one.resolution:.3g} apart there"
            )
    tokens = len(original[0].ids) if original else 0
    same = len(original) - len(divergences)
    return Generation(tokens, len(original), same, divergences), failures


def _divergence(
    prompt: int, place: int, a: Continuation, other: int, reference: torch.Tensor, dtype: torch.dtype, tokenizer: Any
) -> Divergence:
    taken = a.ids[place]
    margin = float(reference[taken] - reference[other])
    pair = reference[torch.tensor([taken, other])]
    resolution = float(ulp_size(pair.abs().max(), dtype))
    top_ids = a.top_ids[place]
    errors = a.top_logits[place].double() - reference[top_ids]
    if len(errors) > 1:
        # The same error in all logits moves none against another.
        resolution = max(resolution, _DEVIATIONS * 2**0.5 * float(errors.std()))
    places = [(top_ids == token).nonzero() for token in (taken, other)]
    if all(at.numel() for at in places):
        left, right = (float(errors[int(at[0])]) for at in places)
        resolution = max(resolution, abs(left - right))
    words = None if tokenizer is None else (tokenizer.decode([taken]), tokenizer.decode([other]))
    return Divergence(prompt, place, taken, other, words, margin, resolution, margin <= resolution)


def _generate(model: nn.Module, batch: dict[str, Any], tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (rows, tokens) new ids, and (rows, tokens, kept) the likeliest entries and their logits, on the CPU."""
    device, dtype = device_of(model), dtype_of(model)
    moved = {
        name: value.to(device, dtype if value.is_floating_point() else None) if torch.is_tensor(value) else value
        for name, value in batch.items()
    }
    own = model.generation_config
    begins = batch.get("decoder_input_ids")
    start = int(begins.reshape(-1)[0]) if torch.is_tensor(begins) else getattr(own, "decoder_start_token_id", None)
    plain = GenerationConfig(
        max_new_tokens=tokens,
        do_sample=False,
        num_beams=1,
        bos_token_id=getattr(own, "bos_token_id", None),
        decoder_start_token_id=start,
        return_dict_in_generate=True,
        output_logits=True,
    )
    # Else generation takes from the model's own what the one that it is given leaves open.
    model.generation_config = plain  # type: ignore[assignment]
    try:
        with quiet(), torch.no_grad(), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(0)
            # Classes that override it, as for sounds, decide by more than the likeliest token.
            result = GenerationMixin.generate(model, generation_config=plain, **moved)
    # Whatever a model's code raises.
    except Exception as error:
        raise ModelError(
            f"{type(model).__name__} does not generate from {', '.join(batch)}: {type(error).__name__}: "
            f"{first_line(error)}; leave generation out"
        ) from error
    finally:
        model.generation_config = own
    if len(result.logits) != tokens or result.sequences.dim() != 2:
        raise ModelError(
            f"expected {tokens} new tokens from {type(model).__name__}, got {len(result.logits)}; leave generation out"
        )
    top = [step.float().topk(min(_KEPT, step.shape[-1])) for step in result.logits]
    top_ids, top_logits = (torch.stack([getattr(one, name) for one in top], 1) for name in ("indices", "values"))
    return result.sequences[:, -tokens:].cpu(), top_ids.cpu(), top_logits.cpu()


def _reads_along(name: str, reader: str) -> bool:
    return name.startswith("decoder_") == reader.startswith("decoder_") and "position" not in name
