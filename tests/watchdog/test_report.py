"""Evaluation of the rows of all ranks, and the text of the report."""

import json
import re
import textwrap
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from legacy_ddp._explain.missing import MAX_ROWS, MAX_STACKS, compose, format_loss, missing_ranks, process_text
from legacy_ddp._watchdog.client import (
    MAX_BYTES,
    Endpoint,
    Failure,
    Outcome,
    decode_endpoint,
)
from legacy_ddp._watchdog.process import DEAD, Sample, own_identity
from legacy_ddp._watchdog.reports import Report
from legacy_ddp._watchdog.status import LEFT_AFTER_LOSS, LEFT_NORMALLY, RankStatus, Row, build_rows, own_status
from legacy_ddp._watchdog.watchdog import Watchdog

WAITING_STACK = ("train.py:91 in <module>", "legacy_ddp/_wrapper.py:143 in all_reduce")


def _waits(rank: int, serial: int = 5, phase: str = "agree", seconds: float = 10.2) -> Row:
    call = f"all_reduce() call {serial}"
    sample = Sample(call, phase, seconds, 7, WAITING_STACK)
    return Row(rank, "node-a", 4710 + rank, Outcome.ANSWERED, sample, serial, True, call, "running")


def _works(rank: int, serial: int = 4, phase: str = "user code", stack: tuple[str, ...] = ("train.py:88 in f",)) -> Row:
    sample = Sample("", phase, 12.34, 6, stack)
    call = f"all_reduce() call {serial}" if serial else ""
    return Row(rank, "node-a", 4710 + rank, Outcome.ANSWERED, sample, serial, False, call, "running")


def _is_lost(rank: int, outcome: Outcome, process: str = "", note: str = "") -> Row:
    return Row(rank, "node-b", 4710 + rank, outcome, process=process, note=note)


def _line(report: Report) -> str:
    """The text of the report before the table."""
    return " ".join(report.text.split("\n\n")[0].split())


def test_a_rank_in_user_code_is_named_with_its_line_and_its_stack_comes_first() -> None:
    report = compose([_waits(0), _works(1), _waits(2)])

    assert report.missing == (1,)
    assert report.text == textwrap.dedent(
        """\
        all_reduce() call 5, phase agree: ranks have waited for 10.2 s; missing rank 1
          (user code after all_reduce() call 4, at train.py:88 in f, on host node-a)

         rank  doing                                      for  process on host:pid
            1  user code after all_reduce() call 4     12.3 s  running on node-a:4711
         0, 2  all_reduce() call 5: agree              10.2 s  running on node-a

        stack of rank 1, innermost last:
          train.py:88 in f

        stack of ranks 0, 2, innermost last:
          train.py:91 in <module>
          legacy_ddp/_wrapper.py:143 in all_reduce"""
    )


@pytest.mark.parametrize(
    "lost, words",
    [
        (_is_lost(1, Outcome.ENDED), "its process has ended"),
        (_is_lost(1, Outcome.SILENT, "stopped"), "its process is stopped"),
        (_is_lost(1, Outcome.SILENT, "held by a debugger"), "its process is held by a debugger"),
        (_is_lost(1, Outcome.SILENT, "running"), "its process is running but does not answer: Python may be held up"),
        (_is_lost(1, Outcome.SILENT), "does not answer"),
        (_is_lost(1, Outcome.UNREACHABLE), "cannot be reached"),
        (
            _is_lost(1, Outcome.ENDED, note="left after call 4 with ValueError: bad"),
            "left after call 4 with ValueError",
        ),
    ],
)
def test_a_rank_that_does_not_answer_is_named_with_what_is_known_of_its_process(lost: Row, words: str) -> None:
    report = compose([_waits(0), lost, _waits(2)], Failure("no answer within 10 s"))

    assert report.missing == (1,)
    assert f"call 5, phase agree: no answer within 10 s; missing rank 1 ({words}" in _line(report)
    assert "on host node-b)" in _line(report)
    assert not report.is_progressing


