"""Attribution of a difference from the digests and values of all ranks, and the text of its report. Pure."""

import pytest

from legacy_ddp._compare import Difference
from legacy_ddp._replicas.attribution import (
    Attribution,
    StepDigests,
    Verdict,
    add_evidence,
    add_reading_of_buffers,
    attribute_digests,
    attribute_kinds,
    attribute_values,
)
from legacy_ddp._replicas.report import ReplicaDifference, ReplicaReport

# Attribution of a difference from the digests and values of all ranks. Pure

# A step on the gradients that the call left, from parameters 1 to 2, and the buffers that follow.
CLEAN = StepDigests(
    parameters_at_call=1,
    gradients_at_call=10,
    parameters_at_step=1,
    gradients_at_step=10,
    steps=1,
    parameters_after_step=2,
    parameters=2,
    buffers=20,
)


def _but(phases: StepDigests, **changes: int | str) -> StepDigests:
    return StepDigests(**{**vars(phases), **changes})


FLIPPED = _but(CLEAN, parameters=5, changed_after=True)
FIRST_CALL = StepDigests(parameters=1, buffers=20)
OTHER_RATE = _but(CLEAN, parameters_after_step=3, parameters=3)
FLIPPED_BEFORE_STEP = _but(CLEAN, parameters_at_step=5, parameters_after_step=6, parameters=6, changed_before=True)


def test_other_gradients_after_a_call_are_of_the_reduction() -> None:
    """Every other phase has a fault in test_replica_faults.py."""
    reduced = _but(CLEAN, gradients_at_call=11, gradients_at_step=11, parameters_after_step=3, parameters=3)
    verdict = attribute_digests([CLEAN, reduced, CLEAN], 4)

    assert (verdict.phase, verdict.since, verdict.ranks) == ("all_reduce", "the reduction in call 4", (1,))


def test_before_the_first_call_there_is_no_number() -> None:
    verdict = attribute_digests([FIRST_CALL, _but(FIRST_CALL, buffers=21)], 0)

    assert verdict.since == "after the start"


def test_later_evidence_is_listed_once() -> None:
    who = attribute_digests([OTHER_RATE, CLEAN, FLIPPED], 4).who

    assert who == "rank 0 against ranks 1-2 (2 of 3 ranks agree); rank 2: parameters changed outside of a step"


def test_a_contradiction_stays_open_after_later_evidence() -> None:
    both = _but(FLIPPED_BEFORE_STEP, parameters=7)
    verdict = attribute_digests([both, both, _but(CLEAN, parameters=8, changed_after=True)], 4)

    assert (verdict.ranks, verdict.minority, verdict.implicated) == ((), (2,), (0, 1, 2))
    assert verdict.who.endswith("; rank 2: parameters changed outside of a step")


def test_later_evidence_is_added_to_the_minority() -> None:
    steps = [OTHER_RATE, CLEAN, _but(CLEAN, parameters=7, changed_after=True), CLEAN]
    verdict = add_evidence(attribute_digests(steps, 4), (1,), "wrote alone")

    assert (verdict.ranks, verdict.minority, verdict.implicated) == ((0, 1, 2), (0,), (1, 2))
    assert verdict.who.endswith("; rank 2: parameters changed outside of a step; rank 1: wrote alone")


# A second implementation of the rules


@pytest.mark.parametrize(
    "values, has_evidence, ranks, words",
    [
        ("ab", (False, False), (), "cannot attribute: rank 1 against rank 0, no majority"),
        ("ab", (True, True), (), "cannot attribute: rank 1 against rank 0, no majority"),
        ("ab", (True, False), (0,), "rank 1 against rank 0; rank 0: wrote alone"),
        ("aba", (False,) * 3, (1,), "rank 1 against ranks 0, 2 (2 of 3 ranks agree)"),
        (
            "aba",
            (True, False, True),
            (),
            "rank 1 against ranks 0, 2 (2 of 3 ranks agree); ranks 0, 2: wrote alone; count and evidence disagree",
        ),
        ("abc", (False, True, False), (1,), "every rank has its own; rank 1: wrote alone"),
        (
            "aaabc",
            (False,) * 4 + (True,),
            (3, 4),
            "rank 4 against rank 3 against ranks 0-2 (3 of 5 ranks agree); rank 4: wrote alone",
        ),
        ("abc", (False,) * 3, (), "cannot attribute: every rank has its own, no majority"),
        ("aabb", (False, False, True, True), (2, 3), "ranks 2-3 against ranks 0-1; ranks 2-3: wrote alone"),
        ("aaabc", (), (3, 4), "rank 4 against rank 3 against ranks 0-2 (3 of 5 ranks agree)"),
        ("aabc", (), (), "cannot attribute: rank 3 against rank 2 against ranks 0-1, no majority"),
    ],
)
def test_the_text_shows_sides_count_and_evidence(
    values: str, has_evidence: tuple[bool, ...], ranks: object, words: str
) -> None:
    found = attribute_values(values, has_evidence, "wrote alone")

    assert (found.ranks, found.text) == (ranks, words)


