"""How does a training loop with gradient accumulation look? A language model of Python's own source, byte by byte.

torchrun --standalone --nproc-per-node 2 examples/train_lm.py --update-freq 4
"""

import argparse
import math
import os
import sys
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _checkpoint import CheckpointError, load_checkpoint, newest_checkpoint, save_checkpoint
from _progress import Progress
from _ranks import (
    gather_random_states,
    process_group,
    require_equal_settings,
    require_identical_replicas,
    restore_random_state,
)
from _text import BYTE_VALUES, Text, TextError, bigram_bits, bigram_bits_per_byte, cut_windows, read_text
from torch import nn
from torch.nn.functional import cross_entropy

from legacy_ddp import LegacyDistributedDataParallel
from legacy_ddp.debug import Recorder

CONTEXT = 64
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
            print_result(training, text)
    except KeyboardInterrupt:
        if rank == 0:
            hint = "; --resume goes on from the newest checkpoint" if args.save else ""
            print(f"interrupted{hint}", file=sys.stderr, flush=True)
        sys.exit(130)


def train(training: "Training", args: argparse.Namespace, text: Text, settings: dict[str, Any]) -> None:
    """Collective: take the steps that are left; rank 0 shows progress and writes the checkpoints."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    windows = cut_windows(text.train, CONTEXT)
    batch_size = args.batch_size * args.update_freq * world_size
    progress = Progress(training.step, args.steps, visible=rank == 0)
    with recording(training, args):
        while training.step < args.steps:
            mine = global_batch(windows, training.step, batch_size, args.seed)[rank::world_size]
            bits = training.update(mine.chunk(args.update_freq))
            progress.show(training.step, bits)
            if args.check_every and training.step % args.check_every == 0:
                require_identical_replicas(training.model, training.optimizer)
            if args.save and (training.step % args.save_every == 0 or training.step == args.steps):
                state = training.state()
                if rank == 0:
                    save_checkpoint(args.save, training.step, {"settings": settings, **state})
    progress.close()


def recording(training: "Training", args: argparse.Namespace) -> AbstractContextManager[object]:
    """Writes what every step holds to --record DIR, to be compared with ``legacy-ddp diff``."""
    if args.record is None:
        return nullcontext()
    return Recorder(
        training.model,
        args.record,
        optimizer=training.optimizer,
        every=args.record_every,
        first_step=training.step + 1,
    )


@dataclass
class Training:
    """What changes from step to step, which is what a checkpoint holds."""

    model: LegacyDistributedDataParallel
    optimizer: torch.optim.Optimizer
    device: torch.device
    peak_learning_rate: float
    step: int = 0
    calls: int = 0
    earlier_calls: int = 0  # of the runs before the resume

    def update(self, micro_batches: Iterable[torch.Tensor]) -> float:
        """Collective: one step. Returns this rank's loss in bits per byte."""
        self.optimizer.zero_grad()
        loss_sum, sample_size = 0.0, 0
        for windows in micro_batches:
            loss, count = summed_loss(self.model, windows.to(self.device))
            loss.backward()  # communicates nothing, so accumulating gradients needs no no_sync()
            loss_sum, sample_size = loss_sum + loss.item(), sample_size + count
        record = self.model.all_reduce(sample_size=sample_size)
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIP_NORM)  # after all_reduce(), so that all ranks clip alike
        for group in self.optimizer.param_groups:
            group["lr"] = self.peak_learning_rate * learning_rate_factor(self.step)
        self.optimizer.step()
        self.step += 1
        self.calls = self.earlier_calls + record.call
        return in_bits(loss_sum / sample_size)

    def state(self) -> dict[str, Any]:
        """Collective: everything that :meth:`restore` needs, on every rank."""
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
    """Collective: a training at its first step, or where rank 0's ``checkpoint`` was saved."""
    torch.manual_seed(args.seed)
    reduce_dtype = getattr(torch, args.reduce_dtype) if args.reduce_dtype else None
    model = LegacyDistributedDataParallel(ByteModel().to(device), checks=checks, reduce_dtype=reduce_dtype)
    optimizer = torch.optim.AdamW(model.parameters())
    torch.manual_seed(args.seed + 1 + dist.get_rank())  # from here on dropout differs from rank to rank
    training = Training(model, optimizer, device, args.lr)
    if args.resume:
        received: list[Any] = [checkpoint]
        dist.broadcast_object_list(received, src=0)  # only rank 0's host needs the folder
        training.restore(received[0])
    return training