def test_the_report_on_a_rank_that_made_fewer_calls_says_how_to_find_the_step() -> None:
    left = _is_lost(
        1, Outcome.ENDED, note=f"{LEFT_NORMALLY} after all_reduce() call 4, by sys.exit(0) at train.py:9 in main"
    )
    report = compose([_waits(0), left, _waits(2)], Failure("rank 1 ended"))

    assert report.text.split("\n\n")[0] == textwrap.dedent(
        """\
        all_reduce() call 5, phase agree: rank 1 ended; missing rank 1 (left without an
          error after all_reduce() call 4, by sys.exit(0) at train.py:9 in main, on host
          node-b)
        rank 1 made fewer calls. Possible reasons:
        - it stopped alone (a signal, early stopping, an error that its script caught):
          let all ranks stop in the same call: pass metrics={"stop": 1 or 0} in every
          all_reduce(), and leave the loop on every rank where record.metrics["stop"] is
          not 0
        - it left out a whole step (continue before the call): pass metrics={"step":
          step} in every all_reduce(), and compare record.metrics["step"] with step *
          world size; they differ from the first such step on
        - a call is under a condition (if rank == 0): make every call on all ranks
        - it started from another checkpoint or step number: load the same file on all
          ranks
        - it had a batch less: give every rank as many batches (a sampler,
          drop_last=True), or use model.join()"""
    )


def test_the_report_of_a_group_in_which_only_the_function_made_calls_names_the_function() -> None:
    left = _is_lost(1, Outcome.ENDED, note=f"{LEFT_NORMALLY} after all_reduce() call 4, at the end of its script")
    alone = replace(_waits(0), has_wrapper=False)
    advice = _line(compose([alone, left, replace(_waits(2), has_wrapper=False)], Failure("rank 1 ended")))
    with_wrapper = _line(compose([alone, left, _waits(2)], Failure("rank 1 ended")))

    assert "in every all_reduce_gradients(), and leave the loop" in advice
    assert "model.join()" not in advice
    assert "in every all_reduce(), and leave the loop" in with_wrapper
    assert "or use model.join()" in with_wrapper


def test_the_report_on_a_rank_that_left_after_a_signal_has_no_other_reason() -> None:
    left = _is_lost(1, Outcome.CLOSED, "running", note=f"{LEFT_NORMALLY} after call 4, by sys.exit(0), after SIGTERM")
    text = _line(compose([_waits(0), left, _waits(2)], Failure("rank 1 ended")))

    assert "rank 1 made fewer calls, because it stopped alone: let all ranks stop in the same call" in text
    assert "batch" not in text


@pytest.mark.parametrize("note", [f"{LEFT_AFTER_LOSS}: missing rank 2 ({LEFT_NORMALLY} after call 4)", ""])
def test_only_a_rank_that_left_by_itself_is_told_to_have_made_fewer_calls(note: str) -> None:
    rows = [_waits(0), _is_lost(1, Outcome.ENDED, note=note), _waits(2)]

    assert "fewer calls" not in compose(rows, Failure("connection lost")).text


def test_a_rank_that_is_dead_is_not_called_running_while_its_process_ends() -> None:
    assert process_text(_is_lost(1, Outcome.ENDED, "running")) == "dead"


def test_a_rank_that_answered_and_was_then_seen_dead_counts_as_one_that_did_not_answer() -> None:
    peers = [Endpoint(rank, own_identity(), [], "") for rank in range(2)]
    said = own_status(RankStatus(serial=3, call="all_reduce() call 3", in_call=True), [])

    rows = build_rows(
        peers, {0: (Outcome.ANSWERED, {**said, "process_states": {"1": DEAD}}), 1: (Outcome.ANSWERED, said)}
    )

    assert [(row.outcome, row.sample is None) for row in rows] == [(Outcome.ANSWERED, False), (Outcome.ENDED, True)]
    assert missing_ranks(rows) == (1,)


def test_ranks_missing_for_different_reasons_are_named_one_after_the_other() -> None:
    report = compose([_waits(0), _is_lost(1, Outcome.ENDED), _waits(2), _works(3)])

    assert report.missing == (1, 3)
    assert "missing rank 1 (its process has ended, on host node-b); rank 3 (user code after" in _line(report)


