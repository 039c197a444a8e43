"""What is told of a job, from two polls that agree: the state, the missing ranks, the table."""

import json
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from legacy_ddp._explain.job import describe_job
from legacy_ddp._explain.missing import MAX_ROWS, compose, poll_ranks
from legacy_ddp._watchdog.client import Outcome
from legacy_ddp._watchdog.process import DEAD, DEBUGGER, RUNNING, STOPPED, Sample
from legacy_ddp._watchdog.stall import Wait
from legacy_ddp._watchdog.status import PayloadState, RankStatus, Row
from legacy_ddp.debug import _watch
from tests.helpers.status_servers import Answers
from tests.helpers.watching import a_row, a_sample, described, moving, waiting_ranks


def _poll(*changes: dict[int, dict[str, Any]]) -> list[Row]:
    """The rows of ranks that wait in call 5, but for the last rank, which is outside. ``changes`` of their answers."""
    ranks = []
    for rank, changed in enumerate(changes):
        is_last = rank == len(changes) - 1
        status = RankStatus(serial=5 - is_last, call=f"all_reduce() call {5 - is_last}", in_call=not is_last)
        status.activity.enter("agree", status.call)
        ranks.append(Answers(rank, status, changed))
    peers = [one.server.endpoint for one in ranks]
    rows = poll_ranks(peers, peers[0], twice=True)
    for one in ranks:
        one.server.close("")
    return rows


def test_two_polls_tell_who_waits_for_whom_and_not_for_a_rank_that_went_on_between_them() -> None:
    """Asked last, it is in the next call already, and the ranks that were asked first look as if they were behind."""
    job = described(*_poll({}, {}, {}))
    assert (job["state"], job["missing"], waiting_ranks(job)) == ("waiting", [2], [0, 1])

    job = described(*_poll({}, {}, {2: {"serial": 6, "in_call": True, "call": "all_reduce() call 6"}}))
    assert (job["state"], job["missing"], job["summary"]) == ("moving", [], "")


OUTSIDE: dict[str, Any] = {"in_call": False, "sample": a_sample("user code")}
_BARRIER, _RECV = Wait("barrier", "train.py:7 in main", 70.0), Wait("recv", "pipe.py:3 in main", 70.0)
_EXCHANGE = [a_row(rank, sample=a_sample("payload")) for rank in range(2)]
_IDLE = a_row(1, **OUTSIDE)


@pytest.mark.parametrize(
    "rows, warn_after_seconds, state, missing",
    [
        ([a_row(0, sample=a_sample(seconds=70.0)), moving(1)], 60.0, "late", []),
        (_EXCHANGE, 60.0, "moving", []),
        (_EXCHANGE, 1.0, "late", []),
        ([_IDLE], 60.0, "idle", []),
        ([_IDLE, a_row(2, **OUTSIDE, is_busy=True)], 60.0, "moving", []),
        ([_IDLE, a_row(2, **OUTSIDE, is_advancing=True)], 60.0, "moving", []),
        ([a_row(0, wait=replace(_BARRIER, seconds=0.01), **OUTSIDE), _IDLE], 60.0, "idle", []),
        ([a_row(0, wait=replace(_BARRIER, seconds=2.0), **OUTSIDE), _IDLE], 60.0, "waiting", [1]),
        ([a_row(0, wait=replace(_BARRIER, seconds=61.0), **OUTSIDE), _IDLE], 60.0, "late", [1]),
    ],
)
def test_the_state_of_a_job_is_a_word(
    rows: list[Row], warn_after_seconds: float, state: str, missing: list[int]
) -> None:
    job = described(*rows, warn_after_seconds=warn_after_seconds)

    assert (job["state"], job["missing"]) == (state, missing)


