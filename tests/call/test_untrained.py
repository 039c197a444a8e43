"""Trainings without effect: gradients cleared before the call, parameters without an optimizer, local steps alone."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from legacy_ddp import LegacyDistributedDataParallel, all_reduce_gradients
from tests.helpers import logged_warnings
from tests.helpers.ranks import run_ranks
from tests.helpers.shared_jobs import on_ranks, run_cases
from tests.helpers.small_models import KINDS, tanh_net
from tests.helpers.tiers import thorough

Model = LegacyDistributedDataParallel
CALLS = 20  # a look at the parameters comes in the 17th


class Job:
    """A module, its calls and its backward passes on data of the rank's own."""

    def __init__(self, rank: int, *, make: Callable[[], nn.Module] = tanh_net, function: bool = False, **options: Any):
        self.rank, self.net, self.is_function = rank, make(), function
        self.size = {"sample_size": 6} if options.get("reproducible") else {}
        if not function:
            self.model = Model(self.net, **options)
        torch.manual_seed(100 + rank)

    def backward(self, scale: float = 1.0) -> None:
        (self.forward(torch.randn(6, 4) + self.rank).square().mean() * scale).backward()

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        return self.net(data) if self.is_function else self.model(data)

    def call(self, **arguments: Any) -> Any:
        arguments = {**self.size, **arguments}
        return all_reduce_gradients(self.net, **arguments) if self.is_function else self.model.all_reduce(**arguments)

    def train(self, optimizer: torch.optim.Optimizer, calls: int = CALLS) -> None:
        for _ in range(calls):
            self.net.zero_grad()
            self.backward()
            self.call()
            optimizer.step()


def _sgd(module: nn.Module, lr: float = 0.01) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=lr)


def _assign(net: nn.Module) -> None:
    net.load_state_dict({name: tensor.clone() for name, tensor in net.state_dict().items()}, assign=True)


# What has no effect: the job, and the words of its warning


def _cleared(job: Job, *, ranks: tuple[int, ...] = (0, 1), set_to_none: bool = True) -> None:
    optimizer = _sgd(job.net)
    job.call()  # the first call of the function adds the hooks that see backward
    for _ in range(CALLS):
        job.backward()
        if job.rank in ranks:
            optimizer.zero_grad(set_to_none=set_to_none)
        job.call()
        optimizer.step()
        optimizer.zero_grad()


def _cleared_in_a_hook(job: Job) -> None:
    """The step comes later, so that weights stay equal, and its gradients never."""

    def drop(parameter: torch.Tensor) -> None:
        parameter.grad = None

    for parameter in job.net.parameters():
        parameter.register_post_accumulate_grad_hook(drop)
    _cleared(job, ranks=())


def _assigned(job: Job) -> None:
    optimizer = _sgd(job.net)
    _assign(job.net)
    job.train(optimizer)


def _assigned_in_training(job: Job) -> None:
    """The old tensors keep their last gradients."""
    optimizer = _sgd(job.net)
    job.train(optimizer, 3)
    _assign(job.net)
    job.train(optimizer)


def _optimizer_of_a_copy(job: Job) -> None:
    job.train(_sgd(copy.deepcopy(job.net)))


def _replaced_layer(job: Job) -> None:
    optimizer = _sgd(job.net)
    torch.manual_seed(5)
    job.call()
    job.net[2] = nn.Linear(4, 1)
    job.train(optimizer)


def _thawed(job: Job) -> None:
    job.net[0].requires_grad_(True)
    job.train(_sgd(job.net[2]))


def _frozen_net() -> nn.Module:
    net = tanh_net()
    net[0].requires_grad_(False)
    return net


