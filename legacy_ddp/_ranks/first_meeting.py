"""The first meeting of the ranks of a group: they find each other in the store of the group, and connect in a tree.

Every rank makes a constant number of operations on the store, besides polls of a counter. The first rank of a host to
arrive is its hub, and the hubs form a tree in the order of their arrival. All members arrive before any hub connects to
another. A rank that cannot connect writes its error to the store, for the other ranks.

Every rank brings a card with facts about its process. The cards of all ranks show which ranks share a host.
"""

import hashlib
import json
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from legacy_ddp import _torch as internals
from legacy_ddp._errors import LegacyDDPError, PeerError, PeerLostError, SyncTimeoutError
from legacy_ddp._log import logger_of
from legacy_ddp._ranks.star import Star, StarLostError
from legacy_ddp._ranks.star_sockets import HostListener, HubListener, connect_hubs, connect_on_host
from legacy_ddp._text import name_ranks, system_error_text
from legacy_ddp._watchdog.client import decode_endpoint
from legacy_ddp._watchdog.process import boot_id

ARITY = 32  # hubs below a hub
MAX_RANKS = 256  # on a host: more were not tried
# The facts about a process, and what it means if they differ between ranks.
_MEANINGS = {
    "boot": "they run on different hosts",
    "network": "they run in different network namespaces",
    "user": "they belong to different users",
}
_BEGINS, _ARRIVALS, _ERROR, _HUBS = "begins", "arrivals", "error", "hubs"
_SHORTEST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.002, 0.25
_QUEUE = 4096  # connections that wait; the kernel may allow less (net.core.somaxconn, 4,096)
_NAME = "first collective on this process group"
# Why a rank may be late, if a wrapper makes the first call (True), or all_reduce_gradients() (False).
_LATE = {
    True: "long work before the wrapper, such as preparing data (pass a longer timeout_seconds); an error (look at the "
    "output of these processes); a rank without a wrapper, for example under a condition (construct it on "
    "every rank of the group)",
    False: "long work before the call, such as preparing data (set LEGACY_DDP_CHECKS=timeout_seconds=... to a longer "
    "time); an error (look at the output of these processes); a call under a condition such as if rank == 0 (make it "
    "on every rank of the group)",
}
_WHY_LATE = (
    "  long work before it, such as preparing data, is no fault if it ends in time: else pass a longer\n"
    "  timeout_seconds, or do the work before torch.distributed.init_process_group()"
)
_ERRORS = {kind.__name__: kind for kind in (PeerError, PeerLostError, SyncTimeoutError)}


@dataclass(frozen=True)
class Met:
    star: Star  # the tree
    cards: list[dict[str, Any]]  # of every rank: as own_card(), with ``hub``, the rank of the hub of its host
    store: internals.Store  # the part of the store for further connections


def own_card() -> dict[str, str]:
    """The facts about this process, equal on ranks that share a host; and ``problem``: why a fact is not known, empty
    if all are known.
    """
    if sys.platform != "linux":
        return {"problem": f"shared memory needs Linux, got sys.platform {sys.platform!r}"}
    try:
        return {
            "boot": boot_id(),
            # Containers with networks of their own usually share no files either.
            "network": str(os.stat("/proc/self/ns/net").st_ino),
            "user": str(os.geteuid()),
            "problem": "",
        }
    except OSError as error:
        return {"problem": str(error)}


