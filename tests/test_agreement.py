"""What happens when ranks disagree? The same clear error on every rank, gradients untouched, training goes on."""

import gc
import os
import sys
import time
import weakref
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from legacy_ddp import Checks, LegacyDistributedDataParallel, all_reduce_gradients
from tests.outcomes import attempt as _attempt
from tests.outcomes import backward as _backward
from tests.outcomes import small_net as _net
from tests.ranks import run_ranks

# Faults make uneven work, too; its warning has tests of its own.
Model = partial(LegacyDistributedDataParallel, checks=Checks(uneven="allow"))

# Calls and their facts; faults that one rank makes are in test_header_faults.py


def _uneven_beside_skip(rank: int) -> tuple[tuple[int, ...], str]:
    model = LegacyDistributedDataParallel(_net(), checks=Checks(uneven="raise"))
    for _ in range(1 if rank >= 2 else 2):
        _backward(model, 1.0)
    error = _attempt(partial(model.all_reduce, skip=rank == 3))
    assert error is not None
    return error.ranks, str(error)


def test_a_rank_that_skips_is_not_blamed_for_uneven_work() -> None:
    for ranks, text in run_ranks(_uneven_beside_skip, 4):
        assert ranks == (2,)
        assert "rank 2 has 1; ranks 0-1 have 2" in text


def _wrong_function_first(rank: int) -> list[float]:
    first, second = nn.Linear(2, 1, bias=False), nn.Linear(3, 1, bias=False)
    for module in (first, second):
        module.weight.grad = torch.full_like(module.weight, float(rank))
    error = _attempt(lambda: all_reduce_gradients(second if rank else first))
    assert type(error).__name__ == "LayoutError"
    all_reduce_gradients(first)
    all_reduce_gradients(second)
    return [float(module.weight.grad.mean()) for module in (first, second)]


def test_a_first_call_that_went_wrong_uses_no_wrapper_number_up() -> None:
    assert run_ranks(_wrong_function_first, 2) == [[0.5, 0.5]] * 2


class _MaxNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 2, max_norm=1.0)  # renormalises its weight in forward
        self.head = nn.Linear(2, 1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(tokens))


def _evaluates_between(rank: int) -> int:
    model = Model(_MaxNorm())
    with torch.no_grad():
        model.module.embedding.weight.fill_(9.0)
    for _ in range(1 + rank):
        model(torch.tensor([0])).sum().backward()
    if rank == 0:
        with torch.no_grad():
            model(torch.tensor([1, 2]))
    return model.all_reduce().call


def test_a_layer_that_renormalises_its_weight_in_forward_is_no_skipped_call() -> None:
    assert run_ranks(_evaluates_between, 2) == [1, 1]


def _edited_in_place(rank: int) -> list[float]:
    model = Model(nn.Linear(2, 1, bias=False))
    weight, seen = model.module.weight, []
    weight.grad = torch.zeros_like(weight)
    for step in range(3):
        weight.grad.copy_(torch.full_like(weight, 2.0 * step + 2.0 * rank))
        model.all_reduce(sample_size=2)
        seen.append(float(weight.grad[0, 0]))
    return seen


def test_gradients_written_in_place_at_every_step_are_no_second_division() -> None:
    assert run_ranks(_edited_in_place, 2) == [[0.5, 1.5, 2.5]] * 2


# Layouts


def _changed(rank: int, guilty: int, change: str) -> nn.Module:
    module = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 3), nn.Linear(3, 2))
    if rank == guilty:
        if change == "shape":
            module[1] = nn.Linear(3, 3, bias=False)
            module[1].bias = nn.Parameter(torch.zeros(4))
        elif change == "missing":
            module[1] = nn.Linear(3, 3, bias=False)
        elif change == "extra":
            module.register_parameter("scale", nn.Parameter(torch.ones(1)))
        elif change == "cast":
            module[1].to(torch.float64)
        elif change == "frozen":
            module[1].bias.requires_grad_(False)
        elif change == "strides":
            module[0].weight = nn.Parameter(torch.zeros(2, 3).t())
    if change == "untied":
        module[2] = nn.Linear(3, 3)
        if rank != guilty:
            module[2].weight = module[1].weight
    return module


