"""Digests in turns in unusual modules and loops: what is read, and which differences are compared."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from legacy_ddp import LegacyDistributedDataParallel
from tests.helpers import default_trainings as trainings
from tests.helpers import logged_warnings
from tests.helpers.default_trainings import PARTS, Run, Told, train, wide_net
from tests.helpers.shared_jobs import on_ranks, run_cases
from tests.helpers.torch_versions import uses_torch_jit

# Modules


class _Renamed(nn.Sequential):
    """Shows its parameters under names of its own, which lead to no submodule."""

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        for name, parameter in super().named_parameters(*args, **kwargs):
            yield f"model.{name}", parameter


def _trains_renamed(rank: int, faulty: int) -> Told:
    run = Run(rank, module=_Renamed(*wide_net()))
    return train(run, 2 * PARTS, {("stepped", 3): trainings.add_noise} if rank == faulty else {})


def test_a_module_with_names_of_its_own_is_compared() -> None:
    found = run_cases(_trains_renamed, 2, {"silent": (-1,), "faulty": (1,)})

    assert found["silent"] == [[], []]
    first, second = found["faulty"]
    assert first == second
    assert trainings.names_in(first[0][1]) == {"model.3.weight"}


@pytest.mark.usefixtures("alone")
@uses_torch_jit
def test_a_scripted_module_is_digested() -> None:
    net = wide_net()
    del net._buffers["table"]
    model = LegacyDistributedDataParallel(torch.jit.script(net))

    for call in range(1, 4):
        model(torch.ones(2, 64)).sum().backward()
        assert model.all_reduce().call == call


@pytest.mark.usefixtures("alone")
@uses_torch_jit
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_a_traced_forward_records_no_digest() -> None:
    model = LegacyDistributedDataParallel(nn.Linear(2, 1))

    traced = torch.jit.trace(model, torch.ones(1, 2), check_trace=False)

    assert {node.kind() for node in traced.inlined_graph.nodes()} == {"prim::GetAttr", "aten::linear"}


class _Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("values", torch.ones(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def _replace_table(run: Run) -> None:
    run.module[4] = _Table()


def _poke_table(run: Run) -> None:
    run.module.get_buffer("4.values")[3] = 0.5


@on_ranks(2)
def _trains_with_new_table(rank: int) -> Told:
    actions = {("stepped", 5): _replace_table}
    run = Run(rank, module=wide_net().append(_Table()))
    return train(run, 3 * PARTS, actions | ({("stepped", 8): _poke_table} if rank else {}))


def test_a_buffer_of_a_replaced_module_is_read_from_the_next_rotation_on() -> None:
    first, second = _trains_with_new_table()

    assert first == second
    ((_, text),) = first
    assert trainings.names_in(text) == {"4.values"}


# Differences


def _keep_cache(run: Run) -> None:
    run.module.register_buffer("cache", torch.ones(64))


@on_ranks(2)
def _trains_with_cache(rank: int) -> Told:
    actions = {("stepped", 5): _keep_cache, ("stepped", PARTS + 4): trainings.add_noise}
    return train(Run(rank), 4 * PARTS, actions if rank else {})


def test_a_buffer_on_one_rank_alone_leaves_no_rank_waiting_later() -> None:
    first, second = _trains_with_cache()

    assert first == second
    assert len(first) == 2  # and that of the noise
    assert trainings.names_in(first[0][1]) == {"cache"}


def _forwards_other_weights(rank: int, faulty: int) -> list[int]:
    """Rank 0 runs a training forward with other weights, before the forward of the step, and gives the weights back."""

    def forward(run: Run) -> None:
        kept = [parameter.clone() for parameter in run.model.parameters()]
        for parameter in run.model.parameters():
            parameter.mul_(0.5)
        with torch.enable_grad():
            run.model(torch.randn(8, 64))
        for parameter, value in zip(run.model.parameters(), kept, strict=True):
            parameter.copy_(value)

    actions = {("stepped", 2): forward} if rank == 0 else {}
    if rank == faulty:
        actions["stepped", 6] = trainings.initialise
    return [call for call, _ in train(Run(rank), 4 * PARTS - 1, actions)]


def test_a_digest_of_a_moment_that_has_passed_is_silent_and_hides_no_later_difference() -> None:
    found = run_cases(_forwards_other_weights, 2, {"silent": (-1,), "faulty": (1,)})

    assert found["silent"] == [[], []]
    calls, others = found["faulty"]
    assert calls == others
    assert len(calls) == 1
    assert 6 < calls[0] <= 3 + 2 * PARTS


def _joins(rank: int, checks: tuple[str, ...]) -> list[str]:
    """Rank 0 leaves first. Rank 1 has weights of its own."""
    run = Run(rank, arguments={"checks": checks[rank]})
    run.wrap()
    if rank == 1:
        trainings.initialise(run)
    with run.model.join():
        told = train(run, 4 if rank == 0 else 2 * PARTS, {})
    return [text for _, text in told] + logged_warnings.take()  # of the calls of others


def test_ranks_that_are_left_in_a_join_are_compared_unless_one_that_left_has_checks_off() -> None:
    found = run_cases(_joins, 4, {"off on a rank": (("off", *["info"] * 3),), "on": (("info",) * 4,)})

    assert found["off on a rank"] == [[]] * 4
    first, *others = found["on"]
    assert others == [first] * 3
    (text,) = first
    assert "rank 1 against ranks 2-3" in text