@pytest.mark.parametrize(
    "of, told",
    [
        (
            (),
            "; every rank of the wrapper's process group is there; the other 2 ranks of the job may be missing: run "
            "legacy-ddp watch on their hosts",
        ),
        ((4, 5), "; all of them are there; look at the network between them"),
    ],
)
def test_a_group_that_is_a_part_of_the_job_says_that_it_does_not_see_the_rest(of: tuple[int, ...], told: str) -> None:
    """A barrier of the whole job said "all of them are there", with the missing rank outside of the group."""
    rows = [a_row(rank, wait=replace(_BARRIER, ranks=of), **OUTSIDE) for rank in range(2)]

    summary = describe_job(rows, [4, 5], 4, 60.0, with_stacks=False)["summary"]

    numbers = "ranks 0-1 of the wrapper's process group are ranks 4-5 of the job"
    assert (
        summary == f"outside of calls: ranks 0-1 have waited 70 s in barrier() at train.py:7 in main{told}; {numbers}"
    )


@pytest.mark.parametrize(
    "waits, told",
    [
        ([_BARRIER, replace(_BARRIER, line="train.py:9 in main")], "all of them are there, at different lines"),
        ([_BARRIER, replace(_BARRIER, function="all_reduce")], "they wait for each other: make the same collectives"),
        (
            [replace(_RECV, source=1), replace(_RECV, source=0)],
            "ranks 0-1 wait for messages that no other sends or takes",
        ),
        (
            [replace(_RECV, source=1), replace(_RECV, source=2), replace(_RECV, source=1), _BARRIER],
            "ranks 1-2 wait for messages that no other sends or takes",
        ),
        (
            [replace(_BARRIER, ranks=(0, 1)), replace(_BARRIER, ranks=(0, 1)), _BARRIER],
            "all of ranks 0-1 are in barrier(): look at the network between them first",
        ),
        (
            [replace(_RECV, source=5), _BARRIER],
            "rank 0 has waited 70 s in recv() for rank 5 of the job, outside of the wrapper's process group, at pipe",
        ),
    ],
)
def test_the_hint_fits_what_the_ranks_wait_in(waits: list[Wait], told: str) -> None:
    """Every two places were "they wait for each other", also the same barrier at two lines."""
    rows = [a_row(rank, wait=wait, **OUTSIDE) for rank, wait in enumerate(waits)]
    size = 6 if "rank 5" in told else len(rows)

    assert told in describe_job(rows, range(len(rows)), size, 60.0, with_stacks=False)["summary"]


def test_a_rank_whose_process_goes_on_after_its_end_is_told_with_the_reason_of_the_end() -> None:
    """It was "process exit", at a line of threading, for as long as a thread of the script went on."""
    left = "left after all_reduce() call 4 with ValueError: bad, at train.py:15 in main"
    place = "threading.py:1590 in _shutdown"
    ends = a_row(1, in_call=False, serial=4, note=left, sample=a_sample("process exit", stack=(place,)))
    waits = a_row(0, in_call=False, sample=a_sample("user code"), wait=_BARRIER)

    assert described(waits, ends)["summary"].endswith(f"rank 1 is not there: {left}; its process goes on, at {place}")
    asked = replace(ends, note="left after all_reduce() call 4 with KeyboardInterrupt, at train.py:15 in main")
    assert described(waits, asked)["summary"] == ""


def test_a_rank_that_stopped_early_and_waits_for_the_others_is_told_with_the_reason() -> None:
    """It waits in the last barrier, and the other ranks in the next call."""
    stopped = a_row(1, in_call=False, serial=4, wait=_BARRIER)
    text = " ".join(compose([a_row(0), stopped, a_row(2)]).text.split())

    assert "missing rank 1 (" in text
    assert "rank 1 waits in barrier() for the ranks in this call, and these for rank 1: make the same calls" in text


