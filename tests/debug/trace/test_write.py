"""Files of a rank before a flush, after a kill, and on a full disk."""

import os
import random
import resource
from itertools import count
from pathlib import Path

import pytest

from legacy_ddp._errors import TraceError
from legacy_ddp.debug._trace.read import RankTrace, open_run
from legacy_ddp.debug._trace.records import Names, Section, Values, Writer
from tests.helpers.fork_server import fork_server
from tests.helpers.processes import limited
from tests.helpers.trace_scenarios import contents_of
from tests.helpers.traces import environment


def _section(step: int, numel: int = 3) -> Section:
    names = tuple(f"buffer '{index}'" for index in range(numel))
    return Section(Names("buffers", names, ("",) * numel), Values((f"{step:016x}",) * numel, (1.0 * step,) * numel))


def _left(path: Path) -> list[int]:
    """The steps in a file, all of which are as they were written, up to a torn line if there is one."""
    with RankTrace(path) as trace:
        assert trace.damage == ""
        for (step, phase), what in contents_of(trace).items():
            if phase == "buffers":
                assert isinstance(what, Section)
                assert what == _section(step, len(what.names.names))
        return list(trace.steps)


def _write_for_ever(folder: Path, numel: int) -> None:
    writer = Writer(folder, environment(0, 1))
    for step in count():
        writer.section(step, _section(step, numel))
        writer.flush()


@pytest.mark.parametrize("numel", [1, 30_000])  # lines of 200 bytes, and of more than a MiB
def test_a_kill_leaves_whole_lines(tmp_path: Path, numel: int) -> None:
    for attempt in range(3):
        folder = tmp_path / str(attempt)
        writing = fork_server().Process(target=_write_for_ever, args=(folder, numel), daemon=True)
        writing.start()
        path = folder / "rank-00000.jsonl"
        enough = 8000 * numel**0.5 + random.Random(attempt).randrange(50_000)
        while not (path.exists() and path.stat().st_size > enough):
            writing.join(0.001)
            assert writing.exitcode is None
        writing.kill()
        writing.join()

        steps = _left(path)
        assert steps == list(range(len(steps)))
        assert len(steps) > 0
        assert open_run(folder).size_bytes == path.stat().st_size > enough


def test_nothing_follows_a_torn_line_when_there_is_room_again(tmp_path: Path) -> None:
    writer = Writer(tmp_path, environment(0, 1))
    writer.section(0, _section(0, 100))
    with limited(resource.RLIMIT_FSIZE, 1000), pytest.raises(OSError, match="File too large"):
        writer.flush()
    torn = writer.path.read_bytes()
    writer.section(1, _section(1))
    with pytest.raises(OSError, match="an earlier line of the trace was not written whole"):
        writer.flush()
    with pytest.raises(OSError, match="an earlier line of the trace was not written whole"):
        writer.close(1, "closed")

    assert writer.path.read_bytes() == torn
    with RankTrace(writer.path) as trace:
        assert (trace.torn, trace.damage, trace.end) == (True, "", "")


def test_a_disk_that_is_full_from_the_start_is_reported_and_no_file_stays_open(tmp_path: Path) -> None:
    before = os.listdir("/proc/self/fd")
    full = pytest.raises(TraceError, match=r"rank-00000.jsonl cannot be written: File too large")
    with limited(resource.RLIMIT_FSIZE, 10), full:
        Writer(tmp_path, environment(0, 1))

    assert len(os.listdir("/proc/self/fd")) == len(before)
