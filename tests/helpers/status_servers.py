"""A status server in a process of its own, also in namespaces of its own."""

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from legacy_ddp._watchdog.client import decode_endpoint

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


class Listener:
    """A process with a status server. ``pid``: outside of its namespaces."""

    def __init__(self, process: "subprocess.Popen[str]", line: str) -> None:
        endpoint = decode_endpoint(1, line.encode())
        assert endpoint is not None
        self.process, self.line, self.endpoint = process, line, endpoint
        self.pid = _innermost_child(process.pid)


class Observer:
    """A process that looks at servers, perhaps from other namespaces."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def look(self, listener: Listener) -> tuple[str, str, str]:
        """The state in /proc, the state by two signs, and the outcome of a request."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(listener.line.strip(), file=self._process.stdin, flush=True)
        visible, state, outcome = json.loads(self._process.stdout.readline())
        return visible, state, outcome


@contextmanager
def a_listener(*prefix: str) -> Iterator[Listener]:
    """A listener, started by the command ``prefix``."""
    with _python(prefix, _LISTENER) as process:
        assert process.stdout is not None
        yield Listener(process, process.stdout.readline())


@contextmanager
def an_observer(*prefix: str) -> Iterator[Observer]:
    """An observer, started by the command ``prefix``."""
    with _python(prefix, _OBSERVER) as process:
        yield Observer(process)


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
