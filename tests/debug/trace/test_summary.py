"""Summaries have the contents of a trace."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from legacy_ddp._statistics import LateRank
from legacy_ddp._text import format_bytes
from legacy_ddp.debug._trace.read import open_run
from legacy_ddp.debug._trace.records import RANK_FILE
from legacy_ddp.debug._trace.summary import NonFinite, Summary, Waiting, lines, summarise
from tests.helpers.operations import operation
from tests.helpers.traces import call_facts, environment, without, write_trace


def summary(folder: Path, **written: Any) -> Summary:
    return summarise(open_run(write_trace(folder / "trace", **written)))


def test_steps_phases_and_size_are_those_of_the_files(tmp_path: Path) -> None:
    found = summary(tmp_path)

    assert (found.world_size, found.every, found.steps, found.recorded) == (2, 1, (0, 5), 6)
    assert found.phases == {
        "local_gradients": 2,
        "reduced_gradients": 2,
        "settings": 1,
        "optimizer": 2,
        "parameters": 2,
        "buffers": 1,
    }
    assert found.size_bytes == sum(path.stat().st_size for path in (tmp_path / "trace").iterdir())
    assert found.ends == {"closed after step 5": [0, 1]}


def test_norms_are_those_of_the_whole_gradient_at_the_first_and_last_step(tmp_path: Path) -> None:
    # norms of 'a' and 'b': 1 + step / 8, 2 + step / 8
    assert summary(tmp_path).norms == ((1, math.hypot(1.125, 2.125)), (5, math.hypot(1.625, 2.625)))


def test_ranks_that_ended_otherwise_are_distinguished(tmp_path: Path) -> None:
    folder = write_trace(tmp_path / "trace", world_size=3)
    path = folder / RANK_FILE.format(1)
    path.write_bytes(path.read_bytes()[:-30])

    found = summarise(open_run(folder))

    assert found.ends == {
        "closed after step 5": [0, 2],
        "killed, still running, or recorder stopped; its last line is torn after step 5": [1],
    }
    assert "  end: ranks 0, 2: closed after step 5" in lines(found)


def test_facts_of_all_ranks_are_reported_once_and_others_by_rank(tmp_path: Path) -> None:
    def odd(rank: int, size: int) -> Any:
        return environment(rank, size, facts={"torch": "2.13.0", "host": f"node-{rank // 2}", "pid": str(rank)})

    found = summary(tmp_path, world_size=3, environments=odd)

    assert found.facts == {"torch": "2.13.0"}
    assert found.own_facts == (("host", (("node-0", (0, 1)), ("node-1", (2,)))),)
    assert "  host: node-0 on ranks 0-1; node-1 on rank 2" in lines(found)


def test_the_first_non_finite_element_is_the_earliest_of_all_ranks(tmp_path: Path) -> None:
    planted = {
        (0, 4, "local_gradients", "gradient of 'a'"): ("ab" * 8, 1.0, 9),
        (1, 3, "parameters", "parameter 'b'"): ("ab" * 8, 1.0, 2),
        (2, 3, "reduced_gradients", "gradient of 'b'"): ("ab" * 8, 1.0, 7),
    }

    found = summary(tmp_path, world_size=3, planted=planted)

    assert found.nonfinite == NonFinite(3, "reduced_gradients", 2, "gradient of 'b'", 7)
    assert summary(tmp_path / "finite").nonfinite is None


def test_the_rank_that_waited_least_most_often_is_the_one_waited_for(tmp_path: Path) -> None:
    waits = {1: (0.5, 0.1, 0.2), 2: (0.3, 0.1, 0.5), 3: (0.0, 0.2, 0.4)}

    found = summary(
        tmp_path,
        world_size=3,
        steps=3,
        calls=lambda step, rank: call_facts(step, rank, seconds_waited=waits[step][rank]),
    )

    assert found.waiting is not None
    assert (found.waiting.rank, found.waiting.steps, found.waiting.of_steps) == (1, 2, 3)
    assert found.waiting.median_seconds == pytest.approx(0.4)  # of 0.4, 0.4 and 0.4


def test_only_steps_that_all_ranks_recorded_say_who_was_waited_for(tmp_path: Path) -> None:
    folder = write_trace(tmp_path / "trace", steps=3, end=None, calls=lambda step, rank: call_facts(step, rank))
    path = folder / RANK_FILE.format(0)  # killed after step 1, so that rank 1 seems to wait for nobody later
    without(path, lambda line: b'"step":2' in line or b'"step":3' in line)

    waiting = summarise(open_run(folder)).waiting

    assert waiting is not None
    assert (waiting.rank, waiting.steps, waiting.of_steps) == (0, 1, 1)


def test_of_ranks_that_waited_alike_the_lowest_is_named(tmp_path: Path) -> None:
    found = summary(tmp_path, world_size=3, calls=lambda step, rank: call_facts(step, rank, seconds_waited=0.5))

    assert found.waiting == Waiting(0, 5, 5, 0.0)


def test_show_says_in_which_part_of_its_step_a_rank_is_late(tmp_path: Path) -> None:
    # A step of rank 0 takes 40 + 20 + 30 ms, and 11 ms in the call. The others wait 20 ms, rank 1 waits 4 ms.
    def calls(step: int, rank: int) -> Any:
        is_late = rank == 1
        parts = {"data": 0.04, "forward": 0.035 if is_late else 0.02, "backward": 0.03}
        return call_facts(step, rank, seconds_waited=0.004 if is_late else 0.02, parts=parts)

    found = summary(tmp_path, world_size=3, steps=10, calls=calls)

    assert found.late is not None
    assert (found.late.rank, found.late.calls, found.late.of_calls, found.late.part) == (1, 10, 10, "forward")
    text = " ".join(line.strip() for line in lines(found))
    assert (
        "late rank: the other ranks waited for rank 1 in 10 of 10 calls, 16 ms a call (median), 16% of the step; "
        "rank 1 takes 15 ms longer than the others in forward" in text
    )
    json.dumps(found.as_json(), allow_nan=False)


def test_a_trace_without_parts_names_no_late_rank(tmp_path: Path) -> None:
    """As traces of earlier versions."""
    waits = (0.5, 0.1, 0.5)

    found = summary(
        tmp_path, world_size=3, steps=10, calls=lambda step, rank: call_facts(step, rank, seconds_waited=waits[rank])
    )

    assert found.late is None
    assert not any("late rank" in line for line in lines(found))


def test_of_ranks_that_are_not_finite_in_the_same_place_the_lowest_is_named(tmp_path: Path) -> None:
    planted = {(rank, 3, "parameters", "parameter 'b'"): ("ab" * 8, 1.0, 1 + rank) for rank in (1, 2)}

    assert summary(tmp_path, world_size=3, planted=planted).nonfinite == NonFinite(
        3, "parameters", 1, "parameter 'b'", 2
    )


def test_one_rank_waits_for_nobody(tmp_path: Path) -> None:
    assert summary(tmp_path, world_size=1).waiting is None


def test_a_norm_of_the_whole_gradient_that_no_float64_holds_is_left_out(tmp_path: Path) -> None:
    planted = {(0, 1, "reduced_gradients", f"gradient of '{name}'"): ("ab" * 8, 1.7e308) for name in "ab"}

    found = summary(tmp_path, planted=planted)

    assert found.norms == ((5, math.hypot(1.625, 2.625)),)


def test_a_run_killed_before_its_first_step_has_a_summary(tmp_path: Path) -> None:
    found = summary(tmp_path, steps=0, names={}, end=None)

    assert (found.steps, found.norms, found.phases) == (None, (), {})
    assert "no steps" in " ".join(" ".join(lines(found)).split())  # wherever the name of the folder wraps it


def test_the_text_says_what_there_is(tmp_path: Path) -> None:
    text = lines(summary(tmp_path, world_size=2))

    assert "  NaN or infinity in tensors: none" in text
    assert "  norm of the reduced gradients: 2.40442 at step 1, 3.08727 at step 5" in text
    assert "environment of all ranks:" in text
    assert "  threads: 1" in text


def test_machines_get_the_format_and_its_version(tmp_path: Path) -> None:
    found = summary(tmp_path).as_json()

    assert (found["format"], found["version"], found["world_size"]) == ("legacy_ddp show", 1, 2)


@pytest.mark.parametrize(
    "number, text",
    [(0, "0 bytes"), (999, "999 bytes"), (1340, "1.34 kB"), (138_500_000, "138 MB"), (2_500_000_000, "2.5 GB")],
)
def test_sizes_are_reported_in_powers_of_ten(number: float, text: str) -> None:
    assert format_bytes(number) == text


_TEXT = st.text(max_size=200)


@given(_TEXT, st.dictionaries(_TEXT, _TEXT), st.dictionaries(_TEXT, st.lists(st.integers(0, 5000), min_size=1)), _TEXT)
def test_lines_never_exceed_80_columns(
    folder: str, facts: dict[str, str], ends: dict[str, list[int]], name: str
) -> None:
    found = Summary(
        folder=folder,
        world_size=5001,
        every=10,
        started="2026-01-02T03:04:05+00:00",
        steps=(0, 10**9),
        recorded=10**8,
        size_bytes=10**15,
        ends=ends,
        phases={"parameters": 10**6},
        facts=facts,
        own_facts=tuple((fact, ((value, (0, 7)), ("x", (1,)))) for fact, value in facts.items()),
        norms=((1, 1e300), (10**9, 1e-300)),
        nonfinite=NonFinite(1, "parameters", 3, name, 10**9),
        waiting=Waiting(1, 2, 3, 1e-9),
        late=LateRank(5000, 10**6, 10**6, 1e9, 1.0, "data", 1e9),
    )

    assert all(len(line) <= 80 and line.isprintable() for line in lines(found))


def test_metrics_and_logged_values_are_shown_with_their_first_and_last_value(tmp_path: Path) -> None:
    def calls(step: int, rank: int) -> Any:
        return call_facts(step, rank, metrics={"loss": 1 / step, "bad": math.nan} if step != 2 else {"once": 7.0})

    def logs(step: int, rank: int) -> dict[str, float | str]:
        return {"lr": step / 8 + rank, "note": f"at {step}"} if rank < 2 else {"own": -math.inf} if step == 4 else {}

    found = summary(tmp_path, world_size=3, calls=calls, logs=logs)

    assert [(item.name, item.first, item.last) for item in found.metrics] == [
        ("loss", (1, 1.0), (5, 0.2)),
        ("bad", (1, "nan"), (5, "nan")),
        ("once", (2, 7.0), (2, 7.0)),
    ]
    assert [(item.name, item.ranks, item.first, item.last) for item in found.logged] == [
        ("lr", (0, 1), (0, 0.0), (5, 0.625)),
        ("note", (0, 1), (0, "at 0"), (5, "at 5")),
        ("own", (2,), (4, "-inf"), (4, "-inf")),
    ]
    shown = lines(found)
    at = shown.index("  metric 'loss', sum over the ranks: 1 at step 1, 0.2 at step 5")
    assert shown[at : at + 6] == [
        "  metric 'loss', sum over the ranks: 1 at step 1, 0.2 at step 5",
        "  metric 'bad', sum over the ranks: nan at step 1, nan at step 5",
        "  metric 'once', sum over the ranks: 7 at step 2",
        "  logged 'lr', rank 0: 0 at step 0, 0.625 at step 5 (also logged by rank 1)",
        "  logged 'note', rank 0: at 0 at step 0, at 5 at step 5 (also logged by rank 1)",
        "  logged 'own', rank 2: -inf at step 4",
    ]
    json.dumps(found.as_json(), allow_nan=False)


def test_show_names_the_ranks_without_operations(tmp_path: Path) -> None:
    recorded = [operation("mul", ["a" * 16], ["b" * 16])]

    found = summary(tmp_path, operations=lambda step, rank: recorded if rank == 0 and step in (1, 2) else ())

    shown = lines(found)
    at = shown.index("  operations of forward and backward: steps 1-2 (1 a step and rank)")
    assert shown[at + 1] == "  operations missing on rank 1: steps 1-2"
    assert found.as_json()["missing_operations"] == (((1,), (1, 2)),)
