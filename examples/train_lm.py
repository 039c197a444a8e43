"""A training loop with gradient accumulation: a language model of Python's source, byte by byte.

torchrun --standalone --nproc-per-node 2 examples/train_lm.py --update-freq 4
torchrun --standalone --nproc-per-node 2 examples/train_lm.py --reproducible --micro-batches 8
"""

import argparse
import hashlib
import math
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from _batches import MicroBatch, dealt, shared_out
from _checkpoint import CheckpointError, save_checkpoint
from _lm_options import CONTEXT, build_parser, checked_settings, read_checkpoint, sampler_of
from _progress import Progress
from _ranks import (
    gather_random_states,
    process_group,
    require_equal_settings,
    require_identical_replicas,
    restore_random_state,
)
from _text import (
    BYTE_VALUES,
    Text,
    TextError,
    bigram_bits,
    bigram_bits_per_byte,
    cut_windows,
    read_text,
)
from torch import nn
from torch.nn.functional import cross_entropy

from legacy_ddp import LegacyDistributedDataParallel
from legacy_ddp.data import micro_batch_rng
from legacy_ddp.debug import Recorder

WARMUP_STEPS = 30
CLIP_NORM = 1.0


def main() -> None:
    parser = build_parser()
    args = parser.parse_args()
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    try:  # what one rank can find wrong alone, it finds before the others wait for it
        text = read_text()
        settings = checked_settings(args, text, world_size)
        checkpoint = read_checkpoint(args, settings) if rank == 0 else None
    except (CheckpointError, TextError, ValueError) as error:
        parser.error(str(error))
    try:
        with process_group() as device:
            require_equal_settings(settings)
            training = start_training(args, checkpoint, device)
            train(training, args, text, settings)
            print_result(training, text, cut_windows(text.held_out, CONTEXT)[: args.held_out])
    except KeyboardInterrupt:
        if rank == 0:
            hint = "; --resume goes on from the newest checkpoint" if args.save else ""
            print(f"interrupted{hint}", file=sys.stderr, flush=True)
        sys.exit(130)


def train(training: "Training", args: argparse.Namespace, text: Text, settings: dict[str, Any]) -> None:
    """Collective: take the remaining steps; rank 0 shows progress and writes the checkpoints."""
    rank = dist.get_rank()
    progress = Progress(training.step, args.steps, visible=rank == 0)
    batches = micro_batches(cut_windows(text.train, CONTEXT), args, training.step)
    with recording(training, args):
        while training.step < args.steps:
            bits = training.update(next(batches))
            progress.show(training.step, bits)
            if args.check_every and training.step % args.check_every == 0:
                require_identical_replicas(training.model, training.optimizer)
            if args.save and (training.step % args.save_every == 0 or training.step == args.steps):
                state = training.state()
                if rank == 0:
                    save_checkpoint(args.save, training.step, {"settings": settings, **state}, keep=args.keep)
    progress.close()


def micro_batches(windows: torch.Tensor, args: argparse.Namespace, first_step: int) -> Iterator[list[MicroBatch]]:
    """Per step, the micro-batches of this rank; with --reproducible independent of the world size."""
    if args.reproducible:
        return shared_out(windows, first_step, sampler_of(windows, args, dist.get_rank(), dist.get_world_size()))
    return dealt(
        windows,
        first_step,
        batch_size=args.batch_size,
        update_freq=args.update_freq,
        seed=args.seed,
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
    )


def recording(training: "Training", args: argparse.Namespace) -> AbstractContextManager[object]:
    """A recorder of every step to --record DIR, for ``legacy-ddp diff``."""
    if args.record is None:
        return nullcontext()
    return Recorder(
        training.model,
        args.record,
        optimizer=training.optimizer,
        every=args.record_every,
        first_step=training.step + 1,
        operations=range(args.operations, args.operations + 1) if args.operations else (),
    )


