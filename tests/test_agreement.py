"""What happens when ranks disagree? The same clear error on every rank, gradients untouched, training goes on."""

import gc
import os
import sys
import time
import weakref
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

from legacy_ddp import Checks, LegacyDDPError, LegacyDistributedDataParallel, all_reduce_gradients
from tests.ranks import run_ranks

# Faults make uneven work, too; its warning has tests of its own.
Model = partial(LegacyDistributedDataParallel, checks=Checks(uneven="allow"))


class Outcome(NamedTuple):
    """What a rank saw of a faulty call, and whether the next call was right."""

    error: str
    ranks: tuple[int, ...]
    text: str
    untouched: bool
    recovered: bool


def _net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))


def _backward(model: nn.Module, value: float) -> None:
    model(torch.full((1, 2), value)).sum().backward()


def _attempt(action: Callable[[], object]) -> LegacyDDPError | None:
    try:
        action()
    except LegacyDDPError as error:
        return error
    return None


def _bits(model: LegacyDistributedDataParallel) -> list[torch.Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def _same(before: list[torch.Tensor | None], after: list[torch.Tensor | None]) -> bool:
    return all(a is b if a is None or b is None else torch.equal(a, b) for a, b in zip(before, after, strict=True))


def _next_call_is_right(model: LegacyDistributedDataParallel, rank: int) -> bool:
    """Every parameter gets the mean of the ranks' numbers, which is exact for so small ones."""
    model.zero_grad()
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, float(rank))
    model.all_reduce()
    mean = torch.tensor(sum(range(model.process_group.size()))) / model.process_group.size()
    return all(torch.equal(p.grad, mean.expand_as(p)) for p in model.parameters() if p.grad is not None)


def _outcome(model: LegacyDistributedDataParallel, rank: int, action: Callable[[], object]) -> Outcome:
    before = _bits(model)
    error = _attempt(action)
    untouched = _same(before, _bits(model))
    assert error is not None, f"rank {rank}: no error"
    return Outcome(type(error).__name__, error.ranks, str(error), untouched, _next_call_is_right(model, rank))


def _agreed(outcomes: list[Outcome], error: str, ranks: tuple[int, ...], *words: str) -> None:
    """All ranks tell the same story, it is the right one, and nothing was harmed."""
    first = outcomes[0]
    assert all(outcome == first for outcome in outcomes), outcomes
    assert (first.error, first.ranks) == (error, ranks), first
    assert all(word in first.text for word in words), first.text
    assert first.untouched
    assert first.recovered


# Calls


