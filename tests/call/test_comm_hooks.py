"""Communication hooks: the bucket that a hook gets, and the use of its result."""

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from tests.helpers.cases import Part, get_gradients, set_gradients, wrap_module
from tests.helpers.comm_hooks import at_once, mean
from tests.helpers.ranks import run_ranks
from tests.helpers.shared_jobs import on_ranks, run_cases
from tests.helpers.small_models import add_gradients, gradient_values, step, wrap

GRADS = [[torch.tensor([1.0, 2.0]), torch.tensor([7.0]), None], [torch.tensor([3.0, 6.0]), None, None]]
MEANS: dict[str, tuple[tuple[Part, Part], list[Any]]] = {
    "mean": (({}, {}), [[2.0, 4.0], [3.5], None]),
    "sample_size": (({"sample_size": 3}, {"sample_size": 1}), [[1.0, 2.0], [1.75], None]),
    "one rank skips": (({"skip": True}, {}), [[3.0, 6.0], None, None]),
    "one rank has no samples": (({"sample_size": 0}, {"sample_size": 2}), [[1.5, 3.0], None, None]),
    "nobody takes part": (({"skip": True}, {"skip": True}), [None, None, None]),
}


def _resizing(state: Any, bucket: Any) -> Any:
    """A mean. It leaves its buffer in another size and with other values: no gradient and no later call has these."""
    result = bucket.buffer() * 0.5
    dist.all_reduce(result)
    bucket.buffer().resize_(1000).fill_(77.0)
    return at_once(result)


def _reduced(rank: int, parts: tuple[Part, Part]) -> list[Any]:
    model = wrap_module([torch.zeros(2), torch.zeros(1), torch.zeros(3)])
    model.register_comm_hook(None, _resizing)
    for _ in range(2):
        set_gradients(model, copy.deepcopy(GRADS[rank]))
        model.all_reduce(**parts[rank])
    return [None if grad is None else grad.tolist() for grad in get_gradients(model)]


@pytest.mark.unsimulated("its tensors cannot be copied with copy.deepcopy")
def test_the_hooks_mean_is_scaled_to_those_that_took_part() -> None:
    found = run_cases(_reduced, 2, {name: (parts,) for name, (parts, _) in MEANS.items()})

    assert found == {name: [expected] * 2 for name, (_, expected) in MEANS.items()}


_SHOWN = [
    ("state", 0, False, torch.float32, [((3, 2), (1, 3)), ((1, 2, 2, 2), (8, 1, 4, 2))]),
    ("state", 1, False, torch.float64, [((2,), (1,))]),
    ("state", 2, True, torch.float32, [((2, 2), (2, 1))]),
]
_GRADS_AFTERWARDS = [
    ((1, 3), [[1.0, 1.0]] * 3),
    ((1,), [1.0, 1.0]),
    ((1,), [1 + 4j, 1 + 4j]),
    ((1, 4, 2), [[[[1.0, 1.0]] * 2] * 2]),
]


@on_ranks(2, [(_SHOWN, _GRADS_AFTERWARDS)] * 2)
def test_a_hook_sees_every_bucket_with_shapes_strides_and_parameters(rank: int) -> tuple[list[Any], list[Any]]:
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
        return mean(None, bucket)

    model.register_comm_hook("state", look)
    grads = [torch.full_like(tensor, 2.0 * rank) for tensor in parameters]
    grads[2] = grads[2] + 4j
    set_gradients(model, grads)
    model.all_reduce()
    # Versions of torch differ in the stride of the first dimension, of size 1.
    return seen, [(grad.stride()[-3:], grad.tolist()) for grad in get_gradients(model) if grad is not None]


@pytest.mark.unsimulated("it has no sparse tensors")
@on_ranks(2, [[True, True, [[2.0], [2.0], [0.0]], [1.5, 1.5]]] * 2)
def test_sparse_gradients_do_not_go_through_the_hook(rank: int) -> list[Any]:
    model, shown = wrap_module([torch.zeros(3, 1), torch.zeros(2)]), []

    def note(state: Any, bucket: Any) -> Any:
        shown.append(bucket.buffer().tolist())
        return mean(None, bucket)

    model.register_comm_hook(None, note)
    sparse = torch.sparse_coo_tensor([[rank]], [[4.0]], (3, 1), check_invariants=True)
    set_gradients(model, [sparse, torch.full((2,), 1.0 + rank)])
    model.all_reduce()
    first, second = get_gradients(model)
    return [shown == [[0.0] * 3 + [1.0 + rank] * 2], first.is_sparse, first.to_dense().tolist(), second.tolist()]


def _on_a_sub_group(rank: int) -> float | None:
    """Each rank is a group of its own; the mean over the default one, which None stands for, would be 1.5."""
    model = wrap(process_group=[dist.new_group([0]), dist.new_group([1])][rank])
    model.register_comm_hook(model.process_group, default_hooks.allreduce_hook)
    return step(model, 1.0 + rank)


def test_a_hook_of_torch_on_a_sub_group_takes_the_group_as_its_state() -> None:
    assert run_ranks(_on_a_sub_group, 2) == [1.0, 2.0]


@on_ranks(2, [[[[2.0, 2.0]] * 2, [torch.float16]]] * 2)
def test_a_hook_may_be_registered_between_steps(rank: int) -> list[Any]:
    """Between two steps, with gradients in half precision, which travel in another dtype without a hook."""
    model, dtypes = wrap_module([torch.zeros(2, dtype=torch.float16)]), []

    def note(state: Any, bucket: Any) -> Any:
        dtypes.append(bucket.buffer().dtype)
        return mean(None, bucket)

    found = []
    for number in range(2):
        if number == 1:
            model.register_comm_hook(None, note)
        set_gradients(model, [torch.full((2,), 1.0 + 2 * rank, dtype=torch.float16)])
        model.all_reduce()
        found += [grad.tolist() for grad in get_gradients(model) if grad is not None]
    return [found, dtypes]


@pytest.mark.unsimulated("its tensors cannot be copied with copy.deepcopy")
@on_ranks(2, [[3.0, 1.0, 1.0]] * 2)
def test_a_copy_has_no_hook(rank: int) -> list[Any]:
    model = wrap()
    model.register_comm_hook(None, lambda _, bucket: at_once(bucket.buffer() * 3))  # no pickle could carry it
    found = []
    for each in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        each.zero_grad()
        add_gradients(each, 1.0)
        each.all_reduce()
        found += gradient_values(each).values()
    return found
