"""The private groups of a parent group: nothing that users send can meet our headers or payloads there.

Collective: the first call on a parent group, by its members alone. ``new_group`` would not do: it is collective over
the whole world, and its names depend on how many groups a rank already owns.
"""

import atexit
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from legacy_ddp import _torch_internals as internals
from legacy_ddp._compare import name_ranks
from legacy_ddp._errors import LegacyDDPError, LostPeerError, PeerLostError, SyncTimeoutError

# Waiting is cut into slices so that Python's signal handlers (Ctrl-C) run; a slice that ends early breaks nothing.
_SLICE = timedelta(milliseconds=100)
_STORE_SLICE = timedelta(seconds=1)

_groups: "weakref.WeakKeyDictionary[dist.ProcessGroup, Groups]" = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Place:
    """Where a rank is: what an error says when the others do not answer."""

    operation: str
    call: int
    phase: str

    def __str__(self) -> str:
        return f"{self.operation} call {self.call}, phase {self.phase}"


class Groups:
    """Control and payload group of one parent group, shared by every wrapper of the process on that parent."""

    def __init__(self, parent: dist.ProcessGroup) -> None:
        self.rank = parent.rank()
        self.size = parent.size()
        self.lost: BaseException | None = None  # what made the groups unusable
        self.busy = threading.Lock()
        self._parent = weakref.ref(parent)
        self._members = 0
        self._control: Any = None
        self._payload: Any = None

    def enlist(self) -> int:
        """A number for one more wrapper: equal on all ranks that make their first calls in the same order."""
        self._members += 1
        return self._members

    def gather(self, row: torch.Tensor, *, timeout: timedelta, place: Place) -> torch.Tensor:
        """Collective: every rank's host tensor ``row``, of one shape s, as one tensor of shape (size, *s)."""
        rows = torch.empty((self.size, *row.shape), dtype=row.dtype)
        if self.size == 1:
            return rows.copy_(row)
        options = internals.operation_options("Allgather", timeout)
        self.wait(self._control.allgather([list(rows.unbind(0))], [row], options), timeout=timeout, place=place)
        return rows

    def gather_bytes(self, data: bytes, *, timeout: timedelta, place: Place) -> list[bytes]:
        """Collective: the bytes of every rank, of any length each."""
        length = torch.tensor([len(data)], dtype=torch.int64)
        lengths = self.gather(length, timeout=timeout, place=place).flatten().tolist()
        padded = torch.zeros(max(1, *lengths), dtype=torch.uint8)
        padded[: len(data)] = torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)[: len(data)]
        rows = self.gather(padded, timeout=timeout, place=place)
        return [bytes(row[:length].tolist()) for row, length in zip(rows, lengths, strict=True)]

    def maximum(self, values: torch.Tensor, *, timeout: timedelta, place: Place) -> torch.Tensor:
        """Collective: the element-wise maximum over the ranks, in place; host tensor."""
        if self.size > 1:
            options = internals.operation_options("Allreduce", timeout)
            options.reduceOp = dist.ReduceOp.MAX
            self.wait(self._control.allreduce([values], options), timeout=timeout, place=place)
        return values

    def payload(self, device: torch.device) -> Any:
        """The group that carries tensors of ``device``: the private one on gloo, else the user's own."""
        parent = self._parent()
        return self._payload if parent is None or _is_gloo(parent, device) else parent

    def wait(self, work: Any, *, timeout: timedelta, place: Place, device: torch.device | None = None) -> None:
        """Wait for ``work``: of the control group, or of the payload group for ``device``.

        On gloo a signal handler may raise out of it.

        Raises:
            SyncTimeoutError: a rank did not arrive in time.
            PeerLostError: a connection broke.
        """
        start = time.monotonic()
        try:
            if device is None or self.payload(device) is self._payload:
                while not _finished(work):
                    pass
            else:
                work.wait()  # orders the stream behind it; the host goes on
        except RuntimeError as error:
            self.lost = _lost_error(error, time.monotonic() - start, timeout, place)
            raise self.lost from error
        except BaseException as error:
            # The operation is still under way: a later one would be paired with it.
            self.lost = error
            raise

    def build(self, parent: dist.ProcessGroup, timeout: timedelta) -> None:
        """Collective: connect the members; a world of one needs no connection."""
        if self.size == 1:
            return
        store = internals.PrefixStore("legacy_ddp", internals.group_store(parent))
        # Counting arrivals gives each building a number of its own, also on a store that lived through an earlier one.
        generation = (store.add("arrivals", 1) - 1) // self.size
        store = internals.PrefixStore(str(generation), store)
        _await_members(store, self.rank, self.size, timeout)
        self._control, self._payload = (
            internals.ProcessGroupGloo(internals.PrefixStore(name, store), self.rank, self.size, timeout)
            for name in ("control", "payload")
        )

    def close(self) -> None:
        """Drop the groups; their threads end here and not somewhere in the interpreter's last breath."""
        self._control = self._payload = None


