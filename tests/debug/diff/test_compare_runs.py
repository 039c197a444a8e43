"""Comparison of two runs: step, phase, name and ranks of the first difference, and its possible causes."""

from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.command import Place, RefusedError, Side, compare
from tests.helpers.recorded import PHASES, RANK_FILE
from tests.helpers.traces import KIND, NAMES, START, call_facts, end_after, environment, without, write_trace

WORD = "ab" * 8


RATE = NAMES["settings"][0]


def pair(tmp_path: Path, a: Mapping[str, Any] | None = None, b: Mapping[str, Any] | None = None) -> Any:
    """Two runs, compared, that differ in how they were written."""
    return compare(write_trace(tmp_path / "a", **(a or {})), write_trace(tmp_path / "b", **(b or {})))


def cut(folder: Path, rank: int, drop: int) -> None:
    """Take the last lines of a file away."""
    path = folder / RANK_FILE.format(rank)
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-drop]))


def damage(folder: Path, rank: int, needle: bytes) -> int:
    """Change one byte of the first line that holds ``needle``; its number."""
    path = folder / RANK_FILE.format(rank)
    lines = path.read_bytes().splitlines(keepends=True)
    index = next(index for index, line in enumerate(lines) if needle in line)
    lines[index] = lines[index].replace(b'"words"', b'"wards"')
    path.write_bytes(b"".join(lines))
    return index + 1


def test_each_name_of_the_first_location_has_the_ranks_on_which_it_differs(tmp_path: Path) -> None:
    first, second = NAMES["parameters"]
    wheres = [(0, 3, "parameters", first), (0, 3, "parameters", second), (1, 3, "parameters", second)]

    found = pair(tmp_path, b={"planted": dict.fromkeys(wheres, (WORD, 3.5))})

    assert [(item.name, item.ranks) for item in (found.first, *found.others)] == [(first, (0,)), (second, (0, 1))]


def test_the_earliest_step_comes_first_then_the_phase_then_the_lowest_rank_then_the_name(tmp_path: Path) -> None:
    planted = {
        (0, 4, "local_gradients", "gradient of 'a'"): (WORD, 1.0),
        (0, 3, "parameters", "parameter 'a'"): (WORD, 1.0),
        (2, 3, "reduced_gradients", "gradient of 'a'"): (WORD, 1.0),
        (1, 3, "reduced_gradients", "gradient of 'b'"): (WORD, 1.0),
        (2, 3, "reduced_gradients", "gradient of 'b'"): (WORD, 1.0),
    }

    found = pair(tmp_path, {"world_size": 3}, {"world_size": 3, "planted": planted})

    assert found.first is not None
    assert (found.first.step, found.first.phase, found.first.name) == (3, "reduced_gradients", "gradient of 'b'")
    assert found.first.ranks == (1, 2)
    assert found.places == (
        Place(3, "reduced_gradients", (1, 2), 2, 2),
        Place(3, "parameters", (0,), 1, 2),
        Place(4, "local_gradients", (0,), 1, 2),
    )


def test_the_first_ten_locations_are_listed_and_the_rest_counted(tmp_path: Path) -> None:
    planted = {
        (rank, step, phase, NAMES[phase][step % 2]): (WORD, 1.0)  # no two steps alike, so that none are joined
        for rank in (0, 1)
        for step in range(2, 9)
        for phase in ("reduced_gradients", "parameters")
        if (rank, step) != (0, 2)  # so that rank 1 pushes a location of rank 0 out
    }

    found = pair(tmp_path, {"steps": 8}, {"steps": 8, "planted": planted})

    expected = [(step, phase) for step in range(2, 7) for phase in ("reduced_gradients", "parameters")]
    assert [(place.step, place.phase) for place in found.places] == expected
    assert [place.ranks for place in found.places] == [(1,), (1,), *[(0, 1)] * 8]
    assert found.more_places == 4


def test_steps_one_after_the_other_in_which_the_same_names_differ_on_the_same_ranks_are_one_location(
    tmp_path: Path,
) -> None:
    planted = {(1, step, "parameters", "parameter 'b'"): (WORD, 1.0) for step in range(62, 121)}
    planted |= {(rank, 119, "buffers", "buffer 'mean'"): (WORD, 1.0) for rank in (0, 1)}

    found = pair(tmp_path, {"steps": 120}, {"steps": 120, "planted": planted})

    assert found.places == (
        Place(62, "parameters", (1,), 1, 2, last_step=120, steps=59),
        Place(119, "buffers", (0, 1), 1, 1),
    )
    assert found.more_places == 0


@pytest.mark.parametrize(
    "other",
    [
        {(1, 4, "parameters", "parameter 'a'"): (WORD, 1.0)},  # another name
        {(1, 4, "parameters", f"parameter '{name}'"): (WORD, 1.0) for name in "ab"},  # one name more
        {(rank, 4, "parameters", "parameter 'b'"): (WORD, 1.0) for rank in (0, 1)},  # another rank, too
        {},  # nothing at all
    ],
)
def test_a_step_that_differs_in_another_way_or_not_at_all_parts_the_steps_around_it(
    tmp_path: Path, other: dict[tuple[int, int, str, str], tuple[str, float]]
) -> None:
    around = {(1, step, "parameters", "parameter 'b'"): (WORD, 1.0) for step in (2, 3, 5, 6)}

    found = pair(tmp_path, {"steps": 6}, {"steps": 6, "planted": {**around, **other}})

    spans = [(place.step, place.last_step) for place in found.places]
    assert spans == ([(2, 3), (4, None), (5, 6)] if other else [(2, 3), (5, 6)])


