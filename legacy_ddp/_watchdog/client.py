"""Requests to the status servers of other ranks: one line of JSON each way over TCP.

Not through a store: to read a store blocks while its owner is stopped, all ranks would write all the time, and all
would be lost with the owner. A request needs no third process, and no rank sends one before a rank waits. A failed
request is information, too: an ended process has no open port.

Each side proves that it knows the token of the server before the other side reads more. The token itself is not sent,
because another process may have got the port of a dead rank.
"""

import fcntl
import hmac
import json
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar

from legacy_ddp._watchdog.process import (
    DEAD,
    ENDING,
    STOPPED,
    TRACED,
    UNKNOWN,
    Identity,
    own_identity,
    queued_seconds,
    visible_state,
)

_INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_SIOCGIFADDR = 0x8915  # Linux: address of an interface
# To find the interface of the default route. The addresses are for documentation (RFC 5737, RFC 3849) and get no data:
# connecting a datagram socket only looks up the route.
_OUTSIDE: tuple[tuple[int, str], ...] = ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1"))
# A Python thread answers in milliseconds. If it must wait for the GIL of a busy process, in tens of milliseconds.
ANSWER_SECONDS = 0.7
# The same on a crowded machine: the threads of the process wait for a processor for more than this share of the time.
PATIENT_SECONDS = 3.0
_CROWDED_SHARE = 0.5
MAX_BYTES, PART_BYTES = 2**20, 2**16  # of a message, from a process that knows the token
# A client begins with a greeting: a random number, and the proof made with it. The server answers with its own proof.
_NONCE_BYTES, PROOF_BYTES = 16, 32
GREETING_BYTES = _NONCE_BYTES + PROOF_BYTES
_SIGNS = (DEAD, ENDING)  # in /proc, of an end
_LOOK_SECONDS = 0.1  # to connect on the same machine: its kernel accepts or refuses at once
MAX_CONCURRENT_REQUESTS = 32

Address = tuple[str, int]
Message = Mapping[str, Any]
_T = TypeVar("_T")


@dataclass(frozen=True)
class Failure:
    """A failure that ended a call for good."""

    reason: str
    is_late: bool = False  # nothing broke, but a rank was silent for too long
    ranks: tuple[int, ...] = ()  # the lost ranks, if known without a poll


class Outcome(StrEnum):
    ANSWERED = "answers"
    ENDED = "its process has ended"
    CLOSED = "its status server is closed"  # but the process is there
    STRANGER = "another process answers at its port"
    LEFT = "has left the call"  # and was not asked
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
        return json.dumps([vars(self.identity), self.addresses, self.token]).encode()


def decode_endpoint(rank: int, data: bytes) -> Endpoint | None:
    """None for empty bytes: ``rank`` has no status server."""
    if not data:
        return None
    identity, addresses, token = json.loads(data)
    return Endpoint(rank, read_as(Identity, identity), [(host, port) for host, port in addresses], token)


def request(
    peer: Endpoint, message: Message, own: Identity, seconds: float = ANSWER_SECONDS
) -> tuple[Outcome, Message | None]:
    """Send a request and return the answer. ``own``: the identity of this process.

    Blocks for at most about ``seconds``, or ``PATIENT_SECONDS`` on a crowded machine; not at all if the process is
    dead, or if the kernel shows it as stopped.
    """
    limit = _Limit(peer.identity, seconds)
    while True:
        if visible_state(peer.identity) in (STOPPED, TRACED):
            return Outcome.SILENT, None
        outcome, answer = _request_once(peer, message, own, limit)
        if outcome in (Outcome.CLOSED, Outcome.STRANGER):
            state = visible_state(peer.identity)
            is_dead = state in _SIGNS or (outcome is Outcome.CLOSED and state == UNKNOWN)
            return (Outcome.ENDED if is_dead else outcome), None
        # Try again: a process that is about to end accepts connections and drops them until its port is closed.
        if outcome is Outcome.ANSWERED or limit.is_over():
            return outcome, answer
        time.sleep(0.02)


def state_of(peer: Endpoint) -> str:
    """``running``, ``stopped``, ``held by a debugger`` or ``dead``; empty if this process cannot see the process."""
    state = visible_state(peer.identity)
    if state not in _SIGNS:
        return state
    # Dead only by two signs: /proc does not show the process, and its port refuses connections. One sign alone may have
    # another cause.
    return DEAD if _refuses(peer) else UNKNOWN


def _refuses(peer: Endpoint) -> bool:
    own = own_identity()
    if peer.identity.network != own.network:  # an answer may take long
        return False
    try:
        connect(peer, own, _LOOK_SECONDS).close()
    except OSError as error:
        return isinstance(error, ConnectionRefusedError)
    return False


class _Limit:
    """The time limit of a request to ``process``: ``seconds`` from now on, or more on a crowded machine."""

    def __init__(self, process: Identity, seconds: float) -> None:
        self._process, self._seconds = process, seconds
        self._start, self._queued = time.monotonic(), queued_seconds(process)

    @property
    def connect_seconds(self) -> float:
        """Seconds left to connect: a kernel accepts a connection at once, however slow the process is."""
        return max(0.01, self._start + self._seconds - time.monotonic())

    def is_over(self) -> bool:
        seconds = time.monotonic() - self._start
        if seconds < self._seconds:
            return False
        is_crowded = queued_seconds(self._process) - self._queued > _CROWDED_SHARE * seconds
        return seconds > PATIENT_SECONDS or not is_crowded


