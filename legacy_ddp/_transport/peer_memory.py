"""The segments of the other ranks of a host, mapped into this process.

All ranks know which segments are mapped everywhere on their host: the table changes only by agreed steps. A call with
known segments therefore needs no exchange but its headers. With several hosts the table has the ranks of all hosts, and
all ranks decide alike whether any rank has a new segment.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from legacy_ddp._buckets.segment import Segment, map_segment, no_memory_text
from legacy_ddp._transport.rows import SegmentIds, decode_segments
from legacy_ddp._transport.star import Descriptors
from legacy_ddp._transport.wait import Gatherer

_MAX_KEPT_VIEWS = 4


class PeerMemory:
    """Mapped segments of the ranks of a group, uint8 tensors by rank and serial number. Of one wrapper.

    The table has the segments of other hosts, too, without a tensor. ``segments``: of every rank in this call.
    """

    def __init__(self, size: int) -> None:
        self.segments: Sequence[SegmentIds] = ()
        # The segments of all ranks, as exchanged, if a further call with the same segments maps and unmaps nothing.
        self.settled: bytes | None = None
        self._mapped: list[dict[int, torch.Tensor | None]] = [{} for _ in range(size)]
        self.views: dict[Hashable, Any] = {}  # made of the segments by the caller, who knows their meaning

    def __getitem__(self, key: tuple[int, int]) -> torch.Tensor:
        """The segment with the key (rank, serial number), of a rank of this host."""
        rank, serial = key
        memory = self._mapped[rank].get(serial)
        if memory is None:
            raise KeyError(f"segment {serial} of rank {rank} is not mapped")
        return memory

    def settle(self, call: Gatherer, encoded: bytes, own: Callable[[], Sequence[Segment | None]]) -> str:
        """Forget and map what a call with the segments ``encoded`` needs. Collective if any of them is not mapped.

        ``own``: gives the segments of this rank, by position.

        Returns:
            As :meth:`map_new`.
        """
        self.settled, segments = None, decode_segments(encoded)
        self.forget_unused(segments)
        unknown = self.unknown(segments)
        is_known = not any(unknown)
        if not is_known and (problem := self.map_new(call, segments, unknown, own())):
            return problem
        self.segments, self.settled = segments, encoded if is_known else None
        return ""

    def forget_unused(self, segments: Sequence[SegmentIds]) -> None:
        """Unmap the segments that no rank will use again.

        If a rank has spare memory, its newest earlier segments stay mapped, too: as many as it has current ones.
        ``segments``: the current segments of every rank, as exchanged.
        """
        for mapped, current in zip(self._mapped, segments, strict=True):
            used = sum(map(bool, current.serials))
            surplus = len(mapped) - (2 * used if current.has_spare else used)
            if surplus > 0:
                for serial in [serial for serial in mapped if serial not in current.serials][:surplus]:
                    del mapped[serial]
                self.views.clear()

    def keep_views(self, key: Hashable, views: object) -> None:
        """Keep ``views`` until a segment is forgotten, or many others are kept."""
        if len(self.views) >= _MAX_KEPT_VIEWS:
            self.views.clear()
        self.views[key] = views

    def unknown(self, segments: Sequence[SegmentIds]) -> list[list[int]]:
        """For every rank the positions of its segments that are not mapped everywhere on its host."""
        return [
            [index for index, serial in enumerate(current.serials) if serial and serial not in mapped]
            for mapped, current in zip(self._mapped, segments, strict=True)
        ]

    def map_new(
        self,
        call: Gatherer,
        segments: Sequence[SegmentIds],
        unknown: Sequence[Sequence[int]],
        own: Sequence[Segment | None],
    ) -> str:
        """Collective: map the segments at the ``unknown`` positions of each host, on all ranks of all hosts or on none.

        ``own``: the segments of this rank, by position.

        Returns:
            The first problem of any rank, as text; empty after success.
        """
        rank = call.groups.rank
        new = {index: segment for index in unknown[rank] if (segment := own[index]) is not None}
        shared = [segment.descriptor for segment in new.values()]
        counts = {other: len(unknown[other]) for other in call.groups.host_ranks}
        received: Descriptors = call.over_star("share_descriptors", shared, counts)
        found: dict[tuple[int, int], torch.Tensor] = {(rank, index): segment.memory for index, segment in new.items()}
        problem: OSError | None = received.problem
        missing = next((other for other, each in received.descriptors.items() if len(each) < counts[other]), None)
        try:
            for other, descriptors in received.descriptors.items():
                for index, descriptor in zip(unknown[other], descriptors, strict=False):
                    found[other, index] = map_segment(descriptor)
        except OSError as error:
            problem = problem or error
        finally:
            received.close()
        # Where a rank could not send, the others only know that something is missing.
        symptom = "" if missing is None else f"no shared memory (descriptors of rank {missing} did not arrive)"
        reason = call.first_problem("" if problem is None else no_memory_text(problem), symptom)
        if reason:
            return reason
        for other, indices in enumerate(unknown):
            for index in indices:
                self._mapped[other][segments[other].serials[index]] = found.get((other, index))
        return ""
