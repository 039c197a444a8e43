"""Do torch DDP's communication hooks do here what they do there, and is one that goes wrong an error on all ranks?"""

import copy
import os
import pickle
import signal
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    debugging_hooks,
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
    quantization_hooks,
)
from torch.nn.parallel import DistributedDataParallel

from legacy_ddp import CommHookError, LegacyDDPError, LegacyDistributedDataParallel, PeerError, PeerLostError
from tests.cases import Part, bits_of, get_gradients, set_gradients, wrap_module
from tests.ranks import run_ranks
from tests.small import add_gradients, error_of, gradient_values, step, tanh_net, wrap

Model = LegacyDistributedDataParallel
Hook = Callable[[Any, Any], Any]
Registered = Callable[[], tuple[Any, Hook]]  # made on the rank, where the groups are


def _mean(state: Any, bucket: Any) -> "torch.futures.Future[torch.Tensor]":
    return default_hooks.allreduce_hook(None, bucket)


def _at_once(tensor: Any) -> "torch.futures.Future[Any]":
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(tensor)
    return future


# --- torch's own, against torch DDP -----------------------------------------------------------------------------------


def _power_state(**options: Any) -> powerSGD_hook.PowerSGDState:
    return powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=0.5, **options
    )


def _local_state() -> post_localSGD_hook.PostLocalSGDState:
    alone, _ = dist.new_subgroups(1)
    return post_localSGD_hook.PostLocalSGDState(None, alone, start_localSGD_iter=3)


HOOKS: dict[str, Registered] = {
    "allreduce": lambda: (None, default_hooks.allreduce_hook),
    "fp16": lambda: (None, default_hooks.fp16_compress_hook),
    "no communication": lambda: (None, debugging_hooks.noop_hook),
    "PowerSGD": lambda: (_power_state(), powerSGD_hook.powerSGD_hook),
    "PowerSGD, batched": lambda: (_power_state(), powerSGD_hook.batched_powerSGD_hook),
    "PowerSGD in fp16": lambda: (
        _power_state(),
        default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook),
    ),
    "post-local-SGD": lambda: (_local_state(), post_localSGD_hook.post_localSGD_hook),
}