def _request_once(peer: Endpoint, message: Message, own: Identity, limit: _Limit) -> tuple[Outcome, Message | None]:
    try:
        with connect(peer, own, limit.connect_seconds) as connection:
            connection.settimeout(limit.connect_seconds)
            greeting = greet(peer.token)
            connection.sendall(greeting)
            if not (proof := _read_proof(connection, limit)):
                return Outcome.SILENT, None
            if not hmac.compare_digest(proof, answer_to(greeting, peer.token)):
                return Outcome.STRANGER, None
            connection.sendall(encode_message(message))
            answer = _read(connection, limit)
            return (Outcome.SILENT if answer is None else Outcome.ANSWERED), answer
    except ConnectionRefusedError:
        return Outcome.CLOSED, None
    except (TimeoutError, ConnectionError):
        return Outcome.SILENT, None
    except OSError:
        return Outcome.UNREACHABLE, None


def request_all(
    peers: Sequence[Endpoint], message: Message, own: Identity
) -> dict[int, tuple[Outcome, Message | None]]:
    """The results of :func:`request` by rank. Sends up to ``MAX_CONCURRENT_REQUESTS`` requests at a time."""
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
        # Here, too: at a limit of processes, or while the interpreter is ending, no other thread can be started.
        request_remaining()
    return answers


def connect(peer: Endpoint, own: Identity, seconds: float) -> socket.socket:
    errors: list[OSError] = []
    addresses = reachable(list(peer.addresses), same_network=peer.identity.network == own.network)
    for address in addresses:
        try:
            connection = socket.create_connection(address, timeout=max(0.05, seconds / len(addresses)))
        except OSError as error:
            errors.append(error)
        else:
            keep_alive(connection)
            return connection
    errors.sort(key=lambda error: not isinstance(error, ConnectionRefusedError))  # a refusal says most: it goes first
    raise OSError("connect timed out") if not errors or isinstance(errors[0], TimeoutError) else errors[0]


def keep_alive(connection: socket.socket) -> None:
    """Enable TCP keep-alive: firewalls drop idle connections, and a host may vanish without closing any."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
        if option := getattr(socket, name, None):
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


def greet(token: str) -> bytes:
    """The first bytes of a client."""
    nonce = secrets.token_bytes(_NONCE_BYTES)
    return nonce + _prove(token, b"client", nonce)


def is_greeting(data: bytes, token: str) -> bool:
    return hmac.compare_digest(data[_NONCE_BYTES:], _prove(token, b"client", data[:_NONCE_BYTES]))


def answer_to(greeting: bytes, token: str) -> bytes:
    """The first bytes of the server, to a client with this greeting."""
    return _prove(token, b"server", greeting[:_NONCE_BYTES])


def _prove(token: str, side: bytes, nonce: bytes) -> bytes:
    return hmac.digest(token.encode(), side + nonce, "sha256")


def read_as(kind: Callable[..., _T], data: Mapping[str, Any]) -> _T:
    """The inverse of ``asdict()`` for a dataclass ``kind``, after JSON: lists become tuples."""
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in data.items()})


def encode_message(message: Message) -> bytes:
    return json.dumps({**message}).encode() + b"\n"


def _read_proof(connection: socket.socket, limit: _Limit) -> bytes:
    """The first bytes of the server; fewer if the server closes the connection."""
    data = b""
    while True:
        with suppress(TimeoutError):
            part = connection.recv(PROOF_BYTES - len(data))
            data += part
            if not part or len(data) == PROOF_BYTES:
                return data
        if limit.is_over():  # another program at this port may send single bytes
            raise TimeoutError


def _read(connection: socket.socket, limit: _Limit) -> Message | None:
    """Read a message; None if incomplete or undecodable."""
    data = bytearray()
    while not data.endswith(b"\n") and len(data) < MAX_BYTES:
        try:
            part = connection.recv(PART_BYTES)
        except TimeoutError:
            if limit.is_over():
                raise
            continue
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


def own_hosts() -> list[str]:
    """Addresses of this host: of the interface set for gloo or NCCL, to the job's master, to other hosts, loopback."""
    found = dict.fromkeys(host for host in _candidates() if not host.startswith("127.") and host != "::1")
    return [*found, "127.0.0.1"]


def reachable(addresses: list[Address], *, same_network: bool) -> list[Address]:
    """The addresses to try: loopback only in the same network namespace, and there first."""
    if same_network:
        return sorted(addresses, key=lambda address: not address[0].startswith("127."))
    return [address for address in addresses if not address[0].startswith("127.")]


def _candidates() -> Iterator[str]:
    for variable in _INTERFACE_VARIABLES:
        if name := os.environ.get(variable, "").split(",")[0]:
            with suppress(OSError):
                yield _interface_address(name)
    if master := os.environ.get("MASTER_ADDR"):
        with suppress(OSError):
            for kind, _, _, _, address in socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM):
                with suppress(OSError):
                    yield _source_towards(kind, str(address[0]))
    for family, host in _OUTSIDE:
        with suppress(OSError):
            yield _source_towards(family, host)


def _interface_address(interface: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("256s", interface.encode()[:15])
        return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24])


def _source_towards(family: int, host: str) -> str:
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return str(probe.getsockname()[0])
