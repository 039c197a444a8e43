"""The star of a host in one process: connections, rows, barriers, descriptors, and what is told of a lost rank."""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from legacy_ddp._transport.host_card import new_name, own_card, why_apart
from legacy_ddp._transport.host_row import MAX_SEGMENTS, SegmentIds, decode_host_rows, encode_host_row
from legacy_ddp._transport.star import Star, StarLostError
from legacy_ddp._transport.star_setup import StarListener, connect

T = TypeVar("T")
WORDS = st.lists(st.integers(-(2**63), 2**63 - 1), min_size=16, max_size=16)
SERIALS = st.lists(st.integers(0, 2**32 - 1), max_size=MAX_SEGMENTS)


@contextmanager
def _stars(size: int) -> Iterator[list[Star]]:
    name, token = new_name(), new_name()
    listener = StarListener(name, size)
    leaves = [connect(name, token, rank, size) for rank in range(1, size)]
    stars = [listener.accept(size, token), *leaves]
    listener.close()
    yield stars
    for star in stars:
        star.close()


def _on_all(stars: list[Star], act: Callable[[Star], T]) -> list[T | str]:
    """What ``act`` gives on every rank, or the error as text; each rank in a thread of its own."""

    def run(star: Star) -> T | str:
        try:
            return act(star)
        except StarLostError as error:
            star.close()
            return str(error)

    with ThreadPoolExecutor(len(stars)) as threads:
        return list(threads.map(run, stars))


def _ignore() -> None:
    pass


@pytest.mark.parametrize("size", [2, 3, 8])
def test_every_rank_gets_the_rows_of_all_in_their_order_again_and_again(size: int) -> None:
    with _stars(size) as stars:
        for call in range(3):
            expected = [f"{call} {rank}".encode() for rank in range(size)]
            seen = _on_all(stars, lambda star, rows=expected: star.exchange(rows[star.rank], _ignore))
            assert seen == [expected] * size


def test_nobody_leaves_a_barrier_before_all_have_arrived() -> None:
    arrived = []

    def arrive(star: Star) -> int:
        time.sleep(0.05 * star.rank)  # at different times
        arrived.append(star.rank)
        star.barrier(_ignore)
        return len(arrived)

    with _stars(3) as stars:
        assert _on_all(stars, arrive) == [3, 3, 3]


@pytest.mark.parametrize("lost", [0, 1, 2])
@pytest.mark.parametrize("operation", ["exchange", "barrier"])
def test_all_others_are_told_the_rank_whose_connection_closed(lost: int, operation: str) -> None:
    def act(star: Star) -> None:
        if star.rank == lost:
            star.close()
            return
        if operation == "barrier":
            star.barrier(_ignore)
        else:
            star.exchange(b"row", _ignore)

    with _stars(3) as stars:
        told = _on_all(stars, act)
    assert [text for rank, text in enumerate(told) if rank != lost] == [f"connection to rank {lost} lost"] * 2


def test_a_rank_that_waits_for_another_still_sees_the_end_of_a_third() -> None:
    """The hub reads from one connection at a time."""
    is_over = threading.Event()

    def act(star: Star) -> None:
        if star.rank == 1:
            is_over.wait(10.0)
        elif star.rank == 2:
            star.close()
        else:
            star.barrier(_ignore)

    with _stars(3) as stars, ThreadPoolExecutor(2) as threads:
        late = threads.submit(act, stars[1])
        act(stars[2])
        with pytest.raises(StarLostError, match="connection to rank 2 lost"):
            stars[0].barrier(_ignore)
        is_over.set()
        late.result()


def test_a_waiting_rank_can_leave_after_every_slice() -> None:
    calls = []

    def leave_at_the_second() -> None:
        calls.append(time.monotonic())
        if len(calls) == 2:
            raise KeyboardInterrupt

    with _stars(2) as stars, pytest.raises(KeyboardInterrupt):
        stars[1].barrier(leave_at_the_second)
    assert calls[1] - calls[0] >= 0.05


