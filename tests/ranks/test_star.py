"""The star of a host in one process: cards, connections, rows, descriptors, memory, and what is told of a lost rank."""

import os
import resource
import signal
import socket
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from legacy_ddp._ranks import star_sockets
from legacy_ddp._ranks.first_meeting import MAX_RANKS, find_hosts, own_card, why_gloo
from legacy_ddp._ranks.header import MAX_SEGMENTS, SegmentIds, decode_segments, encode_segments
from legacy_ddp._ranks.star import Star, StarLostError, StarTimeoutError
from legacy_ddp._ranks.star_sockets import HostListener, connect_on_host
from tests.helpers.host_sockets import refused

T = TypeVar("T")
SERIALS = st.lists(st.integers(0, 2**32 - 1), max_size=MAX_SEGMENTS)


@contextmanager
def _stars(size: int, *, first: int = 0, step: int = 1, hub: int = 0) -> Iterator[list[Star]]:
    """The stars of the ranks, ascending. ``hub``: the index of the hub in them."""
    ranks = range(first, first + size * step, step)
    token = "token"
    listener = HostListener(size)
    leaves = {
        rank: connect_on_host(listener.directory, token, rank, ranks[hub]) for rank in ranks if rank != ranks[hub]
    }
    stars = {rank: Star(rank, hub=(ranks[hub], connection)) for rank, connection in leaves.items()}
    stars[ranks[hub]] = Star(ranks[hub], host=listener.accept(size - 1, token))
    listener.close()
    for star in stars.values():  # as after introduce(), which needs a thread for each rank
        star.ranks = star._order = tuple(ranks)
        star._below = {rank: [rank] for rank in (ranks if star._hub is None else [star.rank])}
    try:
        yield [stars[rank] for rank in ranks]
    finally:
        for star in stars.values():
            star.close()


def _on_all(stars: list[Star], act: Callable[[Star], T]) -> list[T | str]:
    """What ``act`` gives on every rank, or the error as text; each rank in a thread of its own."""

    def run(star: Star) -> T | str:
        try:
            return act(star)
        except StarLostError as error:
            star.close()
            return str(error)
        except BaseException:
            star.close()  # or the others would wait
            raise

    with ThreadPoolExecutor(len(stars)) as threads:
        return list(threads.map(run, stars))


def _ignore() -> None:
    pass


def _until(deadline: float) -> Callable[[], None]:
    """Ends a wait for a message that never comes."""

    def check() -> None:
        if time.monotonic() > deadline:
            raise TimeoutError("no message came")

    return check


def test_rows_of_1200_ranks_arrive_in_pieces() -> None:
    """A message to 832 ranks was too long for a socket: "Message too long"."""
    size, columns = 1200, [b"%04d" % rank for rank in range(1200)]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2 * size + 100), hard))
    with _stars(size) as (hub, *leaves), ThreadPoolExecutor(3) as threads:
        for leaf in leaves[1:-1]:
            leaf._send(0, b"R", columns[leaf.rank] * 64, _ignore)
        stars = (hub, leaves[0], leaves[-1])
        read = [threads.submit(star.exchange, [columns[star.rank] * 64], _ignore) for star in stars]
        for leaf in leaves[1:-1]:
            leaf._receive(0, b"R", size * 256, _until(time.monotonic() + 60.0))
        expected = [b"".join(64 * column for column in columns)]
        assert [each.result(60.0) == expected for each in read] == [True] * 3
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("first", [0, 4])
@pytest.mark.parametrize("lost", [0, 1, 2])
@pytest.mark.parametrize("operation", ["exchange", "barrier"])
def test_all_others_are_told_the_rank_whose_connection_closed(lost: int, operation: str, first: int) -> None:
    """``first``: the lowest rank of the host."""
    lost += first

    def act(star: Star) -> None:
        if star.rank == lost:
            star.close()
            return
        if operation == "barrier":
            star.barrier(_ignore)
        else:
            star.exchange([b"row"], _ignore)

    with _stars(3, first=first) as stars:
        told = _on_all(stars, act)
    assert [text for rank, text in enumerate(told, first) if rank != lost] == [f"connection to rank {lost} lost"] * 2