def _one_matrix() -> nn.Module:
    """One parameter, so that the order of gradients in a bucket, which is not torch's, changes nothing."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 5, bias=False), nn.Tanh())


def _trained(rank: int, model: nn.Module, *, steps: int = 6) -> list[list[bytes]]:
    """The weights after every step, each rank having data of its own."""
    torch.manual_seed(11 + rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    seen = []
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 6)).square().mean().backward()
        if isinstance(model, Model):
            model.all_reduce()
        optimizer.step()
        seen.append([bits_of(parameter.detach()) for parameter in model.parameters()])
    return seen


def _with_hook(rank: int, model: nn.Module, name: str) -> list[list[bytes]]:
    state, hook = HOOKS[name]()
    model.register_comm_hook(state, hook)
    return _trained(rank, model)


def _mend_batched_power() -> None:
    """The batched hook of torch 2.13 fails under torch DDP, too: it passes one matrix to what wants a batch of them."""
    orthogonalize = powerSGD_hook._orthogonalize
    powerSGD_hook._orthogonalize = lambda matrices, epsilon=0: orthogonalize(
        matrices.unsqueeze(0) if matrices.dim() == 2 else matrices, epsilon
    )


def _both(rank: int) -> dict[str, tuple[Any, Any]]:
    # Torch's own calls to what it is about to rename, and what it says of PowerSGD's first steps.
    warnings.simplefilter("ignore")
    _mend_batched_power()
    return {
        name: (
            _with_hook(rank, LegacyDistributedDataParallel(_one_matrix()), name),
            _with_hook(rank, DistributedDataParallel(_one_matrix()), name),
        )
        for name in HOOKS
    }


def test_torchs_hooks_give_the_weights_that_they_give_in_torch_ddp() -> None:
    ranks = run_ranks(_both, 2)
    for name in HOOKS:
        for ours, theirs in (rank[name] for rank in ranks):
            assert ours == theirs, name
    compressed = {name: ranks[0][name][0] for name in HOOKS}
    for name in set(HOOKS) - {"allreduce"}:  # or the test could not tell one from the other
        assert compressed[name] != compressed["allreduce"], name
    replicas = {name for name in HOOKS if ranks[0][name][0] == ranks[1][name][0]}
    assert replicas == set(HOOKS) - {"no communication", "post-local-SGD"}


def _quantised(rank: int) -> list[str]:
    warnings.simplefilter("ignore")
    said = []
    for wrapper in (LegacyDistributedDataParallel, DistributedDataParallel):
        model = wrapper(_one_matrix())
        model.register_comm_hook(dist.group.WORLD, quantization_hooks.quantization_pertensor_hook)
        said.append(error_of(_trained, rank, model, steps=1))
    return ["invalid index of a 0-dim tensor" in item[1] for item in said if item]


def test_the_quantization_hooks_of_torch_fail_as_they_do_under_torch_ddp() -> None:
    assert run_ranks(_quantised, 1) == [[True, True]]


def _bf16(rank: int) -> list[float]:
    """torch DDP refuses it on gloo by its name; it runs there all the same."""
    model = wrap()
    model.register_comm_hook(None, default_hooks.bf16_compress_hook)
    add_gradients(model, 1.0 + 2.0**-7 * rank)
    model.all_reduce()
    return list(gradient_values(model).values())


def test_the_bf16_hook_rounds_as_bf16_does() -> None:
    # Halved before the sum: 0.5 and 0.50390625 in bf16; the sum needs 9 bits of fraction, of which bf16 has 8.
    mean = (torch.tensor(0.5).bfloat16() + torch.tensor(1.0078125 / 2).bfloat16()).float().item()
    assert run_ranks(_bf16, 2) == [[mean]] * 2
    assert mean != (1.0 + 1.0078125) / 2


def _resumed(rank: int) -> tuple[Any, Any]:
    """PowerSGD for six steps, and for three, saved, loaded and three more."""
    warnings.simplefilter("ignore")
    whole = _with_hook(rank, LegacyDistributedDataParallel(_one_matrix()), "PowerSGD")
    torch.manual_seed(11 + rank)
    batches = [torch.randn(8, 6) for _ in range(6)]
    model, state = LegacyDistributedDataParallel(_one_matrix()), _power_state()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    for number, batch in enumerate(batches):
        if number == 3:
            saved = pickle.dumps((state, model.module.state_dict(), optimizer.state_dict()))
            state, weights, momenta = pickle.loads(saved)
            state.process_group = None
            model = LegacyDistributedDataParallel(_one_matrix())
            model.module.load_state_dict(weights)
            model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
            optimizer.load_state_dict(momenta)
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        model.all_reduce()
        optimizer.step()
    return whole[-1], [bits_of(parameter.detach()) for parameter in model.parameters()]


def test_a_stateful_hook_survives_a_checkpoint() -> None:
    for whole, resumed in run_ranks(_resumed, 2):
        assert whole == resumed


# --- what a hook is shown, and what becomes of what it returns --------------------------------------------------------


def _reduced(rank: int, parts: tuple[Part, ...], grads: Any, *, hook: Hook = _mean) -> Any:
    model = wrap_module([torch.zeros(2), torch.zeros(1), torch.zeros(3)])
    model.register_comm_hook(None, hook)
    set_gradients(model, copy.deepcopy(grads[rank]))
    record = model.all_reduce(**parts[rank])
    return [None if grad is None else grad.tolist() for grad in get_gradients(model)], record.divisor


@pytest.mark.parametrize(
    "parts, expected",
    [
        pytest.param(({}, {}), [[2.0, 4.0], [3.5], None], id="mean"),
        pytest.param(({"sample_size": 3}, {"sample_size": 1}), [[1.0, 2.0], [1.75], None], id="sample_size"),
        pytest.param(({"skip": True}, {}), [[3.0, 6.0], None, None], id="one rank skips"),
        pytest.param(({"sample_size": 0}, {"sample_size": 2}), [[1.5, 3.0], None, None], id="one rank has no samples"),
        pytest.param(({"skip": True}, {"skip": True}), [None, None, None], id="nobody takes part"),
    ],
)
def test_the_hooks_mean_is_scaled_to_those_that_took_part(parts: Any, expected: Any) -> None:
    grads = [[torch.tensor([1.0, 2.0]), torch.tensor([7.0]), None], [torch.tensor([3.0, 6.0]), None, None]]
    assert [found for found, _ in run_ranks(partial(_reduced, parts=parts, grads=grads), 2)] == [expected] * 2


def _shown(rank: int) -> tuple[list[Any], list[Any]]:
    """What a hook sees of parameters of three dtypes and odd strides."""
    parameters = [
        torch.ones(2, 3).t(),
        torch.ones(2, dtype=torch.float64),
        torch.ones(2, dtype=torch.complex64),
        torch.ones(1, 2, 2, 2).to(memory_format=torch.channels_last),
    ]
    model, seen = wrap_module(parameters), []

    def look(state: Any, bucket: Any) -> Any:
        grads = bucket.gradients()
        assert all(grad.data_ptr() >= bucket.buffer().data_ptr() for grad in grads)
        assert sum(grad.sum().item() for grad in grads) == pytest.approx(bucket.buffer().sum().item())
        shapes = [(tuple(grad.shape), grad.stride()) for grad in grads]
        assert [id(parameter) for parameter in bucket.parameters()] == [
            id(parameter) for parameter in model.parameters() if parameter.dtype == bucket.parameters()[0].dtype
        ]
        seen.append((state, bucket.index(), bucket.is_last(), bucket.buffer().dtype, shapes))
        return _mean(None, bucket)

    model.register_comm_hook("state", look)
    grads = [torch.full_like(tensor, 2.0 * rank) for tensor in parameters]
    grads[2] = grads[2] + 4j
    set_gradients(model, grads)
    model.all_reduce()
    return seen, [(grad.stride(), grad.tolist()) for grad in get_gradients(model) if grad is not None]


def test_a_hook_sees_every_bucket_with_shapes_strides_and_parameters() -> None:
    for seen, grads in run_ranks(_shown, 2):
        assert seen == [
            ("state", 0, False, torch.float32, [((3, 2), (1, 3)), ((1, 2, 2, 2), (8, 1, 4, 2))]),
            ("state", 1, False, torch.float64, [((2,), (1,))]),
            ("state", 2, True, torch.float32, [((2, 2), (2, 1))]),
        ]
        assert grads == [
            ((1, 3), [[1.0, 1.0]] * 3),
            ((1,), [1.0, 1.0]),
            ((1,), [1 + 4j, 1 + 4j]),
            ((8, 1, 4, 2), [[[[1.0, 1.0]] * 2] * 2]),
        ]


def _resizing(state: Any, bucket: Any) -> Any:
    buffer = bucket.buffer()
    shape, mean = buffer.shape, buffer * 0.5
    buffer.resize_(1000).fill_(77.0)  # a hook may do as it likes with what it is given
    dist.all_reduce(mean)
    return _at_once(mean.view(shape))


def test_what_a_hook_does_to_its_buffer_reaches_no_gradient() -> None:
    grads = [[torch.tensor([1.0, 2.0]), torch.tensor([7.0]), torch.ones(3)]] * 2
    found = run_ranks(partial(_twice, grads=grads), 2)
    assert found == [[[[1.0, 2.0], [7.0], [1.0] * 3]] * 2] * 2


def _twice(rank: int, grads: Any) -> Any:
    model, found = wrap_module([torch.zeros(2), torch.zeros(1), torch.zeros(3)]), []
    model.register_comm_hook(None, _resizing)
    for _ in range(2):
        set_gradients(model, copy.deepcopy(grads[rank]))
        model.all_reduce()
        found.append([grad.tolist() for grad in get_gradients(model) if grad is not None])
    return found


def _sparse_and_dense(rank: int) -> list[Any]:
    model, shown = wrap_module([torch.zeros(3, 1), torch.zeros(2)]), []

    def note(state: Any, bucket: Any) -> Any:
        shown.append(bucket.buffer().tolist())
        return _mean(None, bucket)

    model.register_comm_hook(None, note)
    sparse = torch.sparse_coo_tensor([[rank]], [[4.0]], (3, 1), check_invariants=True)
    set_gradients(model, [sparse, torch.full((2,), 1.0 + rank)])
    model.all_reduce()
    first, second = get_gradients(model)
    assert first is not None
    assert second is not None
    return [shown == [[0.0] * 3 + [1.0 + rank] * 2], first.is_sparse, first.to_dense().tolist(), second.tolist()]


def test_sparse_gradients_do_not_go_through_the_hook() -> None:
    assert run_ranks(_sparse_and_dense, 2) == [[True, True, [[2.0], [2.0], [0.0]], [1.5, 1.5]]] * 2


def _tripling(state: Any, bucket: Any) -> Any:
    return _at_once(bucket.buffer() * 3)


def _alone(rank: int) -> list[float | None]:
    model = wrap()
    model.register_comm_hook(None, _tripling)
    add_gradients(model, 2.0)
    model.all_reduce()
    return list(gradient_values(model).values())


def test_a_single_rank_has_its_hook_run_too() -> None:
    assert run_ranks(_alone, 1) == [[6.0]]


def _registered_late(rank: int) -> list[Any]:
    """Between two steps, with gradients in half precision, which travel in another dtype without a hook."""
    model, dtypes = wrap_module([torch.zeros(2, dtype=torch.float16)]), []

    def note(state: Any, bucket: Any) -> Any:
        dtypes.append(bucket.buffer().dtype)
        return _mean(None, bucket)

    found = []
    for number in range(2):
        if number == 1:
            model.register_comm_hook(None, note)
        set_gradients(model, [torch.full((2,), 1.0 + 2 * rank, dtype=torch.float16)])
        model.all_reduce()
        found += [grad.tolist() for grad in get_gradients(model) if grad is not None]
    return [found, dtypes]


def test_a_hook_may_be_registered_between_steps() -> None:
    assert run_ranks(_registered_late, 2) == [[[[2.0, 2.0]] * 2, [torch.float16]]] * 2


def _copied(rank: int) -> list[Any]:
    model = wrap()
    model.register_comm_hook(None, lambda _, bucket: _tripling(None, bucket))  # no pickle could carry it
    found = []
    for each in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        each.zero_grad()
        add_gradients(each, 1.0)
        each.all_reduce()
        found += gradient_values(each).values()
    return found


def test_a_copy_has_no_hook() -> None:
    assert run_ranks(_copied, 2) == [[3.0, 1.0, 1.0]] * 2


# --- hooks that go wrong ----------------------------------------------------------------------------------------------


def _wrong_shape(bucket: Any) -> Any:
    return _at_once(bucket.buffer()[:-1])


def _sparse_result(bucket: Any) -> Any:
    return _at_once(bucket.buffer().to_sparse())


def _wrong_dtype(bucket: Any) -> Any:
    return _at_once(bucket.buffer().double())


def _no_future(bucket: Any) -> Any:
    return bucket.buffer()


def _no_tensor(bucket: Any) -> Any:
    return _at_once("done")


@pytest.mark.parametrize(
    "wrong, words",
    [
        (_wrong_shape, "got float32 (1,) on cpu, expected float32 (2,) on cpu"),
        (_wrong_dtype, "got float64 (2,) on cpu, expected float32 (2,) on cpu"),
        (_sparse_result, "got torch.sparse_coo float32 (2,) on cpu, expected float32 (2,) on cpu"),
        (_no_future, None),
        (_no_tensor, "got str, expected a torch.futures.Future of a tensor"),
    ],
)
def test_a_result_of_no_use_is_the_same_error_on_all_ranks(wrong: Any, words: str | None) -> None:
    # On rank 1 alone the others' collective would lack a partner, so both call none in the first round.
    seen = run_ranks(partial(_wrong_on_one, wrong=wrong), 2)
    assert seen[0] == seen[1]
    if words is None:
        assert seen[0] == ("", (), [1.5])  # a tensor at once is as good as a Future of it
        return
    text, ranks, after = seen[0]
    assert f"rank 1: {words}" in text
    assert "_wrong_on_one" in text, "the hook's name"
    assert ranks == (1,)
    assert after == [1.5]


def _wrong_on_one(rank: int, wrong: Callable[[Any], Any]) -> Any:
    model, calls = wrap(), []

    def hook(state: Any, bucket: Any) -> Any:
        calls.append(1)
        if len(calls) > 1:
            return _mean(None, bucket)
        return wrong(bucket) if rank == 1 else _at_once(bucket.buffer())

    model.register_comm_hook(None, hook)
    add_gradients(model, 1.0 + rank)
    text, ranks = "", ()
    try:
        model.all_reduce()
    except CommHookError as error:
        text, ranks = str(error), error.ranks
        assert list(gradient_values(model).values()) == [1.0 + rank]
    model.all_reduce()
    return text, ranks, list(gradient_values(model).values())


def _raising(rank: int, guilty: tuple[int, ...], error: Exception) -> Any:
    model = wrap(timeout_seconds=20.0)

    def hook(state: Any, bucket: Any) -> Any:
        if rank in guilty:
            raise error
        return _mean(None, bucket)

    model.register_comm_hook(None, hook)
    add_gradients(model, 1.0)
    start = time.monotonic()
    try:
        model.all_reduce()
    except (RuntimeError, KeyError) as error:
        waited = time.monotonic() - start
        text = f"{error} {getattr(error, '__notes__', '')}"
        again = error_of(model.all_reduce)
        return type(error).__name__, text, waited < 20, gradient_values(model), again and again[0]
    return None


def test_a_hook_that_raises_on_one_rank_is_told_to_the_others_at_once() -> None:
    own = KeyError("the hook's own")
    left, raised = run_ranks(partial(_raising, guilty=(1,), error=own), 2, survivors_exit=False)
    assert raised[0] == "KeyError"
    assert "raised by the communication hook" in raised[1]
    assert "in all_reduce() call 1" in raised[1]
    assert left[0] == "PeerLostError"
    assert "rank 1 left all_reduce() call 1 with KeyError" in " ".join(left[1].split())
    for seen in (left, raised):
        assert seen[2:] == (True, {"weight": None}, "LostPeerError")


def test_a_hook_that_raises_on_all_ranks_is_its_own_error_there() -> None:
    for seen in run_ranks(partial(_raising, guilty=(0, 1), error=KeyError("the hook's own")), 2):
        assert seen[0] in {"KeyError", "PeerLostError"}
        assert "the hook's own" in seen[1]


@pytest.mark.parametrize(
    "error, kind, words",
    [
        # Of a wrapper on another group, say: the ranks of this one have agreed on nothing.
        (PeerError("another call's"), "LegacyDDPError", "failed with PeerError: another call's"),
        (PeerLostError("another group's"), "LegacyDDPError", "failed with PeerLostError: another group's"),
        (RuntimeError("my hook wants the gloo group"), "RuntimeError", "my hook wants the gloo group"),
    ],
)
def test_an_error_that_looks_like_one_of_ours_is_still_the_hooks_own(error: Any, kind: str, words: str) -> None:
    left, raised = run_ranks(partial(_raising, guilty=(1,), error=error), 2, survivors_exit=False)
    assert raised[0] == kind
    assert words in raised[1]
    assert left[0] == "PeerLostError"
    assert f"rank 1 left all_reduce() call 1 with {kind}" in " ".join(left[1].split())
    for seen in (left, raised):
        assert seen[2:] == (True, {"weight": None}, "LostPeerError")


def _untouched(rank: int) -> list[Any]:
    """Rank 1 takes no part, its gradients being what the last call left; rank 0's hook returns nonsense."""
    model, calls = wrap_module([torch.zeros(2), torch.zeros(3)]), []

    def hook(state: Any, bucket: Any) -> Any:
        calls.append(1)
        return _at_once(None) if len(calls) == 2 and rank == 0 else _at_once(bucket.buffer())

    model.register_comm_hook(None, hook)
    set_gradients(model, [torch.ones(2), torch.ones(3)])
    model.all_reduce()
    if rank == 1:
        for parameter in model.parameters():
            parameter.grad.fill_(3.0)
    said = error_of(model.all_reduce, skip=rank == 1)
    return [said and said[0], *(grad.tolist() for grad in get_gradients(model) if grad is not None)]