@pytest.mark.parametrize(
    "rows, missing",
    [
        ([_waits(0), _waits(1)], ()),
        ([_waits(0), _waits(1, serial=4)], (1,)),  # still in the call before
        ([_waits(0), _works(1, serial=5)], ()),  # through this call already
        ([_waits(0), _waits(1, phase="pack")], (1,)),
        ([_waits(0, phase="payload"), _waits(1, phase="agree")], (1,)),
        ([_waits(0), _works(1, phase="join, out of data"), _works(2)], (2,)),  # waits for the others, too
        ([_waits(0, phase="hook"), _waits(1, phase="its hook returned what cannot be a gradient: got str")], (1,)),
        ([_waits(0, phase="hook"), _waits(1, phase="compare")], (1,)),
        ([_waits(0, phase="payload"), _waits(1, phase="hook")], (1,)),
        ([_works(0), _works(1)], ()),  # nobody waits any more
        ([_waits(0), _is_lost(1, Outcome.NOT_ASKED), _works(2)], (2,)),  # somebody is known to be behind
        ([_waits(0), _is_lost(1, Outcome.NOT_ASKED), _waits(2)], (1,)),  # it can be nobody else
        ([_waits(0), _is_lost(1, Outcome.NOT_ASKED), _is_lost(2, Outcome.NOT_ASKED)], ()),  # it can be either
        ([_waits(0), _is_lost(1, Outcome.UNKNOWN), _is_lost(2, Outcome.ENDED)], (2,)),
        ([_waits(0), _is_lost(1, Outcome.NOT_ASKED, "dead"), _is_lost(2, Outcome.NOT_ASKED)], (1,)),
        (
            [_waits(0), _is_lost(1, Outcome.ENDED), _waits(2, serial=4, phase="payload")],
            (1,),
        ),  # waits for the dead rank
        (  # the network broke after rank 1 got all headers, and before rank 0 did
            [_waits(0), _waits(1, phase="payload"), *(_is_lost(rank, Outcome.UNREACHABLE) for rank in (2, 3))],
            (2, 3),
        ),
        (  # the hook waits for the vanished host in collectives of its own
            [_waits(0, phase="hook"), _waits(1, phase="payload"), _is_lost(2, Outcome.UNREACHABLE)],
            (2,),
        ),
        ([_waits(0), _waits(1, phase="payload"), _is_lost(2, Outcome.SILENT, "stopped")], (2,)),
        ([_waits(0), _waits(1, phase="payload"), _works(2)], (2,)),
        ([_waits(0, phase="pack"), _waits(1, phase="payload"), _works(2)], (0, 2)),  # may be stuck in pack
        # A rank without an answer may be slow on a crowded machine.
        ([_waits(0), _is_lost(1, Outcome.SILENT, "running"), _works(2)], (2,)),
        ([_waits(0), _is_lost(1, Outcome.SILENT, "running"), _is_lost(2, Outcome.ENDED)], (2,)),
        ([_waits(0), _is_lost(1, Outcome.SILENT, "running"), _waits(2, phase="payload")], (1,)),
    ],
)
def test_ranks_behind_the_farthest_are_missing(rows: list[Row], missing: tuple[int, ...]) -> None:
    assert missing_ranks(rows) == missing


def test_a_rank_without_an_answer_is_mentioned_beside_the_missing_rank() -> None:
    report = compose([_waits(0), _is_lost(1, Outcome.SILENT, "running"), _works(2), _waits(3)])

    said = (
        "missing rank 2 (user code after all_reduce() call 4, at train.py:88 in f, on host node-a); "
        "no answer from rank 1"
    )
    assert said in _line(report)


def test_if_no_rank_is_missing_the_network_is_suspected() -> None:
    report = compose([_waits(0), _waits(1)], Failure("connection lost"))

    assert report.missing == ()
    assert not report.is_progressing
    assert "no rank is missing, every rank is in this call; look at the network" in _line(report)


