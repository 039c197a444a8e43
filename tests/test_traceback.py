"""Tracebacks at the end of a process, as scripts of several ranks show them."""

import re
import signal
import textwrap
from pathlib import Path

from tests.helpers.paths import ROOT
from tests.helpers.scripts import fork_script, fork_scripts, run_script

_START = """
    import os, sys
    import torch
    import torch.distributed as dist
    from legacy_ddp import LegacyDDPError, LegacyDistributedDataParallel, all_reduce_gradients

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method="file://" + os.path.abspath("store"), rank=rank, world_size=size)

    def backward(model):
        model(torch.ones(1, 3)).sum().backward()

    def disagree(model):
        backward(model)
        model.all_reduce(sample_size=1 if rank == 1 else None)

    model = LegacyDistributedDataParallel(torch.nn.Linear(3, 2))
"""
_DISAGREE = "legacy_ddp.DesyncError: all_reduce() call 1: plain and weighted calls met"
_PACKAGE = re.escape(str(ROOT / "legacy_ddp"))  # a checkout may have the same name
_LIBRARY_LINE = re.compile(rf"File \"{_PACKAGE}/\w+\.py\", line \d+, in \w+")
_ANY_LIBRARY_LINE = re.compile(rf"File \"{_PACKAGE}/.*\.py\"")


def _run(folder: Path, script: str, *, ranks: int = 3, start: str = _START, **environment: str) -> list[str]:
    """The errors of each rank, without the rank that torch puts in front of every line. Every rank fails."""
    (folder / "train.py").write_text(textwrap.dedent(start) + textwrap.dedent(script))
    places = [{"RANK": str(rank), "WORLD_SIZE": str(ranks), **environment} for rank in range(ranks)]
    runs = fork_scripts([("train.py",)] * ranks, places, cwd=folder)
    assert {run.returncode for run in runs} <= {1, -signal.SIGKILL, -signal.SIGINT}
    return [re.sub(r"(?m)^\[rank\d\]: ", "", run.stderr) for run in runs]


def _is_pointer(errors: str, beginning: str, rank: int = 0) -> bool:
    """Whether ``errors`` is one line, with the text of the error, that points to ``rank``."""
    (line,) = errors.splitlines()
    assert re.search(r"[^:], at \w+\.py:\d+ in (<module>|\w+) \(raised on all ranks;", line)
    end = f" (raised on all ranks; text and traceback are in the output of rank {rank})"
    return line.startswith(beginning) and line.endswith(end)


def _tracebacks(errors: str) -> int:
    return errors.count("Traceback (most recent call last)")


def test_an_agreed_error_is_one_traceback_with_one_line_of_the_library_and_a_line_on_the_other_ranks(
    tmp_path: Path,
) -> None:
    first, *others = _run(tmp_path, "disagree(model)")

    assert _tracebacks(first) == 1
    assert [line for line in first.splitlines() if "train.py" in line and "in disagree" in line]
    assert len(_ANY_LIBRARY_LINE.findall(first)) == 1
    assert re.search(r"/legacy_ddp/_wrapper\.py\", line \d+, in all_reduce", first)
    assert first.index("in disagree") < first.index("in all_reduce")
    assert "torch/_" not in first
    # The whole text, with every line.
    assert f"{_DISAGREE}:\n  argument: rank 1 has an int sample_size; ranks 0, 2 have sample_size=None\n" in first
    end = "meaning and next step: legacy-ddp explain DesyncError"
    assert first.endswith(f"pass sample_size= on every rank or on none\n{end}\n")
    assert [_is_pointer(errors, _DISAGREE) for errors in others] == [True, True]
    # The rank at fault shows its own line of the script.
    (line,) = [number for number, text in enumerate(_START.splitlines()) if "sample_size=1 if rank == 1" in text]
    assert f"weighted calls met, at train.py:{line + 1} in disagree (raised" in others[0]


def test_an_error_that_all_ranks_make_alike_is_one_traceback_too(tmp_path: Path) -> None:
    first, *others = _run(tmp_path, "model.all_reduce(sample_size='3')")

    assert (_tracebacks(first), len(_ANY_LIBRARY_LINE.findall(first))) == (1, 1)
    assert "TypeError: sample_size is of the wrong type" in first
    assert all(_is_pointer(errors, "TypeError: sample_size is of the wrong type") for errors in others)


def test_the_variable_asks_for_all_tracebacks_with_all_frames(tmp_path: Path) -> None:
    for errors in _run(tmp_path, "disagree(model)", LEGACY_DDP_TRACEBACK="full"):
        assert _tracebacks(errors) == 1
        assert len(_ANY_LIBRARY_LINE.findall(errors)) > 2
        assert _DISAGREE in errors


def test_an_unknown_value_of_the_variable_is_an_error_of_the_first_wrapper(tmp_path: Path) -> None:
    text = "environment variable LEGACY_DDP_TRACEBACK: got 'loud', expected one of ('short', 'full')"
    expected = f"ValueError: {text}\nmeaning and next step: legacy-ddp explain ValueError\n"

    for errors in _run(tmp_path, "", ranks=2, LEGACY_DDP_TRACEBACK="loud"):
        assert errors.endswith(expected)


