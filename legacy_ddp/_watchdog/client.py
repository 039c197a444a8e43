"""How does a rank put a question to another one? A line of JSON each way over TCP.

A store would be the usual place to leave notes, but reading one blocks for as long as its owner is stopped, every rank
would write all the time, and all would be lost with one process. Asking the rank itself needs nobody else, costs
nothing until somebody asks, and its failures tell something: a closed port means that the process has ended.
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

ANSWER_SECONDS = 0.7  # a Python thread answers in milliseconds; one that waits for the GIL of a busy process, in tens
MAX_BYTES, PART_BYTES = 2**20, 2**16
CONCURRENT_QUESTIONS = 32


class Outcome(StrEnum):
    """How a question ended, or why it was not put."""

    ANSWERED = "answers"
    GONE = "its process has ended"
    SILENT = "does not answer"
    UNREACHABLE = "cannot be reached"
    NOT_ASKED = "not asked"
    DEAF = "unknown: checks off, or never met"


@dataclass(frozen=True)
class Peer:
    """A rank as the others know it: who it is, where it listens, and the word that it answers to."""

    rank: int
    identity: Identity
    addresses: Sequence[Address]
    token: str

    def encode(self) -> bytes:
        """For :func:`decode_peer` on another rank."""
        return json.dumps([vars(self.identity), self.addresses, self.token]).encode()


def decode_peer(rank: int, data: bytes) -> Peer | None:
    """The peer of ``rank``, None if it sent nothing because it does not listen."""
    if not data:
        return None
    identity, addresses, token = json.loads(data)
    return Peer(rank, Identity(**identity), [(host, port) for host, port in addresses], token)


def ask(peer: Peer, message: Message, me: Identity, seconds: float = ANSWER_SECONDS) -> tuple[Outcome, Message | None]:
    """Put one question to one rank; blocks for about ``seconds`` at most, not at all where the kernel knows better."""
    give_up = time.monotonic() + seconds
    while True:
        state = state_of(peer.identity)
        if state in (DEAD, STOPPED, TRACED):
            return (Outcome.GONE if state == DEAD else Outcome.SILENT), None
        try:
            with connect(peer, me, give_up - time.monotonic()) as connection:
                connection.settimeout(max(0.01, give_up - time.monotonic()))
                connection.sendall(encode_message(peer, message))
                if (answer := _read(connection)) is not None:
                    return Outcome.ANSWERED, answer
            outcome = Outcome.SILENT
        except ConnectionRefusedError:
            return Outcome.GONE, None
        except TimeoutError:
            return Outcome.SILENT, None
        except ConnectionError:
            outcome = Outcome.SILENT
        except OSError:
            outcome = Outcome.UNREACHABLE
        # A process that is just ending takes connections and drops them, until its port is closed.
        if time.monotonic() > give_up:
            return outcome, None
        time.sleep(0.02)


def ask_all(peers: Sequence[Peer], message: Message, me: Identity) -> dict[int, tuple[Outcome, Message | None]]:
    """Put one question to many ranks; ranks not heard in time are silent.

    Many are asked at the same time, from this thread and as many others as can be started: none at a limit of
    processes, nor while the interpreter is ending.
    """
    answers: dict[int, tuple[Outcome, Message | None]] = dict.fromkeys(
        (p.rank for p in peers), (Outcome.NOT_ASKED, None)
    )
    left = iter(peers)  # shared: every thread takes the next peer

    def ask_those_left() -> None:
        for peer in left:
            answers[peer.rank] = ask(peer, message, me)

    with ThreadPoolExecutor(CONCURRENT_QUESTIONS, thread_name_prefix="legacy_ddp watch") as pool:
        with suppress(RuntimeError):
            for _ in range(min(len(peers), CONCURRENT_QUESTIONS) - 1):
                pool.submit(ask_those_left)
        ask_those_left()
    return answers


def connect(peer: Peer, me: Identity, seconds: float) -> socket.socket:
    """Raises the most telling of the errors: refused, before timed out or unreachable."""
    errors: list[OSError] = []
    addresses = reachable(list(peer.addresses), same_machine=peer.identity.machine == me.machine)
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
    """An idle connection is forgotten by firewalls, and its other end's host may vanish without a word."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
        if option := getattr(socket, name, None):
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


def encode_message(peer: Peer, message: Message) -> bytes:
    return json.dumps({**message, "token": peer.token}).encode() + b"\n"


def _read(connection: socket.socket) -> Message | None:
    """One message; None if the connection ended before it did, or if it is none of ours."""
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