@pytest.mark.parametrize("wait", [None, Wait("gather", "train.py:7 in main", 70.0), replace(_BARRIER, seconds=0.01)])
def test_no_order_of_calls_is_advised_where_another_rank_may_be_the_reason(wait: Wait | None) -> None:
    """Rank 0 waited in gather() for a rank that hung, and was told to make its calls in another order."""
    late = a_row(1, in_call=False, serial=4, wait=_BARRIER if wait is None else wait)
    hangs = a_row(2, in_call=False, serial=4) if wait is None else a_row(2)

    assert "make the same calls" not in " ".join(compose([a_row(0), late, hangs]).text.split())


@pytest.mark.parametrize(
    "changes, state",
    [
        ({"process": DEAD}, "ended"),
        ({"process": STOPPED, "sample": None, "outcome": Outcome.SILENT}, "stopped"),
        ({"sample": a_sample(DEBUGGER), "in_call": False}, "debugger"),
        ({"sample": None, "outcome": Outcome.SILENT, "process": RUNNING}, "silent"),
        ({"sample": None, "outcome": Outcome.UNKNOWN, "is_busy": None}, ""),
        ({"sample": a_sample("user code"), "in_call": False, "is_busy": True}, "busy"),
        ({"sample": a_sample("user code"), "in_call": False}, "idle"),
        ({"sample": a_sample("user code"), "in_call": False, "is_advancing": True}, "moving"),
    ],
)
def test_the_state_of_a_rank_is_a_word(changes: dict[str, Any], state: str) -> None:
    job = described(a_row(0), a_row(1, serial=4, **{"last_call": "all_reduce() call 4", **changes}))

    (row,) = [row for row in job["rows"] if row["ranks"] == [1]]
    assert row["state"] == state


def test_a_status_has_the_seconds_between_the_last_two_calls_of_a_wrapper() -> None:
    status = RankStatus()
    assert status.step_seconds() is None

    for call, at in (("1 of wrapper 1 (Net)", 1.0), ("1 of wrapper 2 (Critic)", 2.0), ("2 of wrapper 1 (Net)", 4.5)):
        status.begins.append((f"all_reduce() call {call}", at))
    status.begins.append(("broadcast_buffers() call 1", 5.0))

    assert status.step_seconds() == 3.5


def test_the_table_of_a_report_counted_the_time_of_a_wait_from_the_last_call_on() -> None:
    waits = a_row(1, serial=4, wait=replace(_BARRIER, seconds=7.0), in_call=False, sample=a_sample("user code", 30.0))

    assert re.search(r"barrier\(\) after all_reduce\(\) call 5 +7\.0 s ", compose([a_row(0), waits]).text)


def test_the_waits_of_several_jobs_are_told_below_each_and_their_stacks_after_each_table() -> None:
    waits = a_row(0, wait=replace(_BARRIER, seconds=7.0), **OUTSIDE)
    jobs = [(100, [waits, a_row(1, **OUTSIDE)]), (200, [moving(0)])]

    assert _watch.lines([{"pid": pid, **described(*rows)} for pid, rows in jobs])[1:] == [
        "     100      2      1  all_reduce() call 5               waits for 7.0 s",
        "          outside of calls: rank 0 has waited 7 s in barrier() at train.py:7 in",
        "          main; rank 1 is not there: user code after all_reduce() call 5, at b",
        "     200      1      1  all_reduce() call 5               moving",
        "",
        "legacy-ddp watch PID shows one of them",
    ]
    text = "\n".join(_watch.lines([{"pid": pid, **described(*rows, with_stacks=True)} for pid, rows in jobs]))
    assert text.count("stack of rank") == text.count("process ") == 2


def test_a_table_of_several_hosts_names_them_and_the_steps() -> None:
    rows = [a_row(rank, host=f"node-{rank // 2}", step_seconds=0.1) for rank in range(3)]
    late = a_row(3, host="node-1", serial=4, in_call=False, sample=a_sample("forward", 3.0), step_seconds=0.2)

    assert _watch.lines([{"pid": 100, **described(*rows, late)}]) == [
        "4 ranks on node-0, node-1, process 100: waits for 2.0 s",
        "  all_reduce() call 5, phase agree: ranks have waited for 2.0 s; missing rank 3",
        "    (forward after all_reduce() call 5, at b, on host node-1)",
        "",
        "rank  doing                              state    for    step  host",
        "   3  forward after all_reduce() call 5  idle   3.0 s  200 ms  node-1",
        " 0-2  all_reduce() call 5: agree         waits  2.0 s  100 ms  2 hosts",
    ]


