"""Which host this process runs on, for the decision whether ranks can share memory."""

import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path

_FACTS = {
    "boot": "they run on different hosts",
    "network": "they run in different network namespaces",
    "user": "they belong to different users",
}


def own_card() -> dict[str, str]:
    """Facts about this process; equal facts mean one host.

    ``boot``: boot id of the kernel. ``network``: inode of the network namespace, because abstract socket names belong
    to it. ``user``: number of the effective user. ``problem``: empty, or the reason why a fact is not known.
    """
    try:
        return {
            "boot": Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip(),
            "network": str(os.stat("/proc/self/ns/net").st_ino),
            "user": str(os.geteuid()),
            "problem": "",
        }
    except OSError as error:
        return {"problem": str(error)}


def new_name() -> str:
    """A name that nobody can guess: 128 random bits."""
    return secrets.token_hex(16)


def why_apart(cards: Sequence[Mapping[str, str]]) -> str:
    """Why the ranks of these cards cannot share memory; empty if they can."""
    for rank, card in enumerate(cards):
        if card["problem"]:
            return f"rank {rank}: {card['problem']}"
    for rank, card in enumerate(cards):
        for fact, meaning in _FACTS.items():
            if card[fact] != cards[0][fact]:
                return f"ranks 0 and {rank}: {meaning}"
    return ""
