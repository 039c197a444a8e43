"""Every feature on a device: the simulated one, or a real one with ``make test DEVICE=cuda``.

In the ranks of these tests the device is torch's default, and their process group has a backend for it. Expected values
are those of one process on the CPU with the joined batch. What only a simulation can show stands in
``test_simulated_device.py``.
"""

import contextlib
import random
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from legacy_ddp import Checks, LegacyDistributedDataParallel, all_reduce_gradients
from legacy_ddp.debug import Recorder, check_replicas, cross_check
from tests.helpers.devices import assert_no_races, count_waits
from tests.helpers.outcomes import attempt
from tests.helpers.ranks import run_ranks
from tests.helpers.scripts import run_script
from tests.helpers.small_models import backward_on_device, wrap_on_device

STEPS, MICRO_BATCHES, ITEMS = 3, 4, 8


def _model() -> nn.Module:
    torch.manual_seed(0)
    with torch.device("cpu"):
        return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def _batches() -> torch.Tensor:
    return torch.randn(STEPS, MICRO_BATCHES, ITEMS, 3, generator=torch.Generator().manual_seed(1), device="cpu")


def _train(rank: int, settings: dict[str, Any]) -> tuple[list[torch.Tensor], list[int | None]]:
    """Weights of rank ``rank`` of 2, and the waits of the host in each step."""
    device, waits = torch.get_default_device(), []
    model = LegacyDistributedDataParallel(_model().to(device), **settings)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for batches in _batches()[:, rank::2].to(device):
        waits.append(count_waits(partial(_step, model, optimizer, batches)))
    return [*model.parameters()], waits


def _step(model: LegacyDistributedDataParallel, optimizer: torch.optim.Optimizer, batches: torch.Tensor) -> None:
    for number, batch in enumerate(batches, 1):
        with contextlib.nullcontext() if number == len(batches) else model.no_sync():
            model(batch).pow(2).sum().backward()
    model.all_reduce(sample_size=len(batches) * ITEMS)
    optimizer.step()
    optimizer.zero_grad()


def _train_in_one_process() -> list[torch.Tensor]:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for batches in _batches():
        optimizer.zero_grad()
        for batch in batches:
            (model(batch).pow(2).sum() / (MICRO_BATCHES * ITEMS)).backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def _takes_a_tensor(_: int, tensor: torch.Tensor) -> tuple[bool, tuple[int, ...], list[float]]:
    return tensor.device.type == torch.get_default_device().type, tensor.stride(), tensor.flatten().tolist()


def test_a_tensor_that_a_test_gives_its_ranks_lies_on_the_device() -> None:
    """It stayed on the CPU, and tests that pass gradients did not test the device."""
    assert run_ranks(_takes_a_tensor, 1, torch.arange(4.0).view(2, 2).t()) == [(True, (1, 2), [0.0, 2.0, 1.0, 3.0])]


SETTINGS: list[tuple[dict[str, Any], int]] = [  # with the waits of the host in a step
    ({}, 0),
    ({"checks": "off"}, 0),
    ({"buffer_size": 8}, 0),
    ({"gradient_as_bucket_view": False}, 0),
    ({"transport": "gloo"}, 0),
    ({"reproducible": True}, 1),  # whether zero_grad() came between blocks
    ({"checks": Checks(nonfinite="raise")}, 1),
    ({"checks": Checks(nonfinite="skip")}, 1),
]


def _trains_with_all_settings(rank: int) -> list[tuple[list[torch.Tensor], list[int | None]]]:
    results = [_train(rank, settings) for settings, _ in SETTINGS]
    assert_no_races()
    return results


def test_ranks_have_the_weights_of_one_process_with_every_setting() -> None:
    expected = _train_in_one_process()

    for results in run_ranks(_trains_with_all_settings, 2):
        for (settings, waits), (weights, waited) in zip(SETTINGS, results, strict=True):
            torch.testing.assert_close(weights, expected, msg=lambda text, s=settings: f"{s}: {text}")
            assert waited[1:] in ([waits] * (STEPS - 1), [None] * (STEPS - 1)), settings