def meet_members(
    store: internals.Store,
    rank: int,
    size: int,
    timeout: timedelta,
    check_room: Callable[[int], None],
    *,
    has_wrapper: bool,
    warn_after_seconds: float | None,
) -> Met:
    """Collective: wait for all members, and connect them.

    ``check_room``: check that this rank can open its connections, with as many ranks below it in the tree.
    ``warn_after_seconds``: when the first rank that came tells which ranks have not come; None for no warning.

    Raises:
        PeerError: on all ranks: a rank cannot open its connections.
        SyncTimeoutError: a member did not arrive. PeerLostError: a member was lost.
    """
    # The count of begins numbers the generations, also on a store that an earlier generation used.
    generation, place = divmod(store.add(_BEGINS, 1) - 1, size)
    of_generation = internals.PrefixStore(str(generation), store)
    meeting = _Meeting(of_generation, rank, timeout, check_room)
    try:
        of_generation.set(f"begun/{rank}", "1")
        try:
            check_room(0)  # not known yet: which ranks are hubs, and of how many ranks
            meeting.join_host()
        except OSError as error:
            meeting.tell(meeting.error_of(error))
        # The first rank alone looks for the others: with all of them the store would get size * size requests.
        warn_after = float("inf") if warn_after_seconds is None or place else warn_after_seconds
        members = _Members(of_generation, rank, size, timeout, warn_after, _LATE[has_wrapper])
        try:
            members.await_all(store, (generation + 1) * size)
        except SyncTimeoutError as error:
            meeting.tell(error)  # to a rank that arrives later
            raise
        meeting.check_error()  # equal on all ranks: a rank writes its error before it arrives
        star, cards = meeting.connect()
    finally:
        meeting.close()
    return Met(star, cards, of_generation)