def test_no_gradient_of_a_rank_that_skips_changes_when_a_hook_goes_wrong() -> None:
    first, second = run_ranks(_untouched, 2)
    assert first == ["CommHookError", [1.0] * 2, [1.0] * 3]
    assert second == ["CommHookError", [3.0] * 2, [3.0] * 3]


def _unusual_buffers(rank: int) -> list[Any]:
    """Freed, and set to nothing."""
    model, calls = wrap(), []

    def hook(state: Any, bucket: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            bucket.set_buffer(None)
        mean = bucket.buffer().clone()
        bucket.buffer().untyped_storage().resize_(0)
        return _at_once(mean)

    model.register_comm_hook(None, hook)
    found = [step(model, 1.0), step(model, 2.0)]
    return [*found, error_of(step, model, 3.0)]


def test_a_hook_may_free_its_buffer_and_may_not_set_it_to_nothing() -> None:
    ((first, second, said),) = run_ranks(_unusual_buffers, 1)
    assert (first, second) == (1.0, 2.0)
    assert said == ("TypeError", "set_buffer() got NoneType, expected a tensor in the buffer's place")


def _together(rank: int) -> int:
    """The first bucket's mean is there when the second bucket's hook has begun."""
    model, first = wrap_module([torch.ones(2), torch.ones(3, dtype=torch.float64)], timeout_seconds=5.0), []

    def hook(state: Any, bucket: Any) -> Any:
        future: torch.futures.Future[Any] = torch.futures.Future()
        first.append((future, bucket))
        if bucket.is_last():
            for waiting, shown in first:
                waiting.set_result(shown.buffer())
        return future

    model.register_comm_hook(None, hook)
    set_gradients(model, [torch.ones(2), torch.ones(3, dtype=torch.float64)])
    return model.all_reduce().payload_bytes


def test_all_buckets_are_begun_before_the_first_is_awaited_and_their_bytes_are_counted() -> None:
    assert run_ranks(_together, 2) == [2 * 4 + 3 * 8] * 2


def _killed_in_the_hook(rank: int) -> Any:
    model = wrap(timeout_seconds=20.0)

    def hook(state: Any, bucket: Any) -> Any:
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return _mean(None, bucket)

    model.register_comm_hook(None, hook)
    add_gradients(model, 1.0)
    try:
        model.all_reduce()
    except LegacyDDPError as error:
        return type(error).__name__, error.ranks, error.phase, gradient_values(model)
    return None


def test_a_rank_that_dies_in_a_hooks_collective_is_named() -> None:
    seen = run_ranks(_killed_in_the_hook, 3, lost=(2,), survivors_exit=False)
    assert seen == [("PeerLostError", (2,), "payload", {"weight": None})] * 2 + [None]


def _silent_hook(rank: int) -> Any:
    model = wrap(timeout_seconds=1.0)

    def hook(state: Any, bucket: Any) -> Any:
        return torch.futures.Future() if rank == 0 else _at_once(bucket.buffer())

    model.register_comm_hook(None, hook)
    add_gradients(model, 1.0)
    said = error_of(model.all_reduce)
    assert said is not None
    return said[0]


def test_a_future_that_never_comes_ends_with_the_timeout() -> None:
    assert set(run_ranks(_silent_hook, 2)) <= {"SyncTimeoutError", "PeerLostError"}


def _on_one_rank(rank: int) -> Any:
    model = wrap()
    if rank == 1:
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    add_gradients(model, 1.0 + rank)
    said = error_of(model.all_reduce)
    return said, gradient_values(model)


def test_a_hook_on_one_rank_alone_is_a_layout_error_on_all() -> None:
    seen = run_ranks(_on_one_rank, 2)
    for rank, ((kind, text), values) in enumerate(seen):
        assert kind == "LayoutError"
        assert "comm_hook" in text
        assert "fp16_compress_hook" in text
        assert values == {"weight": 1.0 + rank}


def _refused(rank: int) -> list[Any]:
    model = wrap()
    said = [error_of(model.register_comm_hook, None, "allreduce")]
    model.register_comm_hook(None, _mean)
    said.append(error_of(model.register_comm_hook, None, _mean))
    for argument in ({"reduce_dtype": torch.bfloat16}, {"reproducible": True}):
        other = wrap(**argument)
        said.append(error_of(other.register_comm_hook, None, _mean))
        other.zero_grad()
        add_gradients(other, 1.0)
        other.all_reduce(sample_size=1)  # what was refused left no trace
    return said


def test_what_cannot_be_a_hook_is_refused_with_the_reason() -> None:
    (said,) = run_ranks(_refused, 1)
    assert [kind for kind, _ in said] == ["TypeError", "ValueError", "ValueError", "ValueError"]
    for (_, text), words in zip(
        said,
        ["got 'allreduce', expected hook(state, bucket)", "there already", "reduce_dtype", "reproducible"],
        strict=True,
    ):
        assert words in text


def _beside_torch_ddp(rank: int) -> bool:
    """Several parameters: the plain hook and no hook are one."""
    found = []
    for has_hook in (True, False):
        model = LegacyDistributedDataParallel(tanh_net())
        if has_hook:
            model.register_comm_hook(None, default_hooks.allreduce_hook)
        torch.manual_seed(rank)
        model(torch.randn(8, 4)).sum().backward()
        model.all_reduce()
        found.append([bits_of(grad) for grad in get_gradients(model)])
    return found[0] == found[1]


def test_the_plain_hook_changes_no_bit_at_two_ranks() -> None:
    assert run_ranks(_beside_torch_ddp, 2) == [True] * 2