WORDS = {
    "shape": "parameter '1.bias': rank 1 has float32 (4,)",
    "missing": "parameter '1.bias': rank 1 has nothing",
    "extra": "parameter 'scale': ranks 0, 2 have nothing; rank 1 has float32 (1,)",
    "cast": "parameter '1.weight': rank 1 has float64",
    "frozen": "parameter '1.bias': rank 1 has float32 (3,) on cpu#0, frozen",
    "strides": "parameter '0.weight': rank 1 has float32 (3, 2) on cpu#0, trainable, strides (1, 3)",
    "untied": "shared with 2.weight",
}


def _construct(rank: int, change: str, init_sync: bool) -> tuple[str, tuple[int, ...], str]:
    error = _attempt(lambda: Model(_changed(rank, 1, change), init_sync=init_sync))
    assert error is not None
    Model(_net()).all_reduce()  # the group is still usable
    return type(error).__name__, error.ranks, str(error)


@pytest.mark.parametrize("init_sync", [True, False])
@pytest.mark.parametrize("change", WORDS)
def test_construction_names_what_one_rank_holds_differently(change: str, init_sync: bool) -> None:
    results = run_ranks(_construct, 3, change, init_sync)
    assert results == results[:1] * 3
    kind, ranks, text = results[0]
    assert (kind, ranks) == ("LayoutError", (1,))
    assert "".join(WORDS[change].split("ranks 0, 2 have nothing; ")) in text, text


class _Ordered(nn.Module):
    def __init__(self, names: list[str]) -> None:
        super().__init__()
        for name in names:
            self.register_parameter(name, nn.Parameter(torch.zeros(2)))


def _other_order(rank: int) -> list[list[float]]:
    model = Model(_Ordered(["a", "b", "c"] if rank == 0 else ["c", "b", "a"]))
    for number, name in enumerate("abc"):
        getattr(model.module, name).grad = torch.full((2,), float(number + 10 * rank))
    model.all_reduce()
    return [getattr(model.module, name).grad.tolist() for name in "abc"]


def test_the_same_names_registered_in_another_order_simply_work() -> None:
    assert run_ranks(_other_order, 2) == [[[5.0, 5.0], [6.0, 6.0], [7.0, 7.0]]] * 2


def _other_setting(rank: int, settings: dict[str, list[Any]]) -> str:
    error = _attempt(
        lambda: LegacyDistributedDataParallel(_net(), **{name: values[rank] for name, values in settings.items()})
    )
    return f"{type(error).__name__} {error}"


@pytest.mark.parametrize(
    "name, values",
    [("buffer_size", [4, 8]), ("reduce_dtype", [None, torch.bfloat16]), ("checks", ["info", Checks(uneven="raise")])],
)
def test_settings_that_must_agree_are_compared(name: str, values: list[Any]) -> None:
    first, second = run_ranks(_other_setting, 2, {name: values})
    assert first == second
    assert first.startswith("LayoutError")
    assert ("uneven" if name == "checks" else name) in first


# Lost peers


def _late_by(rank: int, timeout_seconds: float, missing: int) -> tuple[Any, ...]:
    model = Model(_net(), timeout_seconds=timeout_seconds)
    _backward(model, 1.0)
    if rank == missing:
        time.sleep(timeout_seconds + 2)  # being late is the fault
        return ()
    start = time.monotonic()
    error = _attempt(model.all_reduce)
    waited = time.monotonic() - start
    again = _attempt(model.all_reduce)
    return type(error).__name__, str(error), waited < timeout_seconds + 5, type(again).__name__, str(again)


def test_a_rank_that_does_not_call_ends_the_wait_at_the_timeout() -> None:
    (kind, text, in_time, again, refused), _ = run_ranks(_late_by, 2, 1.0, 1, lost=(1,))
    assert kind == "SyncTimeoutError"
    assert "all_reduce() call 1, phase agree: no answer within 1 s" in text
    assert in_time
    assert again == "LostPeerError"
    assert "not usable after an earlier failure" in refused


def _never_constructs(rank: int) -> tuple[str, tuple[int, ...], str]:
    if rank == 1:
        time.sleep(3)  # being absent is the fault
        return "", (), ""
    error = _attempt(lambda: Model(_net(), timeout_seconds=1))
    assert error is not None
    return type(error).__name__, error.ranks, str(error)


