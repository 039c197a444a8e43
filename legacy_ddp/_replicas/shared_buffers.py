"""The buffers that replicas share: all buffers but statistics of each rank's own data."""

from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from legacy_ddp import _torch as internals
from legacy_ddp._buckets.layout import Named
from legacy_ddp._replicas import state
from legacy_ddp._replicas.digest import digest_each, is_digestible
from legacy_ddp._settings import Settings
from legacy_ddp._transport.call import Call


class SharedBuffers:
    """Chooses the buffers to compare.

    Left out: ``ignore``, ``Checks(local_buffers=)``, buffers that are not saved, and statistics found by :meth:`learn`.
    Running statistics of a frozen normalisation layer are compared, therefore: no rank has updated them.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._marks: dict[str, int] | None = None
        self.statistics: set[str] = set()
        self.has_run = False  # a forward or a backward of this rank has begun since the mark

    def named(self, module: nn.Module) -> list[Named]:
        """The buffers to compare, with all their names, sorted."""
        return [item for item in self.saved(module) if item.name not in self.statistics]

    def saved(self, module: nn.Module) -> list[Named]:
        """The buffers to compare, and those that :meth:`learn` has found to be statistics."""
        left_out = {*self._settings.ignore, *internals.unsaved_buffer_names(module)}
        return state.named_buffers(module, left_out, self._settings.checks.local_buffers)

    def items(self, module: nn.Module) -> list[state.StateItem]:
        """An item for each buffer to compare."""
        return state.buffer_items(self.named(module))

    def mark(self, module: nn.Module) -> None:
        """Remember the present bits: the buffers are equal on all ranks now, or are meant to be.

        A copy of a wrapper has no marks, and every buffer counts as changed: the earlier training may have changed the
        buffer.
        """
        self._marks = _digest(self.named(module))
        self.has_run = False

    def begin_forward(self, module: nn.Module) -> None:
        """A forward with gradients begins. The first forward marks again: a checkpoint may have been loaded since."""
        is_first, self.has_run = not self.has_run, True
        if is_first and self._marks is not None:
            self._marks = _digest(self.named(module))

    def learn(self, call: Call, module: nn.Module, left_out: Collection[int]) -> bool:
        """Collective: find statistics, which differ now and have changed since the mark: on every rank, or, if the
        buffer belongs to a normalisation layer, on a rank where the layer is in training.

        A write to a buffer on some ranks leaves the bits of the mark on the other ranks. Returns whether there are new
        statistics; equal on all ranks that compare the same buffers.
        """
        present, marks = _digest(self.named(module)), self._marks or {}
        updated = internals.updated_statistics_names(module)
        changed = {name for name, bits in present.items() if marks.get(name) != bits}
        # A rank that had no data yet cannot tell.
        own = {
            name: [not self.has_run or name in changed, name in changed & updated, bits]
            for name, bits in present.items()
        }
        rows: list[dict[str, Any]] = call.gather_objects(own)
        compared = [row for rank, row in enumerate(rows) if rank not in left_out]
        unknown = [True, False, 0]  # a buffer that this rank left out before, or does not have
        found = set()
        for name in set[str]().union(*compared):  # not of this rank alone: every rank finds the same names
            may_have_changed, is_updated, bits = zip(*(row.get(name, unknown) for row in compared), strict=True)
            if len(set(bits)) > 1 and (all(may_have_changed) or any(is_updated)):
                found.add(name)
        self.statistics |= found
        return bool(found)


def gather_digests(call: Call, digest: int, left_out: Collection[int]) -> dict[int, int]:
    """Collective: the digest of every rank but ``left_out``."""
    digests = call.gather(torch.tensor([digest], device="cpu")).flatten().tolist()
    return {rank: value for rank, value in enumerate(digests) if rank not in left_out}


def _digest(named: Collection[Named]) -> dict[str, int]:
    """The digest of each buffer with digestible bits."""
    tensors = {item.name: item.tensor for item in named if is_digestible(item.tensor)}
    return dict(zip(tensors, digest_each(tensors.values()), strict=True))