# Where only this moment is known

_FOUND = Attribution((2,), (), "rank 2 against ranks 0-1")
_ALL = ("parameters", "buffers", "gradients", "optimizer")


_AGREE, _OWN, _UNDECIDED = "would differ on every rank", "every rank has its own", "counting ranks does not tell"


@pytest.mark.parametrize(
    "types_and_groups, reading, has_advice",
    [
        ([("float32", [(0, 2), (1,)])], _AGREE, False),
        ([("bfloat16", [(0, 2), (1, 3)])], _AGREE, False),
        ([("float32", [(0,), (1,), (2,)])], _OWN, True),
        ([("float32", [(0,), (1,)])], _UNDECIDED, True),
        # A counter may be equal on ranks with data of their own.
        ([("int64", [(0, 2), (1,)])], _UNDECIDED, True),
        ([("int64", [(0, 2), (1,)]), ("float32", [(0,), (1,), (2,)])], _UNDECIDED, True),
        ([("float32", [(0,), (1,), (2,)]), ("float32", [(0, 2), (1,)])], _AGREE, False),
    ],
)
def test_ranks_that_agree_in_a_buffer_rule_out_statistics_of_their_own(
    types_and_groups: list[tuple[str, list[tuple[int, ...]]]], reading: str, has_advice: bool
) -> None:
    differences = [
        Difference(f"buffer 'b{index}'", tuple((f"{dtype} (2,) {first:x}", (first, *rest)) for first, *rest in groups))
        for index, (dtype, groups) in enumerate(types_and_groups)
    ]
    verdict = add_reading_of_buffers(attribute_kinds(["buffers"], _ALL, _FOUND), differences)

    assert reading in verdict.cause
    assert ("local_buffers=" in verdict.cause) == has_advice
    assert "broadcast_buffers(" in verdict.cause


def test_buffers_explain_nothing_where_parameters_differ() -> None:
    verdict = attribute_kinds(["buffers", "parameters"], _ALL, _FOUND)
    buffer = Difference("buffer 'b'", (("float32 (2,) 1", (0, 2)), ("float32 (2,) 2", (1,))))

    assert add_reading_of_buffers(verdict, [buffer]) == verdict


# Text and properties of a report of replicas. Pure

COMPARED = {"parameters": 20, "buffers": 1, "gradients": 0, "optimizer": 1}
VERDICT = Verdict("step", "the step() after call 3", "rank 1 against rank 0", "another learning rate", (1,))
HOLDERS = (("float32 (2,) 00000000000000aa", (0, 2)), ("float32 (2,) 00000000000000bb", (1,)))


def _difference(name: str = "parameter 'a'", kind: str = "parameters") -> ReplicaDifference:
    return ReplicaDifference(kind, name, HOLDERS)


def _report(*differences: ReplicaDifference, verdict: Verdict = VERDICT) -> ReplicaReport:
    return ReplicaReport("check_replicas() call 3", 3, COMPARED, differences, verdict)


def test_replicas_with_another_past_are_not_identical() -> None:
    report = _report()

    assert not report.identical
    assert "replicas differ in the history since the last call" in str(report)


def test_differences_beyond_ten_are_counted() -> None:
    lines = str(_report(*(_difference(f"parameter 'p{index:02d}'") for index in range(13)))).splitlines()

    assert sum("against" in line and "parameter 'p" in line for line in lines) == 10
    assert lines[-1] == "  ... 3 more"
    assert "13 of 20 parameters" in lines[0]


def test_one_rank_says_nothing_of_generators() -> None:
    assert "generators" not in str(ReplicaReport("check_replicas() call 1", 1, COMPARED, generators=((0,),)))
