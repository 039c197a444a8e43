"""Samples of the activity of this process."""

import ast
import dis
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

from legacy_ddp._ranks.call import Call
from legacy_ddp._watchdog import USER_CODE, process_activity
from legacy_ddp._watchdog.process import AROUND_USER_CODE, Activity, Sample
from legacy_ddp._watchdog.stall import _called, _has_moved, _Seen, _waits_for_work
from tests.helpers.paths import ROOT
from tests.helpers.rank_faults import do_when
from tests.helpers.ranks import run_ranks
from tests.helpers.small_models import add_gradients, wrap


class _Sampler(nn.Module):
    """Samples this process from another thread, in forward, backward and between."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.seen: dict[str, Sample] = {}

    def take(self, name: str) -> None:
        thread = threading.Thread(target=lambda: self.seen.setdefault(name, process_activity.sample()))
        thread.start()
        thread.join()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.take("forward")
        y = x * self.weight
        y.register_hook(lambda _: self.take("backward"))
        return y.sum()


@pytest.mark.usefixtures("alone")
def test_forward_backward_and_what_comes_between_are_told_apart() -> None:
    model = wrap(checks="off")
    model.module = sampler = _Sampler()

    sampler.take("before")
    loss = model(torch.ones(2))
    sampler.take("after")
    loss.backward()
    with torch.no_grad():
        sampler.take("evaluation")
    with pytest.raises(RuntimeError):
        model(torch.ones(7))
    sampler.take("error in forward")

    phases = {name: sample.phase for name, sample in sampler.seen.items()}
    assert phases == {
        "before": "user code",
        "forward": "forward",
        "after": "user code",
        "backward": "backward",
        "evaluation": "user code",
        "error in forward": "user code",
    }
    assert sampler.seen["after"].changes > sampler.seen["forward"].changes > sampler.seen["before"].changes
    for name in sampler.seen:
        assert any(frame.endswith(" in take") for frame in sampler.seen[name].stack)


def _phases_of_a_call(rank: int) -> tuple[list[str], str, str]:
    model = wrap()
    said: list[str] = []
    add_gradients(model, 1.0)

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code is Activity.enter.__code__ and frame.f_locals["self"] is process_activity:
            said.append(f"{frame.f_locals['call']}: {frame.f_locals['phase']}")
        if event == "call" and frame.f_code is Call.phase.__code__:
            said.append(f"{frame.f_locals['self'].full_name}: {frame.f_locals['name']}")

    sys.setprofile(note)
    model.all_reduce()
    sys.setprofile(None)
    return said, process_activity.sample().phase, process_activity.sample().call


def test_a_call_records_its_phases_and_its_end() -> None:
    call = "all_reduce() call 1"
    # The first call also compares the names of buffers.
    phases = [f"{call}: {phase}" for phase in ("plan", "pack", "digest", "agree", "agree", "payload", "alias")]

    assert run_ranks(_phases_of_a_call, 2) == [([*phases, ": user code"], "user code", "")] * 2


@contextmanager
def _nothing() -> Iterator[None]:
    yield


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("depth", [0, 30])
def test_a_call_inside_an_optimizer_s_closure_shows_the_way_into_it_from_the_user_s_line(depth: int) -> None:
    model, sampler = wrap(), _Sampler()
    call: Any = model.all_reduce
    for _ in range(depth):  # each is a frame of the standard library, as a framework's would be
        call = _nothing()(call)

    def closure() -> float:
        add_gradients(model, 1.0)
        sys.setprofile(do_when("alias", partial(sampler.take, "call")))
        call()
        sys.setprofile(None)
        return 0.0

    torch.optim.SGD(model.parameters(), lr=1.0).step(closure)

    sample = sampler.seen["call"]
    assert sample.line.endswith("in closure")
    assert sample.line in sample.stack
    assert sample.stack[-1].endswith("in all_reduce")
    assert len(sample.stack) <= 12
    assert ("..." in sample.stack) == bool(depth)


def _frame_of(filename: str) -> str:
    """What this process says of the frame of a function ``work`` in such a file."""
    found: dict[str, Any] = {}
    exec(compile(ast.parse("def work(look):\n    return look()"), filename, "exec"), found)
    process_activity.enter(USER_CODE)
    (frame,) = (frame for frame in found["work"](process_activity.sample).stack if frame.endswith(" in work"))
    return str(frame)


def test_a_source_path_of_any_bytes_and_length_stays_a_printable_line_with_its_end() -> None:
    frame = _frame_of("<string>\n" * 100_000)

    assert _frame_of("/home/a\udcff/b\udcfe.py") == r"a\udcff/b\udcfe.py:2 in work"
    assert len(frame) <= 200
    assert frame.endswith(":2 in work")
    assert "\n" not in frame


def _works(work: Any, sleep: Callable[[float], None]) -> None:
    work.wait()
    sleep(1.0)


def _listed(works: list[Any]) -> None:
    works[0].wait()


def _stored(store: Any) -> None:
    store.wait(["told"])


def test_a_wait_for_a_work_ends_with_its_statement() -> None:
    """A work that had been waited for was told in every later line that called a function in C."""

    def found(function: Callable[..., None]) -> list[tuple[str, str, int]]:
        calls = [one for one in dis.get_instructions(function) if one.opname.startswith("CALL")]
        return [_called(function.__code__, call.offset) for call in calls]

    assert found(_works) == [("wait", "work", 0), ("", "", 1)]
    assert found(_listed) == [("wait", "", 0)]
    assert found(_stored) == [("wait", "store", 1)]


def _a_look(cpu_seconds: float, slices: int, at: float, issued: int = 7) -> _Seen:
    return _Seen(((_works.__code__, 2),), 0, issued, cpu_seconds, slices, at)


@pytest.mark.parametrize(
    "cpu_seconds, slices, issued, expected",
    [
        (0.0, 0, 0, False),
        (50e-6, 2, 0, False),
        (150e-6, 3, 0, False),  # of three signals
        (4e-3, 200, 0, False),  # of a profiler
        (100e-6, 1, 0, False),  # of one, on a slow processor
        (400e-6, 2, 0, True),
        (0.0, 0, 1, True),
        (15.0, 40, 0, False),  # it waits for a device in a busy loop
    ],
)
def test_signals_that_wake_a_waiting_thread_end_no_wait(
    cpu_seconds: float, slices: int, issued: int, expected: bool
) -> None:
    """Three signals in 15 s were "the wait outside of calls has ended", and a second full report later."""
    before, now = _a_look(3.0, 100, 20.0), _a_look(3.0 + cpu_seconds, 100 + slices, 35.0, 7 + issued)

    assert _has_moved(before, now) is expected


_IMPORT = "from legacy_ddp._watchdog import process_activity"
_AT_ITS_END = """
import threading
import torch  # which cannot be imported later
{}
def tell_at_end():
    threading.main_thread().join()
    {}
    print(process_activity.sample().phase)
