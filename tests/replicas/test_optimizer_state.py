"""Optimizers of replicas: what they hold, changes of their state, and the lines of a report. One process."""

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from torch import nn

from legacy_ddp._explain.attribution import Verdict
from legacy_ddp._explain.compare import describe_items
from legacy_ddp._explain.replica_report import (
    Entry,
    ReplicaDifference,
    ReplicaReport,
    count_holders,
    explain_loss,
    group_entries,
)
from legacy_ddp._memory.layout import distinct
from legacy_ddp._replicas.history import StateHistory
from legacy_ddp._replicas.state import StateItem, describe_membership, parameter_groups
from legacy_ddp._text import MISSING, Difference
from legacy_ddp._torch.device import Reader
from tests.helpers.replica_scenes import flip_lowest

# Descriptions of the parameters in optimizers. One process

Tensors = list[nn.Parameter]


def _net() -> nn.Module:
    net = nn.Module()
    for name in "abcde":
        net.register_parameter(name, nn.Parameter(torch.ones(2, ord(name) - ord("a") + 1)))
    net.e.requires_grad_(False)
    return net


def _like(tensor: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(torch.zeros_like(tensor))


def _hold(net: nn.Module, case: str) -> Tensors:
    a, b, c, d, e = net.parameters()
    return {
        "all": [a, b, c, d, e],
        "all trainable": [a, b, c, d],
        "one left out": [a, b, d],
        "one replaced": [a, _like(b), c, d],
        "a head of its own": [a, b, c, d, _like(torch.ones(7))],
        "a head of its own and one left out": [a, b, d, _like(torch.ones(7))],
        "nothing": [_like(tensor) for tensor in (a, b, c, d)],
    }[case]


@pytest.mark.parametrize(
    "case, words, is_lost",
    [
        ("all", "5 of the model's 5 parameters", False),
        ("all trainable", "4 of the model's 5 parameters", False),
        ("one left out", "3 of the model's 5 parameters, without 'c'", False),
        (
            "one replaced",
            "3 of the model's 5 parameters, without 'b', with a tensor that is not in the model: float32 (2, 2)",
            True,
        ),
        (
            "a head of its own",
            "4 of the model's 5 parameters, with a tensor that is not in the model: float32 (7,)",
            False,
        ),
        (
            "a head of its own and one left out",
            "3 of the model's 5 parameters, without 'c', with a tensor that is not in the model: float32 (7,)",
            False,
        ),
        (
            "nothing",
            "0 of the model's 5 parameters, without 'a', 'b', 'c' and 1 more, with 4 tensors that are not in the model:"
            " float32 (2, 1), float32 (2, 2), float32 (2, 3) and 1 more",
            True,
        ),
    ],
)
def test_what_an_optimizer_holds_is_said_and_a_parameter_that_got_lost_noticed(
    case: str, words: str, is_lost: bool
) -> None:
    net = _net()
    optimizer = torch.optim.SGD(_hold(net, case), lr=0.5)

    assert describe_membership([optimizer], distinct(net.named_parameters())) == (words, is_lost)


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


# Changes of optimizer state outside of steps are found; changes by steps are ignored. One process


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


# The lines of a report about optimizer entries, and lost state as a cause. Pure

Values = tuple[tuple[str, tuple[int, ...]], ...]
TENSORS = (("float32 (2,) 00000000000000aa", (0, 2)), ("float32 (2,) 00000000000000bb", (1,)))
NO_TENSOR = (("float32 (2,) 00000000000000aa", (0, 2)), (MISSING, (1,)))
STEPS = (("float32 () 21.0", (0, 2)), ("float32 () 1.0", (1,)))
PARAMETERS = ("'a'", "'b of \\'c\\''", '"d\'s"')


def _every(key: str, values: Values, holders: Sequence[str] = PARAMETERS) -> list[Difference]:
    return [Difference(f"{key} of {holder}", values) for holder in holders]


@pytest.mark.parametrize(
    "name, key, unit, holder",
    [
        ("exp_avg of 'fc.weight'", "exp_avg", "parameter", "'fc.weight'"),
        ("optimizer 12: step of 'a of b'", "step", "parameter", "optimizer 12: 'a of b'"),
        ("3 in old_dirs of 'a'", "old_dirs", "parameter", "'a'"),
        ("1 in betas of parameter group 7", "betas", "parameter group", "parameter group 7"),
        ("parameter group of 'a'", "parameter group", "parameter", "'a'"),
        ("weights of 'parameter 0 of group 1'", "weights", "parameter", "'parameter 0 of group 1'"),
        ("optimizer 3: state before the last step", "state before the last step", "optimizer", "optimizer 3: "),
        ("a\nline of 'x'", "a\nline", "parameter", "'x'"),
    ],
)
def test_an_entry_is_a_key_and_its_holder(name: str, key: str, unit: str, holder: str) -> None:
    assert Entry.of(name) == ((key, unit), holder)


@pytest.mark.parametrize(
    "differences, line",
    [
        (_every("step", STEPS), "optimizer state: `step` is 1 on rank 1, 21 on ranks 0, 2, in 3 of 4 parameters"),
        (_every("m", TENSORS), "optimizer state: `m` differs in 3 of 4 parameters: rank 1 against ranks 0, 2"),
        (_every("exp_avg", NO_TENSOR), "optimizer state: `exp_avg` is missing on rank 1, in 3 of 4 parameters"),
        (
            _every("lr", (("0.1", (0,)), ("0.2", (1,))), ("parameter group 0", "parameter group 1")),
            "optimizer: `lr` is 0.2 on rank 1, 0.1 on rank 0, in 2 of 4 parameter groups",
        ),
        (
            [*_every("step", STEPS, ["'a'"]), *_every("step", (("float32 () 5.0", (0, 2)), STEPS[1]), ["'b'"])],
            "optimizer state: `step` differs in 2 of 4 parameters: rank 1 against ranks 0, 2",
        ),
        (
            [*_every("m", TENSORS, ["'a'"]), *_every("m", ((TENSORS[0][0], (0, 1)), (TENSORS[1][0], (2,))), ["'b'"])],
            "optimizer state: `m` differs in 2 of 4 parameters: rank 1 against ranks 0, 2; rank 2 against ranks 0-1",
        ),
        (
            _every("lr", tuple((str(rank), (rank,)) for rank in range(64)), ["parameter group 0", "parameter group 1"]),
            "optimizer: `lr` is 63 on rank 63, 62 on rank 62, 61 on rank 61, 0 on rank 0, 60 more values, in 2 of 4 "
            "parameter groups",
        ),
        (
            _every("x", (("float64 () 1.0", (0,)), ("float32 () 1.0", (1,)))),
            "optimizer state: `x` is float32 () 1 on rank 1, float64 () 1 on rank 0, in 3 of 4 parameters",
        ),
    ],
)
def test_a_kind_of_entries_is_one_line(differences: list[Difference], line: str) -> None:
    (kind,) = group_entries(differences, {Entry.of(differences[0].name).kind: 4})

    assert kind.line == line


def test_short_values_come_before_tensors_and_hyperparameters_before_state() -> None:
    differences = [
        *_every("exp_avg", TENSORS),
        *_every("exp_avg_sq", NO_TENSOR),
        *_every("step", STEPS),
        *_every("lr", (("0.1", (0,)), ("0.2", (1, 2))), ["parameter group 0"]),
    ]

    assert [kind.kind[0] for kind in group_entries(differences, {})] == ["lr", "step", "exp_avg_sq", "exp_avg"]


def _loss(*differences: Difference, equal: Sequence[str] = ()) -> str:
    totals = count_holders([*(item.name for item in differences), *equal])
    return explain_loss(group_entries(differences, totals), totals)


def test_ranks_without_any_state_have_lost_it() -> None:
    missing = [*_every("exp_avg", NO_TENSOR), *_every("step", (STEPS[0], (MISSING, (1,))))]

    assert _loss(*missing, equal=["lr of parameter group 0"]).startswith("rank 1 has no optimizer state, unlike the ot")
    # A rank with a part of the state is not one that resumed without.
    assert _loss(*missing, equal=["exp_avg of 'another'"]) == ""
    assert _loss(*missing, equal=["sum of 'a'"]) == ""


@pytest.mark.parametrize(
    "values, words",
    [
        (STEPS, "`step` is 1 on rank 1, 21 on ranks 0, 2: rank 1 lost optimizer state"),
        ((("21", (0,)), ("1", (1, 2))), "`step` is 1 on ranks 1-2, 21 on rank 0: ranks 1-2 lost optimizer state"),
        ((("21", (0, 2)), ("20", (1,))), "`step` is 20 on rank 1, 21 on ranks 0, 2: rank 1 left out steps"),
        ((("1", (0, 2)), ("21", (1,))), "`step` is 21 on rank 1, 1 on ranks 0, 2: ranks 0, 2 lost optimizer state"),
        ((("'a'", (0, 2)), ("'b'", (1,))), ""),
        (TENSORS, ""),
    ],
)
def test_a_lower_step_count_tells_who_lost_state(values: Values, words: str) -> None:
    found = _loss(*_every("step", values))

    assert found.startswith(words)
    assert bool(found) == bool(words)
    assert _loss(*_every("step", values), equal=["step of 'another'"]) == ""


@given(
    some.lists(some.sampled_from(["lr", "step", "exp_avg", "very_long_key_of_a_state" * 2]), min_size=1, unique=True),
    some.integers(1, 300),
    some.integers(1, 3),
    some.integers(2, 40),
    some.integers(2, 40),
)
def test_the_text_is_short_whatever_differs(keys: list[str], params: int, optimizers: int, ranks: int, n: int) -> None:
    differences = []
    for key in keys:
        values = tuple((f"0.{rank % n}", (rank,)) for rank in range(ranks))
        holders = [f"parameter group {i}" if key == "lr" else f"'block.{i}.weight'" for i in range(params)]
        names = [f"optimizer {k}: {key} of {holder}" for k in range(optimizers) for holder in holders]
        differences += [ReplicaDifference(name, values, "optimizer") for name in names]
    counts = count_holders(item.name for item in differences)
    report = ReplicaReport("call 1", ranks, {}, tuple(differences), Verdict("step", "", "", ""), entry_counts=counts)
    lines = str(report).splitlines()

    assert all(len(line) <= 80 for line in lines)
    assert len(lines) <= 4 + 4 * len(keys)


@pytest.mark.parametrize("value", [0.0, -0.0, 21.0, 0.1, -math.inf, 1e-45, 3e38])
def test_a_scalar_of_an_optimizer_is_shown_as_its_number(value: float) -> None:
    (text,) = describe_items([StateItem("optimizer", "step of 'a'", torch.tensor(value))]).values()
    *start, number = text.split()

    assert start == ["float32", "()"]
    assert torch.tensor(float(number)).view(torch.int32) == torch.tensor(value).view(torch.int32)


def test_other_tensors_are_shown_as_digests_and_every_nan_has_its_own_text() -> None:
    nans = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    items = [StateItem("optimizer", f"x of '{index}'", nan) for index, nan in enumerate(nans)]

    assert list(describe_items(items).values()) == ["float32 () nan (0x7fc00000)", "float32 () nan (0x7fc00001)"]
    for other in (StateItem("optimizer", "x", torch.ones(1)), StateItem("parameters", "x", torch.tensor(1.0))):
        assert len(describe_items([other])["x"].split()[-1]) == 16
