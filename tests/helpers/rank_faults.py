"""Faults that happen to a rank, and what each of the other ranks sees of them.

A scene is a short training on every rank; in the call after ``Scene.calls`` good ones the victims meet their fault.
"""

import ctypes
import os
import re
import select
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from legacy_ddp import Checks, LegacyDDPError, LegacyDistributedDataParallel, LostPeerError
from tests.helpers.ranks import run_ranks
from tests.helpers.small_models import error_of


@dataclass(frozen=True)
class Seen:
    """What a survivor saw: the error as it left the call, what lay on disk in that moment, and what was left."""

    kind: str
    ranks: tuple[int, ...]
    phase: str | None
    text: str
    report: str
    seconds: float  # from the fault to the error
    file: Path
    file_text: str
    on_host: bool
    gradients: str
    again: str


@dataclass(frozen=True)
class Scene:
    """``fault`` is what the victims do instead of taking part in a call, or on the way to it."""

    directory: Path
    victims: tuple[int, ...]
    fault: Callable[["Stage"], object]
    timeout_seconds: float = 30.0
    calls: int = 2
    numel: int = 8
    buffer_size: int = 2**28
    reproducible: bool = False
    # What survivors do just before the call in which they lose the victims.
    before: Callable[["Stage"], object] | None = None


class Stage:
    """One rank's part in a scene. Ranks leave notes for each other, and wait for those of others."""

    def __init__(self, scene: Scene, rank: int) -> None:
        self.scene = scene
        self.rank = rank
        self.size = dist.get_world_size()
        self._notes = dist.FileStore(str(scene.directory / "notes"), -1)
        self.model = LegacyDistributedDataParallel(
            nn.Linear(scene.numel, 1, bias=False),
            buffer_size=scene.buffer_size,
            reproducible=scene.reproducible,
            checks=Checks(report_dir=scene.directory),
            timeout_seconds=scene.timeout_seconds,
        )
        self.weight = self.model.module.weight
        self.note(f"pid {rank}", str(os.getpid()))

    def step(self, value: float) -> float:
        """One good call; the first element of the averaged gradient."""
        self.backward(value)
        self.reduce()
        return self.weight.grad.flatten()[0].item()

    def reduce(self) -> None:
        self.model.all_reduce(sample_size=1 if self.scene.reproducible else None)

    def backward(self, value: float) -> None:
        self.model.zero_grad()
        self.model(torch.full((1, self.scene.numel), value)).sum().backward()

    def note(self, name: str, value: str = "") -> None:
        self._notes.set(name, value)

    def read(self, name: str) -> str:
        """What was noted; waits for it."""
        return self._notes.get(name).decode()

    def note_the_fault(self) -> None:
        """To be called right before it."""
        self.note("fault", str(time.monotonic()))

    def get_signal(self, number: int = signal.SIGKILL) -> None:
        """The fault: this signal."""
        self.note_the_fault()
        os.kill(os.getpid(), number)

    def pid(self, rank: int) -> int:
        return int(self.read(f"pid {rank}"))

    def await_waiting(self, ranks: Collection[int]) -> None:
        for rank in ranks:
            self.read(f"waiting {rank}")

    @property
    def is_on_host(self) -> bool:
        """Whether gradients are summed in shared memory; after the first call."""
        return "transport: host" in self.model.extra_repr()

    @property
    def survivors(self) -> tuple[int, ...]:
        return tuple(rank for rank in range(self.size) if rank not in self.scene.victims)

    @property
    def first_victim(self) -> int:
        return self.scene.victims[0]


def play(scene: Scene, world_size: int, **options: Any) -> dict[int, Seen]:
    """What every survivor of the scene saw, by rank."""
    seen = run_ranks(_play, world_size, scene, lost=scene.victims, **options)
    return {rank: seen[rank] for rank in range(world_size) if rank not in scene.victims}


def _play(rank: int, scene: Scene) -> Seen | None:
    stage = Stage(scene, rank)
    for call in range(scene.calls):
        stage.step(float(call + 1))
    if rank in scene.victims:
        scene.fault(stage)
        return None
    stage.backward(float(rank))
    if scene.before is not None:
        scene.before(stage)
    return _survive(stage)


def _survive(stage: Stage) -> Seen:
    before = stage.weight.grad.clone()
    sys.setprofile(do_when(WAITS, partial(stage.note, f"waiting {stage.rank}")))
    try:
        stage.reduce()
    except LostPeerError as error:
        seconds = time.monotonic() - float(stage.read("fault"))
        sys.setprofile(None)
        path = Path(re.findall(r"\(also in (.*)\)", str(error))[0])
        text, after = path.read_text(), stage.weight.grad
        return Seen(
            kind=type(error).__name__,
            ranks=error.ranks,
            phase=error.phase,
            text=str(error),
            report=error.report,
            seconds=seconds,
            file=path,
            file_text=text,
            on_host=stage.is_on_host,
            gradients="none" if after is None else "untouched" if torch.equal(before, after) else "other",
            again=(error_of(stage.model.all_reduce) or ("",))[0],
        )
    raise AssertionError("no error: the call succeeded without its victims")