def test_where_a_rank_is_through_the_call_already_it_is_not_said_to_be_in_it() -> None:
    line = _line(compose([_waits(0), _works(1, serial=5)], Failure("connection lost")))

    assert "no rank is missing, no rank is behind this call; look at the network" in line


def test_a_rank_that_advances_or_is_in_a_debugger_is_progressing_and_the_head_is_one_line() -> None:
    moving, held = replace(_works(1), is_advancing=True), _works(2, phase="debugger")

    report = compose([_waits(0), moving, held])

    assert report.is_progressing
    assert "rank 2 (debugger after all_reduce() call 4" in report.head
    assert "\n" not in report.head
    assert not compose([_waits(0), moving, _works(2)]).is_progressing


def test_a_rank_that_only_computes_is_busy_and_not_progressing_for_it_may_be_a_loop() -> None:
    busy, idle = replace(_works(1), is_busy=True), replace(_works(2), is_busy=False)

    assert (compose([_waits(0), busy]).is_busy, compose([_waits(0), busy]).is_progressing) == (True, False)
    assert not compose([_waits(0), busy, idle]).is_busy
    text = " ".join(compose([_waits(0), busy, idle]).text.split())
    assert "running, busy on node-a:4711" in text
    assert "running, idle on node-a:4712" in text


def test_the_users_own_line_comes_before_the_library_that_it_leads_into() -> None:
    row = _works(1, stack=("train.py:88 in save", "torch/serialization.py:966 in save"))
    assert row.sample is not None

    own = replace(row, sample=replace(row.sample, line="train.py:88 in save"))

    assert "at train.py:88 in save, inside torch/serialization.py:966 in save, on host" in _line(
        compose([_waits(0), own])
    )


def test_a_rank_that_left_after_a_loss_is_not_blamed() -> None:
    victim = _is_lost(1, Outcome.ENDED, note=LEFT_AFTER_LOSS)

    assert compose([_waits(0), victim, _is_lost(2, Outcome.ENDED)]).missing == (2,)


def test_a_rank_that_left_after_a_loss_is_named_if_no_other_rank_can_be_missing() -> None:
    left = [
        _is_lost(rank, Outcome.ENDED, note=f"{LEFT_AFTER_LOSS}: missing rank 1 (its process is stopped)")
        for rank in (0, 2)
    ]

    report = compose([left[0], _waits(1), left[1]], Failure("connection lost"))

    assert report.missing == (0, 2)
    assert f"missing ranks 0, 2 ({LEFT_AFTER_LOSS}: missing rank 1 (its process is stopped), on" in _line(report)
    assert not report.is_progressing
    assert compose([left[0], _waits(1), _works(2)], Failure("failed", ranks=(2,))).missing == (2,)
    assert compose([left[0], _waits(1), _is_lost(2, Outcome.NOT_ASKED)], Failure("failed")).missing == (2,)


@pytest.mark.parametrize("serial", [4, 5, 6])
@pytest.mark.parametrize("is_alone", [False, True])
def test_a_rank_that_is_dead_by_now_is_missing_however_far_it_was_when_it_answered(serial: int, is_alone: bool) -> None:
    dead = replace(_waits(1, serial=serial), process="dead")
    other = _works(0) if is_alone else _waits(0)

    report = compose([other, dead], Failure("connection lost"))

    assert report.missing == (1,)
    assert "missing rank 1 (its process has ended, " in _line(report)
    assert "dead on node-a:4711" in " ".join(report.text.split())
    assert compose([other, dead], Failure("gone", ranks=(0,))).missing == (0, 1)


