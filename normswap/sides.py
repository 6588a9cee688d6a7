"""The two checkpoints of a comparison: what their class makes of each, and which tensors belong together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

from torch import nn

from normswap.loading import build_meta
from normswap.plan import Plan, make_plan
from normswap.shards import Checkpoint
from normswap.source import Source
from normswap.stored import StoredMap, map_stored

__all__ = ["Pairing", "Side", "pair_up"]


class Side:
    """One checkpoint, with what its configuration makes of it; that is worked out when it is first asked for.

    Args:
        source: what `normswap.source.resolve` returned.
        checkpoint: what `normswap.shards.check_source` returned for it.
    """

    def __init__(self, source: Source, checkpoint: Checkpoint) -> None:
        self.source, self.checkpoint = source, checkpoint

    @cached_property
    def model(self) -> nn.Module:
        """Its model on the meta device; not to be changed."""
        return build_meta(self.source)

    @cached_property
    def plan(self) -> Plan:
        """Its norms."""
        return make_plan(self.model)

    @cached_property
    def stored(self) -> StoredMap:
        """Where its parameters are stored."""
        return map_stored(self.model, self.checkpoint)

    @cached_property
    def unread(self) -> frozenset[str]:
        """Stored tensors that the class does not load."""
        return frozenset(self.stored.unread)

    def parameters(self, key: str) -> list[str]:
        """Return the names of the parameters that a stored tensor gives values to."""
        return [piece.parameter for piece in self.stored.by_key.get(key, ())]

    def holders(self, parameter: str) -> list[str]:
        """Return the stored tensors that hold a parameter, also one that has its values from a tied one."""
        return [piece.key for piece in self.stored.by_parameter.get(parameter, ())]


@dataclass
class Pairing:
    """Which stored tensors belong together.

    Attributes:
        pairs: tensor of the checkpoint under test to the original's.
        tied: those of them that are another name of a tied parameter there; the original stores it once.
        left_out: tensor of the original to the one under test that it is tied to there.
        renamed: tensors under test of `pairs` that have another name in the original.
        missing: the original's without a counterpart.
        extra: those under test without a counterpart.
        unread: of both, those that the class does not load, among the ones without a counterpart.
        unfilled: parameters that nothing in the checkpoint under test holds, and something in the original does.
    """

    pairs: dict[str, str] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    renamed: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    extra: list[str] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)
    unfilled: list[str] = field(default_factory=list)


def pair_up(before: Side, after: Side) -> Pairing:
    """Find the counterpart of each stored tensor: by its name, else by the parameter that it gives values to.

    Args:
        before: the original.
        after: the checkpoint under test.

    Raises:
        CheckpointError: transformers refuses the names of the tensors for the class.
        ModelError: a configuration gives no model.
    """
    ours, theirs = before.checkpoint.tensors, after.checkpoint.tensors
    found = Pairing({key: key for key in theirs if key in ours})
    missing, extra = [key for key in ours if key not in theirs], [key for key in theirs if key not in ours]
    if missing or extra:
        signed = {sign: key for key, sign in _signatures(before, missing)}
        for key, sign in _signatures(after, extra):
            if (mine := signed.pop(sign, None)) is not None:
                found.pairs[key] = mine
                found.renamed.append(key)
        used = set(found.pairs.values())
        _pair_tied(before, after, found, extra)
        for key in missing:
            if key not in used:
                _place_missing(before, after, found, key)
    if missing or extra or _flag(before) != _flag(after):
        filled = set(before.stored.by_parameter) | set(before.stored.opaque)
        names = {name for key in found.missing for name in before.parameters(key)}
        found.unfilled = [name for name in after.stored.missing if name in filled and name not in names]
    return found


def _signatures(side: Side, keys: list[str]) -> Iterator[tuple[str, object]]:
    for key in keys:
        if pieces := side.stored.by_key.get(key):
            yield key, tuple((piece.parameter, piece.axes, piece.positions, piece.held) for piece in pieces)


def _pair_tied(before: Side, after: Side, found: Pairing, extra: list[str]) -> None:
    for key in extra:
        if key in found.pairs:
            continue
        sources = {source for name in after.parameters(key) for source in before.holders(name)}
        if len(sources) == 1:
            found.pairs[key] = found.tied[key] = sources.pop()
        else:
            (found.unread if key in after.unread else found.extra).append(key)


def _place_missing(before: Side, after: Side, found: Pairing, key: str) -> None:
    holders = {holder for name in before.parameters(key) for holder in after.holders(name)}
    if key in before.unread:
        found.unread.append(key)
    elif len(holders) == 1:
        found.left_out[key] = holders.pop()
    else:
        found.missing.append(key)


def _flag(side: Side) -> object:
    return getattr(side.source.config.get_text_config(), "tie_word_embeddings", None)
