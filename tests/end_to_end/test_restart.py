"""Does the main job survive SIGKILL at any moment, and damage to what it wrote?"""

import contextlib
import importlib
import io
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.paths import ROOT, python_blocks
from tests.helpers.scripts import EXAMPLES, assert_same_bits, fork_script, load
from tests.helpers.tiers import count

KILLS = count(20, 1)
STEPS = count(60, 34)
LIMIT_SECONDS = 400

sys.path.append(str(EXAMPLES))  # the scripts find their neighbours because Python puts a script's folder there
_checkpoint = importlib.import_module("_checkpoint")
_lm_options = importlib.import_module("_lm_options")

linux = pytest.mark.skipif(sys.platform != "linux", reason="restart.py finds the ranks in /proc")


@pytest.mark.thorough
@linux
@pytest.mark.slow
def test_a_training_killed_at_random_moments_ends_in_the_bits_of_the_undisturbed_one(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    kept = tmp_path / "kept"
    arguments = ("--kills", str(KILLS), "--steps", str(STEPS), "--keep", str(kept))
    script = str(EXAMPLES / "restart.py")
    # The ranks are new processes: restart.py finds them by the environment in /proc, where a fork shows another one.
    run = fork_script(script, *arguments, limit_seconds=LIMIT_SECONDS)
    said = run.stdout + run.stderr

    assert run.returncode == 0, said  # the seed is in it
    record_property("seed", re.search(r"seed (\d+)", said)[1])  # type: ignore[index]  # it is
    kills = [int(start) for start in re.findall(r"^  start (\d+): killed rank [01], newest", said, re.MULTILINE)]
    assert kills == list(range(KILLS)), said
    last = f"step-{STEPS:08d}.pt"
    assert [path.name for path in _checkpoint.checkpoints(kept / "killed")] == [last, f"step-{STEPS - 1:08d}.pt"]
    # Weights, optimizer, and every rank's random generators.
    assert_same_bits(*(load(kept / name / last) for name in ("undisturbed", "killed")))


# Of the loop of docs/restart.md
KILL = """    if (step, rank, os.environ["TORCHELASTIC_RESTART_COUNT"]) == (12, 1, "0"):
        os.kill(os.getpid(), 9)
"""
CALL = "    model.all_reduce()\n"


@pytest.mark.thorough
@pytest.mark.slow
def test_the_loop_of_the_page_survives_a_kill(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "restart.md").read_text(encoding="utf-8")
    (loop,) = python_blocks("docs/restart.md")
    assert loop.count(CALL) == 1
    variable, launch = re.search(r"^    (TORCH_\w+=1) torchrun (.*) train\.py$", page, re.MULTILINE).groups()  # type: ignore[union-attr]  # it is there
    states = []
    for name, text in (("undisturbed", loop), ("killed", loop.replace(CALL, KILL + CALL))):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "train.py").write_text(text)
        run = fork_script(
            *("-m", "torch.distributed.run", *launch.split(), str(folder / "train.py")),
            environment=dict([variable.split("=")]),
            cwd=folder,
            forks_children=True,
        )
        assert run.returncode == 0, run.stderr
        assert run.stderr.count("exitcode: -9") == (name == "killed"), run.stderr
        states.append(load(folder / "checkpoint.pt"))

    assert states[0]["step"] == 30
    assert_same_bits(*states)


# Kills itself at line n of what save_checkpoint() runs through here, for every n: forked, so that torch loads once.
KILLED_AT_EVERY_LINE = """
import json, os, signal, sys, tempfile
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import torch, _checkpoint

def state(step):
    return {"settings": {}, "step": step, "weight": torch.full((5,), float(step))}

def die_at_line(number):
    lines = iter(range(number))
    def trace(frame, event, _):
        if frame.f_code.co_filename != _checkpoint.__file__:
            return None
        if event == "line" and next(lines, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)
        return trace
    sys.settrace(trace)

left = []
while True:
    folder = Path(tempfile.mkdtemp(dir=sys.argv[2]))
    for step in (1, 2):
        _checkpoint.save_checkpoint(folder, step, state(step))
    child = os.fork()
    if child == 0:
        die_at_line(len(left))
        _checkpoint.save_checkpoint(folder, 3, state(3), keep=2)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if status == 0:
        break
    names = sorted(path.name for path in folder.iterdir())
    found = _checkpoint.load_checkpoint(folder, {})
    _checkpoint.save_checkpoint(folder, 3, state(3), keep=2)
    after = sorted(path.name for path in folder.iterdir())
    left.append([os.WTERMSIG(status), names, found["step"], found["weight"].tolist(), after])
print(json.dumps(left))
"""


