"""What did every step hold on this rank? Written while it trains, so that two runs can be compared afterwards."""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from legacy_ddp import _torch as internals
from legacy_ddp._error_text import error_text
from legacy_ddp._log import warn
from legacy_ddp._record import RankRow, SyncRecord
from legacy_ddp._replicas import state as hold
from legacy_ddp._wrapper import LegacyDistributedDataParallel
from legacy_ddp.debug._arguments import Optimizers, as_optimizers, subject_of
from legacy_ddp.debug._steps import Steps
from legacy_ddp.debug._trace import snapshot
from legacy_ddp.debug._trace.environment import environment_of
from legacy_ddp.debug._trace.records import MAX_STEP, CallFacts, Environment, Section
from legacy_ddp.debug._trace.write import Writer


class Recorder:
    """Writes one file per rank, ``<folder>/rank-00000.jsonl``, with 64 bits for every tensor of every recorded step.

    Use it as a context manager around the training loop, on every rank. It takes the start, and of every step, which
    is an ``all_reduce()`` that succeeded: the local gradients, the reduced ones and, once the optimizers have stepped,
    their settings and state, the parameters and the buffers. Of each tensor it writes the digest, the 2-norm and how
    many elements are not finite. ``legacy-ddp diff`` finds where two such traces, or the ranks of one, part;
    docs/trace-format.md says what is in them.

    It changes no bit of the training and communicates nothing. A SIGKILL leaves whole lines. If something cannot be
    recorded or written any more (a full disk, say) it warns and stops, and the training goes on.

    Args:
        model: a wrapper of ours, or the module that ``all_reduce_gradients()`` is called with.
        folder: where to write; made if it is not there. It must hold no trace of this rank yet. ``~`` at its beginning
            is the home directory.
        optimizer: one or several. Without one there are no settings and no state, and the parameters of a step are
            those that the next call finds; so are those of a step that one of them leaves out. An optimizer of some of
            the parameters is as good as one of all; one that holds none of them is warned of on entering.
        every: record the steps whose number it divides.
        first_step: number of the first step: 101 for a training that goes on after 100.
        process_group: of a module that is no wrapper; None for the default group.

    Raises:
        TypeError, ValueError: an unusable argument.
        TraceError: on entering, the file exists or cannot be made.
    """

    def __init__(
        self,
        model: nn.Module,
        folder: str | os.PathLike[str],
        *,
        optimizer: Optimizers | None = None,
        every: int = 1,
        first_step: int = 1,
        process_group: dist.ProcessGroup | DeviceMesh | None = None,
    ) -> None:
        if not isinstance(model, nn.Module) or isinstance(model, DistributedDataParallel):
            raise TypeError(
                f"model is of the wrong type: got {type(model).__name__}, expected a LegacyDistributedDataParallel, or "
                "the module that all_reduce_gradients() is called with"
            )
        if process_group is not None and isinstance(model, LegacyDistributedDataParallel):
            raise ValueError("process_group is the wrapper's own, expected None; assign model.process_group instead")
        self._subject = subject_of(model, process_group)
        self._folder = _path(folder)
        self._optimizers = as_optimizers(optimizer)
        self._every = _count("every", every)
        self._first_step = _count("first_step", first_step)
        self._writer: Writer | None = None
        self._rank = 0
        self._was_used = False
        self._step = first_step - 1  # the last one
        self._steps = Steps(self._optimizers, lambda: self._try(self._take_left))
        # Of the step that comes next: what its forward passes were given, and what its call found.
        self._inputs = snapshot.Inputs()
        self._generators = ""
        self._local: list[Section] = []
        # Of the last one: whether what it leaves is yet to be taken, and the buffers as it left them, where the next
        # forward pass has begun meanwhile.
        self._is_owed = False
        self._buffers: list[Section] | None = None
        self._sees_forwards = False

    def __enter__(self) -> "Recorder":
        if self._was_used:
            raise ValueError("this recorder was used already, expected a new one; a trace is of one run")
        environment = self._environment()
        _warn_of_strangers(environment.rank, self._optimizers, self._subject.module)
        self._writer, self._rank = Writer(self._folder, environment), environment.rank
        self._was_used = True
        try:
            self._is_owed = True
            with torch.no_grad():
                self._take_left(self._writer)
        except BaseException:
            self._writer.discard()
            raise
        self._subject.synchronizer.observers.append(self)
        self._steps.watch()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._subject.synchronizer.observers.remove(self)
        self._steps.release()
        if kind is None and not self._optimizers:  # else the last step was left out, or never came to its end
            self._try(lambda writer: self._take_left(writer, with_buffers=self._sees_forwards))
        self._try(lambda writer: writer.close(self._step, "closed" if kind is None else kind.__name__))
        self._writer = None
        if self._step < self._first_step and kind is None:
            warn(
                self._rank,
                f"the trace in {self._folder} holds no step: the recorder saw no all_reduce() that succeeded; give it "
                "the wrapper whose all_reduce() is called",
                stacklevel=2,
            )

    def see_forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Note what a forward pass is given, if it is one that trains, and the buffers that it is about to change."""
        # torch.jit.trace would take what is done here into its graph.
        if self._writer is None or not torch.is_grad_enabled() or internals.is_tracing():
            return
        self._sees_forwards = True
        if self._is_owed and self._buffers is None:
            self._try(self._keep_buffers)
        if self._is_next_due:
            with torch.no_grad():
                self._inputs.add(args, kwargs)

    def see_local(self, grads: Mapping[str, torch.Tensor | None]) -> None:
        """Take the gradients of this rank, and before that what the last step left if no optimizer stepped since."""
        self._try(lambda writer: self._take_left(writer, with_buffers=False))
        if self._is_next_due:
            self._try(lambda _: self._take_local(grads))

    def see_reduced(self, record: SyncRecord) -> None:
        """Write what the call was and what it left."""
        self._is_owed, self._buffers = self._is_next_due, None
        self._step += 1
        if self._is_owed:
            self._try(lambda writer: self._take_call(writer, record))
        self._steps.start_anew()
        self._inputs, self._local = snapshot.Inputs(), []

    @property
    def _is_next_due(self) -> bool:
        return (self._step + 1) % self._every == 0

    def _take_local(self, grads: Mapping[str, torch.Tensor | None]) -> None:
        self._generators = f"{hold.digest_torch_generators(self._subject.module) % 2**64:016x}"
        self._local = snapshot.gradients("local_gradients", hold.gradients(grads))

    def _take_call(self, writer: Writer, record: SyncRecord) -> None:
        row = record.rows[record.rank]
        if row.took_part:  # else nobody looks at what its gradients hold
            writer.sections(self._step, self._local)
        writer.call(self._step, _facts_of(record, row, self._generators, self._inputs))
        reduced = hold.gradients_in(self._subject.module, self._subject.ignore)
        writer.sections(self._step, snapshot.gradients("reduced_gradients", reduced))
        writer.flush()

    def _keep_buffers(self, _: Writer) -> None:
        self._buffers = snapshot.buffers(self._subject.module, self._subject.ignore)

    def _take_left(self, writer: Writer, *, with_buffers: bool = True) -> None:
        """What the last step left; buffers only if no forward pass can have changed them since."""
        if not self._is_owed:
            return
        module, ignore = self._subject.module, self._subject.ignore
        if self._buffers is None and with_buffers:
            self._buffers = snapshot.buffers(module, ignore)
        writer.sections(self._step, snapshot.left_by_step(module, ignore, self._optimizers, self._steps.settings_of))
        writer.sections(self._step, self._buffers or [])
        self._is_owed = False
        writer.flush()

    def _try(self, act: Callable[[Writer], None]) -> None:
        """The trace is not worth the training: what fails ends the trace alone."""
        if self._writer is None:
            return
        try:
            with torch.no_grad():
                act(self._writer)
        except Exception as error:  # noqa: BLE001 - whatever a user's tensors, or a disk, may come up with
            writer, self._writer = self._writer, None
            writer.abandon()
            why = error.strerror if isinstance(error, OSError) else error_text(error)
            warn(
                self._rank,
                f"{writer.path} ends before step {self._step + 1}, and the training goes on: cannot be recorded or "
                f"written any more ({why})",
                stacklevel=3,
            )

    def _environment(self) -> Environment:
        subject = self._subject
        return environment_of(
            subject.module,
            subject.synchronizer.settings,
            subject.group,
            self._optimizers,
            every=self._every,
            first_step=self._first_step,
        )


def _facts_of(record: SyncRecord, row: RankRow, generators: str, inputs: snapshot.Inputs) -> CallFacts:
    return CallFacts(
        call=record.call,
        micro_batches=row.micro_batches,
        sample_size=row.sample_size,
        took_part=row.took_part,
        divisor=record.divisor,
        local_norm=_finite(row.local_norm) if row.finite else None,
        finite=row.finite,
        payload_bytes=record.payload_bytes,
        seconds={phase: round(seconds, 6) for phase, seconds in record.seconds.items()},
        seconds_waited=round(record.seconds["agree"], 6),
        generators=generators,
        forwards=inputs.forwards,
        inputs=tuple(inputs.found),
        inputs_complete=inputs.complete and inputs.forwards >= row.micro_batches,
    )


def _path(folder: str | os.PathLike[str]) -> Path:
    if not isinstance(folder, str | os.PathLike) or not os.fspath(folder):
        raise TypeError(f"folder is not usable: got {folder!r}, expected a path")
    try:
        return Path(folder).expanduser()
    except RuntimeError as error:  # ~ and no home directory, or ~somebody whom the system does not know
        raise ValueError(
            f"folder is not usable: got {str(folder)!r}, expected ~ with a known home directory; name the whole path"
        ) from error


def _warn_of_strangers(rank: int, optimizers: Sequence[torch.optim.Optimizer], module: nn.Module) -> None:
    """No error: an optimizer may hold copies of the parameters in another precision, and none of themselves."""
    own = {id(parameter) for parameter in module.parameters()}
    for index, optimizer in enumerate(optimizers):
        if not any(id(held) in own for group in optimizer.param_groups for held in group["params"]):
            which = f"optimizer {index}" if len(optimizers) > 1 else "optimizer"
            warn(
                rank,
                f"{which} ({type(optimizer).__name__}) holds no parameter of the model, so its steps need not be those "
                "of the model; give the recorder the optimizer of the model (one that holds copies of the parameters "
                "in another precision is right here)",
                stacklevel=3,
            )


def _finite(norm: float | None) -> float | None:
    """The norm that JSON can hold: of finite gradients it may be too large for a float64, and JSON has no infinity."""
    return norm if norm is not None and math.isfinite(norm) else None


def _count(argument: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_STEP:
        raise ValueError(f"{argument} is not usable: got {value!r}, expected a whole number from 1 to {MAX_STEP:,}")
    return value
