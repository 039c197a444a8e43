"""A job of many ranks in one process: a thread for each kind of rank, the same messages from all ranks of a kind."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, TypeVar, cast

from legacy_ddp._interrupts import OwnedLock
from legacy_ddp._ranks.call import Call, GroupState
from legacy_ddp._ranks.header import Operation
from legacy_ddp._settings import Settings

T = TypeVar("T")
_SECONDS = 60.0


class CountingStar:
    """The star of the ranks of one kind. ``received``: the bytes that one of these ranks has received.

    ``kinds``: the kind of each rank. ``table``: what each kind sends, shared by the stars of all kinds.
    """

    def __init__(self, kind: int, kinds: Sequence[int], table: dict[int, Any], barrier: threading.Barrier) -> None:
        self._kind, self._kinds, self._table, self._barrier = kind, kinds, table, barrier
        self.received = 0

    def exchange(self, columns: Sequence[bytes], _: object) -> list[bytes]:
        sent = self._exchange(columns)
        found = [b"".join(sent[kind][index] for kind in self._kinds) for index in range(len(columns))]
        self.received += sum(map(len, found))
        return found

    def collect(self, own: bytes, sizes: Sequence[int], _: object) -> list[bytes]:
        sent = self._exchange(own)
        found = [sent[kind] if size else b"" for kind, size in zip(self._kinds, sizes, strict=True)]
        self.received += sum(sizes)
        return found

    def _exchange(self, value: Any) -> dict[int, Any]:
        self._table[self._kind] = value
        self._barrier.wait(_SECONDS)
        sent = dict(self._table)
        self._barrier.wait(_SECONDS)
        return sent


def run_kinds(kinds: Sequence[int], action: Callable[[Call, int], T]) -> list[tuple[T, int]]:
    """The result of ``action(call, kind)`` inside of a call, and the bytes received by a rank, for each kind.

    ``kinds[rank]``: the kind of the rank, a number from 0 on. The first rank of each kind runs the code.
    """
    count, table = max(kinds) + 1, dict[int, Any]()
    barrier = threading.Barrier(count)

    def run(kind: int) -> tuple[T, int]:
        star = CountingStar(kind, kinds, table, barrier)
        groups = SimpleNamespace(
            rank=kinds.index(kind),
            size=len(kinds),
            global_ranks=range(len(kinds)),
            star=star,
            watchdog=None,
            busy=OwnedLock(),
            lost="",
            wrapper_count=0,
            endpoints_exchanged=True,
            timeout=lambda _seconds: timedelta(seconds=_SECONDS),
            is_private=lambda _group: True,
            counting_device=None,
        )
        with Call(GroupState(cast(Any, groups)), Operation.ALL_REDUCE, Settings(), "Net") as call:
            return action(call, kind), star.received

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))