def test_a_kill_at_any_line_of_saving_leaves_two_whole_checkpoints_and_the_next_saving_mends_the_rest(
    tmp_path: Path,
) -> None:
    result = fork_script("-c", KILLED_AT_EVERY_LINE, str(EXAMPLES), str(tmp_path))

    assert result.returncode == 0, result.stderr
    assert result.stderr == ""  # nothing was damaged
    moments = json.loads(result.stdout)
    one, two, three, unfinished = (f"step-0000000{name}" for name in ("1.pt", "2.pt", "3.pt", "3.tmp"))
    stages = [[one, two], [one, two, unfinished], [one, two, three], [two, three]]
    seen = [stages.index(names) for _, names, *_ in moments]
    assert seen == sorted(seen)
    assert {*seen} == {0, 1, 2, 3}  # among them: all is written, and not yet renamed
    for (signal_number, names, step, weight, after), stage in zip(moments, seen, strict=True):
        assert signal_number == 9
        assert (step, weight) == ((2, [2.0] * 5) if stage < 2 else (3, [3.0] * 5)), names
        assert after == [two, three]


def _state(step: int) -> dict[str, object]:
    return {"settings": {}, "step": step, "weight": torch.arange(5.0) + step}


@pytest.fixture(scope="module")
def two_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    """A folder with steps 1 and 2, and what the file of step 2 holds."""
    folder = tmp_path_factory.mktemp("two")
    for step in (1, 2):
        _checkpoint.save_checkpoint(folder, step, _state(step))
    return folder, (folder / "step-00000002.pt").read_bytes()


@given(st.data(), st.sampled_from(["cut", "flip", "zeros", "longer"]))
def test_any_damage_to_the_newest_checkpoint_is_said_and_the_one_before_is_used(
    two_checkpoints: tuple[Path, bytes], data: st.DataObject, how: str
) -> None:
    folder, whole = two_checkpoints
    place = data.draw(st.integers(0, len(whole) - 1))
    damaged = bytearray(whole)
    if how == "cut":
        del damaged[place:]
    elif how == "flip":
        damaged[place] ^= data.draw(st.integers(1, 255))
    elif how == "zeros":  # what some file systems leave after a power cut
        damaged[place:] = bytes(len(whole) - place)
        if damaged == whole:
            return
    else:
        damaged[place:place] = b"x"
    newest = folder / "step-00000002.pt"
    newest.write_bytes(damaged)

    with contextlib.redirect_stderr(io.StringIO()) as said:
        found = _checkpoint.load_checkpoint(folder, {})

    assert_same_bits(found, _state(1))
    (line,) = said.getvalue().splitlines()
    assert line.startswith(f"{newest} is damaged: got ")
    assert line.endswith("; trying the one before")


def test_a_whole_checkpoint_is_used_in_silence_and_one_that_cannot_be_read_is_like_a_damaged_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (1, 2):
        _checkpoint.save_checkpoint(tmp_path, step, _state(step))

    assert_same_bits(_checkpoint.load_checkpoint(tmp_path, {}), _state(2))
    assert_same_bits(load(tmp_path / "step-00000002.pt"), _state(2))  # an ordinary file of torch
    assert capsys.readouterr() == ("", "")
    (tmp_path / "step-00000003.pt").mkdir()  # root may read any file
    assert_same_bits(_checkpoint.load_checkpoint(tmp_path, {}), _state(2))
    assert capsys.readouterr().err == (
        f"{tmp_path}/step-00000003.pt cannot be read: [Errno 21] Is a directory: "
        f"'{tmp_path}/step-00000003.pt'; trying the one before\n"
    )


def test_without_any_whole_checkpoint_a_resume_is_refused_and_every_file_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (1, 2):
        _checkpoint.save_checkpoint(tmp_path, step, _state(step))
    (tmp_path / "step-00000001.pt").write_bytes(b"")
    (tmp_path / "step-00000002.pt").write_bytes(b"damaged")
    args = _lm_options.build_parser().parse_args(["--save", str(tmp_path), "--resume", "auto"])

    with pytest.raises(_checkpoint.CheckpointError, match=r"got 2 step-\*\.pt, none of them whole, expected one"):
        _lm_options.read_checkpoint(args, {})

    lines = capsys.readouterr().err.splitlines()
    assert [line.split(" is damaged: ")[0] for line in lines] == [
        str(tmp_path / f"step-0000000{step}.pt") for step in (2, 1)
    ]


def test_resume_auto_starts_where_there_is_nothing_and_goes_on_where_there_is(tmp_path: Path) -> None:
    folder = tmp_path / "not there yet"
    args = _lm_options.build_parser().parse_args(["--save", str(folder), "--resume", "auto", "--steps", "3"])

    assert _lm_options.read_checkpoint(args, {}) is None
    _checkpoint.save_checkpoint(folder, 1, _state(1))
    assert _lm_options.read_checkpoint(args, {})["step"] == 1
    _checkpoint.save_checkpoint(folder, 4, _state(4))
    with pytest.raises(_checkpoint.CheckpointError, match="--steps is behind the newest checkpoint: got 3"):
        _lm_options.read_checkpoint(args, {})


def test_of_old_checkpoints_as_many_are_kept_as_asked_for_and_newer_ones_are_left_alone(tmp_path: Path) -> None:
    for step in (1, 2, 3, 9):
        _checkpoint.save_checkpoint(tmp_path, step, _state(step))
    _checkpoint.save_checkpoint(tmp_path, 4, _state(4), keep=2)  # resumed behind 9, which must be damaged

    assert [int(path.stem.removeprefix("step-")) for path in _checkpoint.checkpoints(tmp_path)] == [9, 4, 3]