def test_descriptors_of_every_rank_reach_all_others() -> None:
    """Rank 1 has none, the others two and one; each is a file with the rank in it."""
    counts = [2, 0, 1]
    files = {rank: [os.memfd_create(f"test {rank}") for _ in range(count)] for rank, count in enumerate(counts)}
    for rank, descriptors in files.items():
        for index, descriptor in enumerate(descriptors):
            os.write(descriptor, f"{rank}.{index}".encode())

    def share(star: Star) -> dict[int, list[bytes]]:
        received = star.share_descriptors(files[star.rank], counts, _ignore)
        content = {rank: [os.pread(each, 10, 0) for each in found] for rank, found in received.items()}
        for descriptor in (each for found in received.values() for each in found):
            os.close(descriptor)
        return content

    with _stars(3) as stars:
        told = _on_all(stars, share)
    everything = {0: [b"0.0", b"0.1"], 2: [b"2.0"]}
    assert told == [{rank: value for rank, value in everything.items() if rank != own} for own in range(3)]
    for descriptor in (each for descriptors in files.values() for each in descriptors):
        os.close(descriptor)


@pytest.mark.parametrize("hello", [b"", b"1 wrong", b"1", b"one right", b"7 right", b"0 right", b"\xff\xfe"])
def test_a_stranger_is_not_taken_for_a_rank(hello: bytes) -> None:
    name = new_name()
    listener = StarListener(name, 2)
    stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    stranger.connect(f"\0legacy_ddp-{name}")
    stranger.send(hello)
    with pytest.raises(OSError, match=r"no connection from ranks \[1\]"):
        listener.accept(2, "right")
    stranger.close()
    own = connect(name, "right", 1, 2)
    listener.accept(2, "right").close()
    own.close()
    listener.close()


def test_nobody_listens_under_an_unknown_name() -> None:
    with pytest.raises(ConnectionRefusedError):
        connect(new_name(), "", 1, 2)


@given(st.lists(st.tuples(SERIALS, st.booleans(), WORDS), min_size=1, max_size=4))
def test_a_row_arrives_as_it_was(rows: list[tuple[list[int], bool, list[int]]]) -> None:
    sent = [
        encode_host_row(SegmentIds(tuple(serials), spare), torch.tensor(words, dtype=torch.int64))
        for serials, spare, words in rows
    ]
    segments, headers = decode_host_rows(sent)

    assert {len(row) for row in sent} == {184}
    assert headers.tolist() == [words for _, _, words in rows]
    for found, (serials, spare, _) in zip(segments, rows, strict=True):
        assert found == (tuple(serials) + (0,) * (MAX_SEGMENTS - len(serials)), spare)


def test_one_host_has_one_boot_one_network_and_one_user() -> None:
    card = own_card()
    apart = {
        "boot": "they run on different hosts",
        "network": "they run in different network namespaces",
        "user": "they belong to different users",
    }

    assert why_apart([card, own_card()]) == ""
    for fact, meaning in apart.items():
        assert why_apart([card, card, {**card, fact: "x"}]) == f"ranks 0 and 2: {meaning}"
    assert why_apart([card, {"problem": "no /proc"}]) == "rank 1: no /proc"


def test_a_last_message_is_read_behind_the_error_of_a_connection_closed_with_unread_messages() -> None:
    """Between two slices the rank that only had not read was blamed."""
    with _stars(3) as (hub, first, second):
        first._send(0, b"Rrow")
        second.close()
        with pytest.raises(StarLostError, match="rank 2"):
            hub._await_message(2, b"R", 3, _ignore)
        hub.close()
        with pytest.raises(StarLostError, match="rank 2"):
            _read_after_a_slice(first)


def _read_after_a_slice(star: Star) -> None:
    star._after_slice(_ignore)
    star.exchange(b"row", _ignore)


def test_a_full_queue_of_the_listener_is_an_error_and_not_a_wait() -> None:
    name = new_name()
    listener = StarListener(name, 1)
    waiting = []
    with pytest.raises(BlockingIOError):
        waiting.extend(connect(name, "", 1, 2) for _ in range(10))
    for star in waiting:
        star.close()
    listener.close()


def test_received_descriptors_are_closed_in_programs_that_the_process_starts() -> None:
    file = os.memfd_create("test")
    with _stars(2) as stars:
        received = _on_all(stars, lambda star: star.share_descriptors([file] if star.rank else [], [0, 1], _ignore))
    (descriptor,) = received[0][1]
    assert not os.get_inheritable(descriptor)
    os.close(descriptor)
    os.close(file)
