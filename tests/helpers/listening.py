"""A small training on every rank, and all that was said of it: log records, stderr, reports."""

import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from legacy_ddp import Checks, LegacyDistributedDataParallel
from tests.helpers.ranks import run_ranks

WARN_SECONDS = 1.0


def said_path(folder: Path, rank: int) -> Path:
    return folder / f"said-by-rank-{rank}.txt"


def listen(function: Callable[..., Any], folder: Path, rank: int, *args: Any) -> Any:
    """Child: keep in a file whatever it says until its process ends: log records, and what reaches stderr otherwise."""
    os.dup2(os.open(said_path(folder, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND), sys.stderr.fileno())
    handler = logging.StreamHandler(sys.stderr)
    handler.setLevel(logging.WARNING)
    handler.setFormatter(logging.Formatter("%(name)s %(levelname)s: %(message)s"))
    logging.getLogger("legacy_ddp").addHandler(handler)
    return function(rank, folder, *args)


@contextmanager
def hearing(level: int = logging.WARNING) -> Iterator[list[str]]:
    """The messages that the library logs in this process, from ``level`` on."""
    logger, heard = logging.getLogger("legacy_ddp"), list[str]()
    handler, before = logging.Handler(level), logger.level
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        yield heard
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


def said(folder: Path, rank: int) -> list[str]:
    return said_path(folder, rank).read_text().splitlines()


def reports(folder: Path) -> list[Path]:
    return sorted(folder.glob("legacy_ddp-*.txt"))


def run(function: Callable[..., Any], world_size: int, folder: Path, *args: Any) -> tuple[list[Any], list[str]]:
    """What the ranks return, and all lines that they said; they leave no report."""
    results = run_ranks(partial(listen, function, folder), world_size, *args, fresh=True)
    assert [path.read_text() for path in reports(folder)] == []
    return results, [line for rank in range(world_size) for line in said(folder, rank)]


def run_silently(function: Callable[..., Any], world_size: int, folder: Path, *args: Any) -> list[Any]:
    results, lines = run(function, world_size, folder, *args)
    assert lines == []
    return results


class Training:
    """A small model that is trained on every rank; ``waits``: how long each call waited for other ranks.

    In the early calls the first warning of a wait is one line.
    """

    def __init__(self, folder: Path | None, *, early_calls: int = 2, process_group: Any = None, **checks: Any) -> None:
        checks = {"warn_after_seconds": WARN_SECONDS, "report_dir": folder, **checks}
        model = nn.Linear(4, 2)
        self.model = LegacyDistributedDataParallel(model, process_group=process_group, checks=Checks(**checks))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.waits: list[float] = []
        for _ in range(early_calls):
            self.step()

    def step(self) -> None:
        self.model(torch.full((3, 4), 1.0 + dist.get_rank())).sum().backward()  # equal data would be warned of
        record = self.model.all_reduce()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.waits.append(record.seconds["agree"])


def own_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("legacy_ddp")]
