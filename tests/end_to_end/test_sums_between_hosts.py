"""Two hosts with two ranks each, in network namespaces: sums of the combined transport, and a rank killed on one host.

Run as a script, this file is one rank: `test_sums_between_hosts.py FOLDER`.
"""

import json
import os
import signal
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from legacy_ddp import LegacyDistributedDataParallel, LostPeerError
from tests.helpers.hosts import Hosts, leave_facts
from tests.helpers.rank_faults import do_when

VICTIM = 3
SIZES = (5, 300_000, 64)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.thorough,  # tests.ranks has the same sums and the same loss on hosts of one network
    pytest.mark.hosts,
]


def _grads(rank: int, step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(10 * rank + step)
    return [torch.randn(numel, generator=generator) for numel in SIZES]


def _train(folder: Path) -> None:
    """Three steps of two models, compared with sums by hand; in the next the victim dies, and the others tell of it."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # of the launcher, on the host of the victim
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    seen = []
    for reproducible in (True, False):
        parameters = nn.ParameterList([nn.Parameter(torch.zeros(numel)) for numel in SIZES])
        model = LegacyDistributedDataParallel(parameters, reproducible=reproducible)
        for step in range(3):
            for parameter, grad in zip(parameters, _grads(rank, step), strict=True):
                parameter.grad = grad
            seen.append(model.all_reduce(sample_size=1).transport)
            for parameter, *grads in zip(parameters, *(_grads(other, step) for other in range(4)), strict=True):
                # The order of two hosts of two ranks is also the order of the tree.
                assert torch.equal(parameter.grad, ((grads[0] + grads[1]) + (grads[2] + grads[3])) / 4)
        seen += [text.strip() for text in repr(model).splitlines() if "transport:" in text]
    if rank == VICTIM:
        sys.setprofile(do_when("total_of", partial(os.kill, os.getpid(), signal.SIGKILL)))
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    try:
        model.all_reduce(sample_size=1)
    except LostPeerError as error:
        dropped = all(parameter.grad is None for parameter in parameters)
        leave_facts(folder / f"lost-{rank}", [seen, type(error).__name__, error.ranks, dropped])
    os._exit(1)  # torch's own group cannot be left in order


def test_sums_are_right_to_the_last_bit_and_a_rank_killed_on_one_host_is_named_on_both(tmp_path: Path) -> None:
    with Hosts(2) as hosts:
        hosts.torchrun(__file__, str(tmp_path), nproc_per_node=2).wait(120.0, check=False)

    of_model = ["host"] * 3 + ["transport: host (2 hosts of 2 ranks, gloo between them)"]
    for rank in range(3):
        facts = json.loads((tmp_path / f"lost-{rank}").read_text())
        assert facts == [of_model * 2, "PeerLostError", [VICTIM], True]


if __name__ == "__main__":
    _train(Path(sys.argv[1]))
