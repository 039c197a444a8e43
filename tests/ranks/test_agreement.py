"""Disagreement of ranks: the same clear error on every rank, gradients untouched, training continues."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from legacy_ddp import Checks, LegacyDistributedDataParallel, all_reduce_gradients
from tests.helpers.outcomes import attempt as _attempt
from tests.helpers.outcomes import backward as _backward
from tests.helpers.outcomes import small_net as _net
from tests.helpers.shared_jobs import on_ranks, once, run_cases

# Ranks in the tests with other versions of torch, and gloo in make test.
pytestmark = [pytest.mark.fast, pytest.mark.usefixtures("transport")]

# Faults make uneven work, too; its warning has tests of its own.
Model = partial(LegacyDistributedDataParallel, checks=Checks(uneven="allow"))


@on_ranks(4)
def _uneven_beside_skip(rank: int) -> tuple[tuple[int, ...], str]:
    model = LegacyDistributedDataParallel(_net(), checks=Checks(uneven="raise"))
    for _ in range(1 if rank >= 2 else 2):
        _backward(model, 1.0)
    error = _attempt(partial(model.all_reduce, skip=rank == 3))
    assert error is not None
    return error.ranks, str(error)


def test_a_rank_that_skips_is_not_blamed_for_uneven_work() -> None:
    for ranks, text in _uneven_beside_skip():
        assert ranks == (2,)
        assert "rank 2 has 1; ranks 0-1 have 2" in text


@on_ranks(2, [[0.5, 0.5]] * 2)
def test_a_first_call_that_went_wrong_uses_no_wrapper_number_up(rank: int) -> list[float]:
    first, second = nn.Linear(2, 1, bias=False), nn.Linear(3, 1, bias=False)
    for module in (first, second):
        module.weight.grad = torch.full_like(module.weight, float(rank))
    error = _attempt(lambda: all_reduce_gradients(second if rank else first))
    assert type(error).__name__ == "LayoutError"
    all_reduce_gradients(first)
    all_reduce_gradients(second)
    return [float(module.weight.grad.mean()) for module in (first, second)]


class _MaxNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 2, max_norm=1.0)  # renormalises its weight in forward
        self.head = nn.Linear(2, 1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(tokens))


@on_ranks(2, [1, 1])
def test_a_layer_that_renormalises_its_weight_in_forward_is_no_skipped_call(rank: int) -> int:
    model = Model(_MaxNorm())
    with torch.no_grad():
        model.module.embedding.weight.fill_(9.0)
    for _ in range(1 + rank):
        model(torch.tensor([0])).sum().backward()
    if rank == 0:
        with torch.no_grad():
            model(torch.tensor([1, 2]))
    return model.all_reduce().call


@on_ranks(2, [[0.5, 1.5, 2.5]] * 2)
def test_gradients_written_in_place_at_every_step_are_no_second_division(rank: int) -> list[float]:
    model = Model(nn.Linear(2, 1, bias=False))
    weight, seen = model.module.weight, []
    weight.grad = torch.zeros_like(weight)
    for step in range(3):
        weight.grad.copy_(torch.full_like(weight, 2.0 * step + 2.0 * rank))
        model.all_reduce(sample_size=2)
        seen.append(float(weight.grad[0, 0]))
    return seen


def _changed(rank: int, guilty: int, change: str) -> nn.Module:
    module = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 3), nn.Linear(3, 2))
    if rank == guilty:
        if change == "shape":
            module[1] = nn.Linear(3, 3, bias=False)
            module[1].bias = nn.Parameter(torch.zeros(4))
        elif change == "strides":
            module[0].weight = nn.Parameter(torch.zeros(2, 3).t())
    if change == "untied":
        module[2] = nn.Linear(3, 3)
        if rank != guilty:
            module[2].weight = module[1].weight
    return module


WORDS = {
    "shape": "parameter '1.bias': rank 1 has float32 (4,)",
    "strides": "parameter '0.weight': rank 1 has float32 (3, 2) on cpu#0, trainable, strides (1, 3)",
    "untied": "shared with 2.weight",
}


def _construct(rank: int, change: str, init_sync: bool) -> tuple[str, tuple[int, ...], str]:
    error = _attempt(lambda: Model(_changed(rank, 1, change), init_sync=init_sync))
    assert error is not None
    Model(_net()).all_reduce()  # the group is still usable
    return type(error).__name__, error.ranks, str(error)


@once
def _constructed() -> dict[str, list[tuple[str, tuple[int, ...], str]]]:
    return run_cases(_construct, 3, {f"{name} {how}": (name, how) for name in WORDS for how in (True, False)})


@pytest.mark.cpu("the text names the device")
@pytest.mark.parametrize("init_sync", [True, False])
@pytest.mark.parametrize("change", WORDS)
def test_construction_names_what_one_rank_holds_differently(change: str, init_sync: bool) -> None:
    results = _constructed()[f"{change} {init_sync}"]
    assert results == results[:1] * 3
    kind, ranks, text = results[0]
    assert (kind, ranks) == ("LayoutError", (1,))
    assert WORDS[change] in text, text


@on_ranks(3)
def _ignoring(rank: int) -> list[str]:
    module = _net()
    module.register_buffer("seen", torch.zeros(1))
    own = ["0.bias", "seen"] if rank else []
    if rank == 2:  # a parameter of this rank alone, which it rightly ignores
        module.register_parameter("own", nn.Parameter(torch.zeros(1)))
        own.append("own")
    construction = _attempt(lambda: Model(module, ignore=own))
    module = _net()
    module.register_buffer("seen", torch.zeros(1))
    broadcast = _attempt(Model(module, ignore=["seen"] if rank else [], init_sync=False).broadcast_buffers)
    return [str(construction), str(broadcast)]


@pytest.mark.cpu("the text names the device")
def test_a_name_in_ignore_on_some_ranks_is_told_as_ignored() -> None:
    results = _ignoring()

    assert results == results[:1] * 3
    construction, broadcast = results[0]
    held = "float32 (3,) on cpu#0, trainable, strides (1,)"
    said = f"\n  parameter '0.bias': rank 0 has {held}; ranks 1-2 have it ignored (ignore=)\n"
    assert said in construction
    assert construction.count("ignored") == 1
    assert "'own'" not in construction
    assert "\n  buffer 'seen': rank 0 has float32 (1,) on cpu#0; ranks 1-2 have it ignored (ignore=)\n" in broadcast


@pytest.mark.cpu("gradients on a device travel on the group of the script")
@on_ranks(2, [[0.5, 2000.0]] * 2)
def test_a_collective_of_the_user_in_flight_does_not_mix_with_gradients(rank: int) -> list[float]:
    model = Model(nn.Linear(1, 1, bias=False))
    model.module.weight.grad = torch.full((1, 1), float(rank))
    mine = torch.full((2,), 1000.0)
    if rank == 1:
        model.all_reduce()
    work = dist.all_reduce(mine, async_op=True)
    if rank == 0:  # in flight before our call on rank 0, after it on rank 1
        model.all_reduce()
    work.wait()
    return [model.module.weight.grad.item(), mine.mean().item()]


@on_ranks(3, [3.0] * 3)
def test_ranks_with_different_numbers_of_groups_meet(rank: int) -> float:
    dist.new_group([0, 1])  # rank 2 owns one group less
    pair = dist.new_group([0, 2])
    if rank != 1:
        part = Model(nn.Linear(1, 1, bias=False), process_group=pair)
        part.module.weight.grad = torch.full((1, 1), float(rank))
        part.all_reduce()
        assert part.module.weight.grad.item() == 1.0
    model = Model(nn.Linear(1, 1, bias=False))
    model.module.weight.grad = torch.full((1, 1), 3.0 * rank)
    model.all_reduce()
    dist.new_group([1, 2])  # the user's next group is still in step
    return model.module.weight.grad.item()
