"""The guard and the digests of replicas with compiled optimizers and models: they compile nothing of their own."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW
from torch.optim.optimizer import _global_optimizer_pre_hooks

from legacy_ddp import LegacyDistributedDataParallel, UnsynchronizedStepError
from tests.helpers.ranks import run_ranks
from tests.helpers.tiers import thorough

STEPS = 8


def _train(rank: int, what: str, checks: str, forgotten: int) -> tuple[list[int], int, int, list[float]]:
    """Graphs, operations in them and graph breaks; how many compilations again; the step that was refused; weights.

    ``what`` is compiled: "model", "optimizer", "step", "step with closure", or "optimizer" whose "pre-hook" calls.
    """
    warnings.filterwarnings("ignore", category=DeprecationWarning)  # torch's compiler uses torch.jit
    warnings.filterwarnings("ignore", "Profiler", UserWarning)
    import torch._dynamo.utils as dynamo_utils
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")
    compiled: Callable[[Any], Any] = torch.compile(backend=counter)
    torch.manual_seed(0)
    model = LegacyDistributedDataParallel(nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1)), checks=checks)
    # One for the guard, the digests of replicas and the search for a scaler.
    assert len(_global_optimizer_pre_hooks) == (0 if checks == "off" else 1)
    optimizer = AdamW(model.parameters(), lr=torch.tensor(0.1), capturable=False)
    called = compiled(model) if what == "model" else model
    optimizer_step = optimizer.step
    if what == "pre-hook":
        optimizer.register_step_pre_hook(lambda *_: model.all_reduce() and None)
    if what in ("optimizer", "pre-hook"):
        optimizer_step = compiled(optimizer.step)

    def backward(call: bool) -> None:
        called(torch.ones(2, 3)).square().sum().backward()
        if call and what != "pre-hook":
            model.all_reduce()

    def step(call: bool) -> None:
        if what == "step with closure":
            optimizer_step(lambda: backward(call))
        else:
            backward(call)
            optimizer_step()
        optimizer.zero_grad()

    if what.startswith("step"):
        step = compiled(step)
    refused = -1
    for index in range(STEPS):
        try:
            step(index != forgotten)
        except UnsynchronizedStepError:
            refused = index
            optimizer.zero_grad()
    counters = dynamo_utils.counters
    graphs = [counter.frame_count, counter.op_count, counters["stats"]["unique_graphs"]]
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).tolist()
    return graphs, sum(counters["recompiles"].values()), refused, weights


def _result(what: str, checks: str, forgotten: int = -1) -> tuple[list[int], int, int, list[float]]:
    (result,) = run_ranks(_train, 1, what, checks, forgotten, timeout_seconds=120, fresh=True)
    return result


@pytest.mark.cpu("it compiles for the CPU")
@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("what", ["model", "optimizer", "step", "step with closure", "pre-hook"])
def test_the_guard_adds_no_graph_and_compiles_nothing_again(what: str) -> None:
    without = _result(what, "off")
    for checks in ("info", "detail") if what == "optimizer" else ("info",):
        assert _result(what, checks) == without

    graphs, _, refused, _ = without
    assert graphs[0] >= 1
    assert refused == -1


@pytest.mark.cpu("it compiles for the CPU")
@pytest.mark.parametrize("what", [thorough("optimizer"), "step", thorough("step with closure")])
def test_a_compiled_program_that_was_right_four_times_is_refused_the_fifth(what: str) -> None:
    assert _result(what, "info", forgotten=4)[2] == 4
