"""Non-finite gradients: error or warning on every rank before the exchange, with the right ranks and parameters."""

import copy
import gc
import pickle
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from legacy_ddp import (
    Checks,
    LegacyDistributedDataParallel,
    NonFiniteGradientError,
    all_reduce_gradients,
)
from tests.helpers import devices, logged_warnings
from tests.helpers.cases import all_bits, get_gradients
from tests.helpers.ranks import run_ranks
from tests.helpers.shared_jobs import on_ranks, run_cases
from tests.helpers.small_models import Said, add_gradients, error_of, gradient_values, step, wrap
from tests.helpers.tiers import thorough

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


def _nan_input(model: LegacyDistributedDataParallel) -> None:
    model(torch.tensor([1.0, NAN])).backward()


def _half_overflows(model: LegacyDistributedDataParallel) -> None:
    model(torch.ones(2), factor=1e5).backward()  # 65504 is the largest number of fp16


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
    "NaN in the input": Fault(_nan_input, "brain", "'linear.weight': 4 NaN of 4"),
    "fp16": Fault(_half_overflows, "small", "'small': 3 inf of 3"),
    "NaN under no_sync()": Fault(_nan_micro_batch, "brain", "'wave': 3 NaN of 3"),
    "bias by hook": Fault(partial(_hook, "linear.bias", NAN), "linear.bias", "'linear.bias': 1 NaN of 2"),
    "tied by hook": Fault(partial(_hook, "linear.weight", -INF), "linear.weight", "'linear.weight': 1 inf of 4"),
    "sparse by hook": Fault(partial(_hook, "embedding.weight", NAN), "embedding.weight", "1 NaN of 4"),
    "bf16 by hook": Fault(partial(_hook, "brain", INF), "brain", "'brain': 1 inf of 3"),
    "complex by hook": Fault(partial(_hook, "wave", complex(INF, NAN)), "wave", "'wave': 1 NaN of 3"),
    "imaginary by hook": Fault(partial(_hook, "wave", complex(0, -INF)), "wave", "'wave': 1 inf of 3"),
}


class Seen(NamedTuple):
    """What a rank saw of one call and what it held before and after."""

    kind: str
    text: str
    ranks: tuple[int, ...]
    parameter: str | None
    call: int | None
    phase: str | None
    untouched: bool
    finite: bool
    next_is_right: bool


def _see(model: LegacyDistributedDataParallel, **arguments: Any) -> Seen:
    before = all_bits(get_gradients(model))
    error: NonFiniteGradientError | None = None
    try:
        model.all_reduce(**arguments)
    except NonFiniteGradientError as caught:
        error = caught
    after = get_gradients(model)
    finite = all(grad is None or bool(torch.isfinite(grad.to_dense()).all()) for grad in after)
    untouched = all_bits(after) == before
    model.zero_grad()
    _backward(model)
    expected = all_bits(get_gradients(model))  # equal on all ranks, and so small that sum and quotient are exact
    model.all_reduce()
    right = all_bits(get_gradients(model)) == expected
    if error is None:
        return Seen("", "", (), None, None, None, untouched, finite, right)
    facts = (error.ranks, error.parameter, error.call, error.phase)
    return Seen(type(error).__name__, str(error), *facts, untouched, finite, right)


def _raising(**checks: Any) -> LegacyDistributedDataParallel:
    checks = {"nonfinite": "raise", "uneven": "allow", **checks}
    return LegacyDistributedDataParallel(Zoo(), checks=Checks(**checks))


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
@pytest.mark.parametrize(
    "world_size, guilty, calls_before",
    [(1, (0,), 0), (2, (1,), 3), (4, (1, 3), 3), thorough(3, (0, 1, 2), 0)],
)
def test_a_gradient_that_is_not_finite_is_the_same_error_on_every_rank_and_stays_where_it_is(
    world_size: int, guilty: tuple[int, ...], calls_before: int
) -> None:
    results = run_ranks(partial(_plant_all, guilty, calls_before), world_size)

    for name, fault in _FAULTS.items():
        first = results[0][name]
        facts = (first.kind, first.ranks, first.parameter, first.call, first.phase)
        assert facts == ("NonFiniteGradientError", guilty, fault.parameter, calls_before + 1, "agree"), name
        assert first.text.startswith(f"all_reduce() call {calls_before + 1}: {HEADLINE}  rank"), first.text
        assert fault.words in first.text.replace("\n    ", " "), first.text
        for rank, of_rank in enumerate(results):
            seen = of_rank[name]
            assert (seen.text, seen.ranks, seen.parameter) == (first.text, first.ranks, first.parameter), name
            assert seen.untouched, name
            assert seen.finite == (rank not in guilty), name  # it did not spread
            assert seen.next_is_right, name


