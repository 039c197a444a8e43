"""Command line options of train_lm.py, and their checks."""

import argparse
import math
import os
from pathlib import Path
from typing import Any

import torch
from _checkpoint import CheckpointError, checkpoints, load_checkpoint
from _text import Text, cut_windows

from legacy_ddp.data import GlobalBatchSampler

CONTEXT = 64
DEFAULT_UPDATE_FREQ = 4
DEFAULT_MICRO_BATCHES = 8


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Train a byte-level language model on Python's own source.")
    parser.add_argument("--steps", type=positive_int, default=250, help="optimizer steps in all (default: 250)")
    parser.add_argument(
        "--update-freq", type=positive_int, metavar="N", help="micro-batches per step and rank (default: 4)"
    )
    parser.add_argument(
        "--batch-size", type=positive_int, default=16, help="windows per micro-batch and rank (default: 16)"
    )
    parser.add_argument("--lr", type=positive_float, default=4e-3, help="peak learning rate (default: 0.004)")
    parser.add_argument("--seed", type=int, default=0, help="of weights, dropout and data order (default: 0)")
    parser.add_argument(
        "--reduce-dtype", choices=("bfloat16", "float16"), help="dtype that gradients travel in (default: their own)"
    )
    parser.add_argument(
        "--reproducible", action="store_true", help="the same weights, to the last bit, on any number of ranks"
    )
    parser.add_argument(
        "--micro-batches",
        type=positive_int,
        metavar="M",
        help="with --reproducible: per step, of all ranks together (default: 8)",
    )
    parser.add_argument(
        "--held-out", type=positive_int, metavar="N", help="windows of held-out text to evaluate (default: all of them)"
    )
    parser.add_argument("--save", type=Path, metavar="DIR", help="write checkpoints here")
    parser.add_argument(
        "--save-every", type=positive_int, default=100, metavar="N", help="steps between checkpoints (default: 100)"
    )
    parser.add_argument(
        "--keep", type=at_least_two, metavar="N", help="checkpoints to keep, the newest (default: all of them)"
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
    parser.add_argument(
        "--operations", type=positive_int, metavar="STEP", help="with --record: record the operations of this step"
    )
    parser.add_argument(
        "--resume",
        nargs="?",
        choices=("newest", "auto"),
        const="newest",
        help="go on from the newest checkpoint in --save DIR; auto: if there is one, else start",
    )
    return parser


def positive_int(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a whole number of at least 1")
    return int(text)


def at_least_two(text: str) -> int:
    if not text.isdecimal() or int(text) < 2:  # the newest one may turn out to be damaged
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a whole number of at least 2")
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
    """The settings that must be equal on all ranks, and before and after a resume, by option name.

    Raises:
        ValueError: the text is shorter than one global batch, --record would overwrite a trace, or --operations lacks
            --record.
    """
    if args.operations and not args.record:
        raise ValueError("--operations has no folder: got no --record, expected --record DIR")
    if args.record and any(args.record.glob("rank-*.jsonl")):
        raise ValueError(f"--record folder is in use: got a trace in {args.record}, expected none; choose another one")
    if args.reproducible:
        if args.update_freq:
            raise ValueError("--update-freq follows from --micro-batches and the number of ranks; leave it out")
        args.micro_batches = args.micro_batches or DEFAULT_MICRO_BATCHES
        sampler_of(cut_windows(text.train, CONTEXT), args, int(os.environ.get("RANK", 0)), world_size)
        split = {"--micro-batches": args.micro_batches}
    elif args.micro_batches:
        raise ValueError("--micro-batches is of use with --reproducible only; add it, or give --update-freq")
    else:
        args.update_freq = args.update_freq or DEFAULT_UPDATE_FREQ
        check_size(args.batch_size * args.update_freq * world_size, len(cut_windows(text.train, CONTEXT)))
        split = {"world size": world_size, "--update-freq": args.update_freq}
    return {
        **split,
        "--batch-size": args.batch_size,
        "--lr": args.lr,
        "--seed": args.seed,
        "--reduce-dtype": args.reduce_dtype,
        "text": text.digest,
    }


def check_size(batch_size: int, window_count: int) -> None:
    if batch_size > window_count:
        raise ValueError(
            f"global batch is larger than the text: got {batch_size} windows, expected at most {window_count}; "
            "lower --batch-size or --update-freq"
        )


def read_checkpoint(args: argparse.Namespace, settings: dict[str, Any]) -> dict[str, Any] | None:
    """The checkpoint to resume, if requested.

    Raises:
        CheckpointError: --resume finds no usable checkpoint, or a run without --resume would mix two trainings.
    """
    if not args.resume:
        if args.save and (found := checkpoints(args.save)):
            raise CheckpointError(
                f"--save folder is in use: got {found[0]}, expected no checkpoint; "
                "add --resume or choose another folder"
            )
        return None
    if args.save is None:
        raise CheckpointError("--resume has no folder: got no --save, expected --save DIR; name the folder to resume")
    if args.resume == "auto" and not checkpoints(args.save):
        return None
    checkpoint = load_checkpoint(args.save, settings)
    if checkpoint["step"] > args.steps:
        raise CheckpointError(
            f"--steps is behind the newest checkpoint: got {args.steps}, expected at least {checkpoint['step']}"
        )
    return checkpoint


def sampler_of(windows: torch.Tensor, args: argparse.Namespace, rank: int, world_size: int) -> GlobalBatchSampler:
    """
    Raises:
        ValueError: the ranks cannot share the micro-batches of a step, or there is too little text.
    """
    return GlobalBatchSampler(
        len(windows), args.batch_size, args.micro_batches, seed=args.seed, rank=rank, world_size=world_size
    )
