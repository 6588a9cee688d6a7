"""Hold one checkpoint, or one module, against another: on disk tensor by tensor, and by running both."""

from __future__ import annotations

import shlex
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from normswap import checkpoint as ckpt
from normswap import opening
from normswap.comparing import Comparison, compare_checkpoints
from normswap.configdiff import doubts_on_settings
from normswap.dtypes import reference_dtype
from normswap.errors import CheckpointError, UsageError
from normswap.inmemory import compare_modules, find_folds, naming, require_values, told_as_folded, unseen_changes
from normswap.manifest import plan_of_manifest
from normswap.measuring import Serving, measure_modules, measure_sources
from normswap.opening import Progress, check_weights, open_source, require_one_class, source_of_manifest
from normswap.parity import Criterion, ParityReport
from normswap.plan import Plan, make_plan
from normswap.processes import how_many
from normswap.sizes import parse_size
from normswap.source import Source

__all__ = ["verify"]

# What a loader reads beside weights and configuration.
_BESIDE = (
    *("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "merges.txt", "generation_config.json"),
    *("chat_template.jinja", "preprocessor_config.json"),
)
# What is told as the backend where no norm was swapped.
_OWN = "none (the model's own code)"


def verify(
    checkpoint: nn.Module | str | Path,
    against: nn.Module | str | Path | None = None,
    *,
    backend: str = "auto",
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    text: str | Path | None = None,
    tokens: int | None = None,
    batch: int = 1,
    generate: int = 0,
    reference: str | torch.dtype | None = None,
    max_memory: str | int | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    criterion: Criterion | None = None,
    progress: Progress | None = None,
) -> ParityReport:
    """Measure whether a checkpoint computes what an original computes, and where it departs.

    The two are compared tensor by tensor first: what was folded, cast, tied or otherwise changed. Then both run on the
    same inputs, beside a reference: the original's stored weights in float32 arithmetic. A checkpoint with a manifest
    is served with its norms swapped; one without is served as it is, unless it is held against itself or a backend is
    asked for.

    Under ``torchrun`` every process holds a share of each model, as transformers divides it with ``tp_plan="auto"``.
    What does not fit into memory is read layer by layer as it is needed.

    Args:
        checkpoint: a converted folder, any checkpoint, or a module (copies of it are measured; it is not changed).
        against: the original. By default the source that the manifest names; without a manifest, the checkpoint
            itself unpatched.
        backend: what runs the swapped norms, as for `patch`.
        dtype: what both are served in; the checkpoint's own by default.
        device: where both run.
        text: UTF-8 file to measure on; the built-in prompts by default.
        tokens: how many tokens to measure on in all; 2048 by default, where the model reads text.
        batch: sequences of unequal length that run as one, padded on the left and on the right in turn.
        generate: tokens that both write greedily after each prompt, to be compared; 0 for none.
        reference: ``"float32"`` or ``"float64"`` arithmetic of the reference; by default the one that is finer than
            what is served.
        max_memory: bytes, or a size such as ``"4GB"``: what would need more to be loaded is read layer by layer.
        revision: branch, tag or commit of a Hub id `checkpoint`.
        trust_remote_code: run code that the checkpoints bring along.
        criterion: bounds of the verdict.
        progress: called with (step, done, total).

    Returns:
        The measurements and the verdict; a failed verdict is returned, not raised.

    Raises:
        CheckpointError: a checkpoint is missing, incomplete or damaged, or the manifest is; its norms are not those of
            the manifest.
        ModelError, BackendError, NothingToPatchError: as for `convert`.
        UsageError: the two are not of one architecture, or an argument has a value that cannot be used.

    Warns:
        UserWarning: a folder holds a second set of weights, which is not read; weights of a pooler are missing.

    Example:
        >>> import torch, normswap
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = dict(hidden_size=32, intermediate_size=48, num_attention_heads=2, num_hidden_layers=1)
        >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes))
        >>> normswap.verify(model, tokens=256).exact.error < 1e-5
        True
    """
    _require_kinds(checkpoint, against, criterion, generate)
    more = {
        "reference": reference_dtype(reference),
        "tokens": tokens,
        "batch": batch,
        "generate": generate,
        "budget": parse_size(max_memory) if isinstance(max_memory, str) else max_memory,
    }
    if isinstance(checkpoint, nn.Module) or isinstance(against, nn.Module):
        against = checkpoint if against is None else against
        if not isinstance(checkpoint, nn.Module) or not isinstance(against, nn.Module):
            kinds = f"{type(checkpoint).__name__} and {type(against).__name__}"
            raise UsageError(f"expected two modules or two checkpoints, got {kinds}")
        require_values(checkpoint, against)
        serving = opening.serving(backend, dtype, device, checkpoint, text, criterion, progress, **more)
        swapped = None if backend == "auto" else serving.backend
        folds = None if checkpoint is against else find_folds(against, checkpoint)
        report = measure_modules(checkpoint, against, serving, backend=swapped, folds=folds)
        tensors = None if checkpoint is against else compare_modules(against, checkpoint)
        if tensors is not None and folds is not None:
            tensors = told_as_folded(tensors, folds)
        named = naming(tensors) if tensors is not None and report.failures else []
        unseen = unseen_changes(tensors) if tensors is not None and report.exact.error == 0 else []
        return replace(
            report,
            failures=[*named, *report.failures],
            doubts=[*report.doubts, *unseen],
            tensors=tensors,
            checkpoint=type(checkpoint).__name__,
            against=type(against).__name__,
            command="normswap.verify(model, against)",
        )
    converted = open_source(checkpoint, revision=revision, trust_remote_code=trust_remote_code)
    serving = opening.serving(backend, dtype, device, converted, text, criterion, progress, **more)
    files = check_weights(converted)
    manifest = ckpt.read_manifest(converted.path)
    original = converted
    if against is not None:
        original = open_source(against, trust_remote_code=trust_remote_code)
    elif manifest is not None:
        original = source_of_manifest(manifest, trust_remote_code)
        if original.path.resolve() == converted.path.resolve():
            raise CheckpointError(
                f"the source that {ckpt.MANIFEST} names is the checkpoint itself, so that there is nothing to hold it "
                "against; name the original with --against"
            )
    found: Comparison | None = None
    if original.path.resolve() != converted.path.resolve():
        other = check_weights(original)
        require_one_class(converted, original)
        found = compare_checkpoints(original, other, converted, files, manifest=manifest, progress=progress)
    swap = manifest is not None or against is None or backend != "auto"
    report = _measured(original, converted, manifest, serving, found, swap)
    notes = [*report.notes, *(found.notes if found is not None else []), *_notes_beside(converted, original)]
    failures = [*(found.failures if found is not None else []), *report.failures]
    doubts = report.doubts
    if found is not None and not failures:
        doubts = [*doubts, *doubts_on_settings(found.figures.settings)]
    if found is None and manifest is not None:
        notes += ckpt.note_on_altered(ckpt.altered_files(ckpt.hash_weights(files), manifest))
    return replace(
        report,
        failures=failures,
        doubts=doubts,
        notes=notes,
        checkpoint=str(checkpoint),
        against=str(original.name),
        tensors=None if found is None else found.figures,
        pairs=[] if found is None else found.pairs,
        backend=report.backend if swap else _OWN,
        processes=how_many(),
        command=_command(checkpoint, against, serving, backend=backend, dtype=dtype, device=device, revision=revision,
                         max_memory=max_memory, trust_remote_code=trust_remote_code),
    )  # fmt: skip


def _notes_beside(converted: Source, original: Source) -> list[str]:
    """Name the files beside weights and configuration that both have and that differ: they are not judged."""
    differ = []
    for name in _BESIDE:
        here, there = converted.path / name, original.path / name
        with suppress(OSError):
            if here.is_file() and there.is_file() and here.read_bytes() != there.read_bytes():
                differ.append(name)
    return [f"{name} differs from the original's, and is not judged" for name in differ]


def _require_kinds(checkpoint: object, against: object, criterion: object, generate: int) -> None:
    """Refuse arguments of another kind by their names, before a deeper place stumbles over them."""
    for name, given in (("checkpoint", checkpoint), ("against", against)):
        if not isinstance(given, (nn.Module, str, Path)) and not (given is None and name == "against"):
            raise UsageError(f"expected {name} to be a module, a folder or a Hub id, got {given!r}")
    if criterion is not None and not isinstance(criterion, Criterion):
        raise UsageError(f"expected criterion to be a normswap.Criterion, got {criterion!r}")
    if generate < 0:
        raise UsageError(f"expected generate to be 0 or more, got {generate}")


def _measured(
    original: Source,
    converted: Source,
    manifest: dict[str, Any] | None,
    serving: Serving,
    found: Comparison | None,
    swap: bool,
) -> ParityReport:
    def plan_of(model: nn.Module) -> Plan:
        plan = make_plan(model) if manifest is None else plan_of_manifest(model, manifest)
        if swap:
            plan.require_swaps()
        return plan

    unexplained = () if found is None else [change.name for change in found.figures.unexplained]
    cast = found is not None and not unexplained and "cast" in found.figures.kind
    folds = None if found is None else found.folds
    same = found is not None and found.figures.kind in ("identical", "rearranged") and not found.figures.changes
    same = same and found is not None and not found.figures.settings and not original.trust_remote_code
    return measure_sources(
        original,
        converted,
        plan_of,
        serving,
        folds=folds,
        swap=swap,
        unrounded=cast,
        unexplained=unexplained,
        same=same,
    )


def _command(checkpoint: str | Path, against: str | Path | None, serving: Serving, **options: Any) -> str:
    """Write the command that measures this again."""
    words = ["normswap", "verify", str(checkpoint)]
    if (count := how_many()) > 1:
        words[:1] = ["torchrun", "--nproc-per-node", str(count), "-m", "normswap"]
    if against is not None:
        words += ["--against", str(against)]
    options = {
        **options,
        "backend": None if options["backend"] == "auto" else options["backend"],
        "text": serving.text,
        "tokens": serving.tokens,
        "batch": None if serving.batch == 1 else serving.batch,
        "generate": serving.generate or None,
        "reference": serving.reference,
    }
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            words.append(flag)
        elif value:
            words += [flag, str(value).removeprefix("torch.")]
    if serving.criterion is not None:
        for name, value in serving.criterion.changed().items():
            words += ["--bound", f"{name}={value:g}"]
    return shlex.join(words)
