"""Ranks of one machine that claim to run on several hosts, without namespaces."""

from collections.abc import Iterator
from contextlib import contextmanager

from legacy_ddp._transport import host_meeting


@contextmanager
def on_host(name: str) -> Iterator[None]:
    """Let the card of this rank tell of a host called ``name``, in the first call on a group inside the block."""
    own_card = host_meeting.own_card
    host_meeting.own_card = lambda: {**own_card(), "boot": name}
    try:
        yield
    finally:
        host_meeting.own_card = own_card
