"""The decision whether the ranks of a group run on one host, and their star. Collective, once per group."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from legacy_ddp._error_text import error_text
from legacy_ddp._transport.gather import Gatherer
from legacy_ddp._transport.host_card import new_name, own_card, why_apart
from legacy_ddp._transport.star import Star
from legacy_ddp._transport.star_setup import StarListener, connect

MAX_RANKS = 256  # a connection holds about 270 messages, and the hub forwards one with descriptors per rank


class HostMeeting:
    """``card``: of this rank, for :meth:`meet` on every rank. Rank 0 listens from the start; its card has the name."""

    def __init__(self, rank: int, size: int) -> None:
        self.card: dict[str, str] = own_card()
        self._rank = rank
        self._size = size
        self._listener: StarListener | None = None
        if rank == 0 and not self.card["problem"]:
            self.card |= {"name": new_name(), "token": new_name()}
            try:
                self._listener = StarListener(self.card["name"], size)
            except OSError as error:
                self.card["problem"] = error_text(error)

    def meet(self, call: Gatherer, cards: Sequence[Mapping[str, str]]) -> tuple[Star | None, str]:
        """Collective: the star, or None and the reason, equal on all ranks."""
        if self._size > MAX_RANKS:
            return None, f"{self._size} ranks on a host, more than {MAX_RANKS}"
        if reason := why_apart(cards):
            return None, reason
        star: Star | None = None
        for step in (self._connect, self._accept):
            star, reason = _agreed(call, star, step, cards[0])
            if reason:
                return None, reason
        return star, ""

    def close(self) -> None:
        """Stop listening; the connections of a star stay."""
        if self._listener is not None:
            self._listener.close()

    def _connect(self, card: Mapping[str, str]) -> Star | None:
        return connect(card["name"], card["token"], self._rank, self._size) if self._rank else None

    def _accept(self, card: Mapping[str, str]) -> Star | None:
        return self._listener.accept(self._size, card["token"]) if self._listener is not None else None


def _agreed(
    call: Gatherer, star: Star | None, step: Callable[[Mapping[str, str]], Star | None], card: Mapping[str, str]
) -> tuple[Star | None, str]:
    """The star after a step of this rank, and the first problem of any rank."""
    problem = ""
    try:
        star = step(card) or star
    except OSError as error:
        problem = error_text(error)
    problems: list[Any] = []
    try:
        problems = call.gather_objects(problem)
    finally:
        if star is not None and (not problems or any(problems)):
            star.close()
    return star, next((f"rank {rank}: {text}" for rank, text in enumerate(problems) if text), "")
