"""A whole training script: the parts that most scripts have, for one rank or many.

python examples/whole_script.py
torchrun --standalone --nproc-per-node 2 examples/whole_script.py --amp --update-freq 2 --checkpoint runs/whole.pt
"""

import argparse
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset, TensorDataset

from legacy_ddp import LegacyDistributedDataParallel

CLASSES = 10
CLIP_NORM = 1.0
EMA_DECAY = 0.9

Batch = list[torch.Tensor]  # images of shape (n, 1, 8, 8), and their labels


def main() -> None:
    args = parse_args()
    device = start_process_group()
    try:
        train(args, device)
    finally:
        dist.destroy_process_group()


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small image classifier on noisy patterns.")
    parser.add_argument("--epochs", type=int, default=4, help="last epoch, counted from 1 (default: 4)")
    parser.add_argument("--batch-size", type=int, default=16, help="images per micro-batch and rank (default: 16)")
    parser.add_argument("--update-freq", type=int, default=2, help="micro-batches per step and rank (default: 2)")
    parser.add_argument("--dropout", type=float, default=0.1, help="share of dropped features (default: 0.1)")
    parser.add_argument("--seed", type=int, default=0, help="of weights, order and dropout (default: 0)")
    parser.add_argument("--amp", action="store_true", help="autocast to bfloat16, with a GradScaler")
    parser.add_argument("--compile", nargs="?", const="inductor", metavar="BACKEND", help="use torch.compile")
    parser.add_argument("--checkpoint", type=Path, help="save to this file after each epoch, and go on from it")
    return parser.parse_args()


def start_process_group() -> torch.device:
    """Collective: join the ranks of torchrun; without torchrun, make a group of one rank."""
    if torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", 1)):
        backend, device = "nccl", torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    else:
        backend, device = "gloo", torch.device("cpu")
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return device


@dataclass
class Training:
    """The objects of the loop. The first five have the state that a checkpoint holds."""

    module: nn.Module
    ema: AveragedModel
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    scaler: torch.amp.GradScaler
    model: LegacyDistributedDataParallel
    forward: Callable[[torch.Tensor], torch.Tensor]  # the model, or the compiled model
    device: torch.device


def build(args: argparse.Namespace, device: torch.device) -> Training:
    """Collective: the model starts from the weights of rank 0."""
    torch.manual_seed(args.seed)
    module = make_module(args.dropout).to(device)
    model = LegacyDistributedDataParallel(module)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return Training(
        module=module,
        ema=AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(EMA_DECAY)),
        optimizer=optimizer,
        scheduler=torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5),
        scaler=torch.amp.GradScaler(device.type, enabled=args.amp),
        model=model,
        forward=torch.compile(model, backend=args.compile) if args.compile else model,
        device=device,
    )