def test_the_text_of_a_loss_has_the_position_of_the_rank_and_the_user_s_line() -> None:
    reason, stack = "rank 1 ended unexpectedly", ("job/train.py:88 in save", "torch/serialization.py:966 in save")
    working = _works(2, phase="forward", stack=stack)
    assert working.sample is not None
    working = replace(working, sample=replace(working.sample, line=stack[0]))

    assert format_loss(_waits(0), reason) == (
        f"{reason}; rank 0 is in all_reduce() call 5, phase agree, at legacy_ddp/_wrapper.py:143 in all_reduce"
    )
    assert format_loss(working, reason) == (
        f"{reason}; rank 2 is in forward after all_reduce() call 4, at job/train.py:88 in save"
    )
    ends = _works(2, phase="process exit", stack=("_watchdog/watchdog.py:191 in note_end",))
    assert format_loss(ends, reason) == f"{reason}; rank 2 is in process exit after all_reduce() call 4"
    said = format_loss(
        _waits(0), "connection lost after 0.04 s (Connection closed by peer)", "missing rank 1 (dead, on host a)"
    )
    assert "peer); missing rank 1 (dead, on host a); rank 0 is in" in said
    assert "\n" not in said


def test_without_a_poll_only_ranks_known_to_be_lost_are_named() -> None:
    rows = [_waits(0), _is_lost(1, Outcome.NOT_ASKED, "dead"), _is_lost(2, Outcome.ENDED)]

    assert compose(rows, Failure("gone", ranks=(2,)), was_polled=False).missing == (2,)
    assert compose(rows, Failure("gone", ranks=(2,))).missing == (1, 2)


def test_a_living_rank_too_slow_to_answer_is_not_blamed_for_the_death_of_another() -> None:
    dead = _is_lost(2, Outcome.ENDED)

    for process, blamed in {"running": (2,), "stopped": (1, 2), "": (1, 2)}.items():
        rows = [_waits(0), _is_lost(1, Outcome.SILENT, process), dead]
        assert compose(rows, Failure("gone", ranks=(2,))).missing == blamed, process


def test_a_thousand_ranks_of_a_hundred_hosts_at_one_place_share_a_headline() -> None:
    rows = [_waits(0), *(replace(_works(rank), host=f"node-{rank // 8}") for rank in range(1, 1000))]

    assert len(compose(rows).head) < 400


def test_a_rank_in_one_long_operation_is_progressing_if_it_began_while_the_others_waited() -> None:
    def behind(seconds: float) -> Row:
        row = _works(1, phase="forward")
        assert row.sample is not None
        return replace(row, sample=replace(row.sample, age_seconds=seconds))

    assert compose([_waits(0, seconds=60.0), behind(20.0)]).is_progressing
    assert not compose([_waits(0, seconds=60.0), behind(50.0)]).is_progressing


def _on(host: str, row: Row) -> Row:
    return replace(row, host=host)


def test_one_waiting_rank_of_each_host_is_a_reporter_where_a_rank_waits() -> None:
    rows = [_works(0), _waits(1), _on("node-c", _waits(2)), _on("node-c", _waits(3))]
    assert sorted(compose(rows).reporters) == [1, 2]

    # On node-d a rank is through the call; on node-e one rank is dead and one works; on node-f nobody is left.
    rows += [_on("node-d", row) for row in (_works(4), _works(5, serial=5))]
    rows += [_on("node-e", row) for row in (_is_lost(6, Outcome.ENDED), _works(7))]
    rows += [_on("node-f", row) for row in (_is_lost(8, Outcome.ENDED), _is_lost(9, Outcome.UNREACHABLE))]
    assert sorted(compose(rows).reporters) == [1, 2, 5, 7, 8]


@pytest.mark.parametrize(
    "rank, reporters, expected",
    [(0, (0, 2), 0), (1, (0, 2), 0), (3, (0, 2), 2), (3, (0, 3), 3), (3, (0,), 3), (3, (), 3)],
)
def test_a_rank_points_to_the_reporter_of_its_own_host(
    rank: int, reporters: tuple[int, ...], expected: int, tmp_path: Path
) -> None:
    hosts = ["node-a", "node-a", "node-b", "node-b"]
    peers = [Endpoint(other, replace(own_identity(), host=host), [], "").encode() for other, host in enumerate(hosts)]
    watchdog = Watchdog(rank, range(4), warn_after_seconds=60.0, report_dir=tmp_path)
    own = decode_endpoint(rank, peers[rank])
    assert own is not None
    watchdog._view.own = own
    watchdog.start(peers)

    assert watchdog.reporter_of(replace(compose([_waits(0)]), reporters=reporters)) == expected
    watchdog.close()