def _reduces_convolutions(rank: int) -> list[tuple[list[float], tuple[int, ...]]]:
    """Gradients of a convolution in channels_last with the sum of torch, and with a hook of torch DDP; the strides."""
    found = []
    for hook in (None, allreduce_hook):
        layer = nn.Conv2d(2, 1, 2, bias=False).to(memory_format=torch.channels_last)
        model = LegacyDistributedDataParallel(layer)
        if hook is not None:
            model.register_comm_hook(dist.group.WORLD, hook)
        model(torch.arange(8.0).view(1, 2, 2, 2) * (rank + 1)).sum().backward()
        model.all_reduce()
        found.append((layer.weight.grad.flatten().tolist(), layer.weight.grad.stride()))
    assert_no_races()
    return found


def test_convolutions_and_hooks_of_torch_ddp_work() -> None:
    mean = [1.5 * value for value in range(8)]  # the gradient of a sum over one position is the image

    for (plain, strides), (hooked, _) in run_ranks(_reduces_convolutions, 2):
        assert plain == hooked == mean
        assert strides[1] == 1


def _metrics(rank: int, device: torch.device | str) -> dict[str, torch.Tensor]:
    return {
        "loss": torch.tensor(0.5 + rank, device=device),
        "half": torch.tensor(1.5, dtype=torch.float16, device=device),
        "items": torch.tensor(2**53 - 1 - rank, device=device),
    }


SUMS = {"loss": 2.0, "half": 3.0, "items": float(2**54 - 3)}


def _logs_metrics(rank: int) -> tuple[dict[str, float], int | None]:
    model = LegacyDistributedDataParallel(_model().to(torch.get_default_device()))
    metrics, records = _metrics(rank, torch.get_default_device()), []
    model(torch.ones(1, 3)).sum().backward()
    model.all_reduce()
    model(torch.ones(1, 3)).sum().backward()
    waits = count_waits(lambda: records.append(model.all_reduce(metrics=metrics)))
    return dict(records[0].metrics), waits


def test_metrics_on_a_device_cost_one_wait_and_keep_the_digits_of_integers() -> None:
    for metrics, waits in run_ranks(_logs_metrics, 2):
        assert metrics == SUMS
        assert waits in (1, None)


def _add_gradient(model: LegacyDistributedDataParallel, rank: int) -> None:
    (model(torch.ones(1, 1)) * (rank + 1)).sum().backward()


def _mixes_collectives(rank: int) -> tuple[str, list[float], list[float], list[float]]:
    """The error of a call, the gradients after it and after the next call, and the script's own sum."""
    model = LegacyDistributedDataParallel(nn.Linear(1, 1, bias=False), checks="off")
    own = torch.full((1,), 100.0)
    _add_gradient(model, rank)
    model.all_reduce()  # the first call loads kernels of CUDA, which waits for collectives in flight
    model.zero_grad()
    _add_gradient(model, rank)

    work = dist.all_reduce(own, async_op=True) if rank == 0 else None
    error = attempt(model.all_reduce)
    first = model.module.weight.grad.flatten().tolist()
    work = work or dist.all_reduce(own, async_op=True)
    work.wait()
    model.all_reduce()
    return str(error or ""), first, model.module.weight.grad.flatten().tolist(), own.tolist()


def test_a_collective_of_the_script_in_another_order_is_an_error_and_never_added_to_gradients() -> None:
    for rank, (error, first, second, own) in enumerate(run_ranks(_mixes_collectives, 2)):
        assert error.startswith("all_reduce() call 2: ranks have issued different numbers of collectives on process_g")
        assert "collectives since the last call: rank 1 has 0; rank 0 has 1" in error
        assert (first, second, own) == ([rank + 1.0], [1.5], [200.0])


