"""Equal training on many ranks and on a single rank: handwritten digits; the accuracy, then a proof in float64.

torchrun --standalone --nproc-per-node 2 examples/train_digits.py
"""

import argparse
from collections.abc import Iterator

import torch
import torch.distributed as dist
from _ranks import exit_together, process_group, require_identical_replicas
from torch import nn
from torch.nn.functional import cross_entropy

from legacy_ddp import LegacyDistributedDataParallel

HELD_OUT = 360
BATCH_SIZE = 64  # images in a step, over all ranks and micro-batches
LEARNING_RATE = 3e-3
MIN_ACCURACY = 0.97
PARITY_EPOCHS = 2
PARITY_TOLERANCE = 1e-12

Digits = tuple[torch.Tensor, torch.Tensor]  # images of shape (n, 1, 8, 8), and their labels


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on the handwritten digits of scikit-learn.")
    parser.add_argument("--epochs", type=int, default=20, help="passes over the training images (default: 20)")
    parser.add_argument(
        "--update-freq", type=int, default=4, metavar="N", help="micro-batches per step and rank (default: 4)"
    )
    args = parser.parse_args()
    if min(args.epochs, args.update_freq) < 1:
        parser.error(f"--epochs, --update-freq: got {args.epochs}, {args.update_freq}, expected at least 1")
    try:
        train_set, test_set = load_digits()
    except ModuleNotFoundError as error:
        parser.error(f'{error.name} is not installed; run: pip install "legacy_ddp[demo]"')
    with process_group() as device:
        show_accuracy(to(device, train_set), to(device, test_set), args.epochs, args.update_freq)
        show_parity(to(device, train_set), args.update_freq)


def show_accuracy(train_set: Digits, test_set: Digits, epochs: int, update_freq: int) -> None:
    """Collective: train, and exit on every rank unless enough held-out digits are classified correctly."""
    model = LegacyDistributedDataParallel(make_model(train_set))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs)
    for epoch in range(epochs):
        for batch in global_batches(train_set, epoch):
            update(model, optimizer, batch, update_freq)
        schedule.step()
    require_identical_replicas(model)

    images, labels = test_set
    with torch.inference_mode():
        accuracy = (model(images).argmax(1) == labels).double().mean().item()
    if dist.get_rank() == 0:
        print(f"accuracy {accuracy:.4f}", flush=True)
    if accuracy < MIN_ACCURACY:
        exit_together(f"accuracy is too low: got {accuracy:.4f}, expected at least {MIN_ACCURACY}")


def show_parity(train_set: Digits, update_freq: int) -> None:
    """Collective: train in float64 on all ranks and on a single rank; exit on every rank if the weights differ.

    Why float64: each order of summation rounds differently, AdamW magnifies the difference, and in float32 the
    difference would hide a bug.
    """
    train_set = (train_set[0].double(), train_set[1])
    model, reference = LegacyDistributedDataParallel(make_model(train_set)), make_model(train_set)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    reference_optimizer = torch.optim.AdamW(reference.parameters(), lr=LEARNING_RATE)
    world_size = dist.get_world_size()
    for epoch in range(PARITY_EPOCHS):
        for batch in global_batches(train_set, epoch):
            update(model, optimizer, batch, update_freq)
            update_alone(reference, reference_optimizer, batch, world_size * update_freq)

    pairs = zip(model.module.parameters(), reference.parameters(), strict=True)
    difference = torch.stack([(ours - theirs).detach().abs().max() for ours, theirs in pairs]).max()
    dist.all_reduce(difference, dist.ReduceOp.MAX)  # each rank has a reference of its own
    if not difference <= PARITY_TOLERANCE:  # NaN is not
        exit_together(f"weights differ from one rank's: got {difference:.1e}, expected at most {PARITY_TOLERANCE:.0e}")
    if dist.get_rank() == 0:
        print(
            f"float64: {world_size} rank{'s' * (world_size > 1)} x update-freq {update_freq} "
            f"equals 1 rank x update-freq {world_size * update_freq} to {difference:.1e}",
            flush=True,
        )


def update(model: LegacyDistributedDataParallel, optimizer: torch.optim.Optimizer, batch: Digits, freq: int) -> None:
    """Collective: one step, from this rank's part of ``batch`` in ``freq`` micro-batches.

    The parts need not be equally large: all_reduce() divides by the number of images on all ranks.
    """
    images, labels = (tensor[dist.get_rank() :: dist.get_world_size()] for tensor in batch)
    optimizer.zero_grad()
    for micro_images, micro_labels in zip(images.tensor_split(freq), labels.tensor_split(freq), strict=True):
        cross_entropy(model(micro_images), micro_labels, reduction="sum").backward()
    model.all_reduce(sample_size=len(images))
    optimizer.step()


def update_alone(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Digits, freq: int) -> None:
    """The same step in plain torch: the whole batch in one process, without legacy_ddp and without communication."""
    images, labels = batch
    optimizer.zero_grad()
    for micro_images, micro_labels in zip(images.tensor_split(freq), labels.tensor_split(freq), strict=True):
        cross_entropy(model(micro_images), micro_labels, reduction="sum").backward()
    for parameter in model.parameters():
        parameter.grad /= len(images)
    optimizer.step()


def global_batches(train_set: Digits, epoch: int) -> Iterator[Digits]:
    """The training images in an equal order on every rank; the last batch of an epoch is smaller."""
    images, labels = train_set
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(epoch)).to(images.device)
    for chosen in order.split(BATCH_SIZE):
        yield images[chosen], labels[chosen]


def make_model(like: Digits) -> nn.Module:
    """A model with equal weights at every call, with dtype and device of the images."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )
    return model.to(like[0])


def load_digits() -> tuple[Digits, Digits]:
    """Training and held-out digits, shuffled equally on every rank."""
    from sklearn import datasets  # an extra: only this script needs it

    digits = datasets.load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(digits.images, dtype=torch.float32)[order, None] / 16
    labels = torch.tensor(digits.target)[order]
    return (images[HELD_OUT:], labels[HELD_OUT:]), (images[:HELD_OUT], labels[:HELD_OUT])


def to(device: torch.device, digits: Digits) -> Digits:
    return digits[0].to(device), digits[1].to(device)


if __name__ == "__main__":
    main()
