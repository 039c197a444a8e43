"""A status server in a process of its own, also in namespaces of its own."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from legacy_ddp._watchdog.client import decode_endpoint
from legacy_ddp._watchdog.server import StatusServer
from legacy_ddp._watchdog.status import RankStatus, own_status

# Prints its endpoint and waits; it can be stopped and killed.
_LISTENER = """
import sys
from legacy_ddp._watchdog.server import StatusServer
server = StatusServer(1, lambda message: {"heard": message["request"]}, print)
server.start(None)
print(server.endpoint.encode().decode(), flush=True)
sys.stdin.read()
server.close("left")
"""
# A request for each line: the endpoint of a server. Prints the state in /proc, the state by two signs, and the outcome.
_OBSERVER = """
import json, sys
from legacy_ddp._watchdog.client import decode_endpoint, request, state_of
from legacy_ddp._watchdog.process import own_identity, visible_state
for line in sys.stdin:
    peer = decode_endpoint(1, line.encode())
    outcome, _ = request(peer, {"request": "status"}, own_identity())
    print(json.dumps([visible_state(peer.identity), state_of(peer), outcome]), flush=True)
"""


class Answers:
    """A server in this process whose n-th answer is ``status`` with ``changes[n]``, ``delays[n]`` seconds late.

    ``answer_in_place``: of all these answers.
    """

    def __init__(
        self, rank: int, status: RankStatus | None = None, changes: Mapping[int, dict[str, Any]] = MappingProxyType({})
    ) -> None:
        self.count = 0
        self.changes = changes
        self.delays: dict[int, float] = {}
        self.on_answer: Callable[[], object] = lambda: None
        self.answer_in_place: dict[str, Any] | None = None
        self._status = status or RankStatus()
        self.server = StatusServer(rank, self._answer, lambda _rank, _exit_reason: None)
        self.server.start(None)

    def _answer(self, _message: Any) -> dict[str, Any]:
        self.count += 1
        time.sleep(self.delays.get(self.count, 0.0))
        self.on_answer()
        if self.answer_in_place is not None:
            return self.answer_in_place
        return {**own_status(self._status, []), **self.changes.get(self.count, {})}


class Listener:
    """A process with a status server. ``pid``: outside of its namespaces."""

    def __init__(self, process: "subprocess.Popen[str]", line: str) -> None:
        self.process, self.line, self.endpoint = process, line, decode_endpoint(1, line.encode())
        self.pid = _innermost_child(process.pid)


@contextmanager
def a_listener(*prefix: str) -> Iterator[Listener]:
    with _python(prefix, _LISTENER) as process:
        yield Listener(process, process.stdout.readline())


@contextmanager
def an_observer(*prefix: str) -> Iterator[Callable[[Listener], tuple[str, str, str]]]:
    """A process that looks at listeners, perhaps from other namespaces, started by the command ``prefix``.

    Yields the look: the state in /proc, the state by two signs, and the outcome of a request.
    """
    with _python(prefix, _OBSERVER) as process:

        def look(listener: Listener) -> tuple[str, str, str]:
            print(listener.line.strip(), file=process.stdin, flush=True)
            visible, state, outcome = json.loads(process.stdout.readline())
            return visible, state, outcome

        yield look


@contextmanager
def _python(prefix: Sequence[str], code: str) -> Iterator["subprocess.Popen[str]"]:
    command = [*prefix, sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def _innermost_child(pid: int) -> int:
    """The process at the end of a chain of children: ``unshare --fork`` has one."""
    while children := Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        pid = int(children[0])
    return pid