def test_a_rank_with_an_error_of_its_own_behind_the_agreed_error_shows_both(tmp_path: Path) -> None:
    first, second, third = _run(tmp_path, "model.all_reduce(sample_size=-1 if rank == 1 else 1)")

    assert _tracebacks(first) == 1
    assert _tracebacks(second) == 2
    assert "\nValueError: sample_size is out of range: got -1" in second
    assert len(_ANY_LIBRARY_LINE.findall(second)) == 2  # one in each traceback
    assert "The above exception was the direct cause" in second
    assert _is_pointer(third, "legacy_ddp.PeerError: ")


def test_an_exception_under_way_on_one_rank_stays_visible(tmp_path: Path) -> None:
    script = """
        backward(model)
        try:
            if rank == 2:
                raise KeyError("lost in user code")
        finally:
            model.all_reduce(sample_size=1 if rank == 1 else None)
    """
    first, second, third = _run(tmp_path, script)

    assert _tracebacks(first) == 1
    assert _is_pointer(second, _DISAGREE)
    assert _tracebacks(third) == 2
    assert "KeyError: 'lost in user code'" in third


def test_a_caught_error_keeps_its_whole_traceback_its_display_changes_nothing_and_later_errors_are_shown_as_ever(
    tmp_path: Path,
) -> None:
    script = """
        try:
            disagree(model)
        except LegacyDDPError as error:
            before = error.__traceback__
            sys.excepthook(type(error), error, before)
            assert error.__traceback__ is before
            files = []
            while before is not None:
                files.append(before.tb_frame.f_code.co_filename)
                before = before.tb_next
            assert sum("/legacy_ddp/" in file for file in files) > 2, files
        def fail():
            raise ValueError(f"from rank {rank}")
        fail()
    """
    for rank, errors in enumerate(_run(tmp_path, script)):
        shown, _, later = errors.rpartition("Traceback (most recent call last)")
        if rank == 0:
            assert (_tracebacks(shown), len(_ANY_LIBRARY_LINE.findall(shown))) == (1, 1)
        else:
            assert _is_pointer(shown, _DISAGREE)
        assert "in fail" in later
        assert later.endswith(f"\nValueError: from rank {rank}\n")


def test_a_hook_of_the_script_gets_every_error_whole(tmp_path: Path) -> None:
    hook = """
    import sys, traceback
    def hook(kind, error, trace):
        print("own hook", kind.__name__, len(traceback.extract_tb(trace)) > 4, file=sys.stderr)
    sys.excepthook = hook
    """
    assert _run(tmp_path, "disagree(model)", start=hook.rstrip() + _START) == ["own hook DesyncError True\n"] * 3


def test_one_survivor_of_a_host_shows_the_report_on_a_lost_rank_and_the_others_three_lines_at_most(
    tmp_path: Path,
) -> None:
    script = """
        if rank == 0:
            os.kill(os.getpid(), 9)
        backward(model)
        model.all_reduce()
    """
    killed, first, *others = _run(tmp_path, script, ranks=4)

    assert killed == ""
    assert _tracebacks(first) == 1
    assert len(_LIBRARY_LINE.findall(first)) == 1
    assert "legacy_ddp.PeerLostError: all_reduce() call 1, phase agree: " in first
    assert "stack of rank" in first
    for errors in others:
        assert len(errors.splitlines()) <= 3, errors
        assert _LOSS_POINTER.search(errors), errors


_LOSS_POINTER = re.compile(
    r"legacy_ddp\.PeerLostError: all_reduce\(\) call 1, .*; missing rank 0 \(.*, at train\.py:\d+ in <module> "
    r"\(the report is in the output of rank 1, also in \S+\.txt\)$"
)


def test_one_rank_of_a_host_shows_the_report_on_a_hang_and_the_others_a_line_also_in_a_sub_group(
    tmp_path: Path,
) -> None:
    script = """
        import atexit, pathlib, threading
        group = dist.new_group([1, 2, 3, 4])
        if rank == 0:
            raise SystemExit(1)
        model = LegacyDistributedDataParallel(torch.nn.Linear(3, 2), process_group=group, timeout_seconds=3.0)
        backward(model)
        atexit.register(pathlib.Path(f"ended-{rank}").touch)
        def load():
            while len([*pathlib.Path().glob("ended-*")]) < 3:
                threading.Event().wait(0.05)
            raise SystemExit(1)
        if rank == 4:
            load()
        model.all_reduce()
    """
    _, first, second, third, silent = _run(tmp_path, script, ranks=5)

    assert (_tracebacks(first), silent) == (1, "")
    assert "stack of rank 3, innermost last:" in first
    for errors in (second, third):
        (line,) = errors.splitlines()
        assert line.startswith("legacy_ddp.SyncTimeoutError: all_reduce() call 1, phase agree: no answer within 3 s; ")
        assert "missing rank 3 (user code after" in line
        assert re.search(r" in <module> \(the report is in the output of rank 1, also in \S+\.txt\)$", line)
        (path,) = re.findall(r"also in (\S+\.txt)", line)
        assert Path(path).read_text().count("stack of rank 3, innermost last:") == 1


