"""Are the forked children of a script children like any other?"""

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.forked_children import _ENVIRON
from tests.helpers.scripts import fork_script, fork_torchrun

pytestmark = pytest.mark.skipif(not _ENVIRON.exists(), reason="needs Linux")

BEFORE = """
import json, os, signal, subprocess, sys
def start(*command, **options):
    return subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, text=True, **options)
def said(*command, **options):
    return json.loads(start(*command, **options).communicate()[0])
"""
LOADED = "import sys, json; print(json.dumps('torch' in sys.modules))"


def _said(program: str, **options: Any) -> Any:
    """What a script prints as JSON whose children are forked."""
    run = fork_script("-c", BEFORE + program, forks_children=True, **options)
    assert (run.returncode, run.stderr) == (0, "")
    return json.loads(run.stdout)


def test_a_child_has_torch_loaded_and_is_a_child_of_the_script() -> None:
    child = "import json, os, sys; print(json.dumps(['torch' in sys.modules, os.getppid(), os.getpid()]))"
    program = f"process = start('-c', {child!r}); told = json.loads(process.communicate()[0])"

    loaded, parent, own, script, known = _said(f"{program}; print(json.dumps([*told, os.getpid(), process.pid]))")

    assert loaded
    assert (parent, own) == (script, known)


ENDS = {
    "pass": 0,
    "import sys; sys.exit(3)": 3,
    "import sys; sys.exit(-1)": 255,
    "import sys; sys.exit('a message')": 1,
    "raise ValueError": 1,
    "import os; os._exit(5)": 5,
    "raise KeyboardInterrupt": -signal.SIGINT,
    "import os; os.abort()": -signal.SIGABRT,
    "import os, signal; os.kill(os.getpid(), signal.SIGKILL)": -signal.SIGKILL,
}


def test_a_child_ends_with_the_status_that_it_would_have_as_a_new_python() -> None:
    program = f"""
processes = [start("-c", code, stderr=subprocess.DEVNULL) for code in {list(ENDS)!r}]
[process.communicate() for process in processes]
print(json.dumps([process.returncode for process in processes]))
"""
    assert _said(program) == list(ENDS.values())


WAITS = "import time; print('ready', flush=True); time.sleep(60)"
HEARS = "import signal; signal.signal(signal.SIGTERM, lambda *_: exit(7))\n" + WAITS


@pytest.mark.parametrize(
    "child, number, status",
    [
        (WAITS, signal.SIGTERM, -signal.SIGTERM),
        (WAITS, signal.SIGINT, -signal.SIGINT),
        (WAITS, signal.SIGKILL, -signal.SIGKILL),
        (HEARS, signal.SIGTERM, 7),
    ],
)
@pytest.mark.parametrize("whom", ["kill", "killpg"])
def test_signals_reach_a_child_and_its_group(child: str, number: int, status: int, whom: str) -> None:
    program = f"""
process = start("-c", {child!r}, stderr=subprocess.DEVNULL, start_new_session={whom == "killpg"})
process.stdout.readline()
os.{whom}(process.pid, {int(number)})
process.communicate()
print(json.dumps(process.returncode))
"""
    assert _said(program) == status


@pytest.mark.parametrize(
    "how",
    [
        "[sys.executable, '-I', '-c', code], {}",  # options of the interpreter
        "[sys.executable, '-c', code], {'env': {**os.environ, 'PYTHONPATH': '/'}}",
        "[sys.executable, '-c', code], {'pass_fds': (0,)}",
        "['sh', '-c', 'exec $0 -c \"$1\"', sys.executable, code], {}",
    ],
)
def test_what_needs_a_new_process_gets_one(how: str) -> None:
    program = f"""
code = {LOADED!r}
command, options = {how}
print(json.dumps(json.loads(subprocess.run(command, capture_output=True, text=True, **options).stdout)))
"""
    assert _said(program) is False


RANK = """
import sys
is_forked = "torch" in sys.modules
shown = open("/proc/self/environ").read().split("\\0")
is_shown = all(any(word.startswith(name) for word in shown) for name in ("GIVEN=1", "RANK=", "TORCHELASTIC_RUN_ID="))
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([dist.get_rank() + 1])
dist.all_reduce(total)
open(sys.argv[1] + os.environ["RANK"], "w").write(f"{is_forked} {is_shown} {total.item()}")
dist.destroy_process_group()
sys.exit(int(sys.argv[2]))
"""


@pytest.mark.parametrize("status", [0, 3])
def test_ranks_of_torchrun_are_forked_and_their_failure_is_that_of_torchrun(status: int, tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(RANK)

    run = fork_torchrun(2, str(script), f"{tmp_path}/", str(status), environment={"GIVEN": "1"})

    assert [(tmp_path / f"{rank}").read_text() for rank in range(2)] == ["True True 3"] * 2
    assert (run.returncode, "exitcode  : 3" in run.stderr) == ((1, True) if status else (0, False)), run.stderr
