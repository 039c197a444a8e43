"""Exceptions with unusual texts on a single rank, and the report of them on the other ranks."""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch.distributed as dist

from legacy_ddp import Checks, LegacyDDPError, LegacyDistributedDataParallel
from tests.helpers.comm_hooks import mean
from tests.helpers.ranks import run_ranks
from tests.helpers.shared_jobs import run_cases
from tests.helpers.small_models import add_gradients, gradient_values, step, wrap
from tests.test_message_parts import MuteError

CULPRIT = 1
FIFTY_MB = 50_000_000
# What is raised, and what the others are told of it.
ODD: dict[str, tuple[Callable[[], Exception], str]] = {
    "surrogate": (lambda: OSError("no file a\udcff.pt"), r"OSError: no file a\udcff.pt"),
    "mute": (MuteError, "MuteError: (no text: its __str__ raised ZeroDivisionError)"),
    "50 MB": (lambda: ValueError("bad " + "x" * FIFTY_MB), "ValueError: bad xxx"),
}


@dataclass(frozen=True)
class Told:
    """What a rank got: the type and the ranks of the error, its text in one line, what lay on disk, and how soon."""

    kind: str
    ranks: tuple[int, ...]
    text: str
    on_disk: str
    seconds: float


def _told(folder: Path, act: Callable[[], object]) -> Told:
    start = time.monotonic()
    try:
        act()
    except LegacyDDPError as error:
        files = [path.read_text(encoding="utf-8") for path in folder.glob("legacy_ddp-*-rank0-*.txt")]
        str(error).encode()  # a user may write it anywhere
        seconds = time.monotonic() - start
        return Told(type(error).__name__, error.ranks, " ".join(str(error).split()), " ".join(files), seconds)
    raise AssertionError("no error")


def _wrap(folder: Path) -> LegacyDistributedDataParallel:
    return wrap(timeout_seconds=30.0, checks=Checks(report_dir=folder))


@dataclass
class _Raises:
    """A sample size that fails when it is looked at."""

    error: Exception

    def __index__(self) -> int:
        raise self.error


def _fails_before_the_header(rank: int, folder: Path, odd: str) -> tuple[Told, float | None]:
    model = _wrap(folder)
    size = _Raises(ODD[odd][0]())
    add_gradients(model, 1.0)
    told = _told(folder, lambda: model.all_reduce(sample_size=size if rank == CULPRIT else 1))
    return told, step(model, 1.0 + rank)


def test_an_exception_before_the_header_is_the_same_error_of_bounded_length_on_all(tmp_path: Path) -> None:
    seen = run_cases(_fails_before_the_header, 2, {odd: (tmp_path, odd) for odd in ODD})
    for odd, ((left, after), (raised, _)) in seen.items():
        assert (left.kind, left.ranks, left.text) == (raised.kind, raised.ranks, raised.text)
        assert (left.kind, left.ranks) == ("PeerError", (CULPRIT,))
        assert f"rank 1: {ODD[odd][1]}" in left.text
        assert len(left.text) < 10_000
        assert ("more characters)" in left.text) == odd.endswith("B")
        assert after == 1.5


def _fails_in_its_hook(rank: int, folder: Path, odd: str) -> Told | tuple[bool, str, Any]:
    model = _wrap(folder)
    own = ODD[odd][0]()

    def hook(state: Any, bucket: Any) -> Any:
        if rank == CULPRIT:
            raise own
        return mean(None, bucket)

    model.register_comm_hook(None, hook)
    add_gradients(model, 1.0)
    if rank != CULPRIT:
        return _told(folder, model.all_reduce)
    with pytest.raises(type(own)) as caught:
        model.all_reduce()
    again = _told(folder, model.all_reduce)
    return caught.value is own, again.text, gradient_values(model)


@pytest.mark.cpu("a collective of a device goes on until its own timeout")
@pytest.mark.parametrize("odd", ODD)
def test_an_exception_in_a_hook_names_its_rank_at_once_whatever_it_says(odd: str, tmp_path: Path) -> None:
    left, (is_own, again, gradients) = run_ranks(_fails_in_its_hook, 2, tmp_path, odd, survivors_exit=False)

    _check_loss(left, f"rank 1 left all_reduce() call 1 with {ODD[odd][1]}")
    assert is_own
    assert f"not usable after an earlier failure ({ODD[odd][1]}" in again
    assert len(again) < 10_000
    assert gradients == {"weight": None}


def _fails_for_good(rank: int, folder: Path, odd: str) -> Told | None:
    model = _wrap(folder)
    step(model, 1.0)
    if rank != CULPRIT:
        return _told(folder, lambda: step(model, 1.0))
    error = ODD[odd][0]()
    with pytest.raises(type(error)):
        _leave_with(error)
    sys.exit(1)  # run_ranks knows a planted error by that


def _leave_with(error: Exception) -> NoReturn:
    try:
        raise error
    finally:
        dist.destroy_process_group()


@pytest.mark.unsimulated("a process with it ends in another way")
@pytest.mark.parametrize("odd", ODD)
def test_an_exception_that_ends_a_rank_is_its_goodbye_whatever_it_says(odd: str, tmp_path: Path) -> None:
    left, _ = run_ranks(_fails_for_good, 2, tmp_path, odd, lost=(CULPRIT,))

    _check_loss(left, f"missing rank 1 (left after all_reduce() call 1 with {ODD[odd][1]}")


def _check_loss(told: Told, words: str) -> None:
    assert (told.kind, told.ranks) == ("PeerLostError", (CULPRIT,))
    assert words in told.text
    assert words in " ".join(told.on_disk.split())
    assert len(told.text) < 10_000
    assert told.seconds < 20, "found by waiting"


def _interrupted_in_no_sync(rank: int, odd: str) -> str:
    model = wrap(reproducible=True)
    error = ODD[odd][0]()
    with pytest.raises(type(error)), model.no_sync():
        raise error
    try:
        model.all_reduce(sample_size=1)
    except LegacyDDPError as problem:
        return str(problem)
    return "no error"


@pytest.mark.parametrize("odd", ["mute", "50 MB"])
def test_an_exception_inside_no_sync_is_told_with_what_to_do_however_long_it_is(odd: str) -> None:
    (text,) = run_ranks(_interrupted_in_no_sync, 1, odd)

    assert f"ended this rank's micro-batch 1 (counted from 1) ({ODD[odd][1]}" in text
    assert text.endswith("do the step again from its first micro-batch, on every rank")


def _leaves_in_a_folder_of_bytes(rank: int, folder: Path) -> Told:
    model = wrap(timeout_seconds=30.0, checks=Checks(report_dir=folder / "r\udcff"))
    step(model, 1.0)
    if rank == CULPRIT:
        sys.exit(1)
    return _told(folder / "r\udcff", lambda: step(model, 1.0))


@pytest.mark.skipif(sys.platform == "darwin", reason="file names are UTF-8 there")
def test_a_report_dir_that_is_no_utf_8_is_named_with_escapes(tmp_path: Path) -> None:
    told, _ = run_ranks(_leaves_in_a_folder_of_bytes, 2, tmp_path, lost=(CULPRIT,))

    assert rf"(also in {tmp_path}/r\udcff/legacy_ddp-" in told.text
    _check_loss(told, "missing rank 1 (left after all_reduce() call 1 with exit status 1")
