"""What stands in ``normswap.json``, and what is read back from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from torch import nn

from normswap.errors import CheckpointError
from normswap.foldplan import Consumer, Fold, FoldPlan, Piece
from normswap.parity import ParityReport
from normswap.plan import Plan, make_plan
from normswap.source import Source
from normswap.spec import NormSpec
from normswap.streaming import Written

__all__ = ["folds_of_manifest", "manifest_of", "parity_entry", "plan_of_manifest"]


def manifest_of(
    source: Source,
    written: Written,
    plan: Plan,
    report: ParityReport | None,
    backend: str,
    *,
    folds: FoldPlan | None = None,
    algebra: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """Return what the manifest records of a conversion.

    Args:
        source: what was converted.
        written: hashes of the weight files that were read and written.
        plan: the norms that are swapped.
        report: the measurements, if any.
        backend: that they were made on.
        folds: the decisions about gains; None where nothing was folded.
        algebra: greatest relative error of the folds before rounding, by norm.
    """
    local = Path(source.name).is_dir()
    done = () if folds is None else folds.folds
    kept = () if folds is None else folds.refusals
    return {
        "source": {
            "name": str(source.path.resolve()) if local else source.name,
            "revision": source.revision,
            "files": written.source,
        },
        "files": written.files,
        "norms": [{"name": d.name, "class": d.cls, "spec": d.spec.to_dict()} for d in plan.swaps if d.spec is not None],
        "refused": [{"name": d.name, "class": d.cls, "reason": d.reason} for d in plan.refusals],
        "folds": [_fold_to_dict(fold, (algebra or {}).get(fold.name)) for fold in done],
        "unfolded": [{"name": fold.name, "reason": fold.reason} for fold in kept],
        "backend": backend,
        "parity": None if report is None else parity_entry(report),
    }


def parity_entry(report: ParityReport) -> dict[str, Any]:
    """Return what a manifest keeps of a report: its verdict and figures.

    What has an entry for each layer, tensor, fold or continuation, or says where in a norm, is left empty: it is for
    the report itself, and a manifest stays with the checkpoint.
    """
    norms = [replace(norm, histogram=[], worst_call=None, worst_row=None, worst_channel=None) for norm in report.norms]
    tensors = None if report.tensors is None else replace(report.tensors, changes=[])
    generation = None if report.generation is None else replace(report.generation, divergences=[])
    return replace(report, norms=norms, tensors=tensors, generation=generation, layers=[], pairs=[]).to_dict()


def _fold_to_dict(fold: Fold, error: float | None) -> dict[str, Any]:
    return {
        "name": fold.name,
        "spec": None if fold.spec is None else fold.spec.to_dict(),
        "bias": fold.bias,
        "untie": fold.untie,
        "consumers": [
            {
                "parameter": consumer.parameter,
                "axis": consumer.axis,
                "bias": consumer.bias,
                "pieces": [list(asdict(piece).values()) for piece in consumer.pieces],
            }
            for consumer in fold.consumers
        ],
        "algebra_error": error,
    }


def folds_of_manifest(manifest: Mapping[str, Any]) -> FoldPlan:
    """Rebuild the folds that a manifest records.

    Raises:
        CheckpointError: an entry is damaged.
    """
    return FoldPlan(tuple(_fold_of(entry) for entry in manifest.get("folds", ())))


def _fold_of(entry: Any) -> Fold:
    try:
        consumers = tuple(
            Consumer(
                str(one["parameter"]),
                int(one["axis"]),
                tuple(Piece(*(int(number) for number in piece)) for piece in one["pieces"]),  # type: ignore[arg-type]
                one["bias"],
            )
            for one in entry["consumers"]
        )
        if not consumers or not all(consumer.pieces for consumer in consumers):
            raise ValueError("no reader, or one that reads nothing")
        spec = NormSpec.from_dict(entry["spec"])
        return Fold(str(entry["name"]), "fold", "", consumers, bool(entry["untie"]), entry["bias"], spec)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"the manifest is damaged: expected a fold under folds, got {str(entry)[:60]} ({error}); convert the "
            "checkpoint again"
        ) from error


def plan_of_manifest(model: nn.Module, manifest: Mapping[str, Any]) -> Plan:
    """Probe the model again and hold it to the specs that the manifest records.

    Raises:
        CheckpointError: a norm computes something else than recorded.
    """
    recorded = {norm["name"]: norm["spec"] for norm in manifest["norms"]}
    plan = make_plan(model)
    found = {decision.name: decision.spec for decision in plan.swaps}
    for name, spec in recorded.items():
        now = found.get(name)
        # What an older version did not record is not held against it.
        computed = {} if now is None else {key: value for key, value in now.to_dict().items() if key in spec}
        if computed != spec:
            other = {key: (value, computed.get(key)) for key, value in spec.items() if computed.get(key) != value}
            differs = ", ".join(f"{key} {then!r}, got {value!r}" for key, (then, value) in other.items())
            raise CheckpointError(
                f"expected the norm {name} to compute what the manifest records ({differs if now else 'got none'}); "
                "the checkpoint or the model's code changed since it was converted: convert it again"
            )
    return Plan(tuple(decision for decision in plan.decisions if decision.name in recorded))