class _Meeting:
    def __init__(
        self, store: internals.Store, rank: int, timeout: timedelta, check_room: Callable[[int], None]
    ) -> None:
        self._store, self._rank, self._timeout, self._check_room = store, rank, timeout, check_room
        self._deadline = time.monotonic() + timeout.total_seconds()
        self.card: dict[str, Any] = own_card()
        facts = json.dumps([self.card.get(fact, f"rank {rank}") for fact in _MEANINGS])
        self._host_key = f"host/{hashlib.sha256(facts.encode()).hexdigest()[:16]}"
        self._hub: tuple[int, socket.socket] | None = None
        self._number = -1  # of this host among the hosts, on its hub
        self._listener: HostListener | None = None
        self._hub_listener: HubListener | None = None
        self._connections: list[socket.socket] = []
        self._is_connected = False
        self._token = secrets.token_hex(16)

    def join_host(self) -> None:
        """Become the hub of the host, or connect to the hub. A rank that cannot connect is a host of its own."""
        if self._store.add(self._host_key, 1) == 1:
            self._listen()
        else:
            place = self._read(f"{self._host_key}/hub", "the first rank of this host")
            self._connect_on_host(place["rank"], place["directory"], place["token"])
        if self._hub is None:
            self._number = self._store.add(_HUBS, 1) - 1
        self.card["hub"] = self._rank if self._hub is None else self._hub[0]

    def _connect_on_host(self, hub: int, directory: str, token: str) -> None:
        try:
            if directory:  # else the hub does not listen, and its card says why
                self._hub = hub, connect_on_host(directory, token, self._rank, hub)
                self._connections.append(self._hub[1])
        except OSError as error:
            self._note_problem(error)
        if self._hub is None:
            self._store.add(f"{self._host_key}/left", 1)

    def _listen(self) -> None:
        try:
            if not self.card["problem"]:
                self._listener = HostListener(_QUEUE)
        except OSError as error:
            self._note_problem(error)
        directory = "" if self._listener is None else self._listener.directory
        place = {"rank": self._rank, "directory": directory, "token": self._token}
        self._store.set(f"{self._host_key}/hub", json.dumps(place))

    def _note_problem(self, error: OSError) -> None:
        self.card["problem"] = f"no connection on the host ({system_error_text(error)})"

    def connect(self) -> tuple[Star, list[Any]]:
        """Collective: the tree as this rank sees it, and the cards of all ranks."""
        try:
            star = self._make_star()
            cards = star.introduce(self.card, self.check)
        except (OSError, StarLostError, SyncTimeoutError) as error:
            self.check_error()  # a rank that knows of an error closes its connections
            self.tell(self.error_of(error))
            raise self.error_of(error) from None
        self._is_connected = True
        return star, cards

    def close(self) -> None:
        """Stop listening, and close the connections unless the star has them."""
        for listener in (self._listener, self._hub_listener):
            if listener is not None:
                listener.close()
        for connection in [] if self._is_connected else self._connections:
            connection.close()

    def _make_star(self) -> Star:
        if self._hub is not None:
            return Star(self._rank, hub=self._hub)
        count = self._count_on_host()
        below = max(0, min(ARITY, self._store.add(_HUBS, 0) - ARITY * self._number - 1))
        if count + below:
            self._check_room(count + below)
        host: Mapping[int, socket.socket] = {}
        if self._listener is not None:
            host = self._listener.accept(count, self._token)
            self._connections += host.values()
        if below:
            self._hub_listener = HubListener(self._rank)
            told = {"rank": self._rank, "endpoint": self._hub_listener.endpoint.encode().decode()}
            self._store.set(f"hub/{self._number}", json.dumps(told))
        above = None
        if self._number > 0:
            number = (self._number - 1) // ARITY
            place = self._read(f"hub/{number}", f"hub {number}")
            endpoint = decode_endpoint(place["rank"], place["endpoint"].encode())
            assert endpoint is not None
            above = place["rank"], connect_hubs(endpoint, self._rank, self._deadline - time.monotonic())
            self._connections.append(above[1])
        hubs = {} if self._hub_listener is None else self._hub_listener.accept(below, self.check)
        self._connections += hubs.values()
        return Star(self._rank, above=above, host=host, hubs=hubs)

    def _count_on_host(self) -> int:
        if self._listener is None:
            return 0
        return self._store.add(self._host_key, 0) - 1 - self._store.add(f"{self._host_key}/left", 0)

    def error_of(self, problem: OSError | StarLostError | SyncTimeoutError) -> LegacyDDPError:
        """The error of all ranks for a problem of this rank."""
        if isinstance(problem, OSError):
            text = f"{_NAME}: rank {self._rank} cannot open its connections: {system_error_text(problem)}"
            return PeerError(text, ranks=(self._rank,), phase="agree")
        if isinstance(problem, StarLostError):
            return PeerLostError(f"{_NAME} failed: {problem}", phase="agree")
        return problem

    def tell(self, error: LegacyDDPError) -> None:
        # To be called before this rank closes its connections: the other ranks then look for the error.
        self._store.set(_ERROR, json.dumps([type(error).__name__, str(error), error.ranks]))

    def check_error(self) -> None:
        if self._store.check([_ERROR]):
            kind, text, ranks = json.loads(self._store.get(_ERROR))
            raise _ERRORS[kind](text, ranks=tuple(ranks), phase="agree")

    def check(self, who: str = "a rank") -> None:
        """To be called in every wait: raises the error of a rank, or the timeout. ``who``: the rank waited for."""
        self.check_error()
        if time.monotonic() > self._deadline:
            seconds = f"{self._timeout.total_seconds():g} s"
            raise SyncTimeoutError(
                f"{_NAME}: {who} did not connect within {seconds}; look at the output of these processes", phase="agree"
            )

    def _read(self, key: str, who: str) -> dict[str, Any]:
        _ask_until(lambda: self._store.check([key]), lambda: self.check(who))
        place: dict[str, Any] = json.loads(self._store.get(key))
        return place