@pytest.mark.parametrize("impatient", [0, 1])
@pytest.mark.parametrize("is_late", [True, False])
def test_a_rank_that_gives_up_is_not_taken_for_lost(impatient: int, is_late: bool) -> None:
    """The hub tells all other ranks; the others tell the hub, which tells the rest."""
    told = threading.Event()

    def act(star: Star) -> str:
        if star.rank == impatient:
            star.give_up(is_late=is_late)
            star.close()
            told.set()
            return "gave up"
        told.wait(10.0)
        expected = StarTimeoutError if is_late else StarLostError
        with pytest.raises(expected, match=None if is_late else f"rank {impatient} left because another rank was lost"):
            star.barrier(_until(time.monotonic() + 30.0))
        return "told"

    with _stars(3) as stars:
        expected = ["told"] * 3
        expected[impatient] = "gave up"
        assert _on_all(stars, act) == expected


def test_a_rank_that_waits_for_another_still_sees_the_end_of_a_third() -> None:
    """The hub reads from one connection at a time."""
    with _stars(3) as (hub, _, third):
        third.close()
        with pytest.raises(StarLostError, match="connection to rank 2 lost"):
            hub.barrier(_until(time.monotonic() + 30.0))


@pytest.mark.parametrize("step, hub", [(1, 0), (2, 0), (1, 1), (1, 2)])
def test_descriptors_of_every_rank_reach_all_others(step: int, hub: int) -> None:
    """The second rank has none, the others two and one; each is a file with the place of the rank in it.

    Descriptors of a hub that is not the lowest rank were taken for those of the lowest: gradients were added in another
    order. ``step``: 2 for ranks of one of two hosts."""
    counts = {0: 2, step: 0, 2 * step: 1}
    files = {rank: [os.memfd_create(f"test {rank}") for _ in range(count)] for rank, count in counts.items()}
    for rank, descriptors in files.items():
        for index, descriptor in enumerate(descriptors):
            os.write(descriptor, f"{rank}.{index}".encode())

    def share(star: Star) -> dict[int, list[bytes]]:
        received = star.share_descriptors(files[star.rank], counts, _ignore)
        content = {rank: [os.pread(each, 10, 0) for each in found] for rank, found in received.descriptors.items()}
        # They are closed in programs that the process starts.
        assert not any(os.get_inheritable(each) for found in received.descriptors.values() for each in found)
        received.close()
        return content

    with _stars(3, step=step, hub=hub) as stars:
        told = _on_all(stars, share)
    everything = {0: [b"0.0", b"0.1"], 2 * step: [f"{2 * step}.0".encode()]}
    own_ranks = [0, step, 2 * step]
    assert told == [{rank: value for rank, value in everything.items() if rank != own} for own in own_ranks]
    for descriptor in (each for descriptors in files.values() for each in descriptors):
        os.close(descriptor)


@pytest.mark.parametrize("hello", [b"", b"1 wrong", b"1", b"one right", b"\xff\xfe"])
def test_a_stranger_is_not_taken_for_a_rank(hello: bytes) -> None:
    listener = HostListener(2)
    stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    stranger.connect(f"{listener.directory}/hub")
    stranger.send(hello)
    with pytest.raises(OSError, match=r"0 ranks have connected, expected 1"):
        listener.accept(1, "right")
    stranger.close()
    own = connect_on_host(listener.directory, "right", 1, 0)
    (connection,) = listener.accept(1, "right").values()
    connection.close()
    own.close()
    listener.close()


def test_a_directory_of_another_file_system_is_named_with_the_way_out() -> None:
    with pytest.raises(OSError, match=r"^/none of rank 0 is not visible here; .* for temporary files \(TMPDIR\)$"):
        connect_on_host("/none", "", 1, 0)


