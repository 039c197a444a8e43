"""Forked children of a script are children like any other."""

import json
import signal
import sys
from pathlib import Path

import pytest

from tests.helpers.scripts import fork_script, fork_torchrun

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")

LOADED = "import sys, json; print(json.dumps('torch' in sys.modules))"
# What ends a child, and its status.
ENDS = {
    "pass": 0,
    "import sys; sys.exit(3)": 3,
    "import sys; sys.exit(-1)": 255,
    "import sys; sys.exit('a message')": 1,
    "raise ValueError": 1,
    "import os; os._exit(5)": 5,
    "raise KeyboardInterrupt": -signal.SIGINT,
    "import os; os.abort()": -signal.SIGABRT,
}
WAITS = "import time; print('ready', flush=True); time.sleep(60)"
HEARS = "import signal; signal.signal(signal.SIGTERM, lambda *_: exit(7))\n" + WAITS
# A child, a signal to it alone or to its group, and its status.
SIGNALLED = [
    (WAITS, "kill", signal.SIGTERM, -signal.SIGTERM),
    (WAITS, "kill", signal.SIGKILL, -signal.SIGKILL),
    (WAITS, "killpg", signal.SIGINT, -signal.SIGINT),
    (HEARS, "killpg", signal.SIGTERM, 7),
]
# What a forked child cannot be: it is a new Python, without torch.
NEW = [
    "[sys.executable, '-I', '-c', code], {}",  # options of the interpreter
    "[sys.executable, '-c', code], {'env': {**os.environ, 'PYTHONPATH': '/'}}",
    "[sys.executable, '-c', code], {'pass_fds': (0,)}",
    "['sh', '-c', 'exec $0 -c \"$1\"', sys.executable, code], {}",
]
PROGRAM = f"""
import json, os, signal, subprocess, sys
code = {LOADED!r}

def start(*command, **options):
    return subprocess.Popen([sys.executable, "-c", *command], stdout=subprocess.PIPE, text=True, **options)

def parent():
    process = start("import json, os, sys; print(json.dumps(['torch' in sys.modules, os.getppid(), os.getpid()]))")
    return json.loads(process.communicate()[0]) == [True, os.getpid(), process.pid]

def ends(codes):
    processes = [start(code, stderr=subprocess.DEVNULL) for code in codes]
    [process.communicate() for process in processes]
    return [process.returncode for process in processes]

def signalled(program, whom, number):
    process = start(program, stderr=subprocess.DEVNULL, start_new_session=whom == "killpg")
    process.stdout.readline()
    getattr(os, whom)(process.pid, number)
    process.communicate()
    return process.returncode

def loaded(command, options):
    return json.loads(subprocess.run(command, capture_output=True, text=True, **options).stdout)

print(json.dumps([
    parent(),
    ends({[*ENDS]!r}),
    [signalled(*given) for given in {[(child, whom, int(number)) for child, whom, number, _ in SIGNALLED]!r}],
    [{", ".join(f"loaded({how})" for how in NEW)}],
]))
"""


def test_a_child_of_the_script_has_torch_loaded_ends_as_a_new_python_would_and_hears_signals() -> None:
    run = fork_script("-c", PROGRAM, forks_children=True)

    assert (run.returncode, run.stderr) == (0, "")
    is_own_child, ends, signalled, loaded = json.loads(run.stdout)
    assert is_own_child
    assert dict(zip(ENDS, ends, strict=True)) == ENDS
    assert signalled == [status for *_, status in SIGNALLED]
    assert dict(zip(NEW, loaded, strict=True)) == dict.fromkeys(NEW, False)


RANK = """
import sys
is_forked = "torch" in sys.modules
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([dist.get_rank() + 1])
dist.all_reduce(total)
open(sys.argv[1] + os.environ["RANK"], "w").write(f"{is_forked} {os.environ['GIVEN']} {total.item()}")
dist.destroy_process_group()
sys.exit(3)
"""


def test_ranks_of_torchrun_are_forked_and_their_failure_is_that_of_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(RANK)

    run = fork_torchrun(2, str(script), f"{tmp_path}/", environment={"GIVEN": "1"})

    assert [(tmp_path / f"{rank}").read_text() for rank in range(2)] == ["True 1 3"] * 2
    assert (run.returncode, "exitcode  : 3" in run.stderr) == (1, True), run.stderr
