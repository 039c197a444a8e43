"""The watchdog of a process that may start no more threads, or open no more descriptors."""

import json
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from legacy_ddp import Checks
from legacy_ddp._watchdog.client import DEAD, Outcome, own_identity, request_all, state_of
from legacy_ddp._watchdog.server import StatusServer
from tests.helpers.listening import WARN_SECONDS, Training, listen, said
from tests.helpers.paths import ROOT
from tests.helpers.ranks import run_ranks
from tests.helpers.small_models import error_of, wrap

# More than the address space holds: Python's threads cannot be started, as at a limit of processes; those of C++ can.
TOO_LARGE_STACK_BYTES = 2**47


@contextmanager
def _no_more_threads() -> Iterator[None]:
    threading.stack_size(TOO_LARGE_STACK_BYTES)
    try:
        yield
    finally:
        threading.stack_size(0)


# Threads


def test_many_ranks_answer_though_no_thread_can_be_started() -> None:
    servers = [StatusServer(rank, lambda message: {"heard": message["request"]}, print) for rank in range(3)]
    for server in servers:
        server.start(None)

    with _no_more_threads():
        answers = request_all([server.endpoint for server in servers], {"request": "status"}, own_identity())

    assert answers == dict.fromkeys(range(3), (Outcome.ANSWERED, {"heard": "status"}))
    for server in servers:
        server.close("")


def _late_without_threads(rank: int, folder: Path) -> list[float]:
    training = Training(folder)
    weights = []
    with _no_more_threads():
        if rank == 1:
            time.sleep(2.5 * WARN_SECONDS)  # being late is the fault
        for _ in range(2):
            training.step()
            weights.append(training.model.module.weight.sum().item())
    return weights


def test_a_warning_that_falls_due_where_no_thread_can_be_started_is_given_and_training_goes_on(tmp_path: Path) -> None:
    results = run_ranks(partial(listen, _late_without_threads, tmp_path), 2)

    assert results[0] == results[1]
    first, *_ = told = said(tmp_path, 0)
    assert "all_reduce() call 3, phase agree: ranks have waited for" in first
    assert "stack of rank 1, innermost last:" in "\n".join(told)
    assert "Traceback" not in "\n".join(told)


def _constructs(rank: int, folder: str) -> tuple[object, object]:
    if rank == 1:
        threading.stack_size(TOO_LARGE_STACK_BYTES)
    first = error_of(wrap, checks=Checks(report_dir=folder), timeout_seconds=20.0)
    threading.stack_size(0)
    return first, error_of(wrap, checks=Checks(report_dir=folder))


def test_a_watchdog_that_cannot_be_started_on_one_rank_is_the_same_error_on_all_and_the_group_stays_usable(
    tmp_path: Path,
) -> None:
    results = run_ranks(_constructs, 2, str(tmp_path))

    for (kind, text), later in results:
        assert kind == "PeerError"
        assert "rank 1" in text
        assert "can't start new thread" in text
        assert later is None
    assert list(tmp_path.iterdir()) == []


# Descriptors


def test_a_process_that_cannot_be_looked_at_for_want_of_a_descriptor_is_not_called_dead() -> None:
    alive = own_identity()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        state = state_of(alive)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)

    assert state != DEAD


_AT_THE_LIMIT = """
import json, os, resource, socket, threading
from legacy_ddp._watchdog.server import StatusServer
from legacy_ddp._watchdog.client import encode_message

tries = 0
def count(frame, event, _):
    global tries
    tries += event == "call" and frame.f_code.co_name == "_accept"

threading.setprofile(count)
server = StatusServer(0, lambda message: {"heard": message["request"]}, print)
server.start(None)
first, second = socket.socket(), socket.socket()
limits = resource.getrlimit(resource.RLIMIT_NOFILE)
free = os.dup(0)  # the next number that would be given
os.close(free)
resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
first.connect(server.endpoint.addresses[-1])
first.sendall(encode_message(server.endpoint, {"request": "status"}))
first.settimeout(0.5)
try:
    first.recv(100)
except TimeoutError:
    pass
counted = tries
resource.setrlimit(resource.RLIMIT_NOFILE, limits)
first.settimeout(10.0)
answer = first.recv(100).decode()
resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
second.connect(server.endpoint.addresses[-1])
server.close("")
print(json.dumps([counted, answer, threading.active_count()]))
"""


def test_a_connection_that_waits_at_the_limit_of_descriptors_costs_a_few_tries_and_is_answered_later() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(
        [sys.executable, "-c", _AT_THE_LIMIT], env=environment, capture_output=True, text=True, timeout=60, check=False
    )

    assert ran.stderr == ""
    tries, answer, threads = json.loads(ran.stdout)
    assert 1 <= tries <= 20
    assert json.loads(answer) == {"heard": "status"}
    assert threads == 1  # the main one: closing ended the other