def test_a_step_without_the_call_shows_the_lines_of_the_script_alone_on_every_rank(tmp_path: Path) -> None:
    script = """
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)  # wraps step()
        def train():
            backward(model)
            closure = (lambda: torch.zeros(1)) if rank == 1 else None
            optimizer.step(closure)
        train()
    """
    for errors in _run(tmp_path, script):  # no rank knows whether the others forgot the call, too
        assert _tracebacks(errors) == 1
        frames = re.findall(r"  File \".*?([^/\"]+)\", line \d+, in (.+)", errors)
        assert frames[-2:] == [("train.py", "<module>"), ("train.py", "train")]
        assert {file for file, _ in frames} == {"train.py", "forked_children.py"}  # of the test: it starts the script
        text = errors.partition("legacy_ddp.UnsynchronizedStepError: ")[2]
        assert text.startswith("step() of SGD would use gradients that were not reduced since the last backward:\n")
        assert all(len(line) <= 80 for line in text.splitlines()[1:])


def test_ctrl_c_in_a_call_shows_the_line_of_the_script_and_one_line_of_the_library(tmp_path: Path) -> None:
    script = """
        from functools import partial
        from tests.helpers.rank_faults import WAITS, do_when
        def train():
            backward(model)
            if rank == 0:
                sys.setprofile(do_when(WAITS, partial(os.kill, os.getpid(), 2)))
            model.all_reduce()
        train()
    """
    interrupted, other = _run(tmp_path, script, ranks=2)

    assert _tracebacks(interrupted) == 1
    assert "in train" in interrupted
    assert len(_ANY_LIBRARY_LINE.findall(interrupted)) == 1
    assert interrupted.endswith("KeyboardInterrupt\n"), interrupted
    assert "legacy_ddp.PeerLostError: " in other


def test_the_line_points_to_the_first_rank_of_the_group_counted_in_the_job(tmp_path: Path) -> None:
    script = """
        group = dist.new_group([1, 2])
        if rank == 0:
            raise SystemExit(1)
        backward(model)
        all_reduce_gradients(model.module, process_group=group, sample_size=1 if rank == 2 else None)
    """
    _, first, other = _run(tmp_path, script)

    assert _tracebacks(first) == 1
    assert re.search(r"_wrapper\.py\", line \d+, in all_reduce_gradients", first)
    told = _DISAGREE.replace("call 1", "call 1 of wrapper 1 (Linear)")  # the model is wrapped, too
    assert _is_pointer(other, told, rank=1)


def test_frames_of_user_code_below_the_library_stay(tmp_path: Path) -> None:
    script = """
        def callback(record):
            call_again()
        def call_again():
            model.all_reduce()
        model.on_sync(callback)
        backward(model)
        try:
            disagree(model)
        except LegacyDDPError:
            pass
        model.all_reduce()
    """
    for errors in _run(tmp_path, script, ranks=2):
        assert [name for name in re.findall(r", in (\w+)\n", errors) if name in ("callback", "call_again")] == [
            "callback",
            "call_again",
        ]
        assert errors.count("in all_reduce\n") == 2
        assert "inside an on_sync() callback" in errors


def test_under_torchrun_with_record_there_is_one_traceback_and_its_error_file_is_whole(tmp_path: Path) -> None:
    body = """
        from torch.distributed.elastic.multiprocessing.errors import record
        @record
        def main():
            disagree(model)
        main()
    """
    start = _START.replace('init_method="file://" + os.path.abspath("store"), rank=rank, world_size=size', "")
    (tmp_path / "train.py").write_text(textwrap.dedent(start) + textwrap.dedent(body))

    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3")
    run = fork_script(*launch, "train.py", cwd=tmp_path, forks_children=True)

    assert run.returncode == 1
    assert len(re.findall(r"(?m)^\[rank\d\]: Traceback", run.stderr)) == 1
    assert run.stderr.count(f"{_DISAGREE}, at train.py") == 2
    assert "in agree" in run.stderr.partition("Root Cause")[2]


def test_an_installed_package_started_by_its_name_is_the_script(tmp_path: Path) -> None:
    """With ``python -m`` the place of an error was ``<frozen runpy>:88 in _run_code``."""
    (tmp_path / "installed").mkdir()
    program = """
    import sys
    from legacy_ddp import _log
    _log._INSTALLED += (sys.argv[1],)
    sys.excepthook = lambda kind, error, trace: print(_log.line_in_script(error))
    raise ValueError
    """
    (tmp_path / "installed" / "__main__.py").write_text(textwrap.dedent(program))

    run = run_script("-m", "installed", str(tmp_path), cwd=tmp_path)

    assert run.stdout == "__main__.py:6 in <module>\n", run.stderr
