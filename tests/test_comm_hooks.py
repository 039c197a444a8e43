"""Do torch DDP's communication hooks do here what they do there, and what do hooks get to see?"""

import copy
import pickle
import warnings
from collections import OrderedDict
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

from legacy_ddp import LegacyDistributedDataParallel
from tests.cases import Part, bits_of, get_gradients, set_gradients, wrap_module
from tests.hooks import at_once, hold_group, mean
from tests.ranks import run_ranks
from tests.small import add_gradients, error_of, gradient_values, step, tanh_net, wrap

Model = LegacyDistributedDataParallel
Hook = Callable[[Any, Any], Any]
Registered = Callable[[], tuple[Any, Hook]]  # made on the rank, where the groups are


# --- torch's own, against torch DDP -----------------------------------------------------------------------------------


def _power_state(**options: Any) -> powerSGD_hook.PowerSGDState:
    hold_group()
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


def _several_matrices(rank: int, first: str, last: str) -> list[tuple[Any, float]]:
    """Hooks get gradients in the order of names here, and in that of backward there. The bits, and a loss."""
    warnings.simplefilter("ignore")
    found = []
    for wrapper in (LegacyDistributedDataParallel, DistributedDataParallel):
        torch.manual_seed(3)
        layers = {first: nn.Linear(6, 5, bias=False), "m": nn.Tanh(), last: nn.Linear(5, 4, bias=False)}
        net = nn.Sequential(OrderedDict(layers))
        bits = _with_hook(rank, wrapper(net), "PowerSGD")
        found.append((bits, net(torch.randn(64, 6)).square().mean().item()))  # 0.07 before the first step
    return found


def test_power_sgd_of_several_matrices_is_that_of_torch_ddp_where_names_follow_backward() -> None:
    for ours, theirs in run_ranks(_several_matrices, 2, "z", "a"):
        assert ours == theirs


def test_power_sgd_trains_as_well_as_under_torch_ddp_where_names_do_not_follow_backward() -> None:
    for (ours, loss), (theirs, their_loss) in run_ranks(_several_matrices, 2, "a", "z"):
        assert ours != theirs
        assert loss < 0.03
        assert loss == pytest.approx(their_loss, rel=0.1)


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


BROKEN: dict[str, Registered] = {
    "quantization per tensor": lambda: (dist.group.WORLD, quantization_hooks.quantization_pertensor_hook),
    "quantization per channel": lambda: (dist.group.WORLD, quantization_hooks.quantization_perchannel_hook),
    "PowerSGD, batched": HOOKS["PowerSGD, batched"],
}


def _failing(rank: int) -> dict[str, list[Any]]:
    """What each raises here and under torch DDP, on groups of their own: a hook that raises loses its group."""
    warnings.simplefilter("ignore")
    said: dict[str, list[Any]] = {name: [] for name in BROKEN}
    for name, registered in BROKEN.items():
        for wrapper in (LegacyDistributedDataParallel, DistributedDataParallel):
            model = wrapper(_one_matrix(), process_group=dist.new_group([0]))
            model.register_comm_hook(*registered())
            error = error_of(_trained, rank, model)
            said[name].append(error and (error[0], error[1].partition("\n\nAt:")[0]))  # without the stack
    return said


def test_hooks_of_torch_that_fail_under_torch_ddp_fail_with_the_same_error_here() -> None:
    (said,) = run_ranks(_failing, 1)
    for name, (ours, theirs) in said.items():
        assert ours is not None, name
        assert ours == theirs, name


def _bf16(rank: int) -> list[float]:
    """torch DDP refuses it on gloo by its name; it runs there all the same."""
    with pytest.raises(TypeError, match="BF16"):
        DistributedDataParallel(nn.Linear(1, 1)).register_comm_hook(None, default_hooks.bf16_compress_hook)
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


def _reduced(rank: int, parts: tuple[Part, ...], grads: Any, *, hook: Hook = mean) -> Any:
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
        return mean(None, bucket)

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
    return at_once(mean.view(shape))


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
        return mean(None, bucket)

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
    return at_once(bucket.buffer() * 3)


def _alone(rank: int) -> list[float | None]:
    model = wrap()
    model.register_comm_hook(None, _tripling)
    add_gradients(model, 2.0)
    model.all_reduce()
    return list(gradient_values(model).values())


def test_a_single_rank_has_its_hook_run_too() -> None:
    assert run_ranks(_alone, 1) == [[6.0]]


def _on_a_sub_group(rank: int) -> float | None:
    """Each rank is a group of its own; the mean over the default one, which None stands for, would be 1.5."""
    model = wrap(process_group=[dist.new_group([0]), dist.new_group([1])][rank])
    model.register_comm_hook(model.process_group, default_hooks.allreduce_hook)
    return step(model, 1.0 + rank)


def test_a_hook_of_torch_on_a_sub_group_takes_the_group_as_its_state() -> None:
    assert run_ranks(_on_a_sub_group, 2) == [1.0, 2.0]


def _registered_late(rank: int) -> list[Any]:
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


def _beside_torch_ddp(rank: int) -> bool:
    """Several parameters, and two micro-batches to the call: the plain hook and no hook are one."""
    found = []
    for has_hook in (True, False):
        model = LegacyDistributedDataParallel(tanh_net())
        if has_hook:
            model.register_comm_hook(None, default_hooks.allreduce_hook)
        torch.manual_seed(rank)
        with model.no_sync():
            model(torch.randn(8, 4)).sum().backward()
            assert not model.all_reduce().synchronized
        model(torch.randn(8, 4)).sum().backward()
        model.all_reduce()
        found.append([bits_of(grad) for grad in get_gradients(model)])
    return found[0] == found[1]


def test_the_plain_hook_changes_no_bit_at_two_ranks() -> None:
    assert run_ranks(_beside_torch_ddp, 2) == [True] * 2