def test_a_call_on_another_group_is_named() -> None:
    other = replace(_works(1), sample=Sample("broadcast_buffers() call 2", "payload", 1.0, 3, ()))

    assert "rank 1 (broadcast_buffers() call 2 of another group: payload, on" in _line(compose([_waits(0), other]))


def _with(row: Row, **facts: Any) -> Row:
    assert row.sample is not None
    return replace(row, sample=replace(row.sample, **facts))


def test_a_report_says_what_surrounds_a_missing_rank_and_what_a_waiting_rank() -> None:
    busy = _with(_works(1), local_work="no_sync() of Critic: an open block")
    waiting = [_with(_waits(0), closure="LBFGS"), _with(_waits(2), local_work="no_sync() of Actor: an open block")]

    line = _line(compose([waiting[0], busy, waiting[1]]))

    assert "missing rank 1 (user code after all_reduce() call 4, at train.py:88 in f; no_sync() of Critic: an" in line
    assert "Actor" not in line  # a rank in the call is not outside because of a block
    assert "rank 0 made the call in the closure of LBFGS.step(), which decides by the loss how often it runs" in line
    assert "the closure must return the mean loss, equal on all ranks" in line


def test_the_report_on_a_thousand_ranks_has_the_length_of_a_page() -> None:
    rows = [_works(rank, stack=(f"train.py:{rank} in f",)) if rank % 100 == 7 else _waits(rank) for rank in range(1000)]

    report = compose(rows)

    assert report.missing == tuple(range(7, 1000, 100))
    assert len(report.text.splitlines()) < MAX_ROWS + 5 * MAX_STACKS + 40
    assert "... other stacks of ranks" in report.text
    assert "\n0-6, 8-106, 108-206, 208-306, 308-406" in report.text


def test_ranks_in_the_same_state_share_a_line_with_their_hosts_and_the_shortest_and_longest_time() -> None:
    waiting = [_on(f"node-{rank // 2}", _waits(rank, seconds=10 + rank / 10)) for rank in range(13) if rank != 3]
    rows = sorted([*waiting, _works(3)], key=lambda row: row.rank)
    rows[8] = replace(rows[8], is_busy=True)
    rows[9] = replace(_waits(9, phase="pack"), in_call=True)

    tables = [compose(some).text.split("\n\n")[1] for some in (rows[:8], rows)]

    assert tables[0] == textwrap.dedent(
        """\
            rank  doing                                      for  process on host:pid
               3  user code after all_reduce() call 4     12.3 s  running on node-a:4713
        0-2, 4-7  all_reduce() call 5: agree            10.0-10.7 s  running on node-0,
                    node-1, node-2, node-3"""
    )
    assert tables[1] == textwrap.dedent(
        """\
         rank  doing                                      for  process on host:pid
            3  user code after all_reduce() call 4     12.3 s  running on node-a:4713
            9  all_reduce() call 5: pack               10.2 s  running on node-a:4719
        0-2, 4-7, 10-12  all_reduce() call 5: agree            10.0-11.2 s  running on
                 node-0, node-1, node-2, node-3, ... 2 more
            8  all_reduce() call 5: agree              10.8 s  running, busy on
                 node-4:4718"""
    )


def test_many_missing_ranks_have_a_line_each_until_the_page_is_full() -> None:
    rows = [_waits(0), *(_works(rank) for rank in range(1, 1000))]

    table = compose(rows).text.split("\n\n")[1].splitlines()

    assert [int(line.split()[0]) for line in table[1 : 1 + MAX_ROWS]] == [*range(1, 1 + MAX_ROWS)]
    assert table[1 + MAX_ROWS].startswith(f"{1 + MAX_ROWS}-999  user code after all_reduce() call 4")
    assert table[2 + MAX_ROWS].startswith("     0  all_reduce() call 5: agree")
    assert len(table) == 3 + MAX_ROWS


