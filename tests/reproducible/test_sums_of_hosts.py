"""Reproducible sums over several hosts: the bits of one process and of gloo, whatever a step brings.

The ranks claim to run on the hosts in ``hosts``, a letter per rank.
"""

import random
from typing import Any

import pytest
import torch

from legacy_ddp import LegacyDistributedDataParallel
from tests.helpers import tiers
from tests.helpers.cases import all_bits, get_gradients
from tests.helpers.hosts import on_host
from tests.helpers.ranks import run_ranks
from tests.helpers.sums import bring, counted, mixed_model, mixed_window, take, wrap_reproducible
from tests.helpers.tiers import thorough

pytestmark = pytest.mark.parametrize("transport", ["host"], indirect=True)


def _model(rank: int, hosts: str, **options: Any) -> LegacyDistributedDataParallel:
    with on_host(hosts[rank]):
        return mixed_model(**options)


def _line(model: LegacyDistributedDataParallel) -> str:
    (line,) = [text for text in repr(model).splitlines() if "transport:" in text]
    return line.strip()


def _differences(rank: int, hosts: str, buffer_size: int) -> tuple[str, list[int]]:
    """The transport, and the steps with other bits than one process. The number of micro-batches changes."""
    model, wrong = _model(rank, hosts, buffer_size=buffer_size), []
    for step, each in enumerate((1, 4, 2, 1, 1, 4)):
        window = mixed_window(step, each * len(hosts), in_blocks=step % 2 == 0)
        model.zero_grad()
        if all_bits(take(model, window, rank, len(hosts))) != all_bits(window.expected()):
            wrong.append(step)
    return _line(model), wrong


@pytest.mark.parametrize(
    "hosts, buffer_size, text",
    [
        ("aabb", 2**28, "2 hosts of 2 ranks"),
        thorough("aabbcc", 300, "3 hosts of 2 ranks"),
        thorough("aaaabbbb", 2**28, "2 hosts of 4 ranks"),
        *tiers.choose([("aabbccdd", 2**28, "4 hosts of 2 ranks"), ("aaaabbbb", 99, "2 hosts of 4 ranks")], []),
    ],
)
def test_several_hosts_give_the_bits_of_one_process(transport: str, hosts: str, buffer_size: int, text: str) -> None:
    line = f"transport: host ({text}, gloo between them)"
    assert run_ranks(_differences, len(hosts), hosts, buffer_size) == [(line, [])] * len(hosts)


def _random_steps(rank: int, hosts: str, seed: int) -> list[str]:
    """Steps with random numbers of micro-batches, in which ranks and whole hosts have no items.

    Returns the steps with other bits than one process, and with other bits than gloo.
    """
    world_size, wrong = len(hosts), []
    chance = random.Random(seed)
    model = _model(rank, hosts, buffer_size=chance.choice([50, 700, 2**28]))
    over_gloo = mixed_model(transport="gloo")
    for step in range(8):
        each = 2 ** chance.randrange(4)
        has_items = [chance.random() < 0.7 for _ in range(world_size)]
        if step == 3:
            has_items = [host != hosts[0] for host in hosts]
        items = [chance.randint(1, 9) if has_items[number // each] else 0 for number in range(each * world_size)]
        window = mixed_window(1000 * seed + step, each * world_size, items, in_blocks=chance.random() < 0.5)
        model.zero_grad()
        over_gloo.zero_grad()
        bits = all_bits(take(model, window, rank, world_size))
        wrong += [f"step {step}"] if bits != all_bits(counted(window).expected()) else []
        wrong += [f"step {step} over gloo"] if bits != all_bits(take(over_gloo, window, rank, world_size)) else []
    return wrong


@pytest.mark.parametrize(
    "hosts, seed",
    [
        ("aabb", 0),
        *tiers.choose([("aabb", 2), ("aabbcc", 3), ("aaaabbbb", 4)], [thorough("aabbcc", 1)]),
    ],
)
def test_random_steps_have_the_bits_of_one_process_and_of_gloo(transport: str, hosts: str, seed: int) -> None:
    assert run_ranks(_random_steps, len(hosts), hosts, seed) == [[]] * len(hosts)


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


@pytest.mark.parametrize("hosts", ["aabb", thorough("aabbcc")])
def test_parts_may_be_empty(transport: str, hosts: str) -> None:
    mean = (1 + len(hosts)) / 2
    expected = [mean, 0.0, 0.0, mean, 1.0, 1.0, mean, 2.0, 2.0]
    assert run_ranks(_tiny, len(hosts), hosts) == [expected] * len(hosts)