def test_ranks_that_differ_in_the_same_names_are_joined_only_as_a_whole(tmp_path: Path) -> None:
    one, other = "parameter 'a'", "parameter 'b'"
    planted = {(0, step, "parameters", one): (WORD, 1.0) for step in (1, 2)}
    planted |= {(1, 1, "parameters", other): (WORD, 1.0), (1, 2, "parameters", one): (WORD, 1.0)}

    found = pair(tmp_path, b={"planted": planted})

    assert found.places == (Place(1, "parameters", (0, 1), 2, 2), Place(2, "parameters", (0, 1), 1, 2))


@pytest.mark.parametrize("name", ["lr of parameter group 0", "momentum of parameter group 0"])
def test_names_in_another_order_are_no_difference(tmp_path: Path, name: str) -> None:
    settings = ("lr of parameter group 0", "momentum of parameter group 0")
    orders = [
        {**NAMES, "settings": order, "parameters": NAMES["parameters"][::step]}
        for order, step in ((settings, 1), (settings[::-1], -1))
    ]
    # by position the digests of parameters would differ; by name they equal those of the first order
    words = {
        (rank, step, "parameters", f"parameter '{letter}'"): (letter * 16, 1.0)
        for rank in (0, 1)
        for step in range(6)
        for letter in "ab"
    }
    assert (
        pair(tmp_path, {"names": orders[0], "planted": words}, {"names": orders[1], "planted": words}).verdict == "same"
    )

    planted = {**words, (0, 3, "settings", name): ("7", None), (0, 3, "buffers", "buffer 'mean'"): (WORD, 1.0)}
    c = write_trace(tmp_path / "c", names=orders[1], planted=planted)
    found = compare(tmp_path / "a", c)

    assert found.first is not None
    assert (found.first.step, found.first.name) == (3, name)
    assert [(place.step, place.phase) for place in found.places] == [(3, "settings"), (3, "buffers")]


def test_a_rank_whose_file_ends_early_is_not_called_the_same_in_the_steps_of_the_others(tmp_path: Path) -> None:
    a, b = write_trace(tmp_path / "a", world_size=3, steps=120), write_trace(tmp_path / "b", world_size=3, steps=120)
    end_after(b / RANK_FILE.format(1), 4)

    for found, label in ((compare(a, b), "B"), (compare(b, a), "A")):
        assert (found.verdict, found.steps) == ("unknown", (0, 4))
        assert found.headline == (
            f"cannot tell: steps 5-120 were not compared on every rank, because rank 1 of {label} ended before; "
            "nothing differs in steps 0-4"
        )
        assert f"{label}: rank 1 ended after step 4 (killed, still running, or recorder stopped)" in found.notes


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_without_any_step_is_not_called_the_same(tmp_path: Path, rank: int) -> None:
    a, b = write_trace(tmp_path / "a"), write_trace(tmp_path / "b")
    end_after(b / RANK_FILE.format(rank), None)

    found = compare(a, b)

    assert (found.verdict, found.steps) == ("unknown", None)
    assert found.headline == (
        f"cannot tell: steps 0-5 were not compared on every rank, because rank {rank} of B ended before; no step was "
        "compared on every rank"
    )


def test_a_short_rank_beyond_the_steps_of_the_other_run_does_not_count(tmp_path: Path) -> None:
    a, b = write_trace(tmp_path / "a", steps=3), write_trace(tmp_path / "b", steps=20)
    end_after(b / RANK_FILE.format(1), 10)

    found = compare(a, b)

    assert (found.verdict, found.steps) == ("same", (0, 3))


def test_a_rank_that_a_kill_left_one_step_behind_is_compared_as_far_as_it_went(tmp_path: Path) -> None:
    a, b = write_trace(tmp_path / "a", steps=9), write_trace(tmp_path / "b")
    end_after(b / RANK_FILE.format(1), 4)

    found = compare(a, b)

    # 2 ranks x (start: 3 tensors; 4 steps: 9 tensors)
    assert found.headline == "same: 2 ranks, steps 0-4, 6 phases, 78 tensors, bit for bit"
    assert (found.verdict, found.steps) == ("same", (0, 4))


def test_of_a_single_step_that_not_all_ranks_have_only_the_start_is_left(tmp_path: Path) -> None:
    a, b = write_trace(tmp_path / "a", steps=1), write_trace(tmp_path / "b", steps=1)
    end_after(b / RANK_FILE.format(1), 0)

    assert compare(a, b).headline.startswith("cannot tell: only the start (step 0) was recorded by both")


def test_a_difference_counts_wherever_the_ranks_that_show_it_were_compare(tmp_path: Path) -> None:
    a = write_trace(tmp_path / "a")
    b = write_trace(tmp_path / "b", planted={(0, 4, "parameters", "parameter 'a'"): (WORD, 1.0)})
    end_after(b / RANK_FILE.format(1), 1)

    found = compare(a, b)

    assert found.first is not None
    assert (found.verdict, found.first.step, found.steps) == ("different", 4, (0, 1))