@on_ranks(3)
def _two_at_once(rank: int) -> Seen:
    model = _raising()
    plants: list[Plant] = [partial(_hook, "wave", NAN), _backward, partial(_hook, "linear.bias", INF)]
    plants[rank](model)
    return _see(model)


@pytest.mark.unsimulated("it has no sparse tensors")
def test_two_ranks_with_different_parameters_are_told_apart() -> None:
    results = _two_at_once()

    assert {(seen.ranks, seen.parameter, seen.untouched) for seen in results} == {((0, 2), "wave", True)}
    assert {seen.text for seen in results} == {
        f"all_reduce() call 1: {HEADLINE}  rank 0: 'wave': 1 NaN of 3\n  rank 2: 'linear.bias': 1 inf of 2\n"
        "nothing changed: mend the cause, or zero_grad() on all ranks drops this step"
    }


@on_ranks(3)
def _weights_were_bad(rank: int) -> Said:
    model = LegacyDistributedDataParallel(nn.Linear(2, 2), checks=Checks(nonfinite="raise"))
    if rank == 1:
        with torch.no_grad():
            model.module.weight[0, 0] = NAN
    model(torch.ones(1, 2)).square().sum().backward()
    return error_of(model.all_reduce)


def test_weights_that_were_bad_before_are_named() -> None:
    (kind, text), *others = _weights_were_bad()

    assert others == [(kind, text)] * 2
    assert (kind, text) == (
        "NonFiniteGradientError",
        f"all_reduce() call 1: {HEADLINE}"
        "  rank 1: every gradient (2 of 2 parameters); parameters that were not finite\n"
        "    before this backward: 'weight'\n"
        "go back to finite parameters, and look at the step that broke them",
    )


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
    """Also where a filter makes errors of warnings, as here: it is logged, and the ranks stay in step."""
    first, *others = run_ranks(_by_default, 3, ("info",) * 3)

    assert others == [first] * 2
    assert len(first) == 1
    assert first[0].startswith(f"all_reduce() call 2: {HEADLINE}  rank 1: 'weight': 2 NaN of 2\n")


def test_nothing_is_told_where_a_rank_does_not_take_part() -> None:
    ignoring = Checks(nonfinite="ignore")
    checks = {str(each): (each,) for other in ("off", ignoring) for each in (("info", other), (other, "info"))}

    assert run_cases(_by_default, 2, checks) == {name: [[], []] for name in checks}


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


def _steps_with_a_nan(rank: int, makes_scaler: str) -> tuple[int, list[str]]:
    """How often all objects of the process were looked at in 12 steps, of which every second has a NaN."""
    looks, get_objects = 0, gc.get_objects

    def counted(*args: Any) -> Any:
        nonlocal looks
        looks += 1
        return get_objects(*args)

    gc.get_objects = counted
    new_scaler = partial(torch.amp.GradScaler, "cpu", init_scale=2.0**20)
    scaler = new_scaler() if makes_scaler == "before" else None
    model = wrap(checks=Checks(same_data="allow"))
    if makes_scaler == "after":
        scaler = new_scaler()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for number in range(12):
        optimizer.zero_grad()
        loss = model(torch.ones(1, 2)).sum() * (NAN if rank == 0 and number % 2 == 0 else 1.0)
        (loss if scaler is None else scaler.scale(loss)).backward()
        model.all_reduce()
        if scaler is not None:
            scaler.step(optimizer)
            scaler.update()
    return looks, logged_warnings.take()