def train(args: argparse.Namespace, device: torch.device) -> None:
    """Collective: all epochs that the checkpoint does not have yet."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    train_set, held_out = make_data(600, seed=1), make_data(200, seed=2)
    sampler: DistributedSampler[Any] = DistributedSampler(train_set, seed=args.seed)
    loader = DataLoader(train_set, args.batch_size, sampler=sampler)
    training = build(args, device)
    for epoch in range(load_checkpoint(args.checkpoint, training), args.epochs):
        sampler.set_epoch(epoch)  # a different order in each epoch
        # Different dropout in each epoch and on each rank.
        torch.manual_seed(args.seed + 1 + epoch * world_size + rank)
        loss = train_epoch(training, progress_bar(loader, f"epoch {epoch + 1}"), args)
        training.scheduler.step()
        plain, averaged = evaluate(training, held_out)
        if rank == 0:
            text = f"loss {loss:.2f}, accuracy {plain:.2f}, EMA {averaged:.2f}"
            print(f"epoch {epoch + 1}: {text}", flush=True)
            save_checkpoint(args.checkpoint, training, epoch)


def train_epoch(training: Training, loader: Iterable[Batch], args: argparse.Namespace) -> float:
    """Collective: the mean loss of the epoch over all images of all ranks."""
    training.model.train()
    loss, images = 0.0, 0
    batches = iter(loader)
    while micro_batches := list(islice(batches, args.update_freq)):
        loss_of_step, images_of_step = train_step(training, micro_batches, args.amp)
        loss, images = loss + loss_of_step, images + images_of_step
    return loss / images


def train_step(training: Training, micro_batches: list[Batch], amp: bool) -> tuple[float, int]:
    """Collective: one step. Returns the sum of the loss and the number of images, of all ranks."""
    device, loss_sum, sample_size = training.device, torch.zeros((), device=training.device), 0
    for images, labels in micro_batches:
        with torch.autocast(device.type, torch.bfloat16, enabled=amp):
            logits = training.forward(images.to(device))
            loss = cross_entropy(logits, labels.to(device), reduction="sum")
        training.scaler.scale(loss).backward()  # adds to .grad; nothing is sent
        loss_sum += loss.detach()
        sample_size += len(labels)
    record = training.model.all_reduce(sample_size=sample_size, metrics={"loss": loss_sum})
    training.scaler.unscale_(training.optimizer)
    nn.utils.clip_grad_norm_(training.model.parameters(), CLIP_NORM)
    training.scaler.step(training.optimizer)
    training.scaler.update()
    training.optimizer.zero_grad()
    training.ema.update_parameters(training.module)  # equal on all ranks, as the weights are
    return record.metrics["loss"], record.divisor


def evaluate(training: Training, held_out: TensorDataset) -> tuple[float, float]:
    """Collective: the accuracy of the model, and of the averaged weights."""
    training.model.broadcast_buffers()  # all ranks take the BatchNorm statistics of rank 0
    pairs = zip(training.ema.module.buffers(), training.module.buffers(), strict=True)
    for averaged, current in pairs:
        averaged.copy_(current)
    part = Subset(held_out, range(dist.get_rank(), len(held_out), dist.get_world_size()))
    counts = {
        "plain": count_correct(training.model.eval(), part, training.device),
        "averaged": count_correct(training.ema.eval(), part, training.device),
        "images": len(part),
    }
    sums = training.model.all_reduce(skip=True, metrics=counts).metrics  # no gradients
    return sums["plain"] / sums["images"], sums["averaged"] / sums["images"]


@torch.inference_mode()
def count_correct(model: nn.Module, part: Dataset[Any], device: torch.device) -> int:
    """The number of images of this rank's part that the model classifies correctly."""
    count = 0
    for images, labels in DataLoader(part, batch_size=64):
        count += int((model(images.to(device)).argmax(1) == labels.to(device)).sum())
    return count


def save_checkpoint(path: Path | None, training: Training, epoch: int) -> None:
    """On rank 0. A kill at any moment leaves the old file or the new file, never a part."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".new")
    states = {name: part.state_dict() for name, part in saved_parts(training)}
    torch.save({"epoch": epoch, **states}, unfinished)
    unfinished.replace(path)


def load_checkpoint(path: Path | None, training: Training) -> int:
    """Collective: the next epoch; 0 without a file. Only the host of rank 0 needs the file."""
    received: list[Any] = [None]
    if dist.get_rank() == 0 and path is not None and path.exists():
        received = [torch.load(path, map_location="cpu", weights_only=True)]
    dist.broadcast_object_list(received, src=0)
    if (state := received[0]) is None:
        return 0
    for name, part in saved_parts(training):
        part.load_state_dict(state[name])
    return int(state["epoch"]) + 1


def saved_parts(training: Training) -> Iterator[tuple[str, Any]]:
    for name in ("module", "ema", "optimizer", "scheduler", "scaler"):
        yield name, getattr(training, name)


def progress_bar(batches: Iterable[Batch], label: str) -> Iterable[Batch]:
    """The batches; on rank 0 with a bar, if tqdm is installed and stderr is a terminal."""
    if dist.get_rank() != 0:
        return batches
    try:
        from tqdm import tqdm
    except ModuleNotFoundError:
        return batches
    # disable=None: only a terminal gets a bar.
    return tqdm(batches, desc=label, leave=False, disable=None)


def make_module(dropout: float) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(dropout),
        nn.Linear(16 * 4 * 4, CLASSES),
    )


def make_data(count: int, seed: int) -> TensorDataset:
    """Images of ten patterns with noise, the same on every rank; your script reads its files here."""
    patterns = torch.randn(CLASSES, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=draw)
    return TensorDataset(patterns[labels] + 1.5 * torch.randn(count, 1, 8, 8, generator=draw), labels)


if __name__ == "__main__":
    main()