def test_a_phase_that_one_rank_alone_was_compared_in_is_not_counted_and_is_a_note(tmp_path: Path) -> None:
    a, b = write_trace(tmp_path / "a"), write_trace(tmp_path / "b")
    for folder in (a, b):
        without(
            folder / RANK_FILE.format(1),
            lambda line: b'"line":"values"' in line and (b'"settings"' in line or b'"optimizer"' in line),
        )

    found = compare(a, b)

    # 2 ranks x (start: 3 tensors; 5 steps: 2 + 2 + 2 + 1 tensors)
    assert found.headline == "same: 2 ranks, steps 0-5, 4 phases, 76 tensors, bit for bit"
    assert found.notes == ("not compared on rank 1, where not both runs recorded it: settings, optimizer state",)


def test_other_world_sizes_are_the_same_only_as_far_as_all_ranks_of_each_go(tmp_path: Path) -> None:
    a, b = write_trace(tmp_path / "a"), write_trace(tmp_path / "b", world_size=4)
    end_after(b / RANK_FILE.format(3), 4)

    assert compare(a, b).headline.startswith(
        "same: what runs of 2 ranks and of 4 ranks have in common, steps 0-4, 5 phases, "
    )

    end_after(b / RANK_FILE.format(3), 2)
    found = compare(a, b)

    assert found.verdict == "unknown"
    assert "but inside B: cannot tell: steps 3-5 were not compared on every rank, because rank 3" in found.headline


def test_a_difference_beyond_the_common_steps_does_not_count(tmp_path: Path) -> None:
    found = pair(tmp_path, b={"steps": 9, "planted": {(0, 7, "parameters", "parameter 'a'"): (WORD, 1.0)}})

    assert found.verdict == "same"


def test_the_start_of_a_resumed_run_is_compared_with_that_step_of_a_whole_one(tmp_path: Path) -> None:
    def resumed(rank: int, size: int) -> Any:
        return environment(rank, size, first_step=4)

    start = {"environments": resumed, "steps": 2}
    assert pair(tmp_path, b=start).verdict == "different"  # the start has no optimizer state, step 3 has

    with_state = write_trace(tmp_path / "c", **start, planted={(1, 3, "parameters", "parameter 'b'"): (WORD, 1.0)})
    found = compare(tmp_path / "a", with_state)

    assert found.first is not None
    assert found.headline.startswith("different: runs part at the start (step 3) in optimizer state of ranks 0-1: ")
    assert found.first.sides[1] == Side("B", None, None)
    assert "was the optimizer's state left out" in found.meaning
    assert [(place.step, place.phase) for place in found.places] == [(3, "optimizer"), (3, "parameters")]
    assert found.notes == ("A begins with step 0",)


def test_a_run_of_other_first_step_without_optimizer_state_agrees(tmp_path: Path) -> None:
    names = {**NAMES, "optimizer": ()}

    found = pair(
        tmp_path,
        {"names": names},
        {"names": names, "environments": lambda rank, size: environment(rank, size, first_step=4), "steps": 2},
    )

    assert (found.verdict, found.steps) == ("same", (3, 5))
    assert found.notes == ("A begins with step 0",)


def with_optimizer(rank: int, size: int) -> Any:
    return environment(rank, size, facts={"optimizer": "LBFGS"})


@pytest.mark.parametrize(
    "phases, lacking", [(("settings",), "settings"), (("settings", "optimizer"), "settings and optimizer state")]
)
def test_an_optimizer_that_was_given_is_not_said_to_be_missing(
    tmp_path: Path, phases: tuple[str, ...], lacking: str
) -> None:
    changes = {"names": {**NAMES, **dict.fromkeys(phases, ())}, "environments": with_optimizer}

    expected = f"not compared: {lacking}, because no optimizer step after an all_reduce() was recorded"
    assert pair(tmp_path, changes, changes).notes == (expected,)
    assert compare(tmp_path / "a").notes == (expected,)


def test_runs_without_a_common_step_is_unknown(tmp_path: Path) -> None:
    later = {"environments": lambda rank, size: environment(rank, size, first_step=20)}

    found = pair(tmp_path, b=later)

    assert (found.verdict, found.steps) == ("unknown", None)
    assert found.headline == "cannot tell: no step in common (A has steps 0-5 and B has steps 19-24)"


def test_a_phase_that_one_run_never_recorded_is_a_note(tmp_path: Path) -> None:
    names = {**NAMES, "optimizer": (), "settings": ()}

    found = pair(tmp_path, b={"names": names})

    assert found.verdict == "same"
    assert found.notes == ("not compared: B has no settings and no optimizer state",)


def test_phases_that_a_killed_run_did_not_come_to_are_no_difference(tmp_path: Path) -> None:
    a, b = write_trace(tmp_path / "a"), write_trace(tmp_path / "b", end=None)
    cut(b, 1, 3)  # optimizer, parameters and buffers of step 5

    found = compare(a, b)

    assert found.verdict == "same"
    assert found.notes == ("B: all ranks ended after step 5 (killed, still running, or recorder stopped)",)


