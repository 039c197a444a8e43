"""What only a simulated device shows: races, waits of the host by line, a device without doubles, negative controls."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from legacy_ddp import Checks, LegacyDistributedDataParallel
from legacy_ddp.data import micro_batch_rng
from tests.helpers.outcomes import attempt
from tests.helpers.ranks import run_ranks
from tests.helpers.simulated_device import device
from tests.helpers.simulated_group import new_group
from tests.helpers.small_models import wrap_on_device
from tests.helpers.torch_versions import needs_simulation
from tests.test_devices import SUMS, _metrics, _model, _train, _train_in_one_process

pytestmark = needs_simulation


def _train_on_device(rank: int, group: Any) -> list[torch.Tensor]:
    with torch.device("sim"):
        weights, _ = _train(rank, {"process_group": group})
    return [weight.detach().cpu() for weight in weights]


def _trains_without_doubles(rank: int) -> tuple[list[torch.Tensor], dict[str, float], int]:
    """The weights; the metrics of a call, and the waits in it."""
    group = new_group()
    device.has_float64 = False
    weights = _train_on_device(rank, group)
    model = LegacyDistributedDataParallel(_model().to("sim"), process_group=group)
    model(torch.ones(1, 3, device="sim")).sum().backward()
    metrics = _metrics(rank, "sim")
    device.host_waits.clear()
    record = model.all_reduce(metrics=metrics)
    return weights, dict(record.metrics), sum(device.host_waits.values())


def test_a_device_without_doubles_trains_alike_and_its_metrics_keep_the_digits_of_integers() -> None:
    for weights, metrics, waits in run_ranks(_trains_without_doubles, 2, fresh=True):
        torch.testing.assert_close(weights, _train_in_one_process())
        assert (metrics, waits) == (SUMS, 1)


def _trains_without_waits(rank: int) -> tuple[list[torch.Tensor], list[str]]:
    group = new_group()
    group.waits = False
    return _train_on_device(rank, group), device.races


def test_waits_that_do_nothing_are_found_as_races_and_give_other_weights() -> None:
    """The negative control of the detector."""
    expected = _train_in_one_process()

    for weights, races in run_ranks(_trains_without_waits, 2, fresh=True):
        assert any("_call/" in race for race in races)
        assert not all(torch.allclose(mine, one) for mine, one in zip(weights, expected, strict=True))


def _uses_two_groups(rank: int, *, waits: bool) -> tuple[float, list[str]]:
    """What a quick group reduces, after the broadcast of a slow group to the same tensor; and the races."""
    slow, quick = new_group(), new_group()
    slow.delay_seconds, quick.delay_seconds, slow.waits = 0.2, 0.0, waits
    tensor = torch.full((1,), rank + 1.0, device="sim")
    dist.broadcast(tensor, src=0, group=slow)
    dist.all_reduce(tensor, group=quick)
    return tensor.item(), device.races


def test_a_collective_follows_an_awaited_collective_of_another_group_and_without_the_wait_is_a_race() -> None:
    """The quick group reduced what the slow group had not written yet, and no race was found."""
    assert run_ranks(partial(_uses_two_groups, waits=True), 2, fresh=True) == [(2.0, [])] * 2
    for _, races in run_ranks(partial(_uses_two_groups, waits=False), 2, fresh=True):
        assert any(race.startswith("allreduce") for race in races)


def _draws(_: int) -> tuple[list[float], bool]:
    """The draws of a micro-batch, and whether the device's generator is as before."""
    new_group()
    device.manual_seed(5)
    before = device.get_rng_state()
    with micro_batch_rng(step=1, index=2):
        drawn = torch.rand(3, device="sim").cpu().tolist()
    return drawn, torch.equal(device.get_rng_state(), before)


def test_the_generator_of_a_device_is_seeded_by_micro_batch_and_restored() -> None:
    (first, *restored), other = run_ranks(_draws, 2, fresh=True)

    assert restored == [True]
    assert other == (first, True)


def _broadcasts_between(rank: int) -> tuple[list[str], list[float], list[float]]:
    """The errors of a broadcast of parameters and of buffers, the weight, and the script's own tensor."""
    group, errors = new_group(), []
    layer = nn.BatchNorm1d(1).to("sim")
    model = LegacyDistributedDataParallel(layer, process_group=group)
    own = torch.full((1,), 100.0 + rank, device="sim")
    for broadcast in (model.broadcast_parameters, model.broadcast_buffers):
        work = dist.broadcast(own, src=0, group=group, async_op=True) if rank == 0 else None
        errors.append(str(attempt(broadcast)))
        (work or dist.broadcast(own, src=0, group=group, async_op=True)).wait()
        model.broadcast_parameters()
    return errors, layer.weight.detach().cpu().tolist(), own.cpu().tolist()


def test_a_broadcast_does_not_pair_with_a_collective_of_the_script() -> None:
    """It wrote the script's data to the weights of a rank."""
    for errors, weight, own in run_ranks(_broadcasts_between, 2, fresh=True):
        assert all("ranks have issued different numbers of collectives on process_group" in text for text in errors)
        assert (weight, own) == ([1.0], [100.0])


def _is_on_the_cpu(rank: int) -> list[float]:
    """The gradient of a model on the CPU, beside a collective of the device in another order on each rank."""
    group = new_group()
    model = LegacyDistributedDataParallel(nn.Linear(1, 1, bias=False), process_group=group)
    own = torch.ones(1, device="sim")
    (model(torch.ones(1, 1)) * (rank + 1)).sum().backward()
    work = dist.all_reduce(own, group=group, async_op=True) if rank == 0 else None
    model.all_reduce()
    (work or dist.all_reduce(own, group=group, async_op=True)).wait()
    return [model.module.weight.grad.item(), own.item()]


