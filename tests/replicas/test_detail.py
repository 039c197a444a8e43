"""With checks="detail" training goes on after an error, with local steps and with compiled steps."""

import copy
import warnings
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from legacy_ddp import Checks, LegacyDistributedDataParallel, ReplicaDivergenceError
from legacy_ddp.debug import check_replicas
from tests.helpers.ranks import run_ranks
from tests.helpers.shared_jobs import run_cases
from tests.helpers.small_models import Said, add_gradients, error_of, tanh_net

Model = partial(LegacyDistributedDataParallel, checks="detail")


def _backward(model: nn.Module) -> None:
    model(torch.randn(3, 4) + dist.get_rank()).square().mean().backward()


def _train(model: LegacyDistributedDataParallel, optimizer: torch.optim.Optimizer, steps: int) -> bool:
    for _ in range(steps):
        _backward(model)
        model.all_reduce()
        optimizer.step()
        optimizer.zero_grad()
    return check_replicas(model, optimizer, raises=True).identical


def _parts(model: LegacyDistributedDataParallel, optimizer: torch.optim.Optimizer, rank: int) -> None:
    """Another learning rate on rank 1, which the next call tells."""
    _backward(model)
    model.all_reduce()
    optimizer.param_groups[0]["lr"] *= 1 + rank
    optimizer.step()
    optimizer.zero_grad()
    optimizer.param_groups[0]["lr"] = 0.1
    _backward(model)
    with pytest.raises(ReplicaDivergenceError):
        model.all_reduce()


def _goes_back(rank: int, broadcasts: bool) -> bool:
    model = Model(tanh_net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept = copy.deepcopy(model.module.state_dict())
    _parts(model, optimizer, rank)
    if broadcasts:
        model.broadcast_parameters(src=1)
    else:
        model.module.load_state_dict(kept)
    optimizer.zero_grad()
    return _train(model, optimizer, 3)


@pytest.mark.unsimulated("its tensors cannot be copied with copy.deepcopy")
def test_after_an_error_training_goes_on_from_weights_that_all_share() -> None:
    cases = {"broadcasts": (True,), "loads": (False,)}

    assert run_cases(_goes_back, 2, cases) == {name: [True, True] for name in cases}


def _averages_local_steps(rank: int) -> bool:
    model = Model(tanh_net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _train(model, optimizer, 2)
    with model.no_sync():
        for _ in range(3):
            _backward(model)
            optimizer.step()
            optimizer.zero_grad()
    for parameter in model.parameters():
        dist.all_reduce(parameter.data)
        parameter.data /= 2
    return _train(model, optimizer, 2)


def test_local_steps_whose_weights_are_averaged_are_silent() -> None:
    assert run_ranks(_averages_local_steps, 2) == [True, True]


# What is said at construction


def _constructs(rank: int, checks: tuple[Checks, Checks]) -> Said:
    net = nn.Sequential(tanh_net(), nn.BatchNorm1d(1))
    return error_of(LegacyDistributedDataParallel, net, checks=checks[rank])


_DETAIL = Checks("detail")
_UNKNOWN, _ALL, _MEAN = (Checks("detail", local_buffers=[name]) for name in ("1.nothing", "1.*", "1.running_mean"))


@pytest.mark.parametrize(
    "first, second, kind, word",
    [
        (_UNKNOWN, _UNKNOWN, "ValueError", "1.nothing"),
        (_DETAIL, _UNKNOWN, "PeerError", "rank 1: ValueError: local_buffers names what the module"),
        (_DETAIL, Checks("info"), "LayoutError", 'checks="detail"'),
        (_ALL, _MEAN, "LayoutError", "local_buffers"),
    ],
)
def test_checks_that_cannot_be_or_differ_are_told(first: Checks, second: Checks, kind: str, word: str) -> None:
    for said in run_ranks(_constructs, 2, (first, second)):
        assert said is not None
        assert said[0] == kind
        assert word in said[1]


# Compiled steps


def _compiles(rank: int, checks: str) -> list[int]:
    warnings.filterwarnings("ignore", category=DeprecationWarning)  # torch's compiler uses torch.jit
    warnings.filterwarnings("ignore", "Profiler", UserWarning)
    import torch._dynamo.utils as dynamo_utils
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")
    model = LegacyDistributedDataParallel(tanh_net(), checks=checks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1), capturable=False)
    step = torch.compile(optimizer.step, backend=counter)
    for _ in range(6):
        _backward(model)
        model.all_reduce()
        step()
        optimizer.zero_grad()
    assert check_replicas(model, optimizer).identical
    counters = dynamo_utils.counters
    counts = [counter.frame_count, counter.op_count, counters["stats"]["unique_graphs"]]
    return [*counts, sum(counters["recompiles"].values())]


@pytest.mark.thorough
def test_a_compiled_step_is_silent_and_compiles_nothing_more() -> None:
    first, second = run_ranks(_compiles, 2, "detail", timeout_seconds=120)

    assert first == second
    assert [first] == run_ranks(_compiles, 1, "off", timeout_seconds=120)


def _compiled_and_faulty(rank: int) -> str:
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    warnings.filterwarnings("ignore", "Profiler", UserWarning)
    model = Model(tanh_net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = torch.compile(optimizer.step, backend="eager")
    for index in range(3):
        add_gradients(model, 1.0)
        model.all_reduce()
        if (index, rank) == (2, 1):
            model.module[0].weight.grad[0, 0] += 1
        step()
        optimizer.zero_grad()
    with pytest.raises(ReplicaDivergenceError) as caught:
        model.all_reduce()
    return f"{caught.value.phase} {caught.value.ranks}"


def test_a_compiled_step_tells_which_gradients_it_found() -> None:
    assert run_ranks(_compiled_and_faulty, 2, timeout_seconds=120) == ["gradients ()"] * 2
