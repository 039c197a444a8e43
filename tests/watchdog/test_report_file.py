"""The report file: path and mode, a full disk, and a SIGTERM that the user handles."""

import logging
import os
import resource
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from legacy_ddp import Checks, LostPeerError
from legacy_ddp._watchdog.reports import ReportFile
from tests.helpers.listening import Training
from tests.helpers.paths import ROOT
from tests.helpers.ranks import run_ranks
from tests.helpers.small_models import error_of, step, wrap
from tests.helpers.tiers import thorough

STACKS = "most recent call first"  # as faulthandler writes them


@contextmanager
def _file(folder: Path, **arguments: Any) -> Iterator[ReportFile]:
    file = ReportFile(folder, **{"rank": 1, "size": 3, **arguments})
    yield file
    file.close()


def test_a_report_file_is_private_named_after_its_process_and_removed_without_a_report(tmp_path: Path) -> None:
    with _file(tmp_path / "made" / "for it") as file:
        assert stat.S_IMODE(file.path.stat().st_mode) == 0o600
        assert file.path.name.endswith(f"-rank1-pid{os.getpid()}.txt")
        assert "rank 1 of 3" in file.path.read_text()
    assert not file.path.exists()

    with _file(tmp_path) as file:
        file.append("first")
        file.append("second")
    text = file.path.read_text()
    assert text.index("rank 1 of 3") < text.index("first") < text.index("second")


def test_an_existing_file_is_never_written_to(tmp_path: Path) -> None:
    with _file(tmp_path) as file:
        name = file.path.name
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / name).symlink_to(victim)

    with _file(tmp_path) as file:
        file.append("report")

    assert victim.read_text() == "precious"
    assert file.path.name != name
    assert "report" in file.path.read_text()


def test_a_report_after_the_end_is_neither_written_nor_called_a_problem(tmp_path: Path) -> None:
    """The other ranks send the report of a lost rank to all ranks; the lost rank may be at its end, not yet ended."""
    with _file(tmp_path) as file:
        pass

    assert file.append("rank 1 is lost")
    assert "not written" not in file.where("reports of this rank:")
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_no_reason_to_fail() -> None:
    with _file(Path("/tmp")) as file:
        full = os.open("/dev/full", os.O_WRONLY)
        os.dup2(full, file._descriptor)
        os.close(full)

        file.append("report")


def test_a_report_with_a_lone_surrogate_is_written_with_an_escape(tmp_path: Path) -> None:
    file = ReportFile(tmp_path, 0, 2)
    file.append("at a\udcff.py:1 in work")
    file.close()

    assert r"at a\udcff.py:1 in work" in file.path.read_text(encoding="utf-8")


def _construct_with_a_bad_directory(rank: int, folder: str) -> tuple[Any, Any]:
    bad = f"{folder}/file/inside" if rank == 1 else folder
    first = error_of(wrap, checks=Checks(report_dir=bad))
    model = wrap(checks=Checks(report_dir=folder))
    return first, step(model, 1.0 + rank)


def test_a_directory_that_cannot_be_used_on_one_rank_is_an_error_on_all(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")

    results = run_ranks(_construct_with_a_bad_directory, 2, str(tmp_path))

    for said, mean in results:
        kind, text = said
        assert kind == "PeerError"
        assert "rank 1" in text
        assert str(tmp_path / "file") in text
        assert mean == 1.5


# A full disk


@contextmanager
def _full_disk(size_bytes: int = 0) -> Iterator[None]:
    """No file of this process may grow over ``size_bytes``: it is written as far as that, then an error comes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, limits[1]))  # Python ignores the signal that comes with it
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_full_disk_is_told_in_place_of_the_path_and_no_empty_file_is_left(tmp_path: Path) -> None:
    with _full_disk():
        file = ReportFile(tmp_path, 0, 2)
        assert not file.append("report")

    assert file.path.stat().st_size == 0
    assert file.where("also in") == f"not written in full to {file.path}: File too large"
    file.close()
    assert list(tmp_path.iterdir()) == []


def test_a_report_that_is_cut_short_by_a_full_disk_is_not_pointed_to_and_the_next_is(tmp_path: Path) -> None:
    file = ReportFile(tmp_path, 0, 2)
    with _full_disk(file.path.stat().st_size + 100):
        assert not file.append(1000 * "x")
    assert "not written in full" in file.where("also in")

    assert file.append("later")
    assert file.where("also in") == f"also in {file.path}"
    file.close()
    assert "later" in file.path.read_text()


def test_where_no_file_can_be_made_nothing_points_to_the_null_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("not a directory")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "file" / "inside"))

    file = ReportFile(None, 0, 2)

    assert not file.append("report")
    assert file.where("also in") == f"not on disk: [Errno 20] Not a directory: {str(tmp_path / 'file' / 'inside')!r}"
    file.close()


def _loses_a_rank_on_a_full_disk(rank: int, folder: Path) -> list[str]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("legacy_ddp").addHandler(handler)
    training = Training(folder)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with _full_disk(), pytest.raises(LostPeerError) as caught:
        training.step()
    return ["\n".join(said), str(caught.value)]


def test_a_loss_on_a_full_disk_is_told_in_full_by_log_and_error_and_neither_points_to_a_file(tmp_path: Path) -> None:
    for text in run_ranks(_loses_a_rank_on_a_full_disk, 2, tmp_path, lost=(1,))[0]:
        assert "    0  all_reduce() call 3: agree" in text  # in the table
        assert "not written in full to " in text
        assert "also in" not in text
        assert "reports of this rank" not in text


# SIGTERM

_SCRIPT = """
import faulthandler, os, signal, sys
from legacy_ddp._watchdog.reports import ReportFile

folder, story = sys.argv[1:]
if "handler" in story:
    signal.signal(signal.SIGTERM, lambda *_: print("handled"))
if "faulthandler" in story:
    faulthandler.register(signal.SIGTERM, file=open(folder + "/own", "w"), chain="chained" in story)
file = ReportFile(folder, 0, 1)
os.kill(os.getpid(), signal.SIGTERM)
print("alive")
file.append("the end")
"""


@pytest.mark.parametrize(
    "story, output, in_own",
    [
        thorough("faulthandler", "alive", True),
        thorough("handler, then faulthandler", "alive", True),
        ("handler, then chained faulthandler", "handled alive", True),
        ("handler", "handled alive", False),
    ],
)
def test_a_faulthandler_that_the_user_registered_keeps_its_file_and_its_end(
    story: str, output: str, *, in_own: bool, tmp_path: Path
) -> None:
    """It was replaced: the stacks went to the report file, and the process ended."""
    ran = subprocess.run(
        [sys.executable, "-c", _SCRIPT, str(tmp_path), story],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.split() == output.split()
    (report,) = tmp_path.glob("legacy_ddp-*.txt")
    text = report.read_text()
    assert (STACKS in text) is not in_own
    assert ("SIGTERM leaves no stacks here" in text) is in_own
    if in_own:
        assert STACKS in (tmp_path / "own").read_text()