def test_an_exception_may_leave_the_last_step_unfinished(tmp_path: Path) -> None:
    a, b = write_trace(tmp_path / "a"), write_trace(tmp_path / "b", end="RuntimeError")
    path = b / RANK_FILE.format(0)
    without(path, lambda line: b'"step":5,"phase":"buffers"' in line)

    found = compare(a, b)

    assert found.verdict == "same"
    assert found.notes == ("B: all ranks ended after step 5 (left by RuntimeError)",)


def test_a_phase_missing_in_the_midst_of_a_run_is_a_difference(tmp_path: Path) -> None:
    a, b = write_trace(tmp_path / "a"), write_trace(tmp_path / "b")
    path = b / RANK_FILE.format(0)
    without(path, lambda line: b'"step":3,"phase":"parameters"' in line)

    found = compare(a, b)

    assert found.first is not None
    assert (found.first.step, found.first.phase, found.first.ranks) == (3, "parameters", (0,))
    assert found.first.sides[1] == Side("B", None, None)
    assert "Only A holds parameter 'a'." in found.meaning


def test_buffers_that_one_recorder_could_not_take_are_not_compare(tmp_path: Path) -> None:
    a, b = write_trace(tmp_path / "a"), write_trace(tmp_path / "b")
    for rank in (0, 1):
        without(
            b / RANK_FILE.format(rank),
            lambda line: b'"phase":"buffers"' in line and b'"step":0' not in line and b'"line":"values"' in line,
        )

    assert compare(a, b).verdict == "same"


def test_a_torn_last_line_is_only_a_note(tmp_path: Path) -> None:
    a, b = write_trace(tmp_path / "a"), write_trace(tmp_path / "b")
    path = b / RANK_FILE.format(1)
    path.write_bytes(path.read_bytes()[:-30])  # the end line, and none of the step

    found = compare(a, b)

    assert found.verdict == "same"
    assert found.notes == (
        "B: rank 1 ended after step 5 (killed, still running, or recorder stopped; its last line is torn)",
    )


def test_a_damaged_trace_that_agrees_up_to_there_is_unknown(tmp_path: Path) -> None:
    a, b = write_trace(tmp_path / "a"), write_trace(tmp_path / "b")
    line = damage(b, 1, b'"step":3,"phase":"parameters"')

    found = compare(a, b)

    assert found.verdict == "unknown"
    assert found.headline.startswith(f"cannot tell: {b}/rank-00001.jsonl, line {line}: its checksum is not that of its")
    assert any(note.startswith("B: rank 1 ended after step 3 (damaged at line") for note in found.notes)


def test_a_difference_before_the_damage_is_one(tmp_path: Path) -> None:
    a = write_trace(tmp_path / "a", planted={(0, 2, "buffers", "buffer 'mean'"): (WORD, 1.0)})
    b = write_trace(tmp_path / "b")
    damage(b, 1, b'"step":3,"phase":"parameters"')

    assert compare(a, b).verdict == "different"


def test_a_trace_damaged_before_its_first_step_is_named(tmp_path: Path) -> None:
    a, b = write_trace(tmp_path / "a", world_size=1), write_trace(tmp_path / "b", world_size=1)
    path = b / RANK_FILE.format(0)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + b"junk\n")

    found = compare(a, b)

    assert found.verdict == "unknown"
    assert "rank-00000.jsonl, line 2" in found.headline
    assert found.headline.endswith("nothing before it to compare")


def test_traces_of_other_models_are_refused(tmp_path: Path) -> None:
    more = {**NAMES, "parameters": ("parameter 'a'", *(f"parameter 'c{index}'" for index in range(5)))}

    with pytest.raises(RefusedError) as caught:
        pair(tmp_path, b={"names": more})

    assert "only in A: parameter 'b'; only in B: parameter 'c0', parameter 'c1', parameter 'c2' and 2 more" in str(
        caught.value
    )


def test_parameters_of_another_shape_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        RefusedError, match=r"of another kind: parameter 'a' \(float32 \(2, 3\) in A, float32 \(9,\) in B\)"
    ):
        pair(tmp_path, b={"kind": "float32 (9,)"})


def test_without_recorded_parameters_the_names_in_the_environment_tell_models_apart(tmp_path: Path) -> None:
    names = {"local_gradients": NAMES["local_gradients"]}
    other = {"names": names, "environments": lambda rank, size: environment(rank, size, parameters=("a", "z"))}

    with pytest.raises(RefusedError, match="only in A: parameter 'b'; only in B: parameter 'z'"):
        pair(tmp_path, {"names": names}, other)


@pytest.mark.parametrize("kind, is_told", [(KIND, True), ("float32 (9,)", False)])
def test_a_compiled_model_against_an_eager_model_is_told_of_names_that_stay(
    tmp_path: Path, kind: str, is_told: bool
) -> None:
    compiled = {**NAMES, "parameters": ("parameter '_orig_mod.a'", "parameter '_orig_mod.b'")}

    with pytest.raises(RefusedError) as caught:
        pair(tmp_path, {"names": compiled, "kind": kind}, {})

    assert ("use module.compile(), which keeps names" in str(caught.value)) == is_told
    assert ("compare runs of one model" in str(caught.value)) != is_told


