"""Which ranks share a host, and the connections between hosts for gradients. Collective, once per group.

The cards of the first meeting (:mod:`~legacy_ddp._transport.first_meeting`) show which ranks share a host. Between
hosts, the ranks of equal index on their hosts form a gloo group.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from legacy_ddp._text import system_error_text
from legacy_ddp._transport.first_meeting import FACTS
from legacy_ddp._transport.private_groups import check_descriptors, descriptors_of_gloo
from legacy_ddp._transport.wait import Gatherer

MAX_RANKS = 256  # on a host: more were not tried

_MEANINGS = dict(
    zip(
        FACTS,
        (
            "they run on different hosts",
            "they run in different network namespaces",
            "they belong to different users",
        ),
        strict=True,
    )
)


def find_hosts(cards: Sequence[Mapping[str, Any]]) -> list[tuple[int, ...]]:
    """The ranks of every host, ascending; the hosts in the order of their lowest ranks."""
    hosts: dict[int, list[int]] = {}
    for rank, card in enumerate(cards):
        hosts.setdefault(card["hub"], []).append(rank)
    return [tuple(ranks) for ranks in hosts.values()]


def why_gloo(cards: Sequence[Mapping[str, Any]]) -> str:
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
    meaning = next(meaning for fact, meaning in _MEANINGS.items() if cards[other][fact] != cards[0][fact])
    numbers = "one rank each" if sizes == {1} else f"unequal numbers of ranks, {min(sizes)} to {max(sizes)}"
    return f"ranks 0 and {other}: {meaning}, with {numbers}"


def join_hosts(call: Gatherer) -> None:
    """Collective: connect the hosts, or note in ``call.groups`` why only gloo is used. Equal on all ranks."""
    groups = call.groups
    reason, hosts, between = why_gloo(groups.cards), find_hosts(groups.cards), list[Any]()
    if not reason and len(hosts) > 1:
        reason = _agreed(call, lambda: check_descriptors(descriptors_of_gloo(len(hosts))))
        reason = reason or _agreed(call, lambda: between.append(_connect_hosts(call, hosts)))
    if not reason:
        groups.use_hosts(hosts, between[0] if between else None)
    groups.host_problem = reason


def _connect_hosts(call: Gatherer, hosts: Sequence[tuple[int, ...]]) -> Any:
    """Connect this rank to the ranks of equal index on the other hosts: they own the same part of the gradients."""
    number, ranks = next(each for each in enumerate(hosts) if call.groups.rank in each[1])
    return call.groups.connect_gloo(f"hosts, index {ranks.index(call.groups.rank)}", number, len(hosts))


def _agreed(call: Gatherer, step: Callable[[], None]) -> str:
    """Collective: do ``step`` on this rank. Returns the first problem of any rank; empty if no rank had a problem."""
    problem = ""
    try:
        step()
    except (OSError, RuntimeError) as error:
        problem = f"no connection between hosts ({system_error_text(error)})"
    return call.first_problem(problem)
