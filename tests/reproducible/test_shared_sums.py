"""Sums of micro-batches in shared memory, and over several hosts: the bits of one process, whatever a step brings."""

import os
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from legacy_ddp import LegacyDistributedDataParallel
from tests.helpers import tiers
from tests.helpers.cases import all_bits, get_gradients
from tests.helpers.hosts import on_host
from tests.helpers.rank_faults import counting
from tests.helpers.ranks import run_ranks
from tests.helpers.small_models import Said, error_of, transport_line
from tests.helpers.small_sizes import move_gradients_from
from tests.helpers.sums import add_leaf, bring, counted, mixed_model, mixed_window, take, wrap_reproducible
from tests.helpers.tiers import thorough

in_host_memory = pytest.mark.parametrize("transport", ["host"], indirect=True)


def _differences(rank: int, world_size: int) -> tuple[str, list[int]]:
    """The transport of the last step, and the steps with other bits than one process.

    Micro-batches change from step to step, and with them the memory that a rank shares. From step 6 on another rank has
    no data in each step, and brings zeros from memory of its own.
    """
    model, wrong = mixed_model(), []
    for step, each in enumerate((1, 4, 2, 1, 1, 4, 1, 1, 1)):
        items = [3 if step < 6 or number != step % world_size else 0 for number in range(each * world_size)]
        window = mixed_window(step, each * world_size, items, in_blocks=step % 2 == 0)
        model.zero_grad()
        if all_bits(take(model, window, rank, world_size)) != all_bits(counted(window).expected()):
            wrong.append(step)
    return transport_line(model), wrong


@pytest.mark.parametrize("world_size", [3, *map(thorough, [2, 4, 5, *tiers.choose([6, 7, 8], [8])])])
def test_any_number_of_ranks_gives_the_bits_of_one_process_on_either_transport(transport: str, world_size: int) -> None:
    line = "transport: host" if transport == "host" else 'transport: gloo (transport="gloo")'
    assert run_ranks(_differences, world_size, world_size) == [(line, [])] * world_size


def _call(model: LegacyDistributedDataParallel) -> float:
    """Collective: the value of the gradient."""
    model.all_reduce(sample_size=1)
    return next(model.parameters()).grad[0].item()


def _large(rank: int) -> float:
    model = wrap_reproducible([torch.ones(2, dtype=torch.float64)])
    bring(model.module, [torch.full((2,), 2.0 + rank, dtype=torch.float64)])
    model.all_reduce(sample_size=2**62 - 1)
    return next(model.parameters()).grad[0].item()


def test_the_divisor_may_exceed_64_bits(transport: str) -> None:
    assert run_ranks(_large, 5) == [(2 + 3 + 4 + 5 + 6) / float(5 * (2**62 - 1))] * 5


def _kept(rank: int, each: int) -> tuple[list[float], list[float]]:
    """What gradients kept in every step hold at the end, and the results."""
    move_gradients_from(0)
    model = wrap_reproducible([torch.ones(3)], transport="host")
    kept, results = [], []
    for step in range(5):
        model.zero_grad()
        for _ in range(each):
            add_leaf(model, float(rank + step))
        results.append(_call(model))
        if rank == 1:
            kept.append(next(model.parameters()).grad)
    return [grad[0].item() for grad in kept], results


@pytest.mark.parametrize("each", [1, 2])
@in_host_memory
def test_a_result_kept_on_one_rank_is_never_written_to(transport: str, each: int) -> None:
    expected = [each * (step + 0.5) for step in range(5)]
    assert run_ranks(_kept, 2, each) == [([], expected), (expected, expected)]


def _exchanges(rank: int) -> list[int]:
    """Exchanges of descriptors until the end of each step; ranks bring one and two micro-batches in turn."""
    model, seen = wrap_reproducible([torch.ones(3)]), []
    with counting("map_new") as exchanges:
        for step in range(6):
            model.zero_grad()
            for _ in range(1 + step % 2):
                add_leaf(model, 1.0 + rank)
            model.all_reduce(sample_size=1)
            seen += exchanges
    return seen