def test_facts_that_differ_are_causes_likeliest_first(tmp_path: Path) -> None:
    facts = {"torch": "2.14.0", "threads": "4", "seed": "0", "host": "elsewhere", "pid": "9"}
    other = {
        "environments": lambda rank, size: environment(rank, size, facts={"python": "3.12", **facts}),
        "planted": {(0, 1, "parameters", "parameter 'a'"): (WORD, 1.0)},
    }

    found = pair(tmp_path, b=other)

    assert [(cause.what, cause.sides, cause.where) for cause in found.causes] == [
        ("torch", (("A", "2.13.0"), ("B", "2.14.0")), ""),
        ("threads", (("A", "1"), ("B", "4")), ""),
        ("python", (("A", "nothing"), ("B", "3.12")), ""),
    ]


def test_facts_that_differ_on_some_ranks_say_on_which(tmp_path: Path) -> None:
    def odd(rank: int, size: int) -> Any:
        return environment(rank, size, facts={"torch": "2.13.0", "threads": str(1 + rank), "seed": "0"})

    found = pair(
        tmp_path,
        {"world_size": 3},
        {"world_size": 3, "environments": odd, "planted": {(0, 1, "parameters", "parameter 'a'"): (WORD, 1.0)}},
    )

    assert [(cause.what, cause.sides, cause.where) for cause in found.causes] == [
        ("threads", (("A", "1"), ("B", "2")), "on ranks 1-2, shown for rank 1")
    ]


def with_call(step: int, rank: int, **changes: Any) -> dict[str, Any]:
    """A run in which one call is other, and the local gradients after it from step 3 on."""
    return {
        "calls": lambda at, of: call_facts(at, of, **(changes if (at, of) == (step, rank) else {})),
        "planted": {(1, 3, "local_gradients", "gradient of 'a'"): (WORD, 1.5)},
    }


INPUTS = call_facts(3, 1).inputs


@pytest.mark.parametrize(
    "changes, what, sides, detail",
    [
        (
            {"inputs": (INPUTS[0], ("int64 (16, 64)", WORD))},
            "data",
            (f"int64 (16, 64) {INPUTS[1][1]}", f"int64 (16, 64) {WORD}"),
            ", forward pass 2 of 2",
        ),
        (
            {"inputs": (("int64 (8, 64)", WORD), INPUTS[1])},
            "micro-batch shape",
            ("int64 (16, 64)", "int64 (8, 64)"),
            ", forward pass 1 of 2",
        ),
        ({"micro_batches": 3}, "micro-batches", ("2", "3"), ""),
        ({"sample_size": None}, "sample_size", ("64", "None"), ""),
        ({"took_part": False}, "took part", ("yes", "no"), ""),
        ({"generators": WORD}, "random generators", ("0000000000000003", WORD), ""),
    ],
)
def test_what_differs_around_a_call_is_a_cause_with_its_step_and_rank(
    tmp_path: Path, changes: dict[str, Any], what: str, sides: tuple[str, str], detail: str
) -> None:
    found = pair(tmp_path, b=with_call(3, 1, **changes))

    (cause,) = found.causes
    assert (cause.what, cause.sides) == (what, (("A", sides[0]), ("B", sides[1])))
    assert cause.where == f"first at step 3 on rank 1{detail}"


def test_another_number_of_forward_passes_is_told_by_the_numbers(tmp_path: Path) -> None:
    """The text was once ``forward pass 3 of 2: nothing in A``, as a micro-batch of another shape."""
    found = pair(tmp_path, b=with_call(3, 1, forwards=3, inputs=(*INPUTS, ("int64 (16, 64)", WORD))))

    (cause,) = found.causes
    assert (cause.what, cause.sides) == ("forward passes", (("A", "2"), ("B", "3")))
    assert cause.where == "first at step 3 on rank 1"
    assert "The runs took another number of forward passes." in found.meaning
    assert "equal data" not in found.meaning


def test_other_data_before_a_further_forward_pass_have_their_place(tmp_path: Path) -> None:
    inputs = (INPUTS[0], ("int64 (16, 64)", WORD), ("int64 (16, 64)", WORD))

    found = pair(tmp_path, b=with_call(3, 1, forwards=3, inputs=inputs))

    assert [(cause.what, cause.where) for cause in found.causes] == [
        ("data", "first at step 3 on rank 1, forward pass 2"),
        ("forward passes", "first at step 3 on rank 1"),
    ]


def test_a_plain_module_has_no_number_of_micro_batches_to_compare(tmp_path: Path) -> None:
    """A call for a plain module takes part, and counts no micro-batch."""
    found = pair(tmp_path, b=with_call(3, 1, micro_batches=0, forwards=0, inputs=()))

    assert found.causes == ()
    assert "another number" not in found.meaning
    assert "Whether the data differ cannot be told: not all inputs were recorded." in found.meaning


def test_a_rank_that_took_no_part_has_no_micro_batches(tmp_path: Path) -> None:
    found = pair(tmp_path, b=with_call(3, 1, micro_batches=0, forwards=0, inputs=(), took_part=False))

    assert ("micro-batches", (("A", "2"), ("B", "0"))) in [(cause.what, cause.sides) for cause in found.causes]


