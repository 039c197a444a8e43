"""Attribution of a difference from the digests and values of all ranks, and the text of its report. Pure."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from legacy_ddp._explain.attribution import (
    NOTHING,
    Verdict,
    add_evidence,
    add_optimizer_cause,
    add_reading_of_buffers,
    attribute_digests,
    attribute_kinds,
    attribute_values,
)
from legacy_ddp._explain.element_compare import compare_elements
from legacy_ddp._explain.replica_report import ReplicaDifference, ReplicaReport
from legacy_ddp._replicas.history import StepDigests
from legacy_ddp._text import Difference

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
FIRST_CALL = StepDigests(parameters=1, buffers=20)
NO_STEP = StepDigests(parameters_at_call=1, gradients_at_call=10, parameters=1, buffers=20)


def _but(phases: StepDigests, **changes: int | str) -> StepDigests:
    return StepDigests(**{**vars(phases), **changes})


EDITED = _but(CLEAN, gradients_at_step=11, parameters_after_step=3, parameters=3)
FLIPPED = _but(CLEAN, parameters=5, changed_after=True)
OTHER_RATE = _but(CLEAN, parameters_after_step=3, parameters=3)
OTHER_BUFFERS = _but(CLEAN, buffers=21)
FLIPPED_BEFORE_STEP = _but(CLEAN, parameters_at_step=5, parameters_after_step=6, parameters=6, changed_before=True)
MISSED_STEP = _but(CLEAN, parameters_at_step=0, gradients_at_step=0, steps=0, parameters_after_step=0, parameters=1)
OTHER_START = _but(FIRST_CALL, parameters=3)
WRITTEN_WITHOUT_STEP = _but(NO_STEP, parameters=3, changed_after=True)
OTHER_LIST = _but(
    CLEAN, membership=31, parameters_at_step=5, gradients_at_step=11, parameters_after_step=3, parameters=3
)
REPLACED = _but(OTHER_LIST, has_stale_parameter=True)
OTHER_STATE = _but(OTHER_RATE, state_changed_before=True)
OTHER_REDUCED = _but(CLEAN, gradients_at_call=11, gradients_at_step=11, parameters_after_step=3, parameters=3)


@pytest.mark.parametrize("clean", [CLEAN, FIRST_CALL, NO_STEP])
def test_equal_phases_are_no_difference(clean: StepDigests) -> None:
    assert attribute_digests([clean] * 3, 1) == NOTHING


def test_the_moments_of_the_first_call_begin_with_the_first_forward() -> None:
    for before, since in ((1, "the first forward"), (2, "the first forward after call 1")):
        found = attribute_digests([CLEAN, FLIPPED_BEFORE_STEP], before)
        assert found.since == f"between {since} and the step() after call {before}"


def test_a_step_with_a_closure_is_seen_at_its_end_alone() -> None:
    clean, other = (_but(of_rank, parameters_at_step=0, gradients_at_step=0) for of_rank in (CLEAN, OTHER_RATE))

    since = "between the first forward after call 3 and the end of the step() after call 4"
    assert attribute_digests([clean, other], 4).since == since


@pytest.mark.parametrize(
    "clean, faulty, phase, since, has_evidence",
    [
        (CLEAN, OTHER_REDUCED, "all_reduce", "the reduction in call 4", False),
        (CLEAN, MISSED_STEP, "step", "after call 4", False),
        (
            CLEAN,
            FLIPPED_BEFORE_STEP,
            "outside",
            "between the first forward after call 3 and the step() after call 4",
            True,
        ),
        (CLEAN, EDITED, "gradients", "before the step() after call 4", False),
        (CLEAN, OTHER_RATE, "step", "the step() after call 4", False),
        (CLEAN, OTHER_LIST, "step", "the step() after call 4", False),
        (CLEAN, REPLACED, "step", "the step() after call 4", True),
        (CLEAN, OTHER_STATE, "step", "the step() after call 4", True),
        (
            FIRST_CALL,
            OTHER_START,
            "start",
            "the start (construction, or the last broadcast or report of this kind)",
            False,
        ),
        (CLEAN, FLIPPED, "outside", "between the step() after call 4 and this call", True),
        (NO_STEP, WRITTEN_WITHOUT_STEP, "outside", "between the first forward after call 3 and this call", True),
        (CLEAN, OTHER_BUFFERS, "buffers", "after call 4", False),
    ],
)
def test_the_first_thing_that_differs_is_the_phase(
    clean: StepDigests, faulty: StepDigests, phase: str, since: str, has_evidence: bool
) -> None:
    of_two, of_three = attribute_digests([clean, faulty], 4), attribute_digests([clean, faulty, clean], 4)

    assert (of_two.phase, of_two.since, of_two.ranks) == (phase, since, (1,) if has_evidence else ())
    assert of_two.who.startswith("a count cannot tell") == (not has_evidence)
    assert (of_three.phase, of_three.since, of_three.ranks) == (phase, since, (1,))
    assert of_three.who.startswith("rank 1 against ranks 0, 2 (2 of 3 ranks agree)")
    assert ("; rank 1: " in of_three.who) == has_evidence
    assert of_two.cause.partition(": rank")[0] == of_three.cause.partition(": rank")[0] != ""


def test_the_cause_has_the_number_of_steps_of_each_rank() -> None:
    twice = _but(CLEAN, steps=2, parameters_after_step=3, parameters=3)

    assert "steps: rank 2 has 2; rank 1 has 0; rank 0 has 1" in attribute_digests([CLEAN, MISSED_STEP, twice], 4).cause


def test_the_cause_counts_steps_of_an_optimizer_without_the_model() -> None:
    cause = attribute_digests([CLEAN, _but(MISSED_STEP, other_steps=1)], 4).cause

    assert "rank 1 has 0, and 1 of an optimizer that holds no parameter of the model; rank 0 has 1" in cause


@pytest.mark.parametrize(
    "first, second, words",
    [
        ("2 of 2", "1 of 2", "; in optimizers: rank 1 has 1 of 2; rank 0 has 2 of 2"),
        ("1 of 2", "1 of 2", "; in optimizers: the same number on every rank, but different parameters"),
    ],
)
def test_the_cause_describes_optimizers_that_differ(first: str, second: str, words: str) -> None:
    cause = attribute_digests([_but(CLEAN, membership_text=first), _but(OTHER_LIST, membership_text=second)], 4).cause

    assert cause.endswith(words)
    assert "edited" not in cause


def test_before_the_first_call_there_is_no_number() -> None:
    verdict = attribute_digests([FIRST_CALL, _but(FIRST_CALL, buffers=21)], 0)

    assert verdict.since == "after the start"


@pytest.mark.parametrize(
    "phases, phase, ranks",
    [
        ([OTHER_RATE, FLIPPED], "step", (1,)),
        ([OTHER_RATE, CLEAN, FLIPPED], "step", (0, 2)),
        ([EDITED, FLIPPED, CLEAN], "gradients", (0, 1)),
        ([OTHER_BUFFERS, FLIPPED, CLEAN], "outside", (1,)),
        ([FLIPPED, _but(CLEAN, parameters=4, changed_after=True)], "outside", ()),
        ([FLIPPED, _but(CLEAN, parameters=4, changed_after=True), CLEAN], "outside", (0, 1)),
        ([FLIPPED, CLEAN, FLIPPED, CLEAN], "outside", (0, 2)),
        ([EDITED, _but(EDITED, gradients_at_step=12)], "gradients", ()),
    ],
)
def test_a_rank_with_evidence_is_at_fault_too(phases: list[StepDigests], phase: str, ranks: tuple[int, ...]) -> None:
    verdict = attribute_digests(phases, 4)

    assert (verdict.phase, verdict.ranks) == (phase, ranks)


def test_later_evidence_is_listed_once() -> None:
    who = attribute_digests([OTHER_RATE, CLEAN, FLIPPED], 4).who

    assert who == "rank 0 against ranks 1-2 (2 of 3 ranks agree); rank 2: parameters changed outside of a step"


def test_evidence_against_the_majority_outranks_the_count() -> None:
    verdict = attribute_digests([FLIPPED, FLIPPED, CLEAN], 4)

    assert (verdict.ranks, verdict.minority, verdict.implicated) == ((), (2,), (0, 1))
    evidence = "ranks 0-1: parameters changed outside of a step"
    assert verdict.who == f"rank 2 against ranks 0-1 (2 of 3 ranks agree); {evidence}; count and evidence disagree"


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

_Digest = Callable[[StepDigests], object]


def _nothing(_: StepDigests) -> bool:
    return False


_RULES: list[tuple[str, _Digest, Callable[[StepDigests], bool]]] = [
    ("all_reduce", lambda p: p.gradients_at_call, _nothing),
    ("step", lambda p: p.steps, _nothing),
    ("step", lambda p: p.membership, lambda p: p.has_stale_parameter),
    ("outside", lambda p: p.parameters_at_step, lambda p: p.changed_before),
    ("gradients", lambda p: p.gradients_at_step, _nothing),
    ("step", lambda p: p.parameters_after_step, lambda p: p.state_changed_before),
    ("start", lambda p: p.parameters if p.parameters_at_call == 0 else 0, _nothing),
    ("outside", lambda p: p.parameters, lambda p: p.changed_after),
    ("buffers", lambda p: p.buffers, _nothing),
]


def _minority(values: Sequence[object]) -> set[int]:
    most, count = Counter(values).most_common(1)[0]
    return {rank for rank, value in enumerate(values) if value != most} if 2 * count > len(values) else set()


def _at_fault(values: Sequence[object], proven: set[int]) -> set[int]:
    minority = _minority(values)
    if minority and proven - minority:
        return set()
    return minority or proven


def _expected(phases: Sequence[StepDigests]) -> tuple[str, set[int], set[int], set[int]]:
    phase, ranks, minority, implicated = "", set[int](), set[int](), set[int]()
    for name, digest, has_evidence in _RULES:
        values = [digest(of_rank) for of_rank in phases]
        proven = {rank for rank, of_rank in enumerate(phases) if has_evidence(of_rank)}
        proven = set() if len(proven) == len(phases) else proven
        if len(set(values)) == 1:
            continue
        if not phase:
            phase, ranks, minority, implicated = name, _at_fault(values, proven), _minority(values), proven
        elif proven:
            ranks = set() if minority and not ranks else ranks | proven
            implicated = implicated | proven
    return phase, ranks, minority, implicated


_few = st.integers(0, 2)
# Ranks that share calls agree whether there was a call. A step leaves digests.
_with_steps = st.builds(
    StepDigests,
    parameters_at_call=st.just(1),
    gradients_at_call=_few,
    steps=st.integers(1, 2),
    membership=_few,
    parameters_at_step=st.integers(1, 3),
    gradients_at_step=st.integers(1, 3),
    parameters_after_step=_few,
    parameters=_few,
    buffers=_few,
    changed_before=st.booleans(),
    changed_after=st.booleans(),
    state_changed_before=st.booleans(),
    has_stale_parameter=st.booleans(),
)
_without = st.builds(
    StepDigests,
    parameters_at_call=st.just(1),
    gradients_at_call=_few,
    parameters=_few,
    buffers=_few,
    changed_after=st.booleans(),
)
_before_calls = st.builds(StepDigests, parameters=_few, buffers=_few)
_rows = st.one_of(
    st.lists(st.one_of(_with_steps, _without), min_size=1, max_size=8), st.lists(_before_calls, min_size=1, max_size=8)
)


@given(_rows)
def test_any_digests_follow_the_rules(phases: list[StepDigests]) -> None:
    verdict = attribute_digests(phases, 4)

    found = (verdict.ranks, verdict.minority, verdict.implicated)
    assert (verdict.phase, *map(set, found)) == _expected(phases)
    assert all(list(ranks) == sorted(set(ranks)) for ranks in found)
    assert (verdict == NOTHING) == (len({of_rank.digest for of_rank in phases}) == 1)


@given(_rows, st.randoms(use_true_random=False))
def test_no_rank_is_right_by_its_number(phases: list[StepDigests], random: object) -> None:
    order = list(range(len(phases)))
    random.shuffle(order)  # type: ignore[attr-defined]
    verdict, shuffled = attribute_digests(phases, 4), attribute_digests([phases[rank] for rank in order], 4)

    assert shuffled.phase == verdict.phase
    assert {order[rank] for rank in shuffled.ranks} == set(verdict.ranks)


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), min_size=2, max_size=8))
def test_any_values_are_attributed_by_the_rule(held: list[tuple[int, bool]]) -> None:
    values, has_evidence = [value for value, _ in held], [is_proven for _, is_proven in held]
    proven = set() if all(has_evidence) else {rank for rank, is_proven in enumerate(has_evidence) if is_proven}
    if len(set(values)) == 1:
        return  # equal values are never attributed
    found = attribute_values(values, has_evidence, "wrote alone")

    assert (set(found.ranks), set(found.minority)) == (_at_fault(values, proven), _minority(values))
    assert set(found.implicated) == proven
    disagree = bool(_minority(values)) and bool(proven - _minority(values))
    assert ("disagree" in found.who) == disagree
    assert ("a count cannot tell" in found.who) == (not found.ranks and not disagree)
    assert ("wrote alone" in found.who) == bool(proven)
    assert ("ranks agree" in found.who) == (2 * max(Counter(values).values()) > len(values))


@pytest.mark.parametrize(
    "values, has_evidence, ranks, words",
    [
        ("ab", (False, False), (), "a count cannot tell: rank 1 against rank 0, no majority"),
        ("ab", (True, True), (), "a count cannot tell: rank 1 against rank 0, no majority"),
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
        ("abc", (False,) * 3, (), "a count cannot tell: every rank has its own, no majority"),
        ("aabb", (False, False, True, True), (2, 3), "ranks 2-3 against ranks 0-1; ranks 2-3: wrote alone"),
        ("aaabc", (), (3, 4), "rank 4 against rank 3 against ranks 0-2 (3 of 5 ranks agree)"),
        ("aabc", (), (), "a count cannot tell: rank 3 against rank 2 against ranks 0-1, no majority"),
    ],
)
def test_the_text_shows_sides_count_and_evidence(
    values: str, has_evidence: tuple[bool, ...], ranks: object, words: str
) -> None:
    found = attribute_values(values, has_evidence, "wrote alone")

    assert (found.ranks, found.who) == (ranks, words)


# Where only this moment is known

_FOUND = Verdict(who="rank 2 against ranks 0-1", ranks=(2,), minority=(2,))
_ALL = ("parameters", "buffers", "gradients", "optimizer")


@pytest.mark.parametrize(
    "differing, compared, phase, word",
    [
        (["gradients"], _ALL, "gradients", "never reduced"),
        (["gradients", "optimizer"], _ALL, "gradients", "parameters agree"),
        (["gradients", "buffers"], _ALL, "gradients", "parameters agree"),
        (["parameters", "optimizer"], _ALL, "step", "earlier step()"),
        (["parameters", "gradients", "optimizer"], _ALL, "step", "earlier step()"),
        (["optimizer"], _ALL, "step", "will make"),
        (["optimizer", "buffers"], _ALL, "step", "will make"),
        (["parameters"], _ALL, "unknown", "written outside"),
        (["parameters", "gradients", "buffers"], _ALL, "unknown", "written outside"),
        (["parameters"], ("parameters", "buffers"), "unknown", "check_replicas(model, optimizer)"),
        (["buffers"], _ALL, "buffers", "only buffers differ"),
    ],
)
def test_the_verdict_follows_from_the_kinds_that_differ_now(
    differing: list[str], compared: tuple[str, ...], phase: str, word: str
) -> None:
    verdict = attribute_kinds(differing, compared, _FOUND)

    assert (verdict.phase, verdict.ranks, verdict.who) == (phase, _FOUND.ranks, _FOUND.who)
    assert word in verdict.cause
    # Statistics of a layer in training are each rank's own: detail leaves them out.
    assert ('checks="detail"' in verdict.since) == (phase != "buffers")


@pytest.mark.parametrize(
    "differing, lost, settings, cause",
    [
        (["parameters", "optimizer"], "", ["lr", "betas"], "a step() with other hyperparameters (`lr`, `betas`)"),
        (["parameters", "optimizer"], "rank 1 lost it", ["lr"], "rank 1 lost it"),
        (["parameters", "optimizer"], "", [], "an earlier step() had other gradients"),
        (["optimizer"], "", ["lr"], "parameters agree, the optimizer does not"),
        (["gradients"], "rank 1 lost it", ["lr"], "parameters agree, gradients do not"),
    ],
)
def test_what_the_optimizers_show_is_the_cause_of_a_step_that_differed(
    differing: list[str], lost: str, settings: list[str], cause: str
) -> None:
    found = add_optimizer_cause(attribute_kinds(differing, _ALL, _FOUND), lost, settings)

    assert found.cause.startswith(cause)


def test_nothing_that_differs_is_no_verdict() -> None:
    assert attribute_kinds([], _ALL, _FOUND) == NOTHING


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


def test_buffers_of_some_ranks_are_no_statistics() -> None:
    buffer = Difference("buffer 'b'", (("nothing", (0, 2)), ("float32 (2,) 2", (1,))))
    verdict = add_reading_of_buffers(attribute_kinds(["buffers"], _ALL, _FOUND), [buffer], [buffer.name])

    assert verdict.cause.startswith("only buffers differ, and ranks do not hold the same: buffer 'b'. Some ranks have ")
    assert "broadcast" not in verdict.cause


def test_buffers_explain_nothing_where_parameters_differ() -> None:
    verdict = attribute_kinds(["buffers", "parameters"], _ALL, _FOUND)
    buffer = Difference("buffer 'b'", (("float32 (2,) 1", (0, 2)), ("float32 (2,) 2", (1,))))

    assert add_reading_of_buffers(verdict, [buffer]) == verdict


# Text and properties of a report of replicas. Pure

COMPARED = {"parameters": 20, "buffers": 1, "gradients": 0, "optimizer": 1}
VERDICT = Verdict("step", "the step() after call 3", "rank 1 against rank 0", "another learning rate", (1,))
HOLDERS = (("float32 (2,) 00000000000000aa", (0, 2)), ("float32 (2,) 00000000000000bb", (1,)))


def _difference(name: str = "parameter 'a'", kind: str = "parameters") -> ReplicaDifference:
    return ReplicaDifference(name, HOLDERS, kind)


def _report(*differences: ReplicaDifference, verdict: Verdict = VERDICT) -> ReplicaReport:
    return ReplicaReport("check_replicas() call 3", 3, COMPARED, differences, verdict)


def test_identical_replicas_are_one_line_of_what_was_compared() -> None:
    report = ReplicaReport("check_replicas() call 3", 2, COMPARED)

    assert report.identical
    expected = "check_replicas() call 3: replicas are identical: 2 ranks, 20 parameters, 1 buffer, 1 optimizer entry"
    assert " ".join(str(report).split()) == expected


def test_replicas_with_another_past_are_not_identical() -> None:
    report = _report()

    assert not report.identical
    assert "replicas differ in the history since the last call" in str(report)


def test_differences_beyond_ten_are_counted() -> None:
    lines = str(_report(*(_difference(f"parameter 'p{index:02d}'") for index in range(13)))).splitlines()

    assert sum("against" in line and "parameter 'p" in line for line in lines) == 10
    assert lines[-1] == "  ... 3 more"
    assert "13 of 20 parameters" in lines[0]


@pytest.mark.parametrize(
    "shown, other, last",
    [
        (2, "", "  ... and the other 18: all parameters differ"),
        (0, "", "  ... 10 more"),
        (2, "buffers", "  ... 11 more"),
    ],
)
def test_names_that_tell_nothing_are_left_out_where_all_parameters_differ(shown: int, other: str, last: str) -> None:
    element = compare_elements(torch.zeros(2), torch.ones(2))
    found = [_difference(f"parameter 'p{index:02d}'") for index in range(20)]
    found = [replace(item, elements={1: element} if index < shown else {}) for index, item in enumerate(found)]

    lines = str(_report(*found, *([_difference("buffer 'b'", other)] if other else []))).splitlines()

    assert lines[-1] == last
    assert sum("parameter 'p" in line for line in lines) == (10 if other or not shown else shown)


def test_ten_differences_are_all_listed() -> None:
    assert "more" not in str(_report(*(_difference(f"parameter 'p{index:02d}'") for index in range(10))))


@pytest.mark.parametrize(
    "name, kind, parameter",
    [
        ("parameter '0.weight'", "parameters", "0.weight"),
        ("gradient of '0.weight'", "gradients", "0.weight"),
        ("momentum_buffer of '0.weight'", "optimizer", "0.weight"),
        ("buffer '1.running_mean'", "buffers", None),
        ("lr of parameter group 0", "optimizer", None),
    ],
)
def test_a_difference_knows_its_parameter(name: str, kind: str, parameter: str | None) -> None:
    assert _difference(name, kind).parameter == parameter


def test_a_name_is_never_broken() -> None:
    name = f"parameter '{'x' * 100}'"

    assert f"'{'x' * 100}'," in str(_difference(name))


def test_the_minority_is_suspected_and_named_first() -> None:
    assert _difference().suspects == (1,)
    assert "rank 1 against ranks 0, 2" in str(_difference())


@pytest.mark.parametrize(
    "generators, words",
    [
        (((0, 1, 2),), "random generators are equal on ranks 0-2"),
        (((0, 2), (1,)), "random generators are equal on ranks 0, 2"),
        (((0, 2), (1, 3)), "random generators are equal on ranks 0, 2 and on ranks 1, 3"),
        (((0,), (1,)), "random generators differ on all ranks"),
    ],
)
def test_groups_of_generators_that_stand_alike_end_the_line(
    generators: tuple[tuple[int, ...], ...], words: str
) -> None:
    report = ReplicaReport("check_replicas() call 1", 4, COMPARED, generators=generators)

    assert " ".join(str(report).split()).endswith(f"note: {words}; they need not agree")


def test_one_rank_says_nothing_of_generators() -> None:
    assert "generators" not in str(ReplicaReport("check_replicas() call 1", 1, COMPARED, generators=((0,),)))
