"""Evaluation of the rows of all ranks, and the text of the report."""

import json
import textwrap
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from legacy_ddp._explain.missing import MAX_ROWS, MAX_STACKS, compose, format_loss, missing_ranks, process_text
from legacy_ddp._watchdog.client import MAX_BYTES, Endpoint, Failure, Outcome, decode_endpoint
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


def _left(rank: int, note: str) -> Row:
    return _is_lost(rank, Outcome.ENDED, note=note)


def _with(row: Row, **facts: Any) -> Row:
    assert row.sample is not None
    return replace(row, sample=replace(row.sample, **facts))


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


def test_the_advice_on_fewer_calls_fits_how_the_rank_left_and_how_the_others_call() -> None:
    left = _left(1, f"{LEFT_NORMALLY} after all_reduce() call 4, at the end of its script")
    stopped = _is_lost(1, Outcome.CLOSED, "running", f"{LEFT_NORMALLY} after call 4, by sys.exit(0), after SIGTERM")
    after_loss = _left(1, f"{LEFT_AFTER_LOSS}: missing rank 2 ({LEFT_NORMALLY} after call 4)")
    first, last = replace(_waits(0), has_wrapper=False), replace(_waits(2), has_wrapper=False)

    def advice(*rows: Row) -> str:
        return _line(compose(rows, Failure("rank 1 ended")))

    by_function, with_wrapper, signalled = (
        advice(first, left, last),
        advice(first, left, _waits(2)),
        advice(first, stopped),
    )
    assert "in every all_reduce_gradients(), and leave the loop" in by_function
    assert "model.join()" not in by_function
    assert "in every all_reduce(), and leave the loop" in with_wrapper
    assert "or use model.join()" in with_wrapper
    assert "rank 1 made fewer calls, because it stopped alone: let all ranks stop in the same call" in signalled
    assert "batch" not in signalled
    for row in (after_loss, _is_lost(1, Outcome.ENDED)):
        assert "fewer calls" not in advice(first, row)


def test_ranks_missing_for_different_reasons_are_named_with_what_surrounds_them_and_the_waiting_ranks() -> None:
    stack = ("train.py:88 in save", "torch/serialization.py:966 in save")
    works = _with(_works(2, stack=stack), line=stack[0], local_work="no_sync() of Critic: an open block")
    elsewhere = replace(_works(3), sample=Sample("broadcast_buffers() call 2", "payload", 1.0, 3, ()))
    # A rank in the call is not outside because of a block.
    waiting = [_with(_waits(0), closure="LBFGS"), _with(_waits(5), local_work="no_sync() of Actor: an open block")]
    lost = [_is_lost(1, Outcome.ENDED), _is_lost(4, Outcome.SILENT, "running")]

    report = compose([waiting[0], lost[0], works, elsewhere, lost[1], waiting[1]])

    assert report.text.split("\n\n")[0] == textwrap.dedent(
        """\
        all_reduce() call 5, phase agree: ranks have waited for 10.2 s; missing rank 1
          (its process has ended, on host node-b); rank 2 (user code after all_reduce()
          call 4, at train.py:88 in save, inside torch/serialization.py:966 in save;
          no_sync() of Critic: an open block, on host node-a); rank 3
          (broadcast_buffers() call 2 of another group: payload, on host node-a); no
          answer from rank 4
        rank 0 made the call in the closure of LBFGS.step(), which decides by the loss
        how often it runs the closure: the closure must return the mean loss, equal on
        all ranks: record = model.all_reduce(metrics={'loss': loss}), then
        record.metrics['loss'] / world size"""
    )


def test_if_no_rank_is_missing_the_network_is_suspected() -> None:
    through = _line(compose([_waits(0), _works(1, serial=5)], Failure("connection lost")))

    assert "no rank is missing, no rank is behind this call; look at the network" in through
    report = compose([_waits(0), _waits(1)], Failure("connection lost"))
    assert not report.is_progressing
    assert "no rank is missing, every rank is in this call; look at the network" in _line(report)


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