threading.Thread(target=tell_at_end).start()
"""


@pytest.mark.thorough
@pytest.mark.parametrize("imports, phase", [((_IMPORT, ""), "process exit"), (("", _IMPORT), "user code")])
def test_a_process_that_ends_is_told_so_unless_its_main_module_was_never_seen(
    imports: tuple[str, str], phase: str
) -> None:
    """It was user code at a line of a library. A program in another language that calls Python may look ended: here it
    has ended before the import."""
    code = _AT_ITS_END.format(*imports)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)

    assert done.stdout == f"{phase}\n"


_GOES_ON = """
import sys
import threading
import torch.distributed as dist
from torch import nn
from legacy_ddp import LegacyDistributedDataParallel
from legacy_ddp._watchdog import watchdog
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
model = LegacyDistributedDataParallel(nn.Linear(1, 1))
def ask():
    threading.main_thread().join()
    print(watchdog._largest()._answer({"request": "status"})["note"])
threading.Thread(target=ask).start()
if rank == 1:
    raise ValueError("bad batch")
"""


@pytest.mark.thorough
def test_a_rank_whose_process_goes_on_for_a_thread_answers_with_its_exception(tmp_path: Path) -> None:
    # Real processes: a forked one has the frames of its parent.
    command = [sys.executable, "-c", _GOES_ON]
    with subprocess.Popen([*command, "0", str(tmp_path / "store")], cwd=ROOT, stderr=subprocess.DEVNULL):
        done = subprocess.run([*command, "1", str(tmp_path / "store")], cwd=ROOT, capture_output=True, text=True)

    assert "with ValueError: bad batch, at <string>:16 in <module>" in done.stdout, done.stderr


def test_the_stack_of_a_call_under_lightning_did_not_end_at_the_strategy() -> None:
    """The strategy had become another file, and its frames counted as those of a call."""
    assert [path for path in AROUND_USER_CODE if not Path(path).is_file()] == []


def test_a_look_changes_nothing_in_the_variables_of_the_script() -> None:
    """Up to Python 3.12 the dict of locals() was emptied: a checkpoint had no hyperparameters."""

    def train(lr: float) -> dict[str, Any]:
        settings = locals()
        frame = sys._getframe()
        lr = 0.5
        _waits_for_work(frame)
        return settings

    assert train(0.1)["lr"] == 0.1


_waited_for = "a global variable with the name of a local one"


def test_a_variable_of_a_function_hides_the_global_one_with_its_name() -> None:
    """A Work in a variable of the function was taken for the object of that name in the module."""
    seen = []

    class Work:
        wait = staticmethod(partial(lambda: seen.append(_waits_for_work(sys._getframe(1)))))

    def train(_waited_for: Any) -> None:
        _waited_for.wait()

    train(Work())

    assert seen == [sys.version_info < (3, 13)]  # there the object is known, and is no Work