CLEARED = "on ranks 0-1 every gradient was cleared between backward and the call"
CLEARED_ALONE = "on rank 1 every gradient was cleared between backward and the call"
FAULTS: dict[str, tuple[Callable[[Job], None], Callable[[], nn.Module], tuple[str, ...]]] = {
    "cleared": (_cleared, tanh_net, (CLEARED, "nothing is trained")),
    "cleared in place": (partial(_cleared, set_to_none=False), tanh_net, (CLEARED, "nothing is trained")),
    "cleared on a rank": (partial(_cleared, ranks=(1,)), tanh_net, (CLEARED_ALONE, "passes skip=True")),
    "cleared in place on a rank": (
        partial(_cleared, ranks=(1,), set_to_none=False),
        tanh_net,
        (CLEARED_ALONE, "passes skip=True"),
    ),
    "cleared in a hook": (_cleared_in_a_hook, tanh_net, (CLEARED, "test_untrained.py", "in drop", "remove it")),
    "assigned": (_assigned, tanh_net, ("4 of 4 parameters", "make the optimizer of model.parameters() again")),
    "assigned later": (_assigned_in_training, tanh_net, ("4 of 4 parameters", "make the optimizer of model")),
    "copy": (_optimizer_of_a_copy, tanh_net, ("4 of 4 parameters", "make the optimizer of model.parameters() again")),
    "replaced": (_replaced_layer, tanh_net, ("2 of 4 parameters with gradients, first '2.bias'", "make the optimizer")),
    "thawed": (_thawed, _frozen_net, ("2 of 4 parameters with gradients, first '0.bias'", "add_param_group()")),
}
WAYS: dict[str, dict[str, Any]] = {**KINDS, "function": {"function": True}}
# Other faults in the first way alone.
IN_ALL_WAYS = {"cleared", "cleared in place on a rank", "assigned later", "thawed"}
# The function has no plan before its first call, in which the layer is there.
SILENT = {*((name, "off") for name in FAULTS), ("thawed", "function")}


def _said(rank: int, name: str) -> dict[str, list[str]]:
    fault, make, _ = FAULTS[name]
    said = {}
    is_told = "in place" not in name or torch.get_default_device().type == "cpu"  # elsewhere no norm is known
    for way, options in WAYS.items() if is_told else ():
        if way == "info" or name in IN_ALL_WAYS:
            fault(Job(rank, make=make, **options))
            said[way] = logged_warnings.take()
    return said


def test_a_training_without_effect_is_told_once_and_by_rank_0() -> None:
    found = run_cases(_said, 2, {name: (name,) for name in FAULTS})

    for name, (of_rank_0, of_rank_1) in found.items():
        for way, texts in of_rank_0.items():
            assert of_rank_1[way] == [], (name, way)
            assert len(texts) == ((name, way) not in SILENT), (name, way, texts)
            for text in texts:
                assert all(word in text.replace("\n", " ") for word in FAULTS[name][2]), (name, way, text)


def _local(rank: int, steps: int, *, first: bool = False, **options: Any) -> list[str]:
    job = Job(rank, **options)
    optimizer = _sgd(job.net)
    if first:
        job.train(optimizer, 1)
    for _ in range(steps):
        with job.model.no_sync():
            optimizer.zero_grad()
            job.backward()
            job.call()
            optimizer.step()
    return logged_warnings.take()


@on_ranks(2)
def _local_steps(rank: int) -> list[list[str]]:
    return [
        _local(rank, 40),
        _local(rank, 40, reproducible=True),
        _local(rank, 20),
        _local(rank, 40, first=True),
        _local(rank, 40, checks="off"),
    ]


def test_local_steps_without_any_call_are_told_once_on_every_rank() -> None:
    for texts, of_reproducible, *silent in _local_steps():
        (text,) = texts
        assert text.startswith("20 steps were made inside no_sync(), where all_reduce() does nothing")
        assert of_reproducible == texts
        assert silent == [[], [], []]


# Healthy twins


def _frozen_in_effect(job: Job) -> None:
    """The optimizer has the head alone, and the features have gradients all the same."""
    job.train(_sgd(job.net[2]), 40)


def _probe_of_an_assigned_model(job: Job) -> None:
    _assign(job.net)
    job.train(_sgd(job.net[2]), 40)


def _assigned_before(job: Job) -> None:
    _assign(job.net)
    job.train(_sgd(job.net), 40)


def _thawed_and_held(job: Job) -> None:
    optimizer = _sgd(job.net[2])
    job.train(optimizer, 3)
    job.net[0].requires_grad_(True)
    optimizer.add_param_group({"params": list(job.net[0].parameters())})
    job.train(optimizer, 40)


def _no_rate(job: Job) -> None:
    job.train(_sgd(job.net, lr=0.0), 40)