def _issues_other_operations(rank: int) -> list[float]:
    """The gradients of three calls, among operations of a correct program."""
    model = LegacyDistributedDataParallel(nn.Linear(1, 1, bias=False))
    own, found = torch.ones(1), []
    for step in range(3):
        model.zero_grad()
        _add_gradient(model, rank)
        for _ in range(step):
            dist.all_reduce(own)
        dist.barrier()
        dist.broadcast(own, src=0)
        dist.all_gather_object([None, None], rank)
        if rank == 0:
            dist.send(torch.ones(1, device="cpu"), dst=1)
        else:
            dist.recv(torch.ones(1, device="cpu"), src=0)
        model.all_reduce()
        found.append(model.module.weight.grad.item())
    return found


def test_collectives_of_a_correct_program_are_no_error() -> None:
    assert run_ranks(_issues_other_operations, 2) == [[1.5] * 3] * 2


def _uses_checks(rank: int) -> dict[str, Any]:
    found = {}
    model = wrap_on_device(checks="detail")
    if rank == 1:
        with torch.no_grad():
            model.module[0].weight[0, 0] += 1
    backward_on_device(model, rank)
    found["detail"] = str(attempt(model.all_reduce))

    model = wrap_on_device(checks=Checks(nonfinite="raise"))
    backward_on_device(model, rank, first=float("nan") if rank == 1 else 1.0)
    found["nonfinite"] = str(attempt(model.all_reduce))

    model = wrap_on_device()
    random.seed(0)  # earlier jobs of the processes have used these generators
    np.random.seed(0)
    found["same generators"] = str(check_replicas(model, what=("rng",)))
    torch.manual_seed(rank)
    found["other generators"] = str(check_replicas(model, what=("rng",)))
    return found


def test_checks_name_rank_and_parameter() -> None:
    for found in run_ranks(_uses_checks, 2):
        assert "replicas differ in 1 of 4 parameters" in found["detail"]
        assert "parameter '0.weight', float32 (4, 3) on " in found["detail"]
        assert ": rank 1 against rank 0" in found["detail"]
        assert "rank 1: '0.weight': 4 NaN of 12" in found["nonfinite"]
        assert "random generators are equal" in found["same generators"]
        assert "random generators differ" in found["other generators"]


def _uses_tools(rank: int, folder: str) -> dict[str, Any]:
    """What the tools say, and what the other features leave."""
    found, model = {}, wrap_on_device()
    found["same"] = str(cross_check(model, lambda model, batch: model(batch).sum(), torch.ones(4, 3)))
    scale = 1.001 if rank == 1 else 1.0
    found["different"] = str(cross_check(model, lambda model, batch: (model(batch) * scale).sum(), torch.ones(4, 3)))

    model = wrap_on_device(layer=nn.BatchNorm1d(4), reduce_dtype=torch.float32)
    backward_on_device(model, rank)
    model.all_reduce()
    model.broadcast_buffers()
    found["statistics"] = model.module[1].running_mean.tolist()

    model = wrap_on_device()
    optimizer = torch.optim.Adam(model.parameters())

    def step() -> None:
        backward_on_device(model, rank)
        model.all_reduce()
        optimizer.step()

    with Recorder(model, folder, optimizer=optimizer):
        step()
        found["waits of a recorder"] = count_waits(step)
    found["function"] = all_reduce_gradients(model.module).synchronized

    model = wrap_on_device()
    with model.join():
        for _ in range(1 + rank):
            backward_on_device(model, rank)
            model.all_reduce()
    assert_no_races()
    return found


def test_tools_say_the_same_as_on_the_cpu(tmp_path: Path) -> None:
    first, second = run_ranks(_uses_tools, 2, str(tmp_path))

    for found in (first, second):
        assert "all ranks compute the same" in found["same"]  # with Dropout: the generator of the device travels
        assert "ranks 0-1 compute differently" in found["different"]
        assert "1.001" in found["different"]
        assert found["waits of a recorder"] in (2, None)
        assert found["function"]
    assert first["statistics"] == second["statistics"]
    text = run_script("-m", "legacy_ddp", "diff", str(tmp_path)).stdout
    assert text.startswith("same: 2 ranks hold the same, steps 0-2, 4 phases")