@pytest.mark.parametrize("makes_scaler", ["before", thorough("after"), "never"])
def test_steps_with_a_nan_look_at_the_objects_of_the_process_once(makes_scaler: str) -> None:
    """3,000 steps took 137 s instead of 4."""
    for looks, told in run_ranks(_steps_with_a_nan, 2, makes_scaler):
        assert looks == 1
        most = 6 if makes_scaler == "never" else 0  # told again after every finite step
        # A real device that is behind tells of several calls at once, and the first counts.
        assert (min(most, 1) if devices.is_real() else most) <= len(told) <= most


# GradScaler


class Training:
    """Mixed-precision training on the CPU, as torch's recipe has it."""

    def __init__(self, rank: int, *, policy: str = "raise", init_scale: float = 65536.0, enabled: bool = True) -> None:
        self.rank = rank
        self.scaler = torch.amp.GradScaler("cpu", init_scale=init_scale, enabled=enabled)
        self.model = LegacyDistributedDataParallel(
            nn.Linear(4, 2), checks=Checks(nonfinite=policy, grad_scaler=self.scaler)
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.generator = torch.Generator().manual_seed(rank)

    def step(self, factor: float = 1.0) -> list[object]:
        x = torch.randn(8, 4, generator=self.generator)
        self.optimizer.zero_grad()
        self.scaler.scale(self.model(x).square().mean() * factor).backward()
        self.model.all_reduce()
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return all_bits([p.detach() for p in self.model.parameters()])


def _overflows_once(rank: int, policy: str) -> tuple[list[list[object]], list[float]]:
    training = Training(rank, policy=policy)
    weights, scales = [], []
    for call in range(8):
        weights.append(training.step(factor=1e36 if (call, rank) == (3, 1) else 1.0))
        scales.append(training.scaler.get_scale())
    return weights, scales


def test_an_overflow_of_the_scaler_is_a_step_that_all_ranks_skip_silently() -> None:
    for (weights, scales), *others in run_cases(_overflows_once, 3, {"raise": ("raise",), "warn": ("warn",)}).values():
        assert others == [(weights, scales)] * 2
        assert scales == [65536.0] * 3 + [32768.0] * 5
        moved = [weights[call] != weights[call - 1] for call in range(1, 8)]
        assert moved == [True, True, False, True, True, True, True]


def _nan_at_every_step(rank: int, init_scale: float, enabled: bool) -> tuple[list[float], Said]:
    training = Training(rank, init_scale=init_scale, enabled=enabled)
    scales = []
    for _ in range(10):
        if said := error_of(training.step, factor=NAN if rank == 1 else 1.0):
            return scales, said
        scales.append(training.scaler.get_scale())
    return scales, None


_AT_1 = "the GradScaler's scale is {}: to skip this step would not help\n"
# The initial scale, whether the scaler is enabled, the scales until the error, and its words.
_SCALES: list[tuple[float, bool, list[float], str]] = [
    (8.0, True, [4.0, 2.0, 1.0], _AT_1.format(1)),
    (1.0, True, [], _AT_1.format(1)),
    (0.5, True, [], _AT_1.format(0.5)),
    (65536.0, False, [], ""),
]


def test_a_nan_that_the_scaler_did_not_make_is_reported_once_the_scale_is_down() -> None:
    seen = run_cases(_nan_at_every_step, 2, {str(case): case[:2] for case in _SCALES})
    for case in _SCALES:
        first, second = seen[str(case)]
        _, _, scales, words = case
        assert first == second
        assert first[0] == scales
        kind, text = first[1]
        assert kind == "NonFiniteGradientError"
        assert text == (
            f"all_reduce() call {len(scales) + 1}: {HEADLINE}"
            "  rank 1: every gradient (2 of 2 parameters): look at its loss and its input\n"
            f"{words}nothing changed: mend the cause, or zero_grad() on all ranks drops this step"
        )


class _Broken:
    def is_enabled(self) -> bool:
        return True

    def get_scale(self) -> float:
        raise LookupError("no scale here")


def _other_scaler_on(rank: int, odd: int, which: str) -> Said:
    scalers: dict[str, Any] = {
        "none": None,
        "disabled": torch.amp.GradScaler("cpu", enabled=False),
        "at 1": torch.amp.GradScaler("cpu", init_scale=1.0),
        "at infinity": torch.amp.GradScaler("cpu", init_scale=INF),
        "broken": _Broken(),
    }
    scaler = scalers[which] if rank == odd else torch.amp.GradScaler("cpu")
    model = wrap(checks=Checks(nonfinite="raise", grad_scaler=scaler))
    add_gradients(model, INF if rank == 1 else 1.0)
    said = error_of(model.all_reduce)
    assert step(model, rank) == 1.0
    return said


_OTHER_SCALERS = {
    (0, "none"): "no GradScaler is enabled on rank 0: not all ranks would skip this step",
    (1, "none"): "no GradScaler is enabled on rank 1: not all ranks would skip this step",
    (2, "disabled"): "no GradScaler is enabled on rank 2: not all ranks would skip this step",
    (2, "at 1"): "the GradScaler's scale is 1: to skip this step would not help",
    (0, "at infinity"): "the GradScaler's scale is inf: to skip this step would not help",
    (1, "broken"): "rank 1: inspection failed: LookupError: no scale here\nnothing changed",
    (2, "broken"): "rank 1: 'weight': 2 inf of 2\n  rank 2: inspection failed: LookupError: no scale here\nnothing",
}


def test_one_rank_without_a_scaler_overflow_makes_it_an_error_on_all() -> None:
    seen = run_cases(_other_scaler_on, 3, {str(case): case for case in _OTHER_SCALERS})
    for case, words in _OTHER_SCALERS.items():
        first, *others = seen[str(case)]
        assert others == [first] * 2
        assert first[0] == "NonFiniteGradientError"
        assert words in first[1], case


class _OwnScaler:
    """Not of torch: only what the checks ask for."""

    def __init__(self, scale: float) -> None:
        self._scale = scale

    def is_enabled(self) -> bool:
        return True

    def get_scale(self) -> float:
        return self._scale


@pytest.mark.cpu("a device tells later")
@on_ranks(2, [[0, 1]] * 2)
def test_overflows_in_a_row_of_a_scaler_that_is_not_of_torch_are_told_at_its_least_scale_alone(rank: int) -> list[int]:
    """Three calls in a row without finite gradients: the number of warnings in the log, for two scales."""
    found = []
    for scale in (128.0, 1.0):
        model = wrap(checks=Checks(grad_scaler=_OwnScaler(scale)))
        for _ in range(3):
            model.zero_grad()
            add_gradients(model, INF if rank == 1 else 1.0)
            model.all_reduce()
        found.append(len(logged_warnings.take()))
    return found


@pytest.mark.usefixtures("alone")
def test_a_deep_copy_shares_the_scaler_and_a_pickle_leaves_it_out_even_in_the_middle_of_a_step() -> None:
    training = Training(0)
    training.step()
    training.scaler.scale(training.model(torch.ones(1, 4)).sum()).backward()
    training.model.all_reduce()
    training.scaler.unscale_(training.optimizer)

    with pytest.raises(AssertionError):  # torch's own word: not here
        pickle.dumps(training.scaler)
    shared, loaded = copy.deepcopy(training.model), pickle.loads(pickle.dumps(training.model))

    assert shared._settings.checks.grad_scaler is training.scaler
    assert loaded._settings.checks == Checks(nonfinite="raise")
    for model, raises in [(shared, False), (loaded, True)]:
        add_gradients(model, INF)
        assert (error_of(model.all_reduce) is not None) == raises


@pytest.mark.parametrize("scaler", [65536.0, torch.amp.GradScaler, object()])
def test_an_object_that_is_no_scaler_is_refused(scaler: Any) -> None:
    with pytest.raises(
        TypeError, match=r"^checks: grad_scaler is not usable: got .*, expected a torch\.amp\.G"
    ) as caught:
        Checks(grad_scaler=scaler)

    assert "an object with the methods is_enabled() and get_scale()" in str(caught.value)


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

    assert said is not None
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
        assert said is not None
        lines = said[1].splitlines()
        assert lines[1] == "  ranks 0, 12: 'a': 1 NaN of 900"
        assert lines[10:12] == ["  rank 9: 'a': 10 NaN of 900", "  ... 2 more ranks, each with different details"]
