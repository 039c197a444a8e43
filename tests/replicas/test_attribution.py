"""Attribution of a difference: from the digests and values of all ranks, and from the optimizers of a rank. Pure."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from legacy_ddp._explain.attribution import (
    NOTHING,
    Verdict,
    add_optimizer_cause,
    add_reading_of_buffers,
    attribute_digests,
    attribute_kinds,
    attribute_values,
)
from legacy_ddp._memory.layout import distinct
from legacy_ddp._replicas.history import StateHistory, StepDigests
from legacy_ddp._replicas.state import describe_membership, parameter_groups
from legacy_ddp._text import Difference
from legacy_ddp._torch.device import Reader
from tests.helpers.replica_scenes import flip_lowest

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


# Each with all later differences, too: the order of the phases decides.
EDITED = _but(CLEAN, gradients_at_step=11, parameters_after_step=3, parameters=3, buffers=21)
FLIPPED = _but(CLEAN, parameters=5, changed_after=True, buffers=21)
OTHER_RATE = _but(CLEAN, parameters_after_step=3, parameters=3, buffers=21)
OTHER_BUFFERS = _but(CLEAN, buffers=21)
FLIPPED_BEFORE_STEP = _but(EDITED, parameters_at_step=5, parameters_after_step=6, parameters=6, changed_before=True)
MISSED_STEP = _but(
    CLEAN, steps=0, membership=31, parameters_at_step=0, gradients_at_step=0, parameters_after_step=0, parameters=1
)
OTHER_START = _but(FIRST_CALL, parameters=3)
WRITTEN_WITHOUT_STEP = _but(NO_STEP, parameters=3, changed_after=True)
OTHER_LIST = _but(EDITED, membership=31, parameters_at_step=5)
OTHER_REDUCED = _but(EDITED, gradients_at_call=11, steps=2)


def test_the_moments_of_a_step_with_a_closure_and_of_the_first_calls() -> None:
    for before, since in ((1, "the first forward"), (2, "the first forward after call 1")):
        found = attribute_digests([CLEAN, FLIPPED_BEFORE_STEP], before)
        assert found.since == f"between {since} and the step() after call {before}"
    assert attribute_digests([FIRST_CALL, _but(FIRST_CALL, buffers=21)], 0).since == "after the start"

    # A step with a closure is seen at its end alone.
    clean, other = (_but(of_rank, parameters_at_step=0, gradients_at_step=0) for of_rank in (CLEAN, OTHER_RATE))
    since = "between the first forward after call 3 and the end of the step() after call 4"
    assert attribute_digests([clean, other], 4).since == since


_DIGEST = "the first forward after call 3"
_START = "the start (construction, or the last broadcast or report of this kind)"


@pytest.mark.parametrize(
    "clean, faulty, phase, since",
    [
        (CLEAN, OTHER_REDUCED, "all_reduce", "the reduction in call 4"),
        (CLEAN, MISSED_STEP, "step", "after call 4"),
        (CLEAN, FLIPPED_BEFORE_STEP, "outside", f"between {_DIGEST} and the step() after call 4"),
        (CLEAN, EDITED, "gradients", "before the step() after call 4"),
        (CLEAN, OTHER_RATE, "step", "the step() after call 4"),
        (CLEAN, OTHER_LIST, "step", "the step() after call 4"),
        (FIRST_CALL, OTHER_START, "start", _START),
        (CLEAN, FLIPPED, "outside", "between the step() after call 4 and this call"),
        (NO_STEP, WRITTEN_WITHOUT_STEP, "outside", f"between {_DIGEST} and this call"),
        (CLEAN, OTHER_BUFFERS, "buffers", "after call 4"),
    ],
)
def test_the_first_difference_is_the_phase(clean: StepDigests, faulty: StepDigests, phase: str, since: str) -> None:
    verdict = attribute_digests([clean, faulty, clean], 4)

    assert (verdict.phase, verdict.since, verdict.ranks) == (phase, since, (1,))
    assert verdict.cause


def test_the_cause_has_the_number_of_steps_of_each_rank() -> None:
    twice = _but(CLEAN, steps=2, parameters_after_step=3, parameters=3)

    assert "steps: rank 2 has 2; rank 1 has 0; rank 0 has 1" in attribute_digests([CLEAN, MISSED_STEP, twice], 4).cause


def test_optimizers_of_the_same_number_of_other_parameters_are_told_so() -> None:
    digests = [_but(of_rank, membership_text="1 of 2") for of_rank in (CLEAN, OTHER_LIST)]
    cause = attribute_digests(digests, 4).cause

    assert cause.endswith("; in optimizers: the same number on every rank, but different parameters")


def test_later_evidence_is_listed_once_and_decides_nothing_where_count_and_evidence_disagree() -> None:
    changed = "parameters changed outside of a step"
    found = attribute_digests([OTHER_RATE, CLEAN, FLIPPED], 4)
    assert found.who == f"rank 0 against ranks 1-2 (2 of 3 ranks agree); rank 2: {changed}"
    assert (found.ranks, found.minority, found.implicated) == ((0, 2), (0,), (2,))

    found = attribute_digests([FLIPPED_BEFORE_STEP, FLIPPED_BEFORE_STEP, FLIPPED], 4)
    disagree = f"ranks 0-1: {changed}; count and evidence disagree; rank 2: {changed}"
    assert found.who == f"rank 2 against ranks 0-1 (2 of 3 ranks agree); {disagree}"
    assert (found.ranks, found.minority, found.implicated) == ((), (2,), (0, 1, 2))

    assert attribute_digests([CLEAN, CLEAN], 4) == NOTHING


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
        (["parameters", "gradients", "optimizer"], _ALL, "step", "earlier step()"),
        (["optimizer", "buffers"], _ALL, "step", "will make"),
        (["parameters", "gradients", "buffers"], _ALL, "unknown", "written outside"),
        (["parameters"], ("parameters", "buffers"), "unknown", "check_replicas(model, optimizer)"),
        (["buffers"], _ALL, "buffers", "only buffers differ"),
        ([], _ALL, "", ""),
    ],
)
def test_the_verdict_follows_from_the_kinds_that_differ_now(
    differing: list[str], compared: tuple[str, ...], phase: str, word: str
) -> None:
    verdict = attribute_kinds(differing, compared, _FOUND)

    assert (verdict.phase, verdict.ranks, verdict.who) == (phase, *((_FOUND.ranks, _FOUND.who) if phase else ((), "")))
    assert word in verdict.cause
    # Statistics of a layer in training are each rank's own: detail leaves them out.
    assert ('checks="detail"' in verdict.since) == (phase not in ("", "buffers"))


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


def test_buffers_of_some_ranks_are_no_statistics_and_explain_nothing_where_parameters_differ() -> None:
    buffer = Difference("buffer 'b'", (("nothing", (0, 2)), ("float32 (2,) 2", (1,))))
    alone, beside = (attribute_kinds(kinds, _ALL, _FOUND) for kinds in (["buffers"], ["buffers", "parameters"]))
    cause = add_reading_of_buffers(alone, [buffer], [buffer.name]).cause

    assert cause.startswith("only buffers differ, and ranks do not hold the same: buffer 'b'. Some ranks have ")
    assert "broadcast" not in cause
    assert add_reading_of_buffers(beside, [buffer]) == beside


# The parameters that optimizers hold


def _net() -> nn.Module:
    net = nn.Module()
    for name in "abcde":
        net.register_parameter(name, nn.Parameter(torch.ones(2, ord(name) - ord("a") + 1)))
    net.e.requires_grad_(False)
    return net


@pytest.mark.parametrize(
    "held, others, words, is_stale",
    [
        ("abcde", [], "5 of the model's 5 parameters", False),
        (
            "abd",
            [(7,)],  # a head of its own
            "3 of the model's 5 parameters, without 'c', with a tensor that is not in the model: float32 (7,)",
            False,
        ),
        (
            "",
            [(2, 1), (2, 2), (2, 3), (2, 4)],
            "0 of the model's 5 parameters, without 'a', 'b', 'c' and 1 more, with 4 tensors that are not in the model:"
            " float32 (2, 1), float32 (2, 2), float32 (2, 3) and 1 more",
            True,
        ),
    ],
)
def test_what_an_optimizer_holds_is_told_and_a_stale_parameter_noticed(
    held: str, others: list[tuple[int, ...]], words: str, is_stale: bool
) -> None:
    net = _net()
    parameters = [*(net.get_parameter(name) for name in held), *(torch.zeros(shape) for shape in others)]
    optimizer = torch.optim.SGD(parameters, lr=0.5)

    assert describe_membership([optimizer], distinct(net.named_parameters())) == (words, is_stale)


def test_each_parameter_has_its_group() -> None:
    net = _net()
    first = torch.optim.SGD([{"params": [net.a]}, {"params": [net.b, net.c]}], lr=0.5)
    second = torch.optim.SGD([net.c, net.d], lr=0.5)

    assert [(item.name, item.value) for item in parameter_groups([first, second], net, {"d"})] == [
        ("parameter group of 'a'", "0 of optimizer 0"),
        ("parameter group of 'b'", "1 of optimizer 0"),
        ("parameter group of 'c'", "1 of optimizer 0, 0 of optimizer 1"),
        ("parameter group of 'e'", "none"),
    ]
    assert parameter_groups([], net, ()) == []


# Changes of optimizer state: outside of steps they are found, by steps they are ignored


def _stepped(dtype: torch.dtype = torch.float32) -> tuple[torch.optim.Optimizer, StateHistory]:
    parameters = [nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in ((2, 3), (600, 500), ())]
    optimizer, history = torch.optim.Adam(parameters, lr=0.5), StateHistory(Reader())
    _step(optimizer, history)
    history.end_call()
    return optimizer, history


def _step(optimizer: torch.optim.Optimizer, history: StateHistory) -> None:
    history.begin_step(optimizer)
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    history.end_step(optimizer)


def _state(optimizer: torch.optim.Optimizer, index: int = 0) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = optimizer.state[optimizer.param_groups[0]["params"][index]]
    return state


def _load(optimizer: torch.optim.Optimizer) -> None:
    saved = optimizer.state_dict()
    optimizer.load_state_dict({**saved, "state": {key: dict(value) for key, value in saved["state"].items()}})


@pytest.mark.parametrize(
    "change, is_one",
    [
        (lambda it: flip_lowest(_state(it, 1)["exp_avg_sq"], (599, 499)), True),
        (lambda it: flip_lowest(_state(it, 2)["exp_avg"], ()), True),
        (lambda it: _state(it).pop("exp_avg"), True),
        (lambda it: it.state.clear(), True),
        (_load, False),
        (lambda it: it.param_groups[0].update(lr=0.25), False),
        (lambda it: _state(it).update(note="text"), False),
    ],
)
def test_a_change_is_found_now_and_by_the_next_step(
    change: Callable[[torch.optim.Optimizer], object], *, is_one: bool
) -> None:
    optimizer, history = _stepped()
    _step(_stepped()[0], history)  # each optimizer is followed on its own
    change(optimizer)

    assert history.snapshot() == (False, is_one)
    history.begin_step(optimizer)
    history.end_step(optimizer)
    assert history.snapshot() == (is_one, False)


def test_a_change_at_every_step_is_a_habit() -> None:
    optimizer, history = _stepped()
    for _ in range(2):
        _state(optimizer)["exp_avg"].neg_()
        _step(optimizer, history)
        history.end_call()
    _state(optimizer)["exp_avg"].neg_()

    assert history.snapshot() == (False, False)


def test_state_that_is_mended_after_an_error_is_no_change() -> None:
    optimizer, history = _stepped()
    history.restart()
    _state(optimizer)["exp_avg"].neg_()
    _step(optimizer, history)

    assert history.snapshot() == (False, False)