def test_a_cause_has_the_first_step_on_any_rank(tmp_path: Path) -> None:
    def calls(step: int, rank: int) -> Any:
        return call_facts(step, rank, micro_batches=9 if step >= 3 - rank else 2)

    planted = {(0, 4, "local_gradients", "gradient of 'a'"): (WORD, 1.5)}
    found = pair(tmp_path, {"world_size": 3}, {"world_size": 3, "calls": calls, "planted": planted})

    assert [(cause.what, cause.where) for cause in found.causes] == [("micro-batches", "first at step 1 on rank 2")]


def test_what_differs_around_later_calls_explains_nothing(tmp_path: Path) -> None:
    assert pair(tmp_path, b=with_call(4, 0, generators=WORD)).causes == ()


def test_timings_and_norms_of_calls_are_no_causes(tmp_path: Path) -> None:
    changes = {"seconds_waited": 9.0, "local_norm": 7.0, "call": 99, "seconds": {}, "payload_bytes": 3}

    assert pair(tmp_path, b=with_call(3, 1, **changes)).causes == ()


def test_a_call_that_was_not_recorded_rules_nothing_out(tmp_path: Path) -> None:
    a, b = write_trace(tmp_path / "a"), write_trace(tmp_path / "b", **with_call(9, 9))
    path = b / RANK_FILE.format(1)
    without(path, lambda line: line.startswith(b'{"line":"call","step":3,'))

    meaning = compare(a, b).meaning

    assert "equal data" not in meaning
    assert "ruled out" not in meaning


def test_more_inputs_than_a_trace_holds_rule_nothing_out(tmp_path: Path) -> None:
    inputs = (("int64 (1,)", WORD),) * 64
    many = {"calls": lambda step, rank: call_facts(step, rank, inputs=inputs, inputs_complete=False)}

    assert "Whether the data differ cannot be told" in pair(tmp_path, many, {**with_call(9, 9), **many}).meaning


def test_a_difference_of_rounding_size_is_followed_until_norms_part(tmp_path: Path) -> None:
    # norms of 'a' are 1 + step / 8
    planted = {
        (0, 2, "reduced_gradients", "gradient of 'a'"): (WORD, 1.25 * (1 + 1e-6)),
        (0, 3, "parameters", "parameter 'a'"): (WORD, 1.375 * 1.0005),
        (0, 4, "parameters", "parameter 'b'"): (WORD, 2.5 * 1.002),
        (0, 5, "reduced_gradients", "gradient of 'a'"): (WORD, 99.0),
    }

    found = pair(tmp_path, b={"planted": planted})

    assert found.size == pytest.approx(1e-6, rel=1e-3)
    assert "of rounding size, judged by norms alone. It grows beyond 0.1% at step 4: parameter 'b'." in found.meaning


def test_a_difference_may_grow_within_its_first_step(tmp_path: Path) -> None:
    planted = {
        (0, 2, "local_gradients", "gradient of 'a'"): (WORD, 1.25 * (1 + 1e-6)),
        (0, 2, "parameters", "parameter 'a'"): (WORD, 9.0),
    }

    assert "It grows beyond 0.1% at step 2: parameter 'a'." in pair(tmp_path, b={"planted": planted}).meaning


def test_runs_of_other_world_sizes_are_compared_in_what_ranks_share(tmp_path: Path) -> None:
    planted = {
        (0, 1, "local_gradients", "gradient of 'a'"): (WORD, 1.0),
        (0, 3, "buffers", "buffer 'mean'"): (WORD, 1.0),
    }
    local = {"environments": lambda rank, size: environment(rank, size, local_buffers=("me*",)), "planted": planted}

    found = pair(tmp_path, b={**local, "world_size": 4})

    assert found.verdict == "same"
    # start: 2 parameters; 5 steps: 2 + 2 + 2
    assert (
        found.headline
        == "same: what runs of 2 ranks and of 4 ranks have in common, steps 0-5, 4 phases, 32 tensors, bit for bit"
    )
    assert found.notes[:2] == (
        "world sizes 2 and 4: local gradients and inputs were not compared",
        "not compared, because each rank has its own: buffers me*",
    )


def _reproducible(rank: int, size: int) -> Any:
    return environment(rank, size, facts={"reproducible": "True"})


def _share(micro_batches: int, data: str) -> Callable[[int, int], Any]:
    """Calls of a rank that has so many of four micro-batches, each with data of its own."""

    def call(step: int, rank: int) -> Any:
        numbers = range(rank * micro_batches, (rank + 1) * micro_batches)
        inputs = tuple(("int64 (4,)", data if (step, number) == (3, 2) else f"{step}-{number}") for number in numbers)
        return call_facts(
            step, rank, micro_batches=micro_batches, sample_size=micro_batches, forwards=micro_batches, inputs=inputs
        )

    return call


