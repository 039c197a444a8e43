"""The hosts of a group, the star of each host, and the groups between hosts. Collective, once per group."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from legacy_ddp._error_text import system_error_text
from legacy_ddp._transport.arrival import check_descriptors, descriptors_of_gloo
from legacy_ddp._transport.gather import Gatherer
from legacy_ddp._transport.host_card import find_hosts, new_token, own_card, why_gloo
from legacy_ddp._transport.star import Star
from legacy_ddp._transport.star_setup import StarListener, connect


class HostMeeting:
    """``card``: of this rank, for :meth:`meet` on every rank.

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
                self.card |= {"directory": self._listener.directory, "token": new_token()}
            except OSError as error:
                self.card["problem"] = _problem_text("on the host", error)

    def meet(self, call: Gatherer, cards: Sequence[Mapping[str, str]]) -> None:
        """Collective: give the group of ``call`` its star and its group between hosts, or the reason for gloo alone.

        The outcome is equal on all ranks. :meth:`close` closes what the group did not get.
        """
        groups, reason = call.groups, why_gloo(cards)
        if not reason:
            hosts = find_hosts(cards)
            own = next(ranks for ranks in hosts if self._rank in ranks)
            reason = _agreed(call, "on the host", lambda: self._connect(own, cards[own[0]]))
            reason = reason or _agreed(call, "on the host", lambda: self._accept(own))
            if not reason and len(hosts) > 1:
                reason = _agreed(call, "between hosts", lambda: check_descriptors(descriptors_of_gloo(len(hosts))))
                reason = reason or _agreed(call, "between hosts", lambda: self._connect_hosts(call, hosts, own))
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

    def _connect(self, own: Sequence[int], card: Mapping[str, str]) -> None:
        if self._rank != own[0]:
            self._star = connect(card["directory"], card["token"], self._rank, own)

    def _accept(self, own: Sequence[int]) -> None:
        if self._rank == own[0] and self._listener is not None:
            self._star = self._listener.accept(own, self.card["token"])

    def _connect_hosts(self, call: Gatherer, hosts: Sequence[Sequence[int]], own: Sequence[int]) -> None:
        """A group per index on the host: its ranks own the same part of the gradients."""
        name = f"hosts, index {own.index(self._rank)}"
        self._between = call.groups.connect(name, hosts.index(own), len(hosts))


def _agreed(call: Gatherer, place: str, step: Callable[[], None]) -> str:
    """Collective, after a step of this rank: the first problem of any rank, empty without a problem."""
    problem = ""
    try:
        step()
    except (OSError, RuntimeError) as error:
        problem = _problem_text(place, error)
    return call.first_problem(problem)


def _problem_text(place: str, error: OSError | RuntimeError) -> str:
    return f"no connection {place} ({system_error_text(error)})"
