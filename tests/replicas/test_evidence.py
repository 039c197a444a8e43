"""With checks="detail": evidence against a rank, changes that are not evidence, and training after an error."""

import copy
import warnings
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

from legacy_ddp import Checks, LegacyDistributedDataParallel, ReplicaDivergenceError, UnsynchronizedStepError
from legacy_ddp.debug import check_replicas
from tests.helpers.ranks import run_ranks
from tests.helpers.shared_jobs import on_ranks, run_cases
from tests.helpers.small_models import Said, add_gradients, error_of, tanh_net

wrap_in_detail = partial(LegacyDistributedDataParallel, checks="detail")
Model, Optimizer = LegacyDistributedDataParallel, torch.optim.Optimizer


def _divergence(model: Model) -> ReplicaDivergenceError:
    with pytest.raises(ReplicaDivergenceError) as caught:
        model.all_reduce()
    return caught.value


# Evidence against a rank: what it does alone, although all ranks do such things in every step


def _clips_and_skips(model: Model, optimizer: Optimizer, is_odd: bool) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    if not is_odd:
        optimizer.step()


def _clips(model: Model, optimizer: Optimizer, is_odd: bool) -> None:
    if not is_odd:
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()


def _clamps(model: Model, optimizer: Optimizer, is_odd: bool) -> None:
    optimizer.step()
    if not is_odd:
        for parameter in model.parameters():
            parameter.data.clamp_(-1e-3, 1e-3)


def _steps_at_another_rate(model: Model, optimizer: Optimizer, is_odd: bool) -> None:
    optimizer.param_groups[0]["lr"] = 0.25 if is_odd else 0.5
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.5