def _by_hand(job: Job) -> None:
    """Beside an optimizer of another module without gradients."""
    other = _sgd(nn.Linear(4, 4))
    for _ in range(40):
        job.net.zero_grad()
        job.backward()
        job.call()
        for parameter in job.net.parameters():
            parameter.data.sub_(parameter.grad, alpha=0.01)
        other.step()


def _copies(job: Job) -> None:
    """The optimizer has copies, whose gradients and values are written through ``.data``."""
    copies = [parameter.detach().clone().requires_grad_() for parameter in job.net.parameters()]
    for each in copies:
        each.grad = torch.zeros_like(each)
    optimizer = torch.optim.SGD(copies, lr=0.01)
    for _ in range(40):
        job.net.zero_grad()
        job.backward()
        job.call()
        for each, parameter in zip(copies, job.net.parameters(), strict=True):
            each.grad.data.copy_(parameter.grad)
        optimizer.step()
        for each, parameter in zip(copies, job.net.parameters(), strict=True):
            parameter.data.copy_(each)


def _skipping_scaler(job: Job) -> None:
    """Every step is skipped, as with a scale that is far too high; another optimizer has no gradients."""
    optimizer, other = _sgd(job.net), _sgd(nn.Linear(4, 4))
    for _ in range(40):
        optimizer.zero_grad()
        job.backward()
        job.call()
        other.step()


def _calls_add_up(job: Job) -> None:
    optimizer = _sgd(job.net)
    for call in range(60):
        job.backward()
        job.call()
        if call % 30 == 29:
            optimizer.step()
            optimizer.zero_grad()


def _measures_beside_training(job: Job) -> None:
    """Gradients of a model that nobody trains, beside a model that trains."""
    other = tanh_net()
    optimizer = _sgd(other)
    for _ in range(40):
        job.net.zero_grad()
        job.backward()
        job.call()
        optimizer.zero_grad()
        other(torch.ones(2, 4)).sum().backward()
        optimizer.step()


def _dummy_batches(job: Job) -> None:
    optimizer = _sgd(job.net)
    for _ in range(40):
        optimizer.zero_grad()
        job.backward(scale=1.0 - job.rank)
        job.call()
        optimizer.step()


def _clears_now_and_then(job: Job) -> None:
    """A rank drops its bad batches, four in a row at most."""
    optimizer = _sgd(job.net)
    for step in range(40):
        optimizer.zero_grad()
        job.backward()
        if job.rank == 0 and step % 5:
            optimizer.zero_grad(set_to_none=step % 2 > 0)
        job.call()
        optimizer.step()


def _without_data(job: Job) -> None:
    optimizer = _sgd(job.net)
    for _ in range(20):
        optimizer.zero_grad()
        job.backward()
        if job.rank:
            optimizer.zero_grad()
        job.call(skip=job.rank == 1)
        optimizer.step()


def _experts(job: Job) -> None:
    """Each rank uses one of two layers in a step."""
    job.net.zero_grad()
    optimizer = _sgd(job.net)
    for step in range(40):
        optimizer.zero_grad()
        job.net[0 if (step + job.rank) % 2 else 2](torch.randn(3, 4)).square().mean().backward()
        job.call()
        optimizer.step()


TWINS: dict[str, Callable[[Job], None]] = {
    function.__name__.strip("_").replace("_", " "): function
    for function in (
        _frozen_in_effect,
        _probe_of_an_assigned_model,
        _assigned_before,
        _no_rate,
        _by_hand,
        _copies,
        _skipping_scaler,
        _calls_add_up,
        _measures_beside_training,
        _dummy_batches,
        _clears_now_and_then,
        _without_data,
        _experts,
    )
}


def _said_of_twins(rank: int, way: str) -> dict[str, list[str]]:
    said = {}
    for name, twin in TWINS.items():
        twin(Job(rank, **WAYS[way]))
        said[name] = logged_warnings.take()
    _thawed_and_held(Job(rank, make=_frozen_net, **WAYS[way]))
    said["thawed and held"] = logged_warnings.take()
    return said


@pytest.mark.unsimulated("each operation takes long there, and what is told runs there")
@pytest.mark.parametrize("way", ["info", thorough("function")])
def test_nothing_is_said_of_trainings_with_an_effect(way: str) -> None:
    for said in run_ranks(_said_of_twins, 2, way, timeout_seconds=120.0):
        assert {name: texts for name, texts in said.items() if texts} == {}
