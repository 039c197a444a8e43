"""The guard with compiled optimizers and models: it works, and compiles nothing of its own."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim.optimizer import _global_optimizer_pre_hooks

from legacy_ddp import LegacyDistributedDataParallel, UnsynchronizedStepError
from tests.helpers.ranks import run_ranks
from tests.helpers.tiers import thorough, thorough_but

STEPS = 8
_OPTIMIZERS = {"SGD": partial(SGD, lr=0.1), "AdamW": partial(AdamW, lr=torch.tensor(0.1), capturable=False)}


def _train(rank: int, what: str, name: str, checks: str, forgotten: int) -> tuple[list[int], int, int]:
    """Graphs, operations in them and graph breaks; at how many compilations again; and the step that was refused."""
    warnings.filterwarnings("ignore", category=DeprecationWarning)  # torch's compiler uses torch.jit
    warnings.filterwarnings("ignore", "Profiler", UserWarning)
    import torch._dynamo.utils as dynamo_utils
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")
    compiled: Callable[[Any], Any] = torch.compile(backend=counter)
    model = LegacyDistributedDataParallel(nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1)), checks=checks)
    # One for the guard, the digests of replicas and the search for a scaler.
    assert len(_global_optimizer_pre_hooks) == (0 if checks == "off" else 1)
    optimizer = _OPTIMIZERS[name](model.parameters())
    called = compiled(model) if what == "model" else model
    optimizer_step = compiled(optimizer.step) if what == "optimizer" else optimizer.step

    def backward(call: bool) -> None:
        called(torch.ones(2, 3)).square().sum().backward()
        if call:
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
    return graphs, sum(counters["recompiles"].values()), refused


@pytest.mark.cpu("it compiles for the CPU")
@pytest.mark.slow
@pytest.mark.parametrize("name", thorough_but(["AdamW"], _OPTIMIZERS))
@pytest.mark.parametrize("what", ["model", "optimizer", "step", "step with closure"])
@pytest.mark.thorough
def test_the_guard_adds_no_graph_and_compiles_nothing_again(what: str, name: str) -> None:
    ((graphs, again, refused),) = run_ranks(_train, 1, what, name, "info", -1, timeout_seconds=120, fresh=True)

    assert [(graphs, again, refused)] == run_ranks(_train, 1, what, name, "off", -1, timeout_seconds=120, fresh=True)
    assert graphs[0] >= 1
    assert refused == -1


@pytest.mark.cpu("it compiles for the CPU")
@pytest.mark.parametrize("what", [thorough("model"), thorough("optimizer"), "step", thorough("step with closure")])
def test_a_compiled_program_that_was_right_four_times_is_refused_the_fifth(what: str) -> None:
    ((_, _, refused),) = run_ranks(_train, 1, what, "AdamW", "info", 4, timeout_seconds=120, fresh=True)

    assert refused == 4