def test_the_filed_report_has_a_line_of_json_with_every_rank_by_state() -> None:
    rows = [_waits(0), _works(1), replace(_waits(2, seconds=9.75), host="node-\udcff"), _is_lost(3, Outcome.ENDED)]
    rows.append(replace(_waits(4), sample=Sample("all_reduce() call 5", "agree", 10.2, 7, ("train.py:40 in g",))))
    report = compose(rows, Failure("rank 3 ended", ranks=(3,)))

    text, _, line = report.filed.rpartition("\n\n")

    assert text == report.text
    assert "\n" not in line
    found = json.loads(line)
    states = found.pop("states")
    place = {"call": "all_reduce() call 5", "phase": "agree", "seconds": 10.2}
    assert found == {"head": report.head, "missing": [3], "is_late": False, "reporters": [0, 2, 3], **place}
    assert [state["ranks"] for state in states] == [[3], [1], [4], [0, 2]]
    assert (states[0]["activity"], states[0]["process"], states[0]["stack"]) == ("its process has ended", "dead", None)
    assert (states[1]["calls"], states[1]["stack"], states[1]["pids"]) == (4, ["train.py:88 in f"], [4711])
    assert states[3] == {
        "ranks": [0, 2],
        "activity": "all_reduce() call 5: agree",
        "process": "running",
        "answer": "answers",
        "note": "",
        "calls": 5,
        "line": "",
        "stack": list(WAITING_STACK),
        "seconds": [10.2, 9.75],
        "hosts": ["node-a", "node-\\udcff"],
        "pids": [4710, 4712],
    }


def test_the_message_with_the_report_on_a_thousand_ranks_with_a_long_stack_each_fits() -> None:
    stacks = [tuple(f"{'x' * 180}.py:{rank} in {frame}" for frame in range(12)) for rank in range(1, 1000)]
    rows = [_waits(0), *(_works(rank, stack=stack) for rank, stack in enumerate(stacks, 1))]

    assert len(json.dumps(asdict(compose(rows)))) < MAX_BYTES // 2


_SAMPLES = st.builds(
    Sample,
    st.sampled_from(["", "all_reduce() call 3"]),
    st.sampled_from(["plan", "agree", "hook", "payload", "forward", "backward", "user code", "debugger"]),
    st.floats(0, 1e6),
    st.integers(0, 9),
    st.lists(st.sampled_from(["a.py:1 in f", "b.py:2 in g"]), max_size=3).map(tuple),
)
_ROWS = st.builds(
    Row,
    rank=st.just(0),
    host=st.sampled_from(["node-a", "node-b"]),
    pid=st.integers(1, 99999),
    outcome=st.sampled_from(Outcome),
    sample=st.none() | _SAMPLES,
    serial=st.integers(0, 4),
    in_call=st.booleans(),
    last_call=st.sampled_from(["", "all_reduce() call 3"]),
    process=st.sampled_from(["", "running", "stopped", "dead"]),
    note=st.sampled_from(["", "left"]),
    is_advancing=st.booleans(),
    is_busy=st.none() | st.booleans(),
)


@given(st.lists(_ROWS, min_size=1, max_size=40))
def test_whatever_the_ranks_say_the_text_names_all_that_are_missing_in_80_columns(rows: list[Row]) -> None:
    rows = [replace(row, rank=rank, in_call=row.in_call and row.sample is not None) for rank, row in enumerate(rows)]

    report = compose(rows)

    assert report.missing == missing_ranks(rows)
    assert all(len(line) <= 80 for line in report.text.splitlines())
    farthest = max([(0, 0), *(row.progress for row in rows if row.in_call)])
    assert {row.rank for row in rows if row.process == "dead" and row.note != "left"} <= {*report.missing}
    assert all(rows[rank].progress < farthest for rank in report.missing)
    listed = {int(rank) for rank in re.findall(r"(?m)^ *(\d+)  ", report.text)}
    assert set(report.missing[:MAX_ROWS]) <= listed
