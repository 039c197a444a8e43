"""Cards of ranks: facts about the host of a rank. The cards of all ranks show the hosts of a group."""

import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

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


def new_token() -> str:
    """A random number of 128 bits, as text."""
    return secrets.token_hex(16)


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