@pytest.mark.parametrize("place", ["long", "read-only or full"])
def test_a_hub_listens_whatever_the_directory_for_temporary_files(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``long``: an address of a socket has 108 bytes at most. Only its user can enter the directory."""
    long = tmp_path.joinpath("x" * 100, "y" * 100)
    long.mkdir(parents=True)
    monkeypatch.setattr(tempfile, "tempdir", str(long) if place == "long" else str(tmp_path / "missing"))
    umask = os.umask(0)
    try:
        listener = HostListener(2)
    finally:
        os.umask(umask)
    directory = Path(listener.directory)
    assert directory.parent == (long if place == "long" else Path("/dev/shm"))
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    leaf = connect_on_host(listener.directory, "token", 1, 0)
    listener.accept(1, "token")[1].close()
    leaf.close()
    listener.close()
    assert not directory.exists()


@given(st.lists(st.tuples(SERIALS, st.booleans()), min_size=1, max_size=4))
def test_segments_arrive_as_they_were(rows: list[tuple[list[int], bool]]) -> None:
    encoded = [encode_segments(SegmentIds(tuple(serials), spare)) for serials, spare in rows]

    assert {len(row) for row in encoded} == {56}
    for found, (serials, spare) in zip(decode_segments(b"".join(encoded)), rows, strict=True):
        assert found == (tuple(serials) + (0,) * (MAX_SEGMENTS - len(serials)), spare)


def test_where_no_socket_can_be_made_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(star_sockets, "_PLACES", (None, str(tmp_path)))
    with refused("bind", PermissionError(1, "Operation not permitted")), pytest.raises(PermissionError):
        HostListener(2)
    assert list(tmp_path.iterdir()) == []


def test_a_last_message_is_read_behind_the_error_of_a_connection_closed_with_unread_messages() -> None:
    """Between two slices the rank that only had not read was blamed."""
    with _stars(3) as (hub, first, second):
        first._send(0, b"R", b"row", _ignore)
        second.close()
        with pytest.raises(StarLostError, match="rank 2"):
            hub._receive(2, b"R", 3, _ignore)
        hub.close()

        def read_after_a_slice() -> None:
            first._after_slice(_ignore)
            first.exchange([b"row"], _ignore)

        with pytest.raises(StarLostError, match="rank 2"):
            read_after_a_slice()


@pytest.mark.parametrize("row", [b"", b"ro", b"rows"])
def test_a_row_of_another_length_is_no_row_and_its_rank_is_lost(row: bytes) -> None:
    with _stars(2) as (hub, leaf):
        leaf._send(0, b"R", row, _ignore)
        with pytest.raises(StarLostError, match="rank 1"):
            hub.exchange([b"row"], _ignore)


def test_a_full_queue_of_the_listener_is_an_error_and_not_a_wait() -> None:
    listener = HostListener(1)
    waiting = []
    with pytest.raises(BlockingIOError):
        waiting.extend(connect_on_host(listener.directory, "", 1, 0) for _ in range(10))
    for connection in waiting:
        connection.close()
    listener.close()


def test_a_fast_timer_does_not_keep_a_wait_from_its_end() -> None:
    """A receive with a time limit began again after every signal, and a wait under a profiler never ended."""
    signals, slices = 0, 0

    def count_signal(*_: object) -> None:
        nonlocal signals
        signals += 1
        assert signals < 200, "no slice ended within 4 s"

    def count_slice() -> None:
        nonlocal slices
        slices += 1
        if slices == 3:
            raise TimeoutError

    before = signal.signal(signal.SIGALRM, count_signal)
    signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
    try:
        with _stars(2) as (hub, _), pytest.raises(TimeoutError):
            hub.barrier(count_slice)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def _give_up() -> None:
    raise TimeoutError


def test_a_send_to_a_rank_that_does_not_read_can_be_given_up() -> None:
    with _stars(2) as (hub, _), pytest.raises(TimeoutError):
        hub._send(1, b"B", bytes(2**24), _give_up)


# Cards of ranks: which ranks form a host, and why a group uses gloo alone

APART = {
    "boot": "they run on different hosts",
    "network": "they run in different network namespaces",
    "user": "they belong to different users",
}


def test_one_host_has_one_boot_one_network_and_one_user() -> None:
    card = {**own_card(), "hub": 0}

    assert why_gloo([card, card]) == ""
    assert find_hosts([card, card]) == [(0, 1)]
    for fact, meaning in APART.items():
        apart = [card, card, {**card, fact: "x", "hub": 2}]
        assert find_hosts(apart) == [(0, 1), (2,)]
        assert why_gloo(apart) == f"ranks 0 and 2: {meaning}, with unequal numbers of ranks, 1 to 2"
    assert why_gloo([card, {"problem": "no /proc"}]) == "rank 1: no /proc"
    for hosts in (("a",), ("a", "b")):
        cards = [{**card, "boot": host, "hub": hosts.index(host)} for host in hosts * (MAX_RANKS + 1)]
        assert why_gloo(cards) == "257 ranks on a host, more than 256"