# What a rank enters to wait for another: over gloo, and on the host.
WAITS = ("_poll", "_receive", "_receive_from")


def do_when(
    function: str | Collection[str], act: Callable[[], object], *, nth: int = 1
) -> Callable[[FrameType, str, object], None]:
    """A profiler that acts when ``function`` is entered for the ``nth`` time: an exact place, in code as it is.

    Of several functions the first that is entered counts.
    """
    names = {function} if isinstance(function, str) else {*function}
    entered = 0

    def profile(frame: FrameType, event: str, argument: object) -> None:
        nonlocal entered
        if event == "call" and frame.f_code.co_name in names:
            entered += 1
            if entered == nth:
                act()

    return profile


@contextmanager
def counting(function: str) -> Iterator[list[int]]:
    """A list of one number: how often ``function`` was entered inside the block."""
    count = [0]

    def profile(frame: FrameType, event: str, argument: object) -> None:
        count[0] += event == "call" and frame.f_code.co_name == function

    sys.setprofile(profile)
    try:
        yield count
    finally:
        sys.setprofile(None)


def error_after_interrupt(call: Callable[[], object], function: str, *, here: bool) -> str:
    """The type of the error of ``call``, empty after success. With ``here`` Ctrl-C comes as ``function`` is entered.

    The error itself would keep gradients alive.
    """
    if here:
        sys.setprofile(do_when(function, _interrupt))
    try:
        call()
    except (KeyboardInterrupt, LegacyDDPError) as error:
        return type(error).__name__
    finally:
        sys.setprofile(None)
    return ""


def _interrupt() -> None:
    raise KeyboardInterrupt


def killed(stage: Stage) -> None:
    """By SIGKILL, while the others wait."""
    stage.await_waiting(stage.survivors)
    stage.get_signal()


def killed_early(stage: Stage) -> None:
    """By SIGKILL, before the others call; see :func:`outlive_in_backward`."""
    for rank in stage.survivors:
        stage.read(f"in backward {rank}")
    stage.get_signal()


def outlive_in_backward(stage: Stage) -> None:
    """For survivors: backward ends only after the victim did."""

    def outlive(gradient: torch.Tensor) -> None:
        stage.note(f"in backward {stage.rank}")
        end = os.pidfd_open(stage.pid(stage.first_victim))
        assert select.select([end], [], [], 30.0)[0]
        os.close(end)

    output = stage.model(torch.ones(1, stage.scene.numel))
    output.register_hook(outlive)
    output.sum().backward()


def stopped(stage: Stage) -> None:
    stage.await_waiting(stage.survivors)
    stage.get_signal(signal.SIGSTOP)


def fails_in_a_child_of_spawn(stage: Stage) -> None:
    """As ``torch.multiprocessing.spawn`` ends a child: it writes the error to a file, and exits."""
    stage.await_waiting(stage.survivors)
    stage.note_the_fault()
    try:
        raise ValueError("bad batch")
    except ValueError:
        sys.exit(1)


def loops_for_ever(stage: Stage) -> None:
    stage.note_the_fault()
    while True:
        pass


def holds_the_gil(stage: Stage) -> None:
    stage.note_the_fault()
    ctypes.PyDLL(None).sleep(60)


def killed_in_payload(stage: Stage) -> None:
    """When the third of many collectives has ended, or when the sum on the host begins."""
    stage.backward(1.0)
    if stage.is_on_host:
        sys.setprofile(do_when("divide", stage.get_signal))
    else:
        function = "reduce_own_shard" if stage.scene.reproducible else "_finish"
        sys.setprofile(do_when(function, stage.get_signal, nth=3))
    stage.reduce()


def killed_with_another(stage: Stage, *, number: int = signal.SIGKILL) -> None:
    """The first victim sends the signal ``number`` to the second, and ends itself."""
    if stage.rank != stage.first_victim:
        threading.Event().wait()
    stage.await_waiting(stage.survivors)
    stage.note_the_fault()
    os.kill(stage.pid(stage.scene.victims[1]), number)
    os.kill(os.getpid(), signal.SIGKILL)


def killed_while_reporting(stage: Stage, *, function: str) -> None:
    """The second victim is killed; the first, who reports on it for all, kills itself when it enters ``function``."""
    reporter, other = stage.scene.victims
    if stage.rank == other:
        stage.await_waiting([reporter, *stage.survivors])
        stage.get_signal()
    wait = do_when(WAITS, partial(stage.note, f"waiting {reporter}"))
    end = do_when(function, partial(os.kill, os.getpid(), signal.SIGKILL))

    def profile(frame: FrameType, event: str, argument: object) -> None:
        wait(frame, event, argument)
        end(frame, event, argument)

    threading.setprofile(profile)  # for the threads that start from now on
    sys.setprofile(profile)
    stage.backward(1.0)
    stage.reduce()


def killed_with_a_worker(stage: Stage) -> None:
    """By SIGKILL, with a forked worker of a data loader, which holds all its open connections for seconds more."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # forking with threads: what data loaders do
        batches = iter(DataLoader(range(100), num_workers=1, collate_fn=list, multiprocessing_context="fork"))
    next(batches)  # the worker lives as long as this iterator
    killed(stage)