@dataclass
class Training:
    """The state that changes from step to step: the contents of a checkpoint."""

    model: LegacyDistributedDataParallel
    optimizer: torch.optim.Optimizer
    device: torch.device
    peak_learning_rate: float
    seed: int
    reproducible: bool = False
    step: int = 0
    calls: int = 0
    earlier_calls: int = 0  # of the runs before the resume

    def update(self, micro_batches: Iterable[MicroBatch]) -> float:
        """Collective: one step. Returns the loss over all ranks in bits per byte."""
        self.optimizer.zero_grad()
        loss_sum, sample_size = 0.0, 0
        for number, windows in micro_batches:
            with self.micro_batch(number):
                loss, count = summed_loss(self.model, windows.to(self.device))
                loss.backward()
            loss_sum, sample_size = loss_sum + loss.item(), sample_size + count
        record = self.model.all_reduce(sample_size=sample_size, metrics={"loss": loss_sum})
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIP_NORM)  # after all_reduce(), so that all ranks clip alike
        for group in self.optimizer.param_groups:
            group["lr"] = self.peak_learning_rate * learning_rate_factor(self.step)
        self.optimizer.step()
        self.step += 1
        self.calls = self.earlier_calls + record.call
        return in_bits(record.metrics["loss"] / record.sample_size)

    @contextmanager
    def micro_batch(self, number: int) -> Iterator[None]:
        """Backward does not communicate, hence accumulation needs no no_sync(); but --reproducible needs a block per
        micro-batch, in which dropout depends on the step and the number alone."""
        if not self.reproducible:
            yield
            return
        with self.model.no_sync(), micro_batch_rng(self.step, number, seed=self.seed):
            yield

    def state(self) -> dict[str, Any]:
        """Collective: the state for :meth:`restore`, on every rank."""
        return {
            "step": self.step,
            "calls": self.calls,
            "model": self.model.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "random": gather_random_states(self.device),
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.step = state["step"]
        self.calls = self.earlier_calls = state["calls"]
        self.model.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if not self.reproducible:  # then every micro-batch is seeded, and the world size may be another one
            restore_random_state(state["random"][dist.get_rank()], self.device)


class ByteModel(nn.Module):
    """Logits of the next byte after each byte of a window; every window starts without memory."""

    def __init__(self, embedding: int = 64, hidden: int = 192, dropout: float = 0.1) -> None:
        super().__init__()
        self.embed = nn.Embedding(BYTE_VALUES, embedding)
        self.gru = nn.GRU(embedding, hidden, batch_first=True)
        self.dropout = nn.Dropout(dropout)
        self.logits = nn.Linear(hidden, BYTE_VALUES)

    def forward(self, windows: torch.Tensor) -> torch.Tensor:
        states, _ = self.gru(self.embed(windows))
        return self.logits(self.dropout(states))


def start_training(
    args: argparse.Namespace, checkpoint: dict[str, Any] | None, device: torch.device, *, checks: str = "info"
) -> Training:
    """Collective: a training at its first step, or at the step of rank 0's ``checkpoint``."""
    torch.manual_seed(args.seed)
    reduce_dtype = getattr(torch, args.reduce_dtype) if args.reduce_dtype else None
    model = LegacyDistributedDataParallel(
        ByteModel().to(device), checks=checks, reduce_dtype=reduce_dtype, reproducible=args.reproducible
    )
    optimizer = torch.optim.AdamW(model.parameters())
    torch.manual_seed(args.seed + 1 + dist.get_rank())  # from here on dropout differs from rank to rank
    training = Training(model, optimizer, device, args.lr, args.seed, args.reproducible)
    if args.resume:
        received: list[Any] = [checkpoint]
        dist.broadcast_object_list(received, src=0)  # only rank 0's host needs the folder
        if received[0] is not None:
            training.restore(received[0])
    return training


def summed_loss(model: nn.Module, windows: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Loss summed over the targets, and their number: all_reduce() divides by their number on all ranks."""
    inputs, targets = windows[:, :-1].long(), windows[:, 1:].long()
    loss = cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), reduction="sum")
    return loss, targets.numel()


def learning_rate_factor(step: int) -> float:
    """Linear warm-up, then the inverse square root: without a last step, hence a finished training can be continued."""
    return min((step + 1) / WARMUP_STEPS, math.sqrt(WARMUP_STEPS / (step + 1)))


def in_bits(nats: float) -> float:
    return nats / math.log(2)


def print_result(training: Training, text: Text, held_out: torch.Tensor) -> None:
    """Collective: rank 0 prints the result, after a check that all ranks have equal bits."""
    bits = evaluate(training.model, held_out, training.device)
    require_identical_replicas(training.model, training.optimizer)
    if dist.get_rank() == 0:
        bigram = bigram_bits_per_byte(bigram_bits(text.train), held_out)
        print(
            f"done: {bits:.3f} bits/byte (bigram {bigram:.3f}), {training.step} steps, "
            f"{training.calls} all_reduce calls, replicas identical",
            flush=True,
        )
        if training.reproducible:
            print(f"weights {hash_of(training.model.module)}", flush=True)


def hash_of(module: nn.Module) -> str:
    """Hash of all weights, bit for bit."""
    found = hashlib.sha256()
    for name, tensor in module.state_dict().items():
        found.update(name.encode())
        found.update(tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


@torch.inference_mode()
def evaluate(model: nn.Module, windows: torch.Tensor, device: torch.device) -> float:
    """Collective: bits per byte on ``windows``; every rank reads its own part."""
    model.eval()
    total = torch.zeros(2, dtype=torch.float64)
    for batch in windows[dist.get_rank() :: dist.get_world_size()].split(256):
        loss, count = summed_loss(model, batch.to(device))
        total += torch.tensor([loss.item(), count])
    total = total.to(device)
    dist.all_reduce(total)
    loss_sum, count = total.tolist()
    return in_bits(loss_sum / count)


if __name__ == "__main__":
    main()