def _train(rank: int, step: Callable[[Model, Optimizer, bool], object]) -> tuple[str | None, tuple[int, ...], str]:
    """Three steps, of which rank 1 makes the last in another way; phase, ranks and text of the error."""
    model = wrap_in_detail(tanh_net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for index in range(3):
        optimizer.zero_grad()
        add_gradients(model, 1.0)
        model.all_reduce()
        step(model, optimizer, (index, rank) == (2, 1))
    optimizer.zero_grad()
    error = _divergence(model)
    return error.phase, error.ranks, str(error)


@pytest.mark.parametrize("world_size, ranks", [(2, ()), (3, (1,))])
def test_ranks_that_clip_or_clamp_as_always_are_not_accused_of_it(world_size: int, ranks: tuple[int, ...]) -> None:
    phases = {"step": _clips_and_skips, "gradients": _clips, "outside": _clamps}
    found = run_cases(_train, world_size, {phase: (step,) for phase, step in phases.items()})

    for phase, of_ranks in found.items():
        assert [(name, who) for name, who, _ in of_ranks] == [(phase, ranks)] * world_size


def test_a_rate_that_was_another_during_the_step_alone_is_told() -> None:
    for _, _, text in run_ranks(_train, 2, _steps_at_another_rate):
        assert "lr of parameter group 0: rank 1 has 0.25; rank 0 has 0.5" in text


# Steps that did not happen, and gradients that nobody uses


@on_ranks(2, [None] * 2)
def test_a_step_that_the_guard_refused_leaves_no_trace(rank: int) -> Said:
    model = wrap_in_detail(tanh_net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        add_gradients(model, 1.0 + rank)
        if rank == 0:
            with pytest.raises(UnsynchronizedStepError):
                optimizer.step()
        model.all_reduce()
        optimizer.step()
        optimizer.zero_grad()
    return error_of(model.all_reduce)


@on_ranks(2, [None] * 2)
def test_gradients_that_a_closure_drops_are_not_compared(rank: int) -> Said:
    model = wrap_in_detail(tanh_net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def closure() -> float:
        optimizer.zero_grad()
        add_gradients(model, 1.0 + rank)
        model.all_reduce()
        return 0.0

    for _ in range(3):
        add_gradients(model, 5.0 + rank)  # of this rank alone, and dropped by the closure
        optimizer.step(closure)
    return error_of(closure)


@on_ranks(2, [None] * 2)
def test_a_gradient_left_on_a_frozen_layer_that_no_optimizer_holds_is_silent(rank: int) -> Said:
    model = wrap_in_detail(nn.Sequential(nn.Linear(1, 1), tanh_net()))
    optimizer = torch.optim.SGD(model.module[1].parameters(), lr=0.1)
    for parameter in model.module[0].parameters():
        parameter.grad = torch.full_like(parameter, float(rank))
        parameter.requires_grad_(False)
    for _ in range(3):
        for parameter in model.module[1].parameters():
            parameter.grad = torch.ones_like(parameter)
        model.all_reduce()
        optimizer.step()
    return error_of(model.all_reduce)


@on_ranks(2, ["outside (1,)"] * 2)
def test_another_module_put_in_place_is_the_one_that_is_followed(rank: int) -> str:
    model = wrap_in_detail(tanh_net())
    model.module = copy.deepcopy(model.module)
    model.all_reduce()
    if rank == 1:
        with torch.no_grad():
            model.module[0].weight[0, 0] += 1
    error = _divergence(model)
    return f"{error.phase} {error.ranks}"


@on_ranks(2)
def _edits_a_gradient_that_changes_no_weight(rank: int) -> str:
    model = wrap_in_detail(tanh_net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    add_gradients(model, 1.0)
    model.all_reduce()
    if rank == 1:
        model.module[0].weight.grad[0, 0] += 1
    optimizer.step()
    optimizer.zero_grad()
    return error_of(model.all_reduce)[1]


def test_replicas_with_another_past_are_not_equal() -> None:
    for text in _edits_a_gradient_that_changes_no_weight():
        assert text.startswith("all_reduce() call 2: replicas differ in the history since the last call\n")


# Training goes on


def _goes_back(rank: int, broadcasts: bool) -> bool:
    """Rank 1 steps at another rate, which the next call tells; then all ranks take the same weights."""
    model = wrap_in_detail(tanh_net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept = copy.deepcopy(model.module.state_dict())
    add_gradients(model, 1.0)
    model.all_reduce()
    optimizer.param_groups[0]["lr"] = 0.1 * (1 + rank)
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.1
    optimizer.zero_grad()
    _divergence(model)
    if broadcasts:
        model.broadcast_parameters(src=1)
    else:
        model.module.load_state_dict(kept)
    for _ in range(3):
        add_gradients(model, 1.0 + rank)
        model.all_reduce()
        optimizer.step()
        optimizer.zero_grad()
    return check_replicas(model, optimizer, raises=True).identical


@pytest.mark.unsimulated("its tensors cannot be copied with copy.deepcopy")
def test_after_an_error_training_goes_on_from_weights_that_all_share() -> None:
    cases = {"broadcasts": (True,), "loads": (False,)}

    assert run_cases(_goes_back, 2, cases) == {name: [True, True] for name in cases}


def _compiled_and_faulty(rank: int) -> str:
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    warnings.filterwarnings("ignore", "Profiler", UserWarning)
    model = wrap_in_detail(tanh_net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = torch.compile(optimizer.step, backend="eager")
    for index in range(3):
        add_gradients(model, 1.0)
        model.all_reduce()
        if (index, rank) == (2, 1):
            model.module[0].weight.grad[0, 0] += 1
        step()
        optimizer.zero_grad()
    error = _divergence(model)
    return f"{error.phase} {error.ranks}"


def test_a_compiled_step_tells_which_gradients_it_found() -> None:
    assert run_ranks(_compiled_and_faulty, 2, timeout_seconds=120) == ["gradients ()"] * 2


# What is said at construction


def _constructs(rank: int, checks: tuple[Checks, Checks]) -> Said:
    net = nn.Sequential(tanh_net(), nn.BatchNorm1d(1))
    return error_of(LegacyDistributedDataParallel, net, checks=checks[rank])


_DETAIL = Checks("detail")
_UNKNOWN, _ALL, _MEAN = (Checks("detail", local_buffers=[name]) for name in ("1.nothing", "1.*", "1.running_mean"))
# By the error: the checks of both ranks, and words of the text.
WRONG_CHECKS = {
    "ValueError": ((_UNKNOWN, _UNKNOWN), "1.nothing"),
    "PeerError": ((_DETAIL, _UNKNOWN), "rank 1: ValueError: local_buffers names what the module"),
    "LayoutError": ((_DETAIL, Checks("info")), 'checks="detail"'),
    "LayoutError of local buffers": ((_ALL, _MEAN), "local_buffers"),
    "LayoutError of every": ((Checks("detail", every=5), Checks("detail", every=3)), "every=5"),
    "LayoutError of every here": ((Checks("detail", every=5), _DETAIL), "every=5"),
}


def test_checks_that_cannot_be_or_differ_are_told() -> None:
    for name, of_ranks in run_cases(_constructs, 2, {name: (of,) for name, (of, _) in WRONG_CHECKS.items()}).items():
        for said in of_ranks:
            assert said is not None, name
            assert said[0] == name.partition(" ")[0]
            assert WRONG_CHECKS[name][1] in said[1]
