"""Search for a flipped bit: during a training, one bit of one weight changes on one rank.

torchrun --standalone --nproc-per-node 3 examples/hunt.py
"""

import argparse
import random
import sys
from argparse import Namespace
from dataclasses import dataclass

import torch
import torch.distributed as dist
from _batches import global_batch
from _lm_options import CONTEXT, positive_int
from _ranks import exit_together, process_group
from _text import cut_windows, read_text
from torch import nn
from train_lm import Training, start_training

from legacy_ddp import ReplicaDivergenceError

WINDOWS_PER_RANK = 8
STEPS = 20


@dataclass(frozen=True)
class Fault:
    """A bit change on one rank after one step; bit 0 is the lowest bit of the element."""

    rank: int
    step: int
    parameter: str
    place: tuple[int, ...]
    bit: int

    def __str__(self) -> str:
        return f"rank {self.rank}, after step {self.step}, {self.parameter!r} at {self.place}, bit {self.bit}"

    def plant(self, module: nn.Module) -> None:
        mask = torch.tensor(1 << self.bit, dtype=torch.int64).to(torch.int32)  # bit 31 is the sign of both
        module.get_parameter(self.parameter).data.view(torch.int32)[self.place] ^= mask


def main() -> None:
    parser = argparse.ArgumentParser(description="Let one bit of one weight change, and find it.")
    parser.add_argument("--times", type=positive_int, default=1, metavar="N", help="hunts in a row (default: 1)")
    parser.add_argument("--seed", type=int, help="of data and fault (default: another one each time)")
    args = parser.parse_args()
    with process_group() as device:
        if dist.get_world_size() == 1:
            exit_together("one rank alone has nobody to differ from: got 1 rank, expected 2 or more; use torchrun")
        windows = cut_windows(read_text().train, CONTEXT)
        found = [hunt(windows, shared_seed(args.seed) + index, device) for index in range(args.times)]
        say(f"\nfound {sum(found)} of {len(found)}")
    sys.exit(0 if all(found) else 1)


def hunt(windows: torch.Tensor, seed: int, device: torch.device) -> bool:
    """Collective: train until the library reports a rank or all steps are done; returns whether the report is right."""
    settings = Namespace(seed=seed, lr=4e-3, resume=False, reduce_dtype=None, reproducible=False)
    training = start_training(settings, None, device, checks="detail")
    fault = draw_fault(training.model.module, seed)
    say(f"\ntraining on {dist.get_world_size()} ranks; after one of {STEPS - 1} steps one bit will change")
    error = train_until_reported(training, windows, seed, fault)
    say(f"\n{error or 'nothing was reported'}")
    is_found = error is not None and describe(error) == fault
    say(f"\nplanted: {fault}\n{'FOUND' if is_found else 'MISSED'}")
    return is_found


def train_until_reported(
    training: Training, windows: torch.Tensor, seed: int, fault: Fault
) -> ReplicaDivergenceError | None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    while training.step < STEPS:
        batch = global_batch(windows, training.step, WINDOWS_PER_RANK * world_size, seed)
        try:
            training.update([(rank, batch[rank::world_size])])
        except ReplicaDivergenceError as error:
            return error
        if (training.step, rank) == (fault.step, fault.rank):
            fault.plant(training.model.module)
    return None


def draw_fault(module: nn.Module, seed: int) -> Fault:
    """An equal fault on every rank, not after the last step, as no later call could detect the fault."""
    draw = random.Random(seed)
    name, parameter = draw.choice(list(module.named_parameters()))
    return Fault(
        rank=draw.randrange(dist.get_world_size()),
        step=draw.randrange(1, STEPS),
        parameter=name,
        place=tuple(draw.randrange(size) for size in parameter.shape),
        bit=draw.randrange(32),
    )


def describe(error: ReplicaDivergenceError) -> Fault | None:
    """The fault in the report of the library, None for a report about anything but a single bit."""
    (difference, *others) = error.report.differences
    if others or len(error.ranks) != 1 or error.phase != "outside":
        return None
    (rank,) = error.ranks
    element = difference.elements[rank if rank in difference.elements else min(difference.elements)]
    if element.count != 1 or element.bit is None:
        return None
    return Fault(rank, error.call - 1, error.parameter, element.first_index, element.bit)


def shared_seed(seed: int | None) -> int:
    """Collective: the requested seed, or a seed drawn by rank 0."""
    drawn = [random.randrange(2**31) if seed is None else seed]
    dist.broadcast_object_list(drawn, src=0)
    return drawn[0]


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


if __name__ == "__main__":
    main()
