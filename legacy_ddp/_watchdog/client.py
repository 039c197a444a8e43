"""Requests to the status servers of other ranks: one line of JSON each way over TCP.

A store would be the usual place for the status of ranks. But reading a store blocks while the store's owner is stopped,
every rank would write all the time, and everything would be lost with the owner. A request needs no third process, and
there is none until a rank waits. A failed request is information, too: a closed port means an ended process.
"""

import json
import socket
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from legacy_ddp._watchdog.addresses import Address, reachable
from legacy_ddp._watchdog.processes import DEAD, STOPPED, TRACED, Identity, state_of

Message = Mapping[str, Any]

# A Python thread answers in milliseconds; a thread that waits for the GIL of a busy process, in tens of milliseconds.
ANSWER_SECONDS = 0.7
MAX_BYTES, PART_BYTES = 2**20, 2**16
MAX_CONCURRENT_REQUESTS = 32


class Outcome(StrEnum):
    """The result of a request to a rank."""

    ANSWERED = "answers"
    ENDED = "its process has ended"
    SILENT = "does not answer"
    UNREACHABLE = "cannot be reached"
    NOT_ASKED = "not asked"
    UNKNOWN = "unknown: checks off or never connected"


@dataclass(frozen=True)
class Endpoint:
    """The status server of a rank: process, addresses, and the token for every request."""

    rank: int
    identity: Identity
    addresses: Sequence[Address]
    token: str

    def encode(self) -> bytes:
        """Bytes for :func:`decode_endpoint`."""
        return json.dumps([vars(self.identity), self.addresses, self.token]).encode()


def decode_endpoint(rank: int, data: bytes) -> Endpoint | None:
    """The endpoint of ``rank``; None for empty bytes: the rank has no status server."""
    if not data:
        return None
    identity, addresses, token = json.loads(data)
    return Endpoint(rank, Identity(**identity), [(host, port) for host, port in addresses], token)


def request(
    peer: Endpoint, message: Message, own: Identity, seconds: float = ANSWER_SECONDS
) -> tuple[Outcome, Message | None]:
    """Send a request and return the answer. ``own``: the identity of this process.

    Blocks for at most about ``seconds``; not at all if the kernel reports the process as dead or stopped.
    """
    deadline = time.monotonic() + seconds
    while True:
        state = state_of(peer.identity)
        if state in (DEAD, STOPPED, TRACED):
            return (Outcome.ENDED if state == DEAD else Outcome.SILENT), None
        try:
            with connect(peer, own, deadline - time.monotonic()) as connection:
                connection.settimeout(max(0.01, deadline - time.monotonic()))
                connection.sendall(encode_message(peer, message))
                if (answer := _read(connection)) is not None:
                    return Outcome.ANSWERED, answer
            outcome = Outcome.SILENT
        except ConnectionRefusedError:
            return Outcome.ENDED, None
        except TimeoutError:
            return Outcome.SILENT, None
        except ConnectionError:
            outcome = Outcome.SILENT
        except OSError:
            outcome = Outcome.UNREACHABLE
        # Try again: a process that is about to end accepts connections and drops them until its port is closed.
        if time.monotonic() > deadline:
            return outcome, None
        time.sleep(0.02)


def request_all(
    peers: Sequence[Endpoint], message: Message, own: Identity
) -> dict[int, tuple[Outcome, Message | None]]:
    """Send a request to each of many ranks, up to ``MAX_CONCURRENT_REQUESTS`` at a time.

    This thread sends requests, too: at a limit of processes, or while the interpreter is ending, no other thread can be
    started.
    """
    answers: dict[int, tuple[Outcome, Message | None]] = dict.fromkeys(
        (p.rank for p in peers), (Outcome.NOT_ASKED, None)
    )
    remaining = iter(peers)  # shared: every thread takes the next peer

    def request_remaining() -> None:
        for peer in remaining:
            answers[peer.rank] = request(peer, message, own)

    with ThreadPoolExecutor(MAX_CONCURRENT_REQUESTS, thread_name_prefix="legacy_ddp watchdog") as pool:
        with suppress(RuntimeError):
            for _ in range(min(len(peers), MAX_CONCURRENT_REQUESTS) - 1):
                pool.submit(request_remaining)
        request_remaining()
    return answers


def connect(peer: Endpoint, own: Identity, seconds: float) -> socket.socket:
    """Connect to the first address that accepts.

    Raises:
        ConnectionRefusedError: an address refused; the most informative error.
        OSError: timed out or unreachable.
    """
    errors: list[OSError] = []
    addresses = reachable(list(peer.addresses), same_machine=peer.identity.machine == own.machine)
    for address in addresses:
        try:
            connection = socket.create_connection(address, timeout=max(0.05, seconds / len(addresses)))
        except OSError as error:
            errors.append(error)
        else:
            keep_alive(connection)
            return connection
    errors.sort(key=lambda error: not isinstance(error, ConnectionRefusedError))
    raise OSError("connect timed out") if not errors or isinstance(errors[0], TimeoutError) else errors[0]


def keep_alive(connection: socket.socket) -> None:
    """Enable TCP keep-alive: firewalls drop idle connections, and a host may vanish without closing any."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
        if option := getattr(socket, name, None):
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


def encode_message(peer: Endpoint, message: Message) -> bytes:
    return json.dumps({**message, "token": peer.token}).encode() + b"\n"


def _read(connection: socket.socket) -> Message | None:
    """Read a message; None if incomplete or undecodable."""
    data = bytearray()
    while not data.endswith(b"\n") and len(data) < MAX_BYTES:
        part = connection.recv(PART_BYTES)
        if not part:
            return None
        data += part
    return decode_message(data)


def decode_message(data: bytearray) -> Message | None:
    try:
        message = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return message if isinstance(message, dict) else None
