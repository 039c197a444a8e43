"""torch's communication hooks: the same results as under torch DDP."""

import pickle
import warnings
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
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

from legacy_ddp import Checks, LegacyDistributedDataParallel
from tests.helpers.cases import bits_of
from tests.helpers.ranks import run_ranks
from tests.helpers.shared_jobs import on_ranks
from tests.helpers.small_models import add_gradients, gradient_values, wrap

Model = LegacyDistributedDataParallel
Hook = Callable[[Any, Any], Any]
Registered = Callable[[], tuple[Any, Hook]]  # made on the rank, where the groups are


_held: list[dist.ProcessGroup | None] = []


def _power_state() -> powerSGD_hook.PowerSGDState:
    """Keep the default group until this process ends: the callbacks of PowerSGD hold it, too, and are dropped on one of
    its threads, which would have to wait for itself if nothing else held the group, and abort."""
    _held.append(dist.group.WORLD)
    return powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=0.5
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
    "PowerSGD in fp16": lambda: (_power_state(), default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook)),
    "post-local-SGD": lambda: (_local_state(), post_localSGD_hook.post_localSGD_hook),
}


_MAY_DIVERGE = Checks(divergence="ignore")  # as two of the hooks make replicas do


def _one_matrix() -> nn.Module:
    """One parameter, so that the order of gradients in a bucket, which is not torch's, changes nothing."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 5, bias=False), nn.Tanh())


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)


def _trained(rank: int, model: nn.Module, micro_batches: int = 1) -> list[list[bytes]]:
    """The weights after every step, each rank having data of its own."""
    torch.manual_seed(11 + rank)
    return _steps(model, _sgd(model), 6, micro_batches)


def _steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int, micro_batches: int = 1) -> list[list[bytes]]:
    seen = []
    for _ in range(count):
        optimizer.zero_grad()
        for _ in range(micro_batches - 1):
            with model.no_sync():
                model(torch.randn(8, 6)).square().mean().backward()
        model(torch.randn(8, 6)).square().mean().backward()
        if isinstance(model, Model):
            model.all_reduce()
        optimizer.step()
        seen.append([bits_of(parameter.detach()) for parameter in model.parameters()])
    return seen


def _with_hook(rank: int, model: nn.Module, name: str, micro_batches: int = 1) -> list[list[bytes]]:
    state, hook = HOOKS[name]()
    model.register_comm_hook(state, hook)
    return _trained(rank, model, micro_batches)


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


@pytest.mark.cpu("its numbers are those of the CPU")
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


@on_ranks(2)
def _both(rank: int) -> dict[str, tuple[Any, Any]]:
    """With two micro-batches to a call."""
    # Torch's own calls to what it is about to rename, and what it says of PowerSGD's first steps.
    warnings.simplefilter("ignore")
    _mend_batched_power()
    return {
        name: (
            _with_hook(rank, LegacyDistributedDataParallel(_one_matrix(), checks=_MAY_DIVERGE), name, 2),
            _with_hook(rank, DistributedDataParallel(_one_matrix()), name, 2),
        )
        for name in HOOKS
    }


@pytest.mark.cpu("its numbers are those of the CPU")
def test_torchs_hooks_give_the_weights_that_they_give_in_torch_ddp() -> None:
    ranks = _both()
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


def _outcome(rank: int, model: nn.Module) -> tuple[str, str] | list[list[bytes]]:
    """The error without its stack, or the weights."""
    try:
        return _trained(rank, model)
    except Exception as error:  # noqa: BLE001 - the test looks at its type
        return type(error).__name__, str(error).partition("\n\nAt:")[0]


def _failing(rank: int) -> dict[str, list[Any]]:
    """The outcome of each here and under torch DDP, on groups of their own: a hook that raises loses its group."""
    warnings.simplefilter("ignore")
    outcomes: dict[str, list[Any]] = {name: [] for name in BROKEN}
    for name, registered in BROKEN.items():
        for wrapper in (LegacyDistributedDataParallel, DistributedDataParallel):
            model = wrapper(_one_matrix(), process_group=dist.new_group([0]))
            model.register_comm_hook(*registered())
            outcomes[name].append(_outcome(rank, model))
    return outcomes


def test_hooks_of_torch_that_fail_under_torch_ddp_fail_with_the_same_error_here() -> None:
    (outcomes,) = run_ranks(_failing, 1)
    for name, (ours, theirs) in outcomes.items():
        assert ours == theirs, name
        # Torch 2.15 has mended the quantization hooks.
        assert isinstance(ours, tuple) or "quantization" in name, name


@on_ranks(2)
def _bf16(rank: int) -> list[float]:
    """torch DDP refuses it on gloo by its name (not in torch 2.8); it runs there all the same."""
    with suppress(TypeError):
        DistributedDataParallel(nn.Linear(1, 1)).register_comm_hook(None, default_hooks.bf16_compress_hook)
    model = wrap()
    model.register_comm_hook(None, default_hooks.bf16_compress_hook)
    add_gradients(model, 1.0 + 2.0**-7 * rank)
    model.all_reduce()
    return list(gradient_values(model).values())


def test_the_bf16_hook_rounds_as_bf16_does() -> None:
    # Halved before the sum: 0.5 and 0.50390625 in bf16; the sum needs 9 bits of fraction, of which bf16 has 8.
    mean = (torch.tensor(0.5).bfloat16() + torch.tensor(1.0078125 / 2).bfloat16()).float().item()
    assert _bf16() == [[mean]] * 2
    assert mean != (1.0 + 1.0078125) / 2


def _resumed(rank: int) -> tuple[Any, Any]:
    """PowerSGD for six steps, and for three, saved, loaded and three more."""
    warnings.simplefilter("ignore")
    whole = _with_hook(rank, LegacyDistributedDataParallel(_one_matrix()), "PowerSGD")
    first, second = (LegacyDistributedDataParallel(_one_matrix()) for _ in range(2))
    state, optimizer = _power_state(), _sgd(first)
    first.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    torch.manual_seed(11 + rank)
    _steps(first, optimizer, 3)
    saved = pickle.dumps((state, first.module.state_dict(), optimizer.state_dict()))
    state, weights, momenta = pickle.loads(saved)
    state.process_group = None
    second.module.load_state_dict(weights)
    second.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer = _sgd(second)
    optimizer.load_state_dict(momenta)
    return whole[-1], _steps(second, optimizer, 3)[-1]


@pytest.mark.cpu("its numbers are those of the CPU")
def test_a_stateful_hook_survives_a_checkpoint() -> None:
    for whole, resumed in run_ranks(_resumed, 2):
        assert whole == resumed