@pytest.mark.parametrize(
    "rows, missing, lost",
    [
        ([_waits(0), _waits(1)], (), ()),
        ([_waits(0), _waits(1, serial=4)], (1,), ()),  # still in the call before
        ([_waits(0), _works(1, serial=5)], (), ()),  # through this call already
        ([_waits(0), _waits(1, phase="pack")], (1,), ()),
        ([_waits(0, phase="payload"), _waits(1, phase="agree")], (1,), ()),
        ([_waits(0), _works(1, phase="join, out of data"), _works(2)], (2,), ()),  # waits for the others, too
        ([_waits(0, phase="hook"), _waits(1, phase="its hook returned what cannot be a gradient: got str")], (1,), ()),
        ([_waits(0, phase="hook"), _waits(1, phase="compare")], (1,), ()),
        ([_waits(0, phase="payload"), _waits(1, phase="hook")], (1,), ()),
        ([_works(0), _works(1)], (), ()),  # nobody waits any more
        ([_waits(0), _is_lost(1, Outcome.NOT_ASKED), _works(2)], (2,), ()),  # somebody is known to be behind
        ([_waits(0), _is_lost(1, Outcome.NOT_ASKED), _waits(2)], (1,), ()),  # it can be nobody else
        ([_waits(0), _is_lost(1, Outcome.NOT_ASKED), _is_lost(2, Outcome.NOT_ASKED)], (), ()),  # it can be either
        ([_waits(0), _is_lost(1, Outcome.UNKNOWN), _is_lost(2, Outcome.ENDED)], (2,), ()),
        ([_waits(0), _is_lost(1, Outcome.NOT_ASKED, "dead"), _is_lost(2, Outcome.NOT_ASKED)], (1,), ()),
        (
            [_waits(0), _is_lost(1, Outcome.ENDED), _waits(2, serial=4, phase="payload")],
            (1,),
            (),
        ),  # waits for the dead rank
        (  # the network broke after rank 1 got all headers, and before rank 0 did
            [_waits(0), _waits(1, phase="payload"), *(_is_lost(rank, Outcome.UNREACHABLE) for rank in (2, 3))],
            (2, 3),
            (),
        ),
        (  # the hook waits for the vanished host in collectives of its own
            [_waits(0, phase="hook"), _waits(1, phase="payload"), _is_lost(2, Outcome.UNREACHABLE)],
            (2,),
            (),
        ),
        ([_waits(0), _waits(1, phase="payload"), _is_lost(2, Outcome.SILENT, "stopped")], (2,), ()),
        ([_waits(0), _waits(1, phase="payload"), _works(2)], (2,), ()),
        ([_waits(0, phase="pack"), _waits(1, phase="payload"), _works(2)], (0, 2), ()),  # may be stuck in pack
        # A rank without an answer may be slow on a crowded machine.
        ([_waits(0), _is_lost(1, Outcome.SILENT, "running"), _works(2)], (2,), ()),
        ([_waits(0), _is_lost(1, Outcome.SILENT, "running"), _is_lost(2, Outcome.ENDED)], (2,), ()),
        ([_waits(0), _is_lost(1, Outcome.SILENT, "running"), _waits(2, phase="payload")], (1,), ()),
        ([_waits(0), _left(1, LEFT_AFTER_LOSS), _is_lost(2, Outcome.ENDED)], (2,), ()),
        ([_left(0, LEFT_AFTER_LOSS), _waits(1), _left(2, LEFT_AFTER_LOSS)], (0, 2), ()),  # it can be nobody else
        ([_left(0, LEFT_AFTER_LOSS), _waits(1), _works(2)], (2,), (2,)),
        ([_left(0, LEFT_AFTER_LOSS), _waits(1), _is_lost(2, Outcome.NOT_ASKED)], (2,), ()),
        ([_waits(0), _is_lost(1, Outcome.NOT_ASKED, "dead"), _is_lost(2, Outcome.ENDED)], (1, 2), (2,)),
        # A rank too slow to answer is not to blame for the death of another.
        ([_waits(0), _is_lost(1, Outcome.SILENT, "running"), _is_lost(2, Outcome.ENDED)], (2,), (2,)),
        ([_waits(0), _is_lost(1, Outcome.SILENT, "stopped"), _is_lost(2, Outcome.ENDED)], (1, 2), (2,)),
        ([_waits(0), _is_lost(1, Outcome.SILENT), _is_lost(2, Outcome.ENDED)], (1, 2), (2,)),
    ],
)
def test_ranks_behind_the_farthest_are_missing(
    rows: list[Row], missing: tuple[int, ...], lost: tuple[int, ...]
) -> None:
    """``lost``: the ranks of the failure."""
    assert compose(rows, Failure("gone", ranks=lost)).missing == missing


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
    unasked = replace(dead, outcome=Outcome.NOT_ASKED, sample=None)
    assert compose([other, unasked], Failure("gone", ranks=(0,)), was_polled=False).missing == (0,)


