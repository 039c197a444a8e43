"""Waiting for the other ranks in slices and with a deadline, and small exchanges: rows, JSON values and maxima."""

import json
import re
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import cached_property
from typing import Any, cast

import torch

from legacy_ddp import _torch as internals
from legacy_ddp._errors import LostPeerError, PeerLostError, SyncTimeoutError
from legacy_ddp._log import show_elsewhere
from legacy_ddp._memory.layout import fingerprint
from legacy_ddp._ranks.header import SegmentIds, encode_segments
from legacy_ddp._ranks.private_groups import Groups
from legacy_ddp._ranks.star import StarLostError, StarTimeoutError
from legacy_ddp._text import first_line
from legacy_ddp._watchdog import Failure

# A wait on gloo is cut into slices, so that Python's signal handlers (Ctrl-C) run. The operation goes on after a slice.
SLICE = timedelta(milliseconds=100)
_NOTICE_SECONDS = 0.1  # the longest time between an error of gloo and the notice of the same rank


class Gatherer:
    """The communication of a call: starts operations, waits for them, and exchanges headers, host tensors and JSON."""

    segments = SegmentIds()  # of this rank, sent with its header
    peer_segments: bytes | None = None  # of all ranks, encoded; None before the headers, and for a single rank
    name = ""  # for example "all_reduce() call 3"; equal on all ranks of the call
    # "all_reduce() call 3 of wrapper 2 (Critic)" if this process has several wrappers. Ranks may have others, so a text
    # that is equal on all ranks has only the name.
    full_name = ""
    number = 0
    phase_name = ""
    _has_communicated = False  # this rank started an operation: the other ranks count this call, too
    _peers_waiting = False  # the other ranks wait, or may wait, for the next operation of this rank

    def __init__(self, groups: Groups, timeout_seconds: float | None) -> None:
        self.groups = groups
        self._timeout_seconds = timeout_seconds

    @cached_property
    def timeout(self) -> timedelta:
        """Limit of every wait. Computed when it is needed: most calls end before."""
        return self.groups.timeout(self._timeout_seconds)

    def options(self, kind: str) -> Any:
        """Options for one operation (``Allreduce``, ``AllToAll``, ...), with the timeout of this call."""
        return internals.operation_options(kind, self.timeout)

    def run(self, group: Any, start: Callable[[Any], Any]) -> None:
        self.wait(group, self.start(group, start))

    def broadcast(self, flat: torch.Tensor, source: int) -> None:
        """Write the elements of rank ``source`` to ``flat``, of one dimension, on every rank."""
        options = self.options("Broadcast")
        options.rootRank, options.rootTensor = source, 0
        # As bytes, because gloo knows few dtypes.
        self.run(self.groups.payload(flat.device), lambda group: group.broadcast([flat.view(torch.uint8)], options))

    def start(self, group: Any, start: Callable[[Any], Any]) -> Any:
        """Return ``start(group)``. From here on the other ranks depend on this rank."""
        self._has_communicated = self._peers_waiting = True
        return start(group)

    def wait(self, group: Any, work: Any) -> None:
        """Wait for ``work``. On gloo a signal handler may raise; on other backends only the stream waits.

        Raises:
            SyncTimeoutError: a rank did not arrive in time. PeerLostError: a connection broke.
        """
        if not self.groups.is_private(group):
            work.wait()
            return
        start = time.perf_counter()
        while not self._is_done(work, start):
            self._check_watchdog(time.perf_counter() - start)
            self._look_at_star(start)

    def _await_notice(self, start: float) -> None:
        """After an error of gloo: raise the error for a notice, which says more."""
        # The notice may come later, because a rank that leaves drops its operations on gloo first.
        deadline = time.perf_counter() + _NOTICE_SECONDS
        while time.perf_counter() < deadline:
            self._look_at_star(start)
            time.sleep(_NOTICE_SECONDS / 20)

    def _look_at_star(self, start: float) -> None:
        """Raise the error for a notice of a lost rank. gloo has an error only on ranks connected to the lost rank."""
        try:
            if self.groups.star is not None:
                self.groups.star.look()
        except (StarTimeoutError, StarLostError) as error:
            raise self._told_error(error, time.perf_counter() - start) from None

    def wait_until_deadline(self, work: Any) -> None:
        """As :meth:`wait`, on the user's group: checks the deadline, because the group may have no timeout."""
        self._has_communicated = self._peers_waiting = True
        start = time.perf_counter()
        while not self._is_done(work, start):
            self.check_deadline(time.perf_counter() - start)

    def over_star(self, method: str, *args: object) -> Any:
        """The result of a method of the star of the group. Raises as :meth:`wait`; RuntimeError: there is no star."""
        star = self.groups.star
        if star is None:
            raise RuntimeError(f"{self.name}: the ranks of this group have no star")
        self._has_communicated = self._peers_waiting = True
        start = time.perf_counter()
        try:
            return getattr(star, method)(*args, lambda: self.check_deadline(time.perf_counter() - start))
        except (StarTimeoutError, StarLostError) as error:
            raise self._told_error(error, time.perf_counter() - start) from None

    def _told_error(self, error: StarTimeoutError | StarLostError, waited_seconds: float) -> LostPeerError:
        """The error after a notice of another rank, or the end of a connection of the tree."""
        if isinstance(error, StarTimeoutError):
            return self._late_error()
        return self._peer_error(Failure(f"connection lost after {waited_seconds:.2f} s ({error})"))

    def check_deadline(self, waited_seconds: float, problem: str = "no answer") -> None:
        """To be called regularly in a wait without a timeout. ``problem``: for the text of the error.

        Raises:
            SyncTimeoutError: the wait took longer than the timeout of this call.
            LostPeerError: the watchdog knows of a lost rank.
        """
        self._check_watchdog(waited_seconds)
        if waited_seconds > self.timeout.total_seconds():
            raise self._late_error(problem)

    def lost_error(self, error: RuntimeError, waited_seconds: float) -> LostPeerError:
        """The error to raise for ``error`` of the transport after a wait of ``waited_seconds``."""
        limit, reason = self.timeout.total_seconds(), _gloo_reason(error)
        # Or by the text: the time of an operation may have begun while this rank still waited for an earlier operation.
        if waited_seconds >= 0.99 * limit or "timed out" in reason.lower():
            return self._late_error()
        return self._peer_error(Failure(f"connection lost after {waited_seconds:.2f} s ({reason})"))

    def gather(self, row: torch.Tensor) -> torch.Tensor:
        """Collective: ``row`` of every rank, host tensors of equal shape s, as a tensor of shape (size, *s)."""
        rows = torch.empty((self.groups.size, *row.shape), dtype=row.dtype, device="cpu")
        if self.groups.size == 1 or rows.numel() == 0:
            return rows.copy_(row)
        (gathered,) = self.over_star("exchange", [_bytes_of(row)])
        return _tensor_of(gathered, row.dtype).view(rows.shape)

    def exchange_headers(self, *header: bytes) -> list[bytes]:
        """Collective: each part of the header, of all ranks in rank order. Sets :attr:`peer_segments`."""
        if self.groups.size == 1:
            return list(header)
        # Also to ranks of other hosts, because all ranks know what is mapped on each host.
        columns = (encode_segments(self.segments), *header)
        self.peer_segments, *headers = cast("list[bytes]", self.over_star("exchange", columns))
        return headers

    def barrier(self) -> None:
        """Collective on the host: return when every rank of the host has arrived."""
        self.over_star("barrier")

    def gather_objects(self, value: Any) -> list[Any]:
        """Collective: the JSON value of every rank, in rank order; as :meth:`gather_distinct`."""
        by_rank = {rank: item for item, ranks in self.gather_distinct(value) for rank in ranks}
        return [by_rank[rank] for rank in range(self.groups.size)]

    def gather_distinct(self, value: Any) -> list[tuple[Any, tuple[int, ...]]]:
        """Collective: each distinct JSON value with its ranks, ordered by the lowest rank. Tuples arrive as lists.

        The ranks gather fingerprints, 16 bytes per rank. Then the lowest rank of each distinct value sends the value.
        """
        data = json.dumps(value).encode("ascii")  # escapes for all else, also for lone surrogates
        own = (fingerprint(data), len(data))
        holders: dict[tuple[int, int], list[int]] = {}
        for rank, (digest, size) in enumerate(self.gather(torch.tensor(own, device="cpu")).tolist()):
            holders.setdefault((digest, size), []).append(rank)
        texts = [data]
        if len(holders) > 1:
            sources = {ranks[0]: size for (_, size), ranks in holders.items()}
            sizes = [sources.get(rank, 0) for rank in range(self.groups.size)]
            parts = self.over_star("collect", data if self.groups.rank in sources else b"", sizes)
            texts = [parts[rank] for rank in sources]
        return [(json.loads(text), tuple(ranks)) for text, ranks in zip(texts, holders.values(), strict=True)]

    def first_problem(self, *problems: str) -> str:
        """Collective: the first problem of any rank, with the number of the rank; empty if no rank has one.

        ``problems``: of this rank, texts or empty, as many on every rank. A problem in the first place goes before all
        in the second place.
        """
        rows = self.gather_objects(problems)
        return next(
            (f"rank {rank}: {text}" for texts in zip(*rows, strict=True) for rank, text in enumerate(texts) if text), ""
        )

    def maximum(self, values: torch.Tensor) -> torch.Tensor:
        """Collective: element-wise maximum of a host tensor over the ranks."""
        if self.groups.size == 1 or values.numel() == 0:
            return values

        def merge(parts: list[bytes]) -> bytes:
            return _bytes_of(torch.stack([_tensor_of(part, values.dtype) for part in parts]).amax(dim=0))

        return _tensor_of(self.over_star("combine", _bytes_of(values), merge), values.dtype).view(values.shape)

    def _late_error(self, problem: str = "no answer") -> LostPeerError:
        return self._peer_error(Failure(f"{problem} within {self.timeout.total_seconds():g} s", is_late=True))

    def _is_done(self, work: Any, start: float) -> bool:
        outcome = _poll(work)
        if isinstance(outcome, RuntimeError):
            self._await_notice(start)
            raise self.lost_error(outcome, time.perf_counter() - start) from None  # quotes the text of gloo
        return outcome is True

    def _check_watchdog(self, waited_seconds: float) -> None:
        if self.groups.watchdog is not None and (failure := self.groups.watchdog.check_peers(waited_seconds)):
            raise self._peer_error(failure)

    def _peer_error(self, failure: Failure) -> LostPeerError:
        watchdog = self.groups.watchdog
        kind = SyncTimeoutError if failure.is_late else PeerLostError
        if watchdog is None:
            text = f'{self.full_name}: {failure.reason}; missing ranks unknown, because checks="off" starts no watchdog'
            return kind(text, call=self.number, phase=self.phase_name)
        report = watchdog.finalize(failure)
        kind = SyncTimeoutError if report.is_late else PeerLostError
        text = f"{report.text}\n\n({watchdog.file.where('also in')})"
        error = kind(text, ranks=report.missing, call=self.number, phase=self.phase_name)
        error.report = report.text
        if (reporter := watchdog.reporter_of(report)) != self.groups.rank:
            place = f"the report is in the output of rank {self.groups.global_ranks[reporter]}"
            show_elsewhere(error, " ".join(report.head.split()), f"{place}, {watchdog.file.where('also in')}")
        return error


def _bytes_of(tensor: torch.Tensor) -> bytes:
    """The bytes of a host tensor with at least one element."""
    data = bytearray(tensor.nbytes)
    torch.frombuffer(data, dtype=tensor.dtype).view(tensor.shape).copy_(tensor)
    return bytes(data)


def _tensor_of(data: bytes, dtype: torch.dtype) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=dtype)


def _gloo_reason(error: RuntimeError) -> str:
    # Without the place in the source of gloo and without the advice.
    return re.sub(r"^\[[^\]]*\] ?", "", first_line(error)).split(". ")[0]


def _poll(work: Any) -> bool | RuntimeError | None:
    """True after success, the error after a failure, None if ``work`` is still under way after a slice."""
    with suppress(RuntimeError):  # not try/except: Ctrl-C would have the error of the slice as its context
        work.wait(SLICE)
        return True
    if not work.is_completed():
        return None
    # It may have finished between the end of the slice and is_completed(): wait() now gives the real outcome.
    try:
        work.wait()
    except RuntimeError as error:
        return error
    return True
