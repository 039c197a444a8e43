"""The segments that a process keeps mapped, and when a further call with the same segments changes nothing."""

from types import SimpleNamespace
from typing import Any

import pytest

from legacy_ddp._buckets.segment import Segment
from legacy_ddp._transport.peer_memory import PeerMemory
from legacy_ddp._transport.rows import SegmentIds
from legacy_ddp._transport.star import Descriptors


def _alone() -> Any:
    """The call of a single rank: no descriptor comes from another rank, and no rank has a problem."""
    return SimpleNamespace(
        groups=SimpleNamespace(rank=0), over_star=lambda _: Descriptors(), first_problem=lambda *texts: "".join(texts)
    )


def _settle(memory: PeerMemory, segment: Segment) -> list[SegmentIds]:
    ids = [SegmentIds((segment.serial,))]
    assert memory.settle(_alone(), ids, lambda: [segment]) == ""
    return ids


def test_a_call_with_new_segments_is_followed_by_one_that_forgets_the_old_segments() -> None:
    memory, old, new = PeerMemory(1), Segment(64), Segment(64)
    _settle(memory, old)
    ids = _settle(memory, new)
    assert not memory.is_settled(ids)
    memory[0, old.serial]

    _settle(memory, new)
    assert memory.is_settled(ids)
    with pytest.raises(KeyError):
        memory[0, old.serial]


def test_other_segments_are_not_settled() -> None:
    memory, first, second = PeerMemory(1), Segment(64), Segment(64)
    _settle(memory, first)
    _settle(memory, first)

    assert not memory.is_settled([SegmentIds((second.serial,))])
    assert not memory.is_settled([SegmentIds((first.serial,), has_spare=True)])
    assert memory.is_settled([SegmentIds((first.serial,))])