def test_the_text_of_a_loss_has_the_position_of_the_rank_and_no_line_at_its_end() -> None:
    reason, missing = "connection lost (Connection closed by peer)", "missing rank 1 (dead, on host a)"
    place = "rank 0 is in all_reduce() call 5, phase agree, at legacy_ddp/_wrapper.py:143 in all_reduce"
    ends = _works(2, phase="process exit", stack=("_watchdog/watchdog.py:191 in note_end",))

    assert format_loss(_waits(0), reason, missing) == f"{reason}; {missing}; {place}"
    assert format_loss(ends, reason) == f"{reason}; rank 2 is in process exit after all_reduce() call 4"


def test_a_rank_in_one_long_operation_is_progressing_if_it_began_while_the_others_waited() -> None:
    for seconds, expected in ((20.0, True), (50.0, False)):
        behind = _with(_works(1, phase="forward"), age_seconds=seconds)
        assert compose([_waits(0, seconds=60.0), behind]).is_progressing is expected


def test_one_waiting_rank_of_each_host_is_a_reporter_where_a_rank_waits() -> None:
    rows = [_works(0), _waits(1), replace(_waits(2), host="node-c"), replace(_waits(3), host="node-c")]
    assert sorted(compose(rows).reporters) == [1, 2]

    # On node-d a rank is through the call; on node-e one rank is dead and one works; on node-f nobody is left.
    rows += [replace(row, host="node-d") for row in (_works(4), _works(5, serial=5))]
    rows += [replace(row, host="node-e") for row in (_is_lost(6, Outcome.ENDED), _works(7))]
    rows += [replace(row, host="node-f") for row in (_is_lost(8, Outcome.ENDED), _is_lost(9, Outcome.UNREACHABLE))]
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


def test_the_report_on_a_thousand_ranks_has_the_length_of_a_page() -> None:
    rows = [_works(rank, stack=(f"train.py:{rank} in f",)) if rank % 100 == 7 else _waits(rank) for rank in range(1000)]

    report = compose(rows)

    assert report.missing == tuple(range(7, 1000, 100))
    assert len(report.text.splitlines()) < MAX_ROWS + 5 * MAX_STACKS + 40
    assert "... other stacks of ranks" in report.text
    assert "\n0-6, 8-106, 108-206, 208-306, 308-406" in report.text


def test_ranks_in_the_same_state_share_a_line_with_their_hosts_and_the_shortest_and_longest_time() -> None:
    waiting = [
        replace(_waits(rank, seconds=10 + rank / 10), host=f"node-{rank // 2}") for rank in range(13) if rank != 3
    ]
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
    rows = [_waits(0), *(replace(_works(rank), host=f"node-{rank // 8}") for rank in range(1, 1000))]

    report = compose(rows)

    table = report.text.split("\n\n")[1].splitlines()
    assert len(report.head) < 400
    assert [int(line.split()[0]) for line in table[1 : 1 + MAX_ROWS]] == [*range(1, 1 + MAX_ROWS)]
    assert table[1 + MAX_ROWS].startswith(f"{1 + MAX_ROWS}-999  user code after all_reduce() call 4")
    assert table[-1].startswith("     0  all_reduce() call 5: agree")
    assert len(table) == 4 + MAX_ROWS


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