@in_host_memory
def test_the_memory_of_sums_is_mapped_once(transport: str) -> None:
    assert run_ranks(_exchanges, 2) == [[1, 2, 2, 2, 2, 2]] * 2


# A micro-batch that waits while the memory changes


def _other_group(rank: int, sits_out: bool) -> tuple[Said, list[float]]:
    """The micro-batch of the block lies in shared memory, and the call goes to a group that has none yet.

    With ``sits_out`` rank 0 brings nothing to this call, which fails on rank 1, and brings it to the next call.
    """
    model = wrap_reproducible([torch.ones(3)])
    other = dist.new_group([0, 1])
    results = []
    said = None
    for step, group in enumerate((None, other, other, None)):
        model.process_group = dist.group.WORLD if group is None else group
        model.zero_grad()
        add_leaf(model, 1.0 + rank + step)
        if sits_out and step == 1:
            said = error_of(model.all_reduce, sample_size=None if rank else 0)
        results.append(_call(model))
    return said, results


@pytest.mark.parametrize("sits_out", [False, True])
@in_host_memory
def test_a_waiting_micro_batch_survives_a_change_of_the_group(transport: str, sits_out: bool) -> None:
    for said, results in run_ranks(_other_group, 2, sits_out):
        assert results == [1.5, 2.5, 3.5, 4.5]
        assert (said is None) != sits_out
        assert said is None or said[0] == "PeerError"


# Faults


def _second_segment_fails(rank: int, transport: str) -> tuple[Said, list[float], str]:
    """Rank 1 can share its flat tensor, but not its sums of micro-batches."""
    model = wrap_reproducible([torch.ones(3)], transport=transport)
    create, made = os.memfd_create, []

    def fails_second(*arguments: Any) -> int:
        made.append(arguments)
        if rank == 1 and len(made) > 1:
            raise OSError(12, "Cannot allocate memory")
        return create(*arguments)

    os.memfd_create = fails_second
    said, results = None, []
    for step in range(2):
        model.zero_grad()
        for _ in range(2):
            add_leaf(model, 1.0 + rank + step)
        if transport == "host" and step == 0:
            said = error_of(model.all_reduce, sample_size=1)
            os.memfd_create = create
        results.append(_call(model))
    os.memfd_create = create
    return said, results, transport_line(model)


REASON = "rank 1: no shared memory (OSError: [Errno 12] Cannot allocate memory)"


@pytest.mark.parametrize("asked", ["auto", "host"])
@in_host_memory
def test_sums_that_cannot_be_shared_are_the_same_finding_on_all_ranks(transport: str, asked: str) -> None:
    results = run_ranks(_second_segment_fails, 2, asked, fresh=True)
    assert results == [results[0]] * 2
    said, means, line = results[0]
    assert means == [3.0, 5.0]  # 2 x (1 + 2) / 2, and 2 x (2 + 3) / 2
    if asked == "auto":
        assert (said, line) == (None, f"transport: gloo ({REASON})")
    else:
        assert said is not None
        assert said[0] == "TransportError"
        assert REASON in said[1]
        assert line == "transport: host"


def _forked(rank: int) -> tuple[int, int, list[float]]:
    """Shared mappings in the parent and in its child, and a result after the child has written to all gradients."""
    model = wrap_reproducible([torch.ones(3)], transport="host")

    def step(value: float) -> float:
        model.zero_grad()
        for _ in range(2):
            add_leaf(model, value)
        return _call(model)

    step(1.0 + rank)
    grad, totals = next(model.parameters()).grad, model._synchronizer.leaves.sums.zeros(has_peers=True)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        grad.zero_()
        for total in totals:
            total.zero_()
        os.write(writing, str(_shared_mappings()).encode())
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert status == 0
    return _shared_mappings(), int(os.read(reading, 100)), [grad[0].item(), step(2.0 + rank)]


