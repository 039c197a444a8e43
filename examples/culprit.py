"""Search for a wrong kernel: during a training, a matrix product begins to flip a bit of its result on one rank.

torchrun --standalone --nproc-per-node 3 examples/culprit.py
"""

import argparse
import random
import sys
import warnings
from argparse import Namespace
from dataclasses import dataclass

import torch
import torch.distributed as dist
from _batches import global_batch
from _lm_options import CONTEXT, positive_int
from _ranks import exit_together, process_group
from _text import cut_windows, read_text
from hunt import say, shared_seed
from torch import nn
from train_lm import Training, start_training, summed_loss

from legacy_ddp.debug import CrossCheck, CrossCheckReport

WINDOWS_PER_RANK = 8
STEPS = 20
EVERY = 5  # steps from a check to the next
ROWS = WINDOWS_PER_RANK * CONTEXT
# The matrix products of the model: stage, module, operation, and the shape of the result, which occurs there alone.
PRODUCTS = (
    ("forward", "gru", "aten::mm", (ROWS, 576)),
    ("forward", "gru", "aten::addmm", (WINDOWS_PER_RANK, 576)),
    ("forward", "logits", "aten::mm", (ROWS, 256)),
    ("backward", "logits", "aten::mm", (256, 192)),
    ("backward", "logits", "aten::mm", (ROWS, 192)),
    ("backward", "gru", "aten::mm", (WINDOWS_PER_RANK, 192)),
    ("backward", "gru", "aten::mm", (576, 192)),
    ("backward", "gru", "aten::mm", (576, 64)),
    ("backward", "gru", "aten::mm", (ROWS, 64)),
)


@dataclass(frozen=True)
class Fault:
    """From ``step`` on, a product flips a bit of an element on one rank; bit 0 is the lowest bit of the element."""

    rank: int
    stage: str
    module: str
    operation: str
    place: tuple[int, ...]
    bit: int

    def __str__(self) -> str:
        where = f"{self.stage} of {self.module} ({self.operation})"
        return f"rank {self.rank}, {where}, bit {self.bit} of the element {self.place}"


def faulty_kernel(fault: Fault, shape: tuple[int, ...], device: torch.device) -> torch.library.Library:
    """Replace the kernel of an operation for results of ``shape``, below autograd; torch's own is back when the
    returned library is gone."""
    mask = torch.tensor(1 << fault.bit, dtype=torch.int32, device=device)

    def spoil(result: torch.Tensor) -> torch.Tensor:
        if result.shape == shape:
            result.view(torch.int32)[fault.place] ^= mask
        return result

    def mm(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return spoil(torch.mm(left, right, out=left.new_empty(left.shape[0], right.shape[1])))

    def addmm(added: torch.Tensor, left: torch.Tensor, right: torch.Tensor, **factors: float) -> torch.Tensor:
        result = left.new_empty(left.shape[0], right.shape[1])
        return spoil(torch.addmm(added, left, right, **factors, out=result))

    name, library = fault.operation.removeprefix("aten::"), torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch tells that a kernel of its own is replaced
        library.impl(name, {"mm": mm, "addmm": addmm}[name], device.type.upper())
    return library


def main() -> None:
    parser = argparse.ArgumentParser(description="Let a matrix product go wrong on one rank, and find it.")
    parser.add_argument("--times", type=positive_int, default=1, metavar="N", help="searches in a row (default: 1)")
    parser.add_argument("--seed", type=int, help="of data and fault (default: another one each time)")
    args = parser.parse_args()
    with process_group() as device:
        if dist.get_world_size() < 3:
            exit_together(f"two ranks have no majority: got {dist.get_world_size()}, expected 3 or more; use torchrun")
        windows = cut_windows(read_text().train, CONTEXT)
        found = [search(windows, shared_seed(args.seed) + index, device) for index in range(args.times)]
        say(f"\nfound {sum(found)} of {len(found)}")
    sys.exit(0 if all(found) else 1)


def search(windows: torch.Tensor, seed: int, device: torch.device) -> bool:
    """Collective: train until a cross-check reports, or all steps are done; returns whether the report is right."""
    settings = Namespace(seed=seed, lr=4e-3, resume=False, reduce_dtype=None, reproducible=False)
    training = start_training(settings, None, device)
    draw = random.Random(seed)  # equal on all ranks
    step = draw.randrange(STEPS)
    fault, shape = draw_fault(draw)
    say(f"\ntraining on {dist.get_world_size()} ranks; after one of the steps a matrix product goes wrong on one rank")
    report = train_until_reported(training, windows, seed, step, fault, shape)
    say(f"\n{report or 'nothing was reported'}")
    is_found = report is not None and describe(report) == fault
    say(f"\nplanted after step {step}: {fault}\n{'FOUND' if is_found else 'MISSED'}")
    return is_found


def train_until_reported(
    training: Training, windows: torch.Tensor, seed: int, step: int, fault: Fault, shape: tuple[int, ...]
) -> CrossCheckReport | None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    check = CrossCheck(training.model, loss_of, every=EVERY, raises=False)
    kernels = []
    while training.step < STEPS:
        if (training.step, rank) == (step, fault.rank):
            kernels.append(faulty_kernel(fault, shape, training.device))
        batch = global_batch(windows, training.step, WINDOWS_PER_RANK * world_size, seed)[rank::world_size]
        training.update([(rank, batch)])
        report = check(batch)
        if report is not None and not report.agrees:
            return report
    return None


def loss_of(model: nn.Module, windows: torch.Tensor) -> torch.Tensor:
    """The loss of a batch, as in the training."""
    loss, _ = summed_loss(model, windows.to(next(model.parameters()).device))
    return loss


def draw_fault(draw: random.Random) -> tuple[Fault, tuple[int, ...]]:
    """A fault, and the shape of the product. The bit is one of the upper mantissa: the training goes on."""
    stage, module, operation, shape = draw.choice(PRODUCTS)
    place = tuple(draw.randrange(size) for size in shape)
    return Fault(draw.randrange(dist.get_world_size()), stage, module, operation, place, draw.randrange(14, 23)), shape


def describe(report: CrossCheckReport) -> Fault | None:
    """The fault in the report, None for a report about anything but a single bit on one rank."""
    element = report.elements
    if len(report.ranks) != 1 or element is None or element.count != 1 or element.bit is None:
        return None
    (rank,) = report.ranks
    return Fault(rank, report.stage, report.module, report.operation, element.first_index, element.bit)


if __name__ == "__main__":
    main()
