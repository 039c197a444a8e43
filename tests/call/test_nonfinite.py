"""Non-finite gradients: error or warning on every rank before the exchange, with the right ranks and parameters."""

import gc
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch import nn

from legacy_ddp import Checks, LegacyDistributedDataParallel, NonFiniteGradientError, all_reduce_gradients
from tests.helpers import devices, logged_warnings
from tests.helpers.cases import all_bits, get_gradients
from tests.helpers.ranks import run_ranks
from tests.helpers.shared_jobs import on_ranks, run_cases
from tests.helpers.small_models import Said, add_gradients, error_of, gradient_values, wrap

NAN, INF = float("nan"), float("inf")
HEADLINE = "non-finite gradients, found before they were exchanged:\n"


class Zoo(nn.Module):
    """Sparse, tied, unused, empty, half and complex parameters, all ones: every gradient is a small integer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 2, sparse=True)
        self.linear = nn.Linear(2, 2)
        self.tied = self.linear
        self.unused = nn.Linear(2, 2)
        self.empty = nn.Parameter(torch.zeros(0, 2))
        self.brain = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        self.small = nn.Parameter(torch.ones(3, dtype=torch.float16))
        self.wave = nn.Parameter(torch.ones(3, dtype=torch.complex64))
        for parameter in self.parameters():
            nn.init.ones_(parameter)

    def forward(self, x: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
        hidden = self.tied(self.linear(x)) + self.embedding(torch.tensor([1, 3, 1])).sum(0)
        rest = self.brain.float().sum() + (self.wave * (1 + 1j)).real.sum() + self.empty.sum()
        return hidden.sum() + rest * x.sum() + self.small.float().sum() * factor


# Planting

Plant = Callable[[LegacyDistributedDataParallel], None]


def _backward(model: LegacyDistributedDataParallel) -> None:
    model(torch.ones(2)).backward()


def _nan_micro_batch(model: LegacyDistributedDataParallel) -> None:
    with model.no_sync():
        for x in (torch.ones(2), torch.tensor([NAN, 1.0]), torch.ones(2)):
            model(x).backward()
            model.all_reduce()


def _poison(grad: torch.Tensor, value: complex) -> torch.Tensor:
    grad = grad.coalesce().clone() if grad.is_sparse else grad.clone()
    (grad.values() if grad.is_sparse else grad).view(-1)[1] = value
    return grad


def _hook(name: str, value: complex, model: LegacyDistributedDataParallel) -> None:
    handle = model.module.get_parameter(name).register_hook(partial(_poison, value=value))
    _backward(model)
    handle.remove()


class Fault(NamedTuple):
    """``plant`` on the guilty ranks; what the text then says of each and the parameter that is named."""

    plant: Plant
    parameter: str
    words: str


_FAULTS = {
    "NaN in the input": Fault(
        lambda model: model(torch.tensor([1.0, NAN])).backward(), "brain", "'linear.weight': 4 NaN of 4"
    ),
    # 65504 is the largest number of fp16.
    "fp16": Fault(lambda model: model(torch.ones(2), factor=1e5).backward(), "small", "'small': 3 inf of 3"),
    "NaN under no_sync()": Fault(_nan_micro_batch, "brain", "'wave': 3 NaN of 3"),
    "bias by hook": Fault(partial(_hook, "linear.bias", NAN), "linear.bias", "'linear.bias': 1 NaN of 2"),
    "tied by hook": Fault(partial(_hook, "linear.weight", -INF), "linear.weight", "'linear.weight': 1 inf of 4"),
    "sparse by hook": Fault(partial(_hook, "embedding.weight", NAN), "embedding.weight", "1 NaN of 4"),
    "bf16 by hook": Fault(partial(_hook, "brain", INF), "brain", "'brain': 1 inf of 3"),
    "complex by hook": Fault(partial(_hook, "wave", complex(INF, NAN)), "wave", "'wave': 1 NaN of 3"),
    "imaginary by hook": Fault(partial(_hook, "wave", complex(0, -INF)), "wave", "'wave': 1 inf of 3"),
}


class Seen(NamedTuple):
    """What a rank saw of the error of a call: its text, and its ranks, parameter, number of the call and phase."""

    text: str
    facts: tuple[Any, ...]
    untouched: bool
    finite: bool
    next_is_right: bool


def _see(model: LegacyDistributedDataParallel) -> Seen:
    before = all_bits(get_gradients(model))
    with pytest.raises(NonFiniteGradientError) as caught:
        model.all_reduce()
    after, error = get_gradients(model), caught.value
    finite = all(grad is None or bool(torch.isfinite(grad.to_dense()).all()) for grad in after)
    model.zero_grad()
    _backward(model)
    expected = all_bits(get_gradients(model))  # equal on all ranks, and so small that sum and quotient are exact
    model.all_reduce()
    facts = (error.ranks, error.parameter, error.call, error.phase)
    return Seen(str(error), facts, all_bits(after) == before, finite, all_bits(get_gradients(model)) == expected)


def _raising() -> LegacyDistributedDataParallel:
    return LegacyDistributedDataParallel(Zoo(), checks=Checks(nonfinite="raise", uneven="allow"))


def _plant_all(guilty: Sequence[int], calls_before: int, rank: int) -> dict[str, Seen]:
    seen = {}
    for name, fault in _FAULTS.items():
        model = _raising()
        for _ in range(calls_before):
            model.zero_grad()
            _backward(model)
            model.all_reduce()
        model.zero_grad()
        (fault.plant if rank in guilty else _backward)(model)
        seen[name] = _see(model)
    return seen


@pytest.mark.unsimulated("it has no sparse tensors")
@pytest.mark.parametrize("world_size, guilty, calls_before", [(1, (0,), 0), (2, (1,), 3), (4, (1, 3), 3)])
def test_a_gradient_that_is_not_finite_is_the_same_error_on_every_rank_and_stays_where_it_is(
    world_size: int, guilty: tuple[int, ...], calls_before: int
) -> None:
    results = run_ranks(partial(_plant_all, guilty, calls_before), world_size)

    for name, fault in _FAULTS.items():
        first = results[0][name]
        assert first.facts == (guilty, fault.parameter, calls_before + 1, "agree"), name
        assert first.text.startswith(f"all_reduce() call {calls_before + 1}: {HEADLINE}  rank"), first.text
        assert fault.words in first.text.replace("\n    ", " "), first.text
        for rank, of_rank in enumerate(results):
            seen = of_rank[name]
            assert (seen.text, seen.facts) == (first.text, first.facts), name
            assert seen.untouched, name
            assert seen.finite == (rank not in guilty), name  # it did not spread
            assert seen.next_is_right, name


_TWO_RANKS = (
    f"all_reduce() call 1: {HEADLINE}  rank 0: 'wave': 1 NaN of 3\n  rank 2: 'linear.bias': 1 inf of 2\n"
    "nothing changed: mend the cause, or zero_grad() on all ranks drops this step"
)


@pytest.mark.unsimulated("it has no sparse tensors")
@on_ranks(3, [(_TWO_RANKS, (0, 2), "wave", True)] * 3)
def test_two_ranks_with_different_parameters_are_told_apart(rank: int) -> tuple[Any, ...]:
    model = _raising()
    plants: list[Plant] = [partial(_hook, "wave", NAN), _backward, partial(_hook, "linear.bias", INF)]
    plants[rank](model)
    seen = _see(model)
    return seen.text, *seen.facts[:2], seen.untouched


_BAD_WEIGHTS = (
    f"all_reduce() call 1: {HEADLINE}"
    "  rank 1: every gradient (2 of 2 parameters); parameters that were not finite\n"
    "    before this backward: 'weight'\n"
    "go back to finite parameters, and look at the step that broke them"
)


@on_ranks(3, [("NonFiniteGradientError", _BAD_WEIGHTS)] * 3)
def test_weights_that_were_bad_before_are_named(rank: int) -> Said:
    model = LegacyDistributedDataParallel(nn.Linear(2, 2), checks=Checks(nonfinite="raise"))
    if rank == 1:
        with torch.no_grad():
            model.module.weight[0, 0] = NAN
    model(torch.ones(1, 2)).square().sum().backward()
    return error_of(model.all_reduce)


# What is no error


def _idle(rank: int, policy: str) -> list[tuple[Said, float | None]]:
    seen = []
    for arguments in ({"skip": rank == 1}, {"sample_size": 0 if rank == 1 else 1}):
        model = wrap(checks=Checks(nonfinite=policy))
        add_gradients(model, NAN if rank == 1 else 4.0)
        seen.append((error_of(model.all_reduce, **arguments), gradient_values(model)["weight"]))
    model = wrap(checks=Checks(nonfinite=policy))
    add_gradients(model, NAN)
    seen.append((error_of(model.all_reduce, skip=True), gradient_values(model)["weight"]))
    return seen


def test_what_a_rank_that_takes_no_part_holds_does_not_matter() -> None:
    seen = [[(None, 4.0), (None, 4.0), (None, None)]] * 3

    assert run_cases(_idle, 3, {"raise": ("raise",), "warn": ("warn",)}) == {"raise": seen, "warn": seen}


@pytest.mark.cpu("a device tells this some calls later: see test_late_nonfinite.py")
@on_ranks(2, [[True, False]] * 2)
def test_the_function_reduces_non_finite_gradients_and_the_record_names_the_rank(rank: int) -> list[bool | None]:
    model = nn.Linear(2, 1)
    add_gradients(model, NAN if rank == 1 else 1.0)
    rows = all_reduce_gradients(model).rows
    assert "rank 1: every gradient" in logged_warnings.take()[0]
    return [row.finite for row in rows]


# Warnings


def _streak(rank: int) -> list[tuple[int, str]]:
    model = wrap(checks=Checks(nonfinite="warn", uneven="allow", same_data="allow"))
    said = []
    for call in range(1, 9):
        model.zero_grad()
        for _ in range(1 + (rank == 0)):
            add_gradients(model, NAN if (call, rank) in {(2, 1), (3, 1), (3, 2), (4, 0), (6, 2), (8, 0)} else 1.0)
        model.all_reduce(skip=(call, rank) == (8, 0))
        caught = logged_warnings.take_all()
        assert {told.filename for told in caught} <= {__file__}
        logged = caught[0].text if caught else ""
        said += [(call, logged)] if logged else []
        found = model.module.weight.grad.isnan().all().item()
        assert found == (call in (2, 3, 4, 6))  # the call went on
    return said


@pytest.mark.cpu("a device tells this some calls later: see test_late_nonfinite.py")
def test_warnings_are_logged_on_every_rank_and_shown_by_rank_0_at_the_caller_s_line() -> None:
    first, *others = run_ranks(_streak, 3)

    assert others == [first] * 2
    assert [call for call, _ in first] == [2, 6]
    assert first[0][1] == (
        f"all_reduce() call 2: {HEADLINE}  rank 1: 'weight': 2 NaN of 2\n"
        "every rank gets them now (warned once until all are finite again); see\n"
        "  Checks(nonfinite=...) to stop here instead\n"
        "if a loss scaler of your own skips such steps, pass the scaler as\n"
        "  Checks(grad_scaler=...)"
    )


def _by_default(rank: int, checks: tuple[Any, ...]) -> list[str]:
    model = wrap(checks=checks[rank])
    for call in range(3):
        model.zero_grad()
        add_gradients(model, NAN if (call, rank) == (1, 1) else 1.0 + rank)
        model.all_reduce()
    return logged_warnings.take()


@pytest.mark.cpu("a device tells this some calls later: see test_late_nonfinite.py")
def test_a_nan_on_one_rank_is_told_by_default_with_rank_and_parameter() -> None:
    """Also where a filter makes errors of warnings, as here: it is logged, and the ranks stay in step. Nothing is told
    if a rank takes no part in the check."""
    ignoring = Checks(nonfinite="ignore")
    checks = {str(each): (each,) for other in ("off", ignoring) for each in (("info", other), (other, "info"))}
    found = run_cases(_by_default, 2, {"on both": (("info", "info"),), **checks})
    first, second = found.pop("on both")

    assert first == second
    assert len(first) == 1
    assert first[0].startswith(f"all_reduce() call 2: {HEADLINE}  rank 1: 'weight': 2 NaN of 2\n")
    assert found == {name: [[], []] for name in checks}


def _scaler_of_the_loop(rank: int, scales: bool) -> tuple[int, list[str]]:
    """A loop that does not pass its scaler to the checks; the scale overflows in the first step on rank 1."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    idle = torch.amp.GradScaler("cpu")  # never used
    model = wrap(checks=Checks(same_data="allow"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    skipped = 0
    for index in range(4):
        loss = model(torch.ones(1, 2)).sum()
        ((scaler.scale(loss) if scales else loss) * (float("inf") if (index, rank) == (0, 1) else 1.0)).backward()
        model.all_reduce()
        if scales:
            scaler.step(optimizer)
            before = scaler.get_scale()
            scaler.update()
            skipped += scaler.get_scale() < before
        optimizer.zero_grad()
    assert idle.is_enabled()
    return skipped, logged_warnings.take()


def test_a_scaler_that_was_not_passed_is_recognised_by_its_use() -> None:
    found = run_cases(_scaler_of_the_loop, 2, {"scales": (True,), "scales nothing": (False,)})

    assert found["scales"] == [(1, [])] * 2
    (_, first), (_, second) = found["scales nothing"]
    assert first == second
    assert "rank 1" in first[0]


def _error_beside_a_scaler(rank: int, users: tuple[int, ...]) -> str:
    scaler = torch.amp.GradScaler("cpu", enabled=rank in users)
    model = wrap(checks=Checks(nonfinite="raise"))
    (scaler.scale(model(torch.ones(1, 2)).sum()) * (INF if rank == 1 else 1.0)).backward()
    told = error_of(model.all_reduce)
    return "" if told is None else " ".join(told[1].split())


def test_the_error_names_a_scaler_that_is_used_but_was_not_passed() -> None:
    names: dict[tuple[int, ...], str] = {(0, 1, 2): "ranks 0-2", (1,): "rank 1", (): ""}
    for users, (first, *others) in zip(
        names, run_cases(_error_beside_a_scaler, 3, {str(users): (users,) for users in names}).values(), strict=True
    ):
        assert others == [first] * 2
        said = (
            f" a GradScaler of {names[users]} was not passed: pass the scaler as Checks(grad_scaler=...) on all ranks, "
            "and a step that the scaler skips is no error"
        )
        assert first.endswith(
            "nothing changed: mend the cause, or zero_grad() on all ranks drops this step" + (said if users else "")
        )


def _steps_with_a_nan(rank: int, has_scaler: bool) -> tuple[int, list[str]]:
    """How often all objects of the process were looked at in 12 steps, of which every second has a NaN."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20) if has_scaler else None
    model = wrap(checks=Checks(same_data="allow"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with patch.object(gc, "get_objects", wraps=gc.get_objects) as looked:
        for number in range(12):
            optimizer.zero_grad()
            loss = model(torch.ones(1, 2)).sum() * (NAN if rank == 0 and number % 2 == 0 else 1.0)
            (loss if scaler is None else scaler.scale(loss)).backward()
            model.all_reduce()
            if scaler is not None:
                scaler.step(optimizer)
                scaler.update()
    return looked.call_count, logged_warnings.take()


@pytest.mark.parametrize("has_scaler", [True, False])
def test_steps_with_a_nan_look_at_the_objects_of_the_process_once(*, has_scaler: bool) -> None:
    """3,000 steps took 137 s instead of 4."""
    for looks, told in run_ranks(_steps_with_a_nan, 2, has_scaler):
        assert looks == 1
        most = 0 if has_scaler else 6  # told again after every finite step
        # A real device that is behind tells of several calls at once, and the first counts.
        assert (min(most, 1) if devices.is_real() else most) <= len(told) <= most


# The text


@pytest.mark.usefixtures("alone")
def test_five_parameters_are_named_and_the_others_counted() -> None:
    module = nn.ParameterList([nn.Parameter(torch.ones(2)) for _ in range(8)])
    model = LegacyDistributedDataParallel(module, checks=Checks(nonfinite="raise"))
    for index, parameter in enumerate(module):
        parameter.grad = torch.tensor([1.0, INF if index else 1.0])
        with torch.no_grad():
            parameter[1] = NAN if index > 1 else 1.0

    said = error_of(model.all_reduce)

    assert said[1].split("\n", 1)[1] == (
        "  rank 0: '1': 1 inf of 2; '2': 1 inf of 2; '3': 1 inf of 2; '4': 1 inf of 2;\n"
        "    '5': 1 inf of 2; ... 2 more; parameters that were not finite before this\n"
        "    backward: '2', '3', '4', '5', '6', ... 1 more\n"
        "go back to finite parameters, and look at the step that broke them"
    )


def _different_details(rank: int) -> Said:
    model = LegacyDistributedDataParallel(nn.ParameterDict({"a": torch.ones(900)}), checks=Checks(nonfinite="raise"))
    model.module["a"].grad = torch.ones(900)
    model.module["a"].grad[: rank % 12 + 1] = NAN
    return error_of(model.all_reduce)


@pytest.mark.thorough
def test_the_text_of_many_ranks_with_different_details_is_capped() -> None:
    for said in run_ranks(_different_details, 13):
        lines = said[1].splitlines()
        assert lines[1] == "  ranks 0, 12: 'a': 1 NaN of 900"
        assert lines[10:12] == ["  rank 9: 'a': 10 NaN of 900", "  ... 2 more ranks, each with different details"]