def _shared_mappings() -> int:
    return len(re.findall("rw-s .*/memfd:legacy_ddp", Path("/proc/self/maps").read_text()))


@in_host_memory
def test_what_a_forked_child_writes_to_sums_stays_in_the_child(transport: str) -> None:
    """A flat tensor and the sums, of two ranks."""
    assert run_ranks(_forked, 2, fresh=True) == [(4, 0, [3.0, 5.0])] * 2


# Sums over several hosts. The ranks claim to run on the hosts in ``hosts``, a letter per rank


def _random_steps(rank: int, hosts: str, seed: int) -> tuple[str, list[str]]:
    """Steps with random numbers of micro-batches, in which ranks and whole hosts have no items.

    Returns the transport, and the steps with other bits than one process, and with other bits than gloo.
    """
    world_size, wrong = len(hosts), []
    chance = random.Random(seed)
    with on_host(hosts[rank]):
        model = mixed_model(buffer_size=chance.choice([50, 700, 2**28]))
    over_gloo = mixed_model(transport="gloo")
    for step in range(8):
        each = 2 ** chance.randrange(4)
        has_items = [chance.random() < 0.7 for _ in range(world_size)]
        if step == 3:
            has_items = [host != hosts[0] for host in hosts]
        if step % 4 == 2:
            has_items = [True] * world_size
        items = [chance.randint(1, 9) if has_items[number // each] else 0 for number in range(each * world_size)]
        window = mixed_window(1000 * seed + step, each * world_size, items, in_blocks=chance.random() < 0.5)
        model.zero_grad()
        over_gloo.zero_grad()
        bits = all_bits(take(model, window, rank, world_size))
        wrong += [f"step {step}"] if bits != all_bits(counted(window).expected()) else []
        wrong += [f"step {step} over gloo"] if bits != all_bits(take(over_gloo, window, rank, world_size)) else []
    return transport_line(model), wrong


@in_host_memory
@pytest.mark.parametrize(
    "hosts, seed, text",
    [
        ("aabb", 0, "2 hosts of 2 ranks"),
        thorough("aabbcc", 1, "3 hosts of 2 ranks"),
        *tiers.choose(
            [
                ("aabb", 2, "2 hosts of 2 ranks"),
                ("aabbccdd", 3, "4 hosts of 2 ranks"),
                ("aaaabbbb", 4, "2 hosts of 4 ranks"),
            ],
            [thorough("aaaabbbb", 4, "2 hosts of 4 ranks")],
        ),
    ],
)
def test_random_steps_have_the_bits_of_one_process_and_of_gloo(
    transport: str, hosts: str, seed: int, text: str
) -> None:
    line = f"transport: host ({text}, gloo between them)"
    assert run_ranks(_random_steps, len(hosts), hosts, seed) == [(line, [])] * len(hosts)


def _tiny(rank: int, hosts: str) -> list[float]:
    """Fewer elements than ranks on a host, and than hosts: most parts are empty."""
    with on_host(hosts[rank]):
        model = wrap_reproducible([torch.ones(1), torch.ones(2, dtype=torch.float64), torch.ones(0)], transport="host")
    values = []
    for step in range(3):
        model.zero_grad()
        bring(model.module, [torch.full((1,), 1.0 + rank), torch.full((2,), float(step), dtype=torch.float64), None])
        model.all_reduce(sample_size=1)
        values += [value for grad in get_gradients(model.module) if grad is not None for value in grad.tolist()]
    return values


@in_host_memory
@pytest.mark.parametrize("hosts", ["aabb", thorough("aabbcc")])
def test_parts_may_be_empty(transport: str, hosts: str) -> None:
    mean = (1 + len(hosts)) / 2
    expected = [mean, 0.0, 0.0, mean, 1.0, 1.0, mean, 2.0, 2.0]
    assert run_ranks(_tiny, len(hosts), hosts) == [expected] * len(hosts)
