"""The meeting of the hosts of a group: which ranks share a host, and the connections on each host and between hosts.

A card has facts about the host of a rank; the cards of all ranks show which ranks share a host. The lowest rank of a
host is its hub. A star is the connections between the hub and the other ranks of its host. Between hosts, the ranks of
equal index on their hosts form a gloo group. Collective, once per group.
"""

import os
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from legacy_ddp._text import system_error_text
from legacy_ddp._transport.private_groups import check_descriptors, descriptors_of_gloo
from legacy_ddp._transport.star import Star, StarListener, connect
from legacy_ddp._transport.wait import Gatherer

MAX_RANKS = 256  # on a host: more were not tried, and the hub's message with all headers has a limit of its own

_FACTS = {
    "boot": "they run on different hosts",
    "network": "they run in different network namespaces",
    "user": "they belong to different users",
}


def own_card() -> dict[str, str]:
    """Facts about this process; equal facts mean one host.

    ``boot``: boot id of the kernel. ``network``: inode of the network namespace; containers with networks of their own
    usually share no files either. ``user``: number of the effective user. ``problem``: empty, or the reason why a fact
    is not known.
    """
    if sys.platform != "linux":
        return {"problem": f"shared memory needs Linux, got sys.platform {sys.platform!r}"}
    try:
        return {
            "boot": Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip(),
            "network": str(os.stat("/proc/self/ns/net").st_ino),
            "user": str(os.geteuid()),
            "problem": "",
        }
    except OSError as error:
        return {"problem": str(error)}


def find_hosts(cards: Sequence[Mapping[str, str]]) -> list[tuple[int, ...]]:
    """The ranks of every host, ascending; the hosts in the order of their lowest ranks."""
    hosts: dict[tuple[str, ...], list[int]] = {}
    for rank, card in enumerate(cards):
        hosts.setdefault(tuple(card.get(fact, "") for fact in _FACTS), []).append(rank)
    return [tuple(ranks) for ranks in hosts.values()]


def why_gloo(cards: Sequence[Mapping[str, str]]) -> str:
    """Why the ranks of these cards use gloo alone; empty if the ranks of each host can share memory.

    Possible are one host, and hosts with equal numbers of ranks, at least two: every part of the gradients then has an
    owner on every host.
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
    meaning = next(meaning for fact, meaning in _FACTS.items() if cards[other][fact] != cards[0][fact])
    numbers = "one rank each" if sizes == {1} else f"unequal numbers of ranks, {min(sizes)} to {max(sizes)}"
    return f"ranks 0 and {other}: {meaning}, with {numbers}"


class HostMeeting:
    """Gives the group its star and its group between hosts. ``card``: of this rank, for :meth:`meet` on every rank.

    Every rank listens from the start: only the cards of all ranks tell which ranks are hubs, and a card has the
    directory to connect to.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.card: dict[str, str] = own_card()
        self._rank = rank
        self._listener: StarListener | None = None
        self._star: Star | None = None
        self._between: Any = None
        if not self.card["problem"]:
            try:
                self._listener = StarListener(size)
                self.card |= {"directory": self._listener.directory, "token": secrets.token_hex(16)}
            except OSError as error:
                self.card["problem"] = _problem_text("on the host", error)

    def meet(self, call: Gatherer, cards: Sequence[Mapping[str, str]]) -> None:
        """Collective: connect this host and the hosts, or note in ``call.groups`` why only gloo is used.

        The outcome is equal on all ranks. :meth:`close` closes what the group did not get.
        """
        groups, reason = call.groups, why_gloo(cards)
        if not reason:
            hosts = find_hosts(cards)
            host_ranks = next(ranks for ranks in hosts if self._rank in ranks)
            hub_card = cards[host_ranks[0]]
            reason = _agreed(call, "on the host", lambda: self._connect_to_hub(host_ranks, hub_card))
            reason = reason or _agreed(call, "on the host", lambda: self._accept_as_hub(host_ranks))
            if not reason and len(hosts) > 1:
                reason = _agreed(call, "between hosts", lambda: check_descriptors(descriptors_of_gloo(len(hosts))))
                reason = reason or _agreed(call, "between hosts", lambda: self._connect_hosts(call, hosts, host_ranks))
            if not reason:
                groups.use_star(self._star, hosts, self._between)
                self._star = None
        groups.star_problem = reason

    def close(self) -> None:
        """Stop listening, and close the connections of a star that the group did not get."""
        if self._listener is not None:
            self._listener.close()
        if self._star is not None:
            self._star.close()

    def _connect_to_hub(self, host_ranks: Sequence[int], hub_card: Mapping[str, str]) -> None:
        if self._rank != host_ranks[0]:
            self._star = connect(hub_card["directory"], hub_card["token"], self._rank, host_ranks)

    def _accept_as_hub(self, host_ranks: Sequence[int]) -> None:
        if self._rank == host_ranks[0] and self._listener is not None:
            self._star = self._listener.accept(host_ranks, self.card["token"])

    def _connect_hosts(self, call: Gatherer, hosts: Sequence[tuple[int, ...]], host_ranks: tuple[int, ...]) -> None:
        """Connect this rank to the ranks of equal index on the other hosts: they own the same part of the gradients."""
        name = f"hosts, index {host_ranks.index(self._rank)}"
        self._between = call.groups.connect_gloo(name, hosts.index(host_ranks), len(hosts))


def _agreed(call: Gatherer, place: str, step: Callable[[], None]) -> str:
    """Collective: do ``step`` on this rank. Returns the first problem of any rank; empty if no rank had a problem."""
    problem = ""
    try:
        step()
    except (OSError, RuntimeError) as error:
        problem = _problem_text(place, error)
    return call.first_problem(problem)


def _problem_text(place: str, error: OSError | RuntimeError) -> str:
    return f"no connection {place} ({system_error_text(error)})"