_TEXTS = st.text(max_size=60)
_SAMPLES = st.builds(
    Sample,
    call=st.sampled_from(["", "all_reduce() call 5"]),
    phase=st.sampled_from(["agree", "payload", "user code", "forward", "hook", DEBUGGER]),
    age_seconds=st.floats(0, 1e6),
    changes=st.integers(0, 9),
    stack=st.lists(_TEXTS, max_size=3).map(tuple),
    line=_TEXTS,
)
_WAITS = st.builds(
    Wait,
    function=st.sampled_from(["barrier", "all_gather_object", "recv"]),
    line=_TEXTS,
    seconds=st.floats(0, 1e6),
    ranks=st.lists(st.integers(0, 9), max_size=4).map(tuple),
    source=st.integers(-1, 9),
)
_ROWS = st.lists(
    st.fixed_dictionaries(
        {
            "host": _TEXTS,
            "pid": st.integers(0, 2**22),
            "outcome": st.sampled_from(Outcome),
            "sample": st.none() | _SAMPLES,
            "serial": st.integers(0, 9),
            "in_call": st.booleans(),
            "last_call": st.just("") | _TEXTS,
            "process": st.sampled_from(["", RUNNING, STOPPED, DEAD]),
            "note": _TEXTS,
            "is_advancing": st.booleans(),
            "is_busy": st.none() | st.booleans(),
            "payloads": st.just(PayloadState())
            | st.builds(PayloadState, serial=st.integers(1, 9), is_late=st.booleans()),
            "wait": st.none() | _WAITS,
            "step_seconds": st.none() | st.floats(0, 1e6),
            "has_moved": st.booleans(),
        }
    ),
    min_size=1,
    max_size=12,
)


@given(_ROWS, st.floats(0.1, 1e4))
def test_whatever_ranks_say_report_and_table_have_80_columns_and_name_the_missing_or_every_rank(
    facts: list[dict[str, Any]], warn: float
) -> None:
    rows = [Row(rank, **fact) for rank, fact in enumerate(facts)]
    rows = [replace(row, in_call=row.in_call and row.sample is not None) for row in rows]

    report = compose(rows)

    has_escapes = "\\" in report.text  # which make a line longer
    assert has_escapes or all(len(line) <= 80 for line in report.text.splitlines())
    farthest = max([(0, 0), *(row.progress for row in rows if row.in_call)])
    assert {row.rank for row in rows if row.process == DEAD} <= {*report.missing}
    assert all(rows[rank].progress < farthest for rank in report.missing)
    listed = {int(rank) for rank in re.findall(r"(?m)^ *(\d+)  ", report.text)}
    assert set(report.missing[:MAX_ROWS]) <= listed

    job = {"pid": 1, **json.loads(json.dumps(described(*rows, warn_after_seconds=warn, with_stacks=True)))}

    assert sorted(rank for row in job["rows"] for rank in row["ranks"]) == list(range(len(rows)))
    for lines in (_watch.lines([job]), _watch.lines([job, job])):
        assert all(line.isprintable() for line in lines)
    _, table = "\n".join(_watch.lines([job])).split("\n\n")[:2]
    assert max(map(len, table.splitlines())) <= 80
    assert _watch.exit_status([job]) == (job["state"] == "late")


@given(st.sets(st.integers(0, 2000), min_size=1, max_size=300))
def test_a_list_of_ranks_is_short_and_says_how_many(ranks: set[int]) -> None:
    text = _watch._ranks(sorted(ranks))

    assert len(text) <= 12
    assert "(" not in text or text.endswith(f"({len(ranks)})")
