"""Cost of the looks outside of calls, and the time of ``legacy-ddp watch``.

    python benchmarks/bench_watch.py [--json FILE]

a look        the thread of the watchdog looks at a training thread that waits below a stack of 30 frames: processor
              time of a look, and what it is in a second with warn_after_seconds=60
the command   a new process of `legacy-ddp watch`, from its start to its end. 64 ranks on 8 claimed hosts are status
              servers in this process, with real sockets: they answer in turn, and on real hosts at the same time

Aims: looks <= 50 µs in a second; the command <= 3 s, with lines of at most 80 columns.
"""

import argparse
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch  # noqa: F401 - as in a training
from _interrupt import quiet_interrupt
from _measure import machine, parse, save, verdicts

from legacy_ddp import _explain
from legacy_ddp._watchdog.exchange import LocalAnswers
from legacy_ddp._watchdog.process import process_activity
from legacy_ddp._watchdog.server import BackgroundTasks, StatusServer
from legacy_ddp._watchdog.stall import LOOKS, StallWatch
from legacy_ddp._watchdog.status import GroupView, RankStatus, own_status

WARN_SECONDS = 60.0
FRAMES = 30
PAUSE_SECONDS = 0.02
RANKS, RANKS_PER_HOST = 64, 8
MISSING_RANK = 13
AIMS = {"looks in a second, µs": 50.0, "legacy-ddp watch of 64 ranks, s": 3.0, "columns": 80.0}


def main(given: Sequence[str] | None = None) -> None:
    """Print the figures with their aims."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments = parse(parser, given)
    _explain.install()
    looks = arguments.repeats * arguments.rounds
    look_us = look_microseconds(looks)
    seconds, columns = command_seconds(arguments.repeats)
    found = {
        "looks in a second, µs": LOOKS / WARN_SECONDS * look_us,
        "legacy-ddp watch of 64 ranks, s": seconds,
        "columns": float(columns),
    }
    print(f"a look takes {look_us:.0f} µs of a processor, median of {looks}")
    for name, verdict in verdicts(found, AIMS).items():
        print(f"{name:40}{found[name]:10.3g}   aim {AIMS[name]:g}: {verdict}", flush=True)
    save(arguments, machine(), {"look_us": look_us, **found})


def look_microseconds(count: int) -> float:
    """Processor time of a look at a thread that waits, median."""
    is_over, stands = threading.Event(), threading.Event()

    def wait(depth: int) -> None:
        if depth:
            wait(depth - 1)
        else:
            process_activity.enter("user code")
            stands.set()
            is_over.wait()

    thread = threading.Thread(target=wait, args=(FRAMES,))
    thread.start()
    stands.wait()
    seconds = []
    for _ in range(count):
        watch = StallWatch(WARN_SECONDS)
        watch.look()  # the first, to which the second is compared
        watch._looks_at = 0.0
        time.sleep(PAUSE_SECONDS)  # between two looks of a training other code fills the caches of the processor
        start = time.thread_time()
        watch.look()
        seconds.append(time.thread_time() - start)
    is_over.set()
    thread.join()
    return 1e6 * statistics.median(seconds)


def command_seconds(count: int) -> tuple[float, int]:
    """Seconds of the command, median, and the columns of its widest line."""
    status = {
        is_missing: RankStatus(6 - is_missing, f"all_reduce() call {6 - is_missing}", in_call=not is_missing)
        for is_missing in (False, True)
    }
    status[False].activity.enter("agree", status[False].call)
    servers: list[StatusServer] = []
    view: GroupView | None = None
    background = BackgroundTasks(0)

    def answer_locally(connection: Any, message: Any) -> None:
        assert view is not None
        LocalAnswers(view, background, WARN_SECONDS).take(connection, message)

    for rank in range(RANKS):
        own = status[rank == MISSING_RANK]
        on_local = answer_locally if rank == 0 else None
        servers.append(StatusServer(rank, lambda _, own=own: own_status(own, []), lambda *_: None, on_local=on_local))
    peers = [_claim_host(server.endpoint, rank) for rank, server in enumerate(servers)]
    view = GroupView(peers[0], peers, range(RANKS), RANKS)
    try:
        for server in servers:
            server.start(None)
        seconds, text = [], ""
        command = [sys.executable, "-m", "legacy_ddp", "watch", str(os.getpid())]  # other jobs may run on this machine
        for _ in range(count):
            start = time.perf_counter()
            text = subprocess.run(command, capture_output=True, text=True).stdout
            seconds.append(time.perf_counter() - start)
        assert f"missing rank {MISSING_RANK} " in " ".join(text.split()), text
        return statistics.median(seconds), max(map(len, text.splitlines()))
    finally:
        for server in servers:
            server.close("")
        background.close()


def _claim_host(endpoint: Any, rank: int) -> Any:
    host = f"node-{rank // RANKS_PER_HOST}"
    return replace(endpoint, identity=replace(endpoint.identity, host=host))


if __name__ == "__main__":
    with quiet_interrupt():
        main()