def test_gradients_on_the_cpu_have_a_group_of_their_own_beside_a_device() -> None:
    assert run_ranks(_is_on_the_cpu, 2, fresh=True) == [[1.5, 2.0]] * 2


def _forward_and_backward(model: nn.Module, rank: int, number: int) -> None:
    model.zero_grad()
    batch = torch.randn(4, 3, generator=torch.Generator().manual_seed(2 * number + rank))
    model(batch.to("sim")).pow(2).sum().backward()


def _makes_other_steps(rank: int) -> dict[str, tuple[list[str], set[str]]]:
    """Errors of calls after equal numbers of steps, and at last after a step of rank 0 alone; waits of the host."""
    group, found = new_group(), {}
    for as_view in (True, False):
        model = wrap_on_device(group, gradient_as_bucket_view=as_view)
        optimizer = torch.optim.Adam(model.parameters())
        errors = []
        device.host_waits.clear()
        for steps in (0, 1, 1 - rank, 0):
            _forward_and_backward(model, rank, len(errors))
            errors.append(str(attempt(model.all_reduce) or ""))
            for _ in range(steps):
                optimizer.step()
            if not errors[1:] and rank == 0:  # the state of the optimizer, as tools of torch make it
                for parameter in model.parameters():
                    parameter.grad = torch.zeros_like(parameter)
                optimizer.step()
        found[f"views: {as_view}"] = errors, {place for place in device.host_waits if place}
    return found


def test_a_step_of_one_rank_alone_is_an_error_on_a_device_too() -> None:
    """Steps were not counted there. No value is read."""
    for found in run_ranks(_makes_other_steps, 2, fresh=True):
        for (*quiet, error), waits in found.values():
            assert quiet == ["", "", ""]
            assert "ranks made different numbers of optimizer steps since the last call" in error
            assert "rank 1 has 0; rank 0 has 1" in error
            assert waits == set()


def _clips_before_calls(rank: int) -> dict[str, tuple[list[str], list[int]]]:
    """Errors and waits of calls with gradients that rank 1 has clipped, by ``Checks(edited=)``."""
    group, found = new_group(), {}
    for name, checks in (("warn", Checks()), ("raise", Checks(edited="raise"))):
        model, errors, waits = wrap_on_device(group, nn.Identity(), checks=checks), [], []
        for number in range(6):
            _forward_and_backward(model, rank, number)
            if rank == 1:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            device.host_waits.clear()
            errors.append(str(attempt(model.all_reduce) or ""))
            waits.append(sum(count for place, count in device.host_waits.items() if place))
        found[name] = errors, waits
    return found


def test_edited_raise_finds_a_clip_on_a_device() -> None:
    """The norm was not known there, and the check did not look at all."""
    for rank, found in enumerate(run_ranks(_clips_before_calls, 2, fresh=True)):
        assert found["warn"] == ([""] * 6, [0] * 6)
        errors, waits = found["raise"]
        assert errors[:4] == [""] * 4
        assert "clipped by norm" in errors[4]
        assert waits[:4] == [3 * rank] * 4


def _frees_gradients(rank: int) -> list[bool]:
    """Whether each gradient was recorded before the call has replaced it."""
    group = new_group()
    model = LegacyDistributedDataParallel(_model().to("sim"), process_group=group)
    model(torch.ones(1, 3, device="sim")).sum().backward()
    gradients = [parameter.grad.untyped_storage().data_ptr() for parameter in model.parameters()]
    device.recorded.clear()
    model.all_reduce()
    return [address in device.recorded for address in gradients]


def test_memory_of_gradients_is_held_for_the_stream_of_the_call() -> None:
    """Backward may have run on another stream, which would give the memory to other tensors before it was read."""
    assert run_ranks(_frees_gradients, 2, fresh=True) == [[True] * 4] * 2


def _fails_in_a_hook(rank: int, moment: str) -> tuple[str, bool]:
    """The error of a call in which the hook of rank 1 fails, before or after its collective, and whether gradients are
    left. No collective of rank 0 runs meanwhile."""
    group = new_group()
    model = LegacyDistributedDataParallel(nn.Linear(2, 1, bias=False).to("sim"), process_group=group)

    def hook(_: Any, bucket: Any) -> Any:
        if rank == 1 and moment == "before":
            raise ValueError("no table")
        work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
        if rank == 1:
            raise ValueError("no table")
        return work.get_future().then(lambda done: done.value()[0] / 2)

    model.register_comm_hook(None, hook)
    model(torch.ones(1, 2, device="sim")).sum().backward()
    if rank == 0:
        group.hold()
    error = attempt(model.all_reduce)
    if rank == 1 and moment == "before":
        dist.all_reduce(torch.zeros(2, device="sim"), group=group)  # the partner of the collective of rank 0
    group.release()
    dist.barrier()  # a process that ends would close the connections of the collective
    return f"{type(error).__name__}: {error}", model.module.weight.grad is not None


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_hook_that_fails_on_one_rank_is_an_error_on_all_while_their_collectives_run(moment: str) -> None:
    """The host of the others does not wait for the device, but for the result of every hook, with the watchdog."""
    (first, *of_first), (second, *of_second) = run_ranks(partial(_fails_in_a_hook, moment=moment), 2, fresh=True)

    assert first.startswith("PeerLostError: all_reduce() call 1")
    assert "ValueError: no table" in first
    assert second.startswith("ValueError: no table")
    assert of_first == of_second == [False]