class _Members:
    """The wait for all members of the group. Warnings and the error name the ranks that have not come: the error of
    torch's group would not. The first warning comes after ``warn_after_seconds``.
    """

    def __init__(
        self,
        store: internals.Store,
        rank: int,
        size: int,
        timeout: timedelta,
        warn_after_seconds: float,
        reasons: str,
    ) -> None:
        self._store, self._rank, self._size, self._reasons = store, rank, size, reasons
        self._start, self._limit_seconds = time.monotonic(), timeout.total_seconds()
        self._next_seconds = warn_after_seconds  # of a warning, then at twice the time each
        self._has_warned = False

    def await_all(self, arrivals: internals.Store, count: int) -> None:
        arrivals.add(_ARRIVALS, 1)
        _ask_until(lambda: arrivals.add(_ARRIVALS, 0) >= count, self._check)
        if self._has_warned:
            seconds = time.monotonic() - self._start
            extra = {"event": "arrived", "call": "", "phase": "agree", "seconds": round(seconds, 3), "ranks": []}
            logger_of(self._rank).warning("%s: all ranks have come after %.0f s", _NAME, seconds, extra=extra)

    def _check(self) -> None:
        seconds = time.monotonic() - self._start
        if seconds > self._limit_seconds:
            missing = self._missing()
            raise SyncTimeoutError(
                f"{_NAME}: {name_ranks(missing) if missing else 'a rank'} did not arrive within "
                f"{self._limit_seconds:g} s. Possible reasons: {self._reasons}",
                ranks=missing,
                phase="agree",
            )
        if seconds >= self._next_seconds:
            self._next_seconds = 2 * seconds
            self._warn(seconds)

    def _warn(self, seconds: float) -> None:
        if missing := self._missing():
            text = (
                f"{_NAME}: {name_ranks(missing)} {'has' if len(missing) == 1 else 'have'} not come within "
                f"{seconds:.0f} s, and the other ranks wait, for at most {self._limit_seconds:g} s"
            )
            extra = {"event": "waiting", "call": "", "phase": "agree", "seconds": round(seconds, 3), "ranks": missing}
            why = ", as reported" if self._has_warned else f"\n{_WHY_LATE}"
            logger_of(self._rank).warning("%s%s", text, why, extra=extra)
            self._has_warned = True

    def _missing(self) -> list[int]:
        # Not by arrivals: a rank may still wait for the hub of its host, which is the missing one.
        return [other for other in range(self._size) if not self._store.check([f"begun/{other}"])]


def _ask_until(is_done: Callable[[], bool], check: Callable[[], None]) -> None:
    """Wait until ``is_done()``. Calls ``check()``, which may raise, before each pause."""
    # Not by a wait in the store: a stopped owner of the store would block it, and its timeouts would fill the terminal.
    pause = _SHORTEST_PAUSE_SECONDS
    while not is_done():
        check()
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)


def find_hosts(cards: Sequence[Mapping[str, Any]]) -> list[tuple[int, ...]]:
    """The ranks of every host, ascending; the hosts in the order of their lowest ranks."""
    hosts: dict[int, list[int]] = {}
    for rank, card in enumerate(cards):
        hosts.setdefault(card["hub"], []).append(rank)
    return [tuple(ranks) for ranks in hosts.values()]


def why_gloo(cards: Sequence[Mapping[str, Any]]) -> str:
    """Why the ranks of these cards use only gloo; empty if the ranks of each host can share memory.

    The ranks must be on one host, or on hosts with equal numbers of ranks, at least two: every part of the gradients
    then has an owner on every host.
    """
    for rank, card in enumerate(cards):
        if card["problem"]:
            return f"rank {rank}: {card['problem']}"
    hosts = find_hosts(cards)
    sizes = {len(ranks) for ranks in hosts}
    if max(sizes) > MAX_RANKS:
        return f"{max(sizes)} ranks on a host, more than {MAX_RANKS}"
    if len(hosts) == 1 or (len(sizes) == 1 and sizes != {1}):
        return ""
    other = hosts[1][0]
    meaning = next(meaning for fact, meaning in _MEANINGS.items() if cards[other][fact] != cards[0][fact])
    numbers = "one rank each" if sizes == {1} else f"unequal numbers of ranks, {min(sizes)} to {max(sizes)}"
    return f"ranks 0 and {other}: {meaning}, with {numbers}"
