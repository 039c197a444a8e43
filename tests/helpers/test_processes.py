"""What is read from /proc of a child."""

import os
import subprocess
import sys

from tests.helpers import processes


def test_a_child_is_found_with_its_state_and_its_environment() -> None:
    mark = f"PROCESSES_TEST={os.getpid()}"
    program = [sys.executable, "-S", "-c", "input()"]
    with subprocess.Popen(program, stdin=subprocess.PIPE, env=dict([mark.split("=")])) as child:
        assert child.pid in processes.children()
        assert processes.with_variable(mark)[child.pid].startswith(sys.executable.encode())
        assert processes.state(child.pid) in "RSD"
    assert processes.state(child.pid) == "Z"
    assert child.pid not in processes.with_variable(mark)