def test_a_rank_that_never_constructs_is_named() -> None:
    kind, ranks, text = run_ranks(_never_constructs, 3)[0]
    assert (kind, ranks) == ("SyncTimeoutError", (1,))
    assert "rank 1 did not arrive within 1 s" in text


def _do_when(function: str, act: Callable[[], None]) -> Callable[[FrameType, str, object], None]:
    """A profiler that acts when ``function`` is entered: a fault at an exact place, in code as it is."""

    def profile(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_name == function:
            act()

    return profile


def _dies_in(rank: int, function: str) -> tuple[Any, ...]:
    model = Model(nn.Linear(512, 512))
    model.module(torch.ones(1, 512)).sum().backward()
    if rank == 1:
        sys.setprofile(_do_when(function, partial(os._exit, 9)))
    error = _attempt(model.all_reduce)
    assert error is not None
    left = [parameter.grad is None for parameter in model.parameters()]
    return type(error).__name__, error.phase, left, type(_attempt(model.all_reduce)).__name__


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("function, phase", [("agree", "agree"), ("reduce_dense", "payload")])
def test_a_peer_that_dies_is_reported_in_its_phase_and_leaves_nothing_half_reduced(
    world_size: int, function: str, phase: str
) -> None:
    results = run_ranks(_dies_in, world_size, function, lost=(1,))
    for rank in {0, world_size - 1} - {1}:
        kind, where, dropped, again = results[rank]
        assert (kind, where, again) == ("PeerLostError", phase, "LostPeerError")
        assert dropped == [phase == "payload"] * 2


def _interrupted_in(rank: int, function: str) -> tuple[Any, ...]:
    model = Model(nn.Linear(512, 512))
    weight = model.module.weight
    weight.grad = torch.ones_like(weight)
    if rank == 1:
        sys.setprofile(_do_when(function, _interrupt))
    try:
        error: BaseException | None = _attempt(model.all_reduce)
    except KeyboardInterrupt as interrupt:
        error = interrupt
    sys.setprofile(None)
    return type(error).__name__, weight.grad is None, type(_attempt(model.all_reduce)).__name__


def _interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("function, dropped", [("agree_on_kinds", False), ("reduce_dense", True)])
def test_an_interrupt_after_the_header_leaves_no_gradient_half_reduced_and_no_group_out_of_step(
    function: str, dropped: bool
) -> None:
    results = run_ranks(_interrupted_in, 2, function, lost=(0,))
    assert results[1] == ("KeyboardInterrupt", dropped, "LostPeerError")


def _dead_model_is_freed(rank: int) -> bool:
    model = Model(nn.Linear(2, 2), timeout_seconds=1)
    module = weakref.ref(model.module)
    if rank == 0:
        assert _attempt(model.all_reduce) is not None
    else:
        time.sleep(2)  # being late is the fault
    del model
    gc.collect()
    return module() is None


def test_a_lost_group_does_not_keep_the_model_alive() -> None:
    assert run_ranks(_dead_model_is_freed, 2, lost=(1,))[0]


# Other people's traffic


def _async_collective(rank: int) -> tuple[list[float], list[float]]:
    model = Model(nn.Linear(2, 1, bias=False))
    model.module.weight.grad = torch.full((1, 2), float(rank))
    mine = torch.full((2,), 1000.0)
    if rank == 0:  # in flight before our call on rank 0, after it on rank 1
        work = dist.all_reduce(mine, async_op=True)
        model.all_reduce()
    else:
        model.all_reduce()
        work = dist.all_reduce(mine, async_op=True)
    assert work is not None
    work.wait()
    return model.module.weight.grad.flatten().tolist(), mine.tolist()


def test_a_collective_of_the_user_in_flight_does_not_mix_with_gradients() -> None:
    assert run_ranks(_async_collective, 2) == [([0.5, 0.5], [2000.0, 2000.0])] * 2


def _extra_groups(rank: int) -> list[float]:
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
    return model.module.weight.grad.flatten().tolist()


def test_ranks_with_different_numbers_of_groups_meet() -> None:
    assert run_ranks(_extra_groups, 3) == [[3.0]] * 3