@pytest.mark.parametrize(
    "data, expected", [("3-2", []), ("other", [("data", "first at step 3, input 3 of those of all ranks")])]
)
def test_reproducible_runs_of_other_world_sizes_compare_their_data(
    tmp_path: Path, data: str, expected: list[tuple[str, str]]
) -> None:
    planted = {(0, 3, "reduced_gradients", "gradient of 'a'"): (WORD, 1.375000001)}
    a = {"environments": _reproducible, "calls": _share(2, "3-2")}
    b = {"environments": _reproducible, "calls": _share(1, data), "world_size": 4, "planted": planted}

    found = pair(tmp_path, a, b)

    assert [(cause.what, cause.where) for cause in found.causes] == [("world size", ""), *expected]
    assert "the order of the sum is not the reason" in found.meaning
    assert "only if sums are taken in the same order" not in found.meaning
    assert ("The forward passes were given other data." in found.meaning) == bool(expected)
    assert found.notes[0] == "world sizes 2 and 4: local gradients were not compared"


def test_reproducible_runs_with_another_micro_batch_shape_say_so(tmp_path: Path) -> None:
    def wide(step: int, rank: int) -> Any:
        return call_facts(step, rank, inputs=(("int64 (8,)", "a"),), forwards=1, micro_batches=1)

    planted = {(0, 1, "reduced_gradients", "gradient of 'a'"): (WORD, 1.0)}
    a = {"environments": _reproducible, "calls": _share(2, "3-2")}

    found = pair(tmp_path, a, {"environments": _reproducible, "calls": wide, "world_size": 1, "planted": planted})

    assert ("micro-batch shape", (("A", "int64 (4,)"), ("B", "int64 (8,)"))) in [
        (cause.what, cause.sides) for cause in found.causes
    ]


def test_facts_of_single_ranks_do_not_explain_runs_of_other_world_sizes(tmp_path: Path) -> None:
    def own(rank: int, size: int) -> Any:
        return environment(rank, size, facts={"torch": f"2.{size}", "seed": str(rank)})

    planted = {(0, 3, "parameters", "parameter 'a'"): (WORD, 1.0)}
    found = pair(tmp_path, {"environments": own}, {"environments": own, "world_size": 3, "planted": planted})

    assert [cause.what for cause in found.causes[:2]] == ["world size", "torch"]
    assert "seed" not in [cause.what for cause in found.causes]
    assert "not compared, because ranks of a run differ in it: seed" in found.notes


def test_amounts_are_added_only_where_all_ranks_recorded_the_step(tmp_path: Path) -> None:
    planted = {(0, 4, "reduced_gradients", "gradient of 'a'"): (WORD, 1.0)}
    a = write_trace(tmp_path / "a", calls=lambda step, rank: call_facts(step, rank, micro_batches=6, sample_size=96))
    b = write_trace(
        tmp_path / "b",
        world_size=3,
        planted=planted,
        calls=lambda step, rank: call_facts(step, rank, micro_batches=4 if step < 4 else 5),
    )
    path = b / RANK_FILE.format(2)  # killed after step 3
    without(path, lambda line: b'"step":4' in line or b'"step":5' in line)

    found = compare(a, b)

    assert [cause.what for cause in found.causes] == ["world size"]


def test_buffers_of_each_rank_are_compared_between_equal_ranks(tmp_path: Path) -> None:
    local = {"environments": lambda rank, size: environment(rank, size, local_buffers=("mean",))}

    found = pair(tmp_path, local, {**local, "planted": {(1, 3, "buffers", "buffer 'mean'"): (WORD, 1.0)}})

    assert found.first is not None
    assert (found.first.phase, found.first.ranks) == ("buffers", (1,))


def test_other_intervals_of_recording_are_compared_where_both_recorded(tmp_path: Path) -> None:
    planted = {(0, 4, "parameters", "parameter 'a'"): (WORD, 1.0)}
    a = write_trace(tmp_path / "a", environments=lambda rank, size: environment(rank, size, every=2))
    odd = [f'"step":{step},'.encode() for step in (1, 3, 5)]
    for rank in (0, 1):
        path = a / RANK_FILE.format(rank)
        without(path, lambda line: b'"end"' not in line and any(step in line for step in odd))

    found = compare(a, write_trace(tmp_path / "b", planted=planted))

    every_step = {(0, step, "parameters", "parameter 'a'"): (WORD, 1.0) for step in range(1, 6)}
    joined = compare(a, write_trace(tmp_path / "d", planted=every_step))
    assert joined.places == (Place(2, "parameters", (0,), 1, 2, last_step=4, steps=2),)
    same = compare(a, write_trace(tmp_path / "c"))
    assert same.headline.startswith("same: 2 ranks, steps 0-4 (3 compared), ")
    assert found.steps == (0, 4)
    assert "A recorded every 2 steps, B every 1: 3 in common" in found.notes
    assert "Steps after 2 and before this one were not compared" in found.meaning


def test_a_parameter_that_one_run_adds_later_is_a_difference(tmp_path: Path) -> None:
    later = {**NAMES, "parameters": (*NAMES["parameters"], "parameter 'lora'")}
    absent = {(rank, step, "parameters", "parameter 'lora'"): (None, None) for rank in (0, 1) for step in (0, 1, 2)}

    found = pair(
        tmp_path,
        {"names": later, "planted": absent},
        {"names": later, "planted": {**absent, (0, 3, "parameters", "parameter 'lora'"): (None, None)}},
    )

    assert found.first is not None
    assert (found.first.step, found.first.name, found.first.ranks) == (3, "parameter 'lora'", (0,))
    assert "Only A holds parameter 'lora'." in found.meaning