def summed_loss(model: nn.Module, windows: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Loss summed over the targets, and how many they are: all_reduce() divides by their number on all ranks."""
    inputs, targets = windows[:, :-1].long(), windows[:, 1:].long()
    loss = cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), reduction="sum")
    return loss, targets.numel()


def global_batch(windows: torch.Tensor, step: int, batch_size: int, seed: int) -> torch.Tensor:
    """The windows that all ranks read in a step. It follows from the step alone, so a resumed run finds its place."""
    epoch, index = divmod(step, len(windows) // batch_size)
    order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(seed + epoch))
    return windows[order[index * batch_size : (index + 1) * batch_size]]


def learning_rate_factor(step: int) -> float:
    """Linear warm-up, then the inverse square root: without a last step, so a finished training can go on."""
    return min((step + 1) / WARMUP_STEPS, math.sqrt(WARMUP_STEPS / (step + 1)))


def in_bits(nats: float) -> float:
    return nats / math.log(2)


def print_result(training: Training, text: Text) -> None:
    """Collective: rank 0 prints what was learned, after all ranks have shown that they hold the same bits."""
    held_out = cut_windows(text.held_out, CONTEXT)
    bits = evaluate(training.model, held_out, training.device)
    require_identical_replicas(training.model, training.optimizer)
    if dist.get_rank() == 0:
        bigram = bigram_bits_per_byte(bigram_bits(text.train), held_out)
        print(
            f"done: {bits:.3f} bits/byte (bigram {bigram:.3f}), {training.step} steps, "
            f"{training.calls} all_reduce calls, replicas identical",
            flush=True,
        )


@torch.inference_mode()
def evaluate(model: nn.Module, windows: torch.Tensor, device: torch.device) -> float:
    """Collective: bits per byte on ``windows``, of which every rank reads its own part."""
    model.eval()
    total = torch.zeros(2, dtype=torch.float64)
    for batch in windows[dist.get_rank() :: dist.get_world_size()].split(256):
        loss, count = summed_loss(model, batch.to(device))
        total += torch.tensor([loss.item(), count])
    total = total.to(device)
    dist.all_reduce(total)
    loss_sum, count = total.tolist()
    return in_bits(loss_sum / count)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Train a byte-level language model on Python's own source.")
    parser.add_argument("--steps", type=positive_int, default=250, help="optimizer steps in all (default: 250)")
    parser.add_argument(
        "--update-freq", type=positive_int, default=4, metavar="N", help="micro-batches per step and rank (default: 4)"
    )
    parser.add_argument(
        "--batch-size", type=positive_int, default=16, help="windows per micro-batch and rank (default: 16)"
    )
    parser.add_argument("--lr", type=positive_float, default=4e-3, help="peak learning rate (default: 0.004)")
    parser.add_argument("--seed", type=int, default=0, help="of weights, dropout and data order (default: 0)")
    parser.add_argument(
        "--reduce-dtype", choices=("bfloat16", "float16"), help="dtype that gradients travel in (default: their own)"
    )
    parser.add_argument("--save", type=Path, metavar="DIR", help="write checkpoints here")
    parser.add_argument(
        "--save-every", type=positive_int, default=100, metavar="N", help="steps between checkpoints (default: 100)"
    )
    parser.add_argument(
        "--check-every",
        type=positive_int,
        metavar="N",
        help="steps between checks of the replicas (default: none)",
    )
    parser.add_argument("--record", type=Path, metavar="DIR", help="write a trace here, for legacy-ddp diff")
    parser.add_argument(
        "--record-every", type=positive_int, default=1, metavar="N", help="steps between its entries (default: 1)"
    )
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in --save DIR")
    return parser


def positive_int(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a whole number of at least 1")
    return int(text)


def positive_float(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (value > 0 and math.isfinite(value)):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a finite number above 0")
    return value


def checked_settings(args: argparse.Namespace, text: Text, world_size: int) -> dict[str, Any]:
    """What must be equal on all ranks, and before and after a resume, under the names that a user knows.

    Raises:
        ValueError: the text is shorter than one global batch, or --record would overwrite a trace.
    """
    if args.record and any(args.record.glob("rank-*.jsonl")):
        raise ValueError(f"--record folder is in use: got a trace in {args.record}, expected none; choose another one")
    batch_size = args.batch_size * args.update_freq * world_size
    window_count = len(cut_windows(text.train, CONTEXT))
    if batch_size > window_count:
        raise ValueError(
            f"global batch is larger than the text: got {batch_size} windows, expected at most {window_count}; "
            "lower --batch-size or --update-freq"
        )
    return {
        "world size": world_size,
        "--update-freq": args.update_freq,
        "--batch-size": args.batch_size,
        "--lr": args.lr,
        "--seed": args.seed,
        "--reduce-dtype": args.reduce_dtype,
        "text": text.digest,
    }


def read_checkpoint(args: argparse.Namespace, settings: dict[str, Any]) -> dict[str, Any] | None:
    """The checkpoint to resume, if one was asked for.

    Raises:
        CheckpointError: --resume cannot find, read or continue one, or a run without it would mix two trainings.
    """
    if not args.resume:
        if args.save and (found := newest_checkpoint(args.save)):
            raise CheckpointError(
                f"--save folder is in use: got {found}, expected no checkpoint; add --resume or choose another folder"
            )
        return None
    if args.save is None:
        raise CheckpointError("--resume has no folder: got no --save, expected --save DIR; name the folder to resume")
    checkpoint = load_checkpoint(args.save, settings)
    if checkpoint["step"] > args.steps:
        raise CheckpointError(
            f"--steps is behind the newest checkpoint: got {args.steps}, expected at least {checkpoint['step']}"
        )
    return checkpoint


if __name__ == "__main__":
    main()