def groups_of(parent: dist.ProcessGroup, timeout: timedelta) -> Groups:
    """The private groups of ``parent``. Collective: building them, when this process first asks.

    Raises:
        LostPeerError: a member did not arrive, now or earlier, or an earlier wait broke off; they stay unusable.
    """
    groups = _groups.get(parent)
    if groups is None:
        if not _groups:
            atexit.register(_close_all)
        groups = _groups[parent] = Groups(parent)
        try:
            groups.build(parent, timeout)
        except BaseException as error:
            groups.lost = error
            raise
    return groups


def check_usable(groups: Groups) -> None:
    """Raise if an earlier call left ranks at different places.

    Raises:
        LostPeerError: with what happened then.
    """
    if groups.lost is None:
        return
    ranks = groups.lost.ranks if isinstance(groups.lost, LegacyDDPError) else ()
    raise LostPeerError(
        f"the process group is not usable after an earlier failure ({type(groups.lost).__name__}: {groups.lost}); "
        "end this process, or destroy the process group and make a new one",
        ranks=ranks,
    ) from groups.lost


def _is_gloo(group: dist.ProcessGroup, device: torch.device) -> bool:
    return internals.backend_name(group, device) == "gloo"


def _finished(work: Any) -> bool:
    try:
        work.wait(_SLICE)
    except RuntimeError:
        if not work.is_completed():
            return False
        # It may have finished between the slice's end and that question: ask again, now for what really happened.
        work.wait()
    return True


def _lost_error(error: RuntimeError, waited: float, timeout: timedelta, place: Place) -> LostPeerError:
    late = waited >= 0.99 * timeout.total_seconds()
    kind = SyncTimeoutError if late else PeerLostError
    happened = f"no answer within {timeout.total_seconds():g} s" if late else f"connection lost after {waited:.2f} s"
    return kind(
        f"{place}: {happened}; missing ranks unknown (saw: {str(error).splitlines()[0]}); "
        "look for the rank that ended or did not make this call",
        call=place.call,
        phase=place.phase,
    )


def _await_members(store: internals.Store, rank: int, size: int, timeout: timedelta) -> None:
    """Wait until every member is there; who is not is named, which the group's own constructor would not do."""
    store.set(f"here/{rank}", "1")
    keys = [f"here/{other}" for other in range(size)]
    deadline = time.monotonic() + timeout.total_seconds()
    while not _all_set(store, keys):
        if time.monotonic() > deadline:
            missing = [other for other, key in enumerate(keys) if not store.check([key])]
            raise SyncTimeoutError(
                f"first collective on this process group: {name_ranks(missing)} did not arrive within "
                f"{timeout.total_seconds():g} s; look there, or construct the wrapper on every rank of the group",
                ranks=missing,
                phase="agree",
            )


def _all_set(store: internals.Store, keys: Sequence[str]) -> bool:
    try:
        store.wait(list(keys), _STORE_SLICE)
    except RuntimeError:
        return bool(store.check(list(keys)))
    return True


def _close_all() -> None:
    for groups in list(_groups.values()):
        groups.close()