def test_many_ranks_are_compared_with_two_files_open_at_a_time(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    shape = {"world_size": 150, "steps": 2}
    a = write_trace(tmp_path / "a", **shape)
    b = write_trace(tmp_path / "b", **shape, planted={(77, 2, "buffers", "buffer 'mean'"): (WORD, 1.0)})
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
        found = compare(a, b)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    assert found.first is not None
    assert (found.first.phase, found.first.ranks) == ("buffers", (77,))


_PLACES = [(phase, name) for phase in PHASES for name in NAMES[phase]]


@st.composite
def planted_differences(draw: st.DrawFn) -> tuple[int, int, tuple[int, int, str, str]]:
    world_size, steps = draw(st.integers(1, 4)), draw(st.integers(1, 12))
    phase, name = draw(st.sampled_from([place for place in _PLACES if place[0] != "settings"]))
    first = 0 if phase in START else 1
    return world_size, steps, (draw(st.integers(0, world_size - 1)), draw(st.integers(first, steps)), phase, name)


@settings(max_examples=40)
@given(planted_differences())
def test_one_difference_anywhere_is_found_there_and_from_both_sides(
    drawn: tuple[int, int, tuple[int, int, str, str]],
) -> None:
    world_size, steps, where = drawn
    with TemporaryDirectory() as folder:
        shape = {"world_size": world_size, "steps": steps}
        a = write_trace(Path(folder) / "a", **shape)
        b = write_trace(Path(folder) / "b", **shape, planted={where: (WORD, 0.5)})
        found, reverse = compare(a, b), compare(b, a)

    rank, step, phase, name = where
    assert found.first is not None
    assert (found.first.step, found.first.phase, found.first.name, found.first.ranks) == (step, phase, name, (rank,))
    assert found.places == (Place(step, phase, (rank,), 1, len(NAMES[phase])),)
    found.first.sides = tuple(side._replace(label="AB"[side.label == "A"]) for side in found.first.sides[::-1])
    assert reverse.first == found.first
    assert (reverse.verdict, reverse.places, reverse.size) == (found.verdict, found.places, found.size)


@settings(max_examples=25)
@given(
    st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3),
    st.floats(0, 1e6),
    st.integers(1, 3),
    st.text(max_size=8),
)
def test_equal_values_are_the_same_whatever_is_around_them(
    facts: dict[str, str], seconds: float, world_size: int, started: str
) -> None:
    noisy = {
        "environments": lambda rank, size: environment(rank, size, facts=facts, started=started),
        "calls": lambda step, rank: call_facts(step, rank, seconds_waited=seconds, local_norm=seconds),
        "world_size": world_size,
    }
    with TemporaryDirectory() as folder:
        a = write_trace(Path(folder) / "a", world_size=world_size)
        b = write_trace(Path(folder) / "b", **noisy)

        assert [compare(a, b).verdict, compare(b, a).verdict, compare(b, b).verdict] == ["same"] * 3


def test_other_world_sizes_are_not_the_same_if_the_ranks_of_one_run_part(tmp_path: Path) -> None:
    planted = {(1, 2, "parameters", "parameter 'a'"): (WORD, 1.0)}

    found = pair(tmp_path, {"planted": planted}, {"world_size": 4})

    assert found.verdict == "unknown"
    assert found.headline.startswith(
        "cannot tell: rank 0 of each run holds the same, but inside A: different: ranks part at step 2 in parameters"
    )


def test_other_world_sizes_are_not_the_same_if_another_rank_is_damaged(tmp_path: Path) -> None:
    a, b = write_trace(tmp_path / "a"), write_trace(tmp_path / "b", world_size=4)
    damage(a, 1, b'"step":3')

    found = compare(a, b)

    assert found.verdict == "unknown"
    assert "but inside A: cannot tell: " in found.headline


def test_the_same_folder_twice_is_a_note(tmp_path: Path) -> None:
    folder = write_trace(tmp_path / "a")

    assert compare(folder, folder).notes == ("A and B are the same folder",)


def test_a_gradient_that_is_nothing_but_rounding_does_not_hide_that_all_is(tmp_path: Path) -> None:
    """The gradient of a bias before BatchNorm is zero; what it differs by is less than the other's last digit."""
    planted = [
        {(0, 2, "local_gradients", "gradient of 'a'"): (word * 16, norm)}
        for word, norm in (("c", 1e-9), ("d", 1.02e-9))
    ]
    found = pair(tmp_path, {"planted": planted[0]}, {"planted": planted[1]})

    assert found.size is not None
    assert found.size < 1e-10
    assert "of rounding size" in found.meaning


def test_local_gradients_that_part_in_the_same_step_come_before_settings(tmp_path: Path) -> None:
    planted = {(0, 2, "settings", RATE): ("0.002", None), (0, 2, "local_gradients", "gradient of 'a'"): (WORD, 1.0)}

    found = pair(tmp_path, b={"planted": planted})

    assert found.first is not None
    assert found.first.phase == "local_gradients"
    assert RATE in [cause.what for cause in found.causes]