def _extra_call(rank: int, sample_size: int | None, clear: bool) -> Outcome:
    model = Model(_net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _backward(model, 1.0 + rank)
    model.all_reduce(sample_size)
    optimizer.step()
    if rank != 1:
        optimizer.zero_grad(set_to_none=clear)
        _backward(model, 2.0)
    return _outcome(model, rank, partial(model.all_reduce, sample_size))


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("clear", [True, False])
def test_an_extra_call_on_one_rank_is_named_on_all(world_size: int, clear: bool) -> None:
    outcomes = run_ranks(_extra_call, world_size, None, clear)
    _agreed(outcomes, "DesyncError", (1,), "all_reduce() call 2", "rank 1", "an extra call")


def test_an_extra_call_with_sample_size_would_divide_twice_and_is_named_on_all() -> None:
    _agreed(run_ranks(_extra_call, 3, 4, True), "PeerError", (1,), "rank 1: GradientError", "a second time")


def _skipped_call(rank: int) -> Outcome:
    model = Model(_net(), checks=Checks(uneven="allow", unsynchronized_step="allow"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        _backward(model, 1.0 + rank)
        if rank == 1 and step == 0:
            optimizer.step()
            optimizer.zero_grad()
            continue
        return _outcome(model, rank, model.all_reduce)
    raise AssertionError


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_skipped_call_on_one_rank_is_named_on_all(world_size: int) -> None:
    outcomes = run_ranks(_skipped_call, world_size)
    _agreed(outcomes, "DesyncError", (1,), "rank 1", "a skipped call", "micro-batches")


def _local_steps(rank: int) -> int:
    model = Model(_net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(6):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        _backward(model, 1.0 + rank)
        if step % 3 == 2:
            model.all_reduce()
        with model.no_sync():
            optimizer.step()
    return model.all_reduce().call


def test_local_steps_between_calls_on_every_rank_are_no_skipped_call() -> None:
    # The last call repeats the one before on every rank: allowed, too.
    assert run_ranks(_local_steps, 2) == [3, 3]


def _no_batch(rank: int, clear: bool) -> tuple[list[float], int]:
    model = Model(_net())
    for step in range(2):
        model.zero_grad(set_to_none=clear)
        if rank == 0 or step == 0:
            _backward(model, 1.0)
        record = model.all_reduce()
    return model.module[1].bias.grad.tolist(), record.call


@pytest.mark.parametrize("clear", [True, False])
def test_a_rank_without_a_batch_is_no_rank_that_calls_twice(clear: bool) -> None:
    assert run_ranks(_no_batch, 2, clear) == [([0.5, 0.5], 2)] * 2


def _other_operation(rank: int) -> Outcome:
    model = Model(_net())
    _backward(model, 1.0)
    return _outcome(model, rank, model.broadcast_buffers if rank == 1 else model.all_reduce)


@pytest.mark.parametrize("world_size, blamed", [(2, ()), (3, (1,))])
def test_another_operation_on_one_rank_is_named_on_all(world_size: int, blamed: tuple[int, ...]) -> None:
    outcomes = run_ranks(_other_operation, world_size)
    _agreed(outcomes, "DesyncError", blamed, "rank 1 has broadcast_buffers() call 2", "all_reduce() call 1")


def _other_wrapper(rank: int) -> list[Outcome]:
    models = [Model(_net()), Model(_net())]
    for model in models:
        _backward(model, 1.0)
    first = models[rank % 2]
    error = _attempt(first.all_reduce)
    assert error is not None
    return [
        Outcome(type(error).__name__, error.ranks, str(error), True, _next_call_is_right(model, rank))
        for model in models
    ]


def test_another_wrapper_on_one_rank_is_named_on_all_and_both_go_on() -> None:
    outcomes = run_ranks(_other_wrapper, 3)
    for model in range(2):
        _agreed([outcome[model] for outcome in outcomes], "DesyncError", (1,), "rank 1 has number 2 on this group")


def _mixed_sample_size(rank: int) -> Outcome:
    model = Model(_net())
    _backward(model, 1.0)
    return _outcome(model, rank, partial(model.all_reduce, 5 if rank == 2 else None))


def test_none_against_int_sample_size_is_named_on_all() -> None:
    _agreed(
        run_ranks(_mixed_sample_size, 3), "DesyncError", (2,), "rank 2 has an int sample_size", "every rank or on none"
    )


def _skip_among(rank: int, sample_size: int | None) -> tuple[list[float], tuple[int, ...]]:
    model = Model(nn.Linear(1, 1, bias=False))
    model.module.weight.grad = torch.full((1, 1), 4.0 * rank)
    record = model.all_reduce(skip=True) if rank == 1 else model.all_reduce(sample_size)
    return model.module.weight.grad.flatten().tolist(), record.skipped_ranks


@pytest.mark.parametrize("sample_size, expected", [(None, 4.0), (2, 2.0)])
def test_skip_goes_with_either_meaning(sample_size: int | None, expected: float) -> None:
    assert run_ranks(_skip_among, 3, sample_size) == [([expected], (1,))] * 3


# Failures of one rank


def _create_graph(rank: int, guilty: tuple[int, ...]) -> Outcome:
    model = Model(_net())
    _backward(model, 1.0)
    if rank in guilty:
        model.module[1].bias.grad.requires_grad_()
    return _outcome(model, rank, model.all_reduce)


def test_a_local_validation_error_on_one_rank_is_the_same_error_on_all() -> None:
    outcomes = run_ranks(_create_graph, 3, (2,))
    _agreed(outcomes, "PeerError", (2,), "rank 2: GradientError: grad of '1.bias' requires grad", "detach it")


def test_the_same_mistake_on_every_rank_is_the_rank_s_own_error() -> None:
    outcomes = run_ranks(_create_graph, 2, (0, 1))
    _agreed(outcomes, "GradientError", (), "grad of '1.bias' requires grad")


def _wrong_argument(rank: int, guilty: tuple[int, ...]) -> tuple[str, str, bool]:
    model = Model(_net())
    _backward(model, 1.0)
    before = _bits(model)
    try:
        model.all_reduce(-1 if rank in guilty else 1)
    except (ValueError, LegacyDDPError) as error:
        return type(error).__name__, str(error), _same(before, _bits(model)) and _next_call_is_right(model, rank)
    return "", "", False


def test_a_wrong_argument_reaches_the_ranks_that_did_not_make_it() -> None:
    for kind, text, fine in run_ranks(_wrong_argument, 2, (1,)):
        assert kind == "PeerError"
        assert "rank 1: ValueError: sample_size is out of range: got -1" in text
        assert fine
    assert [(kind, fine) for kind, _, fine in run_ranks(_wrong_argument, 2, (0, 1))] == [("ValueError", True)] * 2


def _fails_while_the_other_broadcasts(rank: int) -> Outcome:
    model = Model(_net())
    _backward(model, 1.0)
    return _outcome(model, rank, model.broadcast_buffers if rank == 0 else partial(model.all_reduce, -1))


def test_a_failure_that_meets_another_call_has_one_text_on_all_ranks() -> None:
    _agreed(run_ranks(_fails_while_the_other_broadcasts, 2), "PeerError", (1,), "rank 1: ValueError: sample_size")


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


def _changed_later(rank: int, change: str) -> Outcome:
    model = Model(_net())
    _backward(model, 1.0)
    bias = model.module[1].bias
    if rank == 1:
        if change == "frozen":
            bias.requires_grad_(False)
        elif change == "cast":
            model.double()
        elif change == "added":
            model.module.append(nn.Linear(2, 2))
    before = _bits(model)
    error = _attempt(model.all_reduce)
    assert error is not None
    untouched = _same(before, _bits(model))
    if rank == 1:  # the user undoes it, and training goes on
        bias.requires_grad_(True)
        model.float()
        del model.module[2:]
    return Outcome(type(error).__name__, error.ranks, str(error), untouched, _next_call_is_right(model, rank))


@pytest.mark.parametrize("change, word", [("frozen", "frozen"), ("cast", "float64"), ("added", "parameter '2.bias'")])
def test_a_change_of_the_model_on_one_rank_is_named_on_all_and_can_be_undone(change: str, word: str) -> None:
    _agreed(run_ranks(_changed_later, 3, change), "LayoutError", (1,), word)


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


def _error_in_no_sync(rank: int) -> list[float]:
    model = Model(nn.Linear(2, 1, bias=False))
    try:
        with model.no_sync():
            _backward(model, 1.0)
            if rank == 1:
                raise KeyError("from user code")
    except KeyError:
        pass
    model.all_reduce()
    return model.module.weight.grad.flatten().tolist()


def test_an_exception_inside_no_sync_does_not_leave_synchronisation_off() -> None:
    assert run_ranks(_error_in_no_sync, 2) == [[1.0, 1.0]] * 2
