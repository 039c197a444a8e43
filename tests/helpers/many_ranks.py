"""A job of many ranks in one process: a thread for each kind of rank, the same messages from all ranks of a kind."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import torch

from legacy_ddp._settings import Settings
from legacy_ddp._transport.call import Call, GroupState
from legacy_ddp._transport.rows import Operation

T = TypeVar("T")
_SECONDS = 60.0


class CountingGroup:
    """The control group of the ranks of one kind. ``received``: the bytes that one of these ranks has received.

    ``kinds``: the kind of each rank. ``table``: what each kind sends, shared by the groups of all kinds.
    """

    def __init__(self, kind: int, kinds: Sequence[int], table: dict[int, Any], barrier: threading.Barrier) -> None:
        self._kind, self._kinds, self._table, self._barrier = kind, kinds, table, barrier
        self.received = 0

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], _options: Any) -> Any:
        sent = self._exchange(inputs[0])
        for output, kind in zip(outputs[0], self._kinds, strict=True):
            output.copy_(sent[kind])
            self.received += output.nbytes
        return _DONE

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> Any:
        tensors[0].copy_(self._exchange(tensors[0])[self._kinds[options.rootRank]])
        self.received += tensors[0].nbytes
        return _DONE

    def _exchange(self, tensor: torch.Tensor) -> dict[int, torch.Tensor]:
        self._table[self._kind] = tensor.clone()
        self._barrier.wait(_SECONDS)
        sent = dict(self._table)
        self._barrier.wait(_SECONDS)
        return sent


_DONE = SimpleNamespace(wait=lambda *_: True, is_completed=lambda: True)


def run_kinds(kinds: Sequence[int], action: Callable[[Call, int], T]) -> list[tuple[T, int]]:
    """The result of ``action(call, kind)`` inside of a call, and the bytes received by a rank, for each kind.

    ``kinds[rank]``: the kind of the rank, a number from 0 on. The first rank of each kind runs the code.
    """
    count, table = max(kinds) + 1, dict[int, Any]()
    barrier = threading.Barrier(count)

    def run(kind: int) -> tuple[T, int]:
        control = CountingGroup(kind, kinds, table, barrier)
        groups = SimpleNamespace(
            rank=kinds.index(kind),
            size=len(kinds),
            global_ranks=range(len(kinds)),
            control=control,
            star=None,
            watchdog=None,
            busy=threading.Lock(),
            lost="",
            wrapper_count=0,
            endpoints_exchanged=True,
            timeout=lambda _seconds: timedelta(seconds=_SECONDS),
            is_private=lambda _group: True,
            note_issued=lambda: None,
        )
        with Call(GroupState(cast(Any, groups)), Operation.ALL_REDUCE, Settings(), "Net") as call:
            return action(call, kind), control.received

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))
