"""Recorder of the state of this rank in every step, for a later comparison of runs or ranks."""

import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Never, SupportsFloat

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from legacy_ddp import _torch as internals
from legacy_ddp._call.pack import read_numbers
from legacy_ddp._errors import LegacyDDPError, argument_errors, show_usable
from legacy_ddp._log import warn
from legacy_ddp._record import SyncRecord
from legacy_ddp._replicas import state as hold
from legacy_ddp._text import error_text, printable
from legacy_ddp._torch.device import Reader
from legacy_ddp._wrapper import LegacyDistributedDataParallel
from legacy_ddp.debug._arguments import (
    Optimizers,
    Target,
    as_count,
    as_flag,
    as_folder,
    as_optimizers,
    as_steps,
    target_of,
)
from legacy_ddp.debug._operations.capture import OperationCapture
from legacy_ddp.debug._operations.operation import Operation
from legacy_ddp.debug._trace import snapshot
from legacy_ddp.debug._trace.environment import environment_of
from legacy_ddp.debug._trace.records import Section, Writer
from legacy_ddp.debug._trace.snapshot import facts_of

_SECTION = "Trace warnings"


class Recorder:
    """Writes one file per rank, ``<folder>/rank-00000.jsonl``, with 64 bits for every tensor of every recorded step.

    Use the recorder as a context manager around the training loop, on every rank. It records the start and every step.
    A step is a successful ``all_reduce()``. The recorder writes the local and the reduced gradients and, after the step
    of the optimizers, their settings and state, the parameters and the buffers: of each tensor the digest, the 2-norm
    and the number of non-finite elements. ``legacy-ddp diff`` finds the first difference between two traces, or between
    the ranks of a trace; docs/trace-format.md describes the files.

    Recording changes no bit of the training and communicates nothing. A SIGKILL leaves whole lines. If the recorder
    cannot record or write (a full disk, for example), it warns and stops, and the training goes on.

    Args:
        model: a :class:`legacy_ddp.LegacyDistributedDataParallel`, compiled or not, or the argument of
            ``all_reduce_gradients()``.
        folder: the folder to write to; created if missing. It must hold no trace of this rank yet. A leading ``~`` is
            the home directory.
        optimizer: one or several optimizers. Without an optimizer, no settings and no state are recorded, and the
            parameters of a step are recorded at the next call; the same holds if an optimizer skips a step. An
            optimizer may hold only some of the parameters. If it holds none, the recorder warns on entering.
        every: record the steps with a number divisible by ``every``.
        first_step: number of the first step: 101 for a training resumed after step 100.
        operations: numbers of steps, as ``range(40, 42)``, that are recorded with every operation of forward and
            backward in order: name, module, parameters among its inputs, shapes, digests of inputs and outputs, state
            of the random generator. ``every`` does not matter for these steps. An operation costs 50 to 200 µs, and 20
            to 40 bytes. Operations of a compiled wrapper are not recorded, those of a compiled module inside are. See
            docs/trace-format.md for what is left out, for torch.compile and for threads.
        process_group: of a plain module; None for the default group.
        argv: record the command line (``sys.argv``). Pass False if it holds a secret.

    Raises:
        TypeError, ValueError: an unusable argument.
        TraceError: on entering, the file exists or cannot be created.

    Example:
        >>> with Recorder(model, folder, optimizer=optimizer):
        ...     model(inputs).sum().backward()
        ...     record = model.all_reduce()
        ...     optimizer.step()
    """

    @argument_errors
    def __init__(
        self,
        model: nn.Module,
        folder: str | os.PathLike[str],
        *,
        optimizer: Optimizers | None = None,
        every: int = 1,
        first_step: int = 1,
        operations: Collection[int] = (),
        process_group: dist.ProcessGroup | DeviceMesh | None = None,
        argv: bool = True,
    ) -> None:
        inside = internals.inside_of_compiled(model)
        if not isinstance(model, nn.Module) or isinstance(inside, DistributedDataParallel):
            raise TypeError(
                f"model is of the wrong type: got {type(inside).__name__}, expected a LegacyDistributedDataParallel, "
                "or the module that all_reduce_gradients() is called with"
            )
        if process_group is not None and isinstance(inside, LegacyDistributedDataParallel):
            raise ValueError("process_group is the wrapper's own, expected None; assign model.process_group instead")
        self._target = target_of(model, process_group)
        self._folder = as_folder(folder)
        self._optimizers = as_optimizers(optimizer)
        self._every = as_count("every", every)
        self._first_step = as_count("first_step", first_step)
        self._operations = _OperationSteps(self._target, as_steps("operations", operations))
        self._has_argv = as_flag("argv", argv)
        self._writer: Writer | None = None
        self._handles: list[RemovableHandle] = []
        self._rank = 0
        self._was_used = self._is_open = False
        self._step = first_step - 1  # the last step
        self._steps = _OptimizerSteps(self._optimizers, lambda: self._try(self._write_result))
        # Reads numbers from devices, so that the host waits once in a call, and once after a step.
        self._reader = Reader()
        # Of the next step: inputs of its forward passes, generators and local gradients at its call.
        self._inputs = snapshot.Inputs(self._reader)
        self._generators = ""
        self._local: list[Section] = []
        # Of the last step: whether its result (parameters, optimizer state, buffers) is not recorded yet, and its
        # buffers if the next forward pass has begun already.
        self._is_result_pending = False
        self._buffers: list[Section] | None = None
        self._has_seen_forwards = False

    @argument_errors
    def __enter__(self) -> "Recorder":
        if self._was_used:
            raise ValueError("this recorder was used already, expected a new one; a trace is of one run")
        target = self._target
        transport = target.synchronizer.transport_on(target.group)
        environment = environment_of(
            target.module,
            target.synchronizer.settings,
            target.group,
            self._optimizers,
            every=self._every,
            first_step=self._first_step,
            transport="" if transport is None else transport.expected_text,
            argv=sys.argv if self._has_argv else None,
        )
        _warn_of_foreign_optimizers(environment.rank, self._optimizers, target.module)
        self._writer, self._rank = Writer(self._folder, environment), environment.rank
        self._was_used = True
        try:
            self._is_result_pending = True  # the state before the first step is the result of the step before it
            with torch.no_grad():
                self._write_result(self._writer)
            self._watch()
        except BaseException:
            writer, self._writer = self._writer, None  # without a writer, registered observers do nothing
            writer.discard()
            raise
        self._is_open = True
        self._try(self._begin_operations)
        return self

    def _watch(self) -> None:
        observers = self._target.synchronizer.observers
        self._handles = [
            observers.forward.add(self._see_forward),
            observers.called.add(self._see_call),
            observers.local.add(self._see_local),
            observers.reduced.add(self._see_reduced),
            observers.returned.add(self._see_returned),
        ]
        self._steps.watch()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._steps.release()
        self._operations.cancel()
        self._is_open = False
        if kind is None and not self._optimizers:  # with optimizers, the pending step was skipped or is incomplete
            self._try(lambda writer: self._write_result(writer, with_buffers=self._has_seen_forwards))
        self._try(lambda writer: writer.close(self._step, "closed" if kind is None else kind.__name__))
        self._writer = None
        if self._step < self._first_step and kind is None:
            warn(
                self._rank,
                f"the trace in {self._folder} holds no step: the recorder saw no all_reduce() that succeeded; give it "
                "the wrapper whose all_reduce() is called",
                _SECTION,
            )
        elif kind is None and (missing := self._operations.missing(self._step)):
            warn(self._rank, f"the trace in {self._folder} {missing}", _SECTION)

    @argument_errors
    @show_usable
    def log(self, /, *unnamed: Never, **values: SupportsFloat | str) -> None:
        """Record values of this rank: a learning rate, or the loss of this rank's data. They are not summed.

        The values belong to the step of the last ``all_reduce()``, or to the start before the first one. A later value
        of the same name replaces an earlier value of the step. Values of a step that is not recorded (``every``) are
        left out. Local: other ranks may log other names.

        Args:
            values: numbers and tensors with one element, recorded as doubles, and texts.

        Raises:
            TypeError: a value is neither a number nor a text, or has no name.
            ValueError: outside of the ``with`` block; a number beyond the range of a double.
        """
        if unnamed:
            raise TypeError(f"log() takes values by name: got {unnamed[0]!r}, expected name=value; write log(**values)")
        if not self._is_open:
            raise ValueError("log() was called outside of the recorder's block, expected inside: with Recorder(...):")
        numbers = {name: value for name, value in values.items() if not isinstance(value, str)}
        read = read_numbers("log", numbers, "a real number, a tensor with one element, or a text")
        logged: dict[str, float | str] = {name: read.get(name, str(value)) for name, value in values.items()}
        is_start = self._step < self._first_step
        if logged and (is_start or self._is_due(self._step)):
            self._try(lambda writer: writer.log_now(self._step, logged))

    def _see_forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Note the inputs of a training forward pass, and the buffers before the pass changes them."""
        # Not under torch.jit.trace, which would record these operations in its graph.
        if self._writer is None or not torch.is_grad_enabled() or internals.is_tracing():
            return
        self._has_seen_forwards = True
        if self._is_result_pending and self._buffers is None:
            self._try(self._snapshot_buffers)
        if self._is_next_due:
            with torch.no_grad():
                self._inputs.add(args, kwargs)
            self._try(lambda _: self._operations.begin_forward(self._step + 1))

    def _see_call(self) -> None:
        self._try(lambda _: self._operations.end_backward())

    def _see_local(self, grads: Mapping[str, torch.Tensor | None]) -> None:
        """Record the result of the last step if an optimizer skipped it, then the local gradients."""
        self._try(lambda writer: self._write_result(writer, with_buffers=False))
        if self._is_next_due:
            self._try(lambda _: self._measure_local(grads))

    def _see_reduced(self, record: SyncRecord) -> None:
        self._step += 1
        self._is_result_pending = self._is_due(self._step)
        self._buffers = None
        if self._is_result_pending:
            self._try(lambda writer: self._write_call(writer, record))
        self._steps.reset()
        self._inputs, self._local = snapshot.Inputs(self._reader), []

    def _see_returned(self, _: SyncRecord) -> None:
        # Begin the operations of a plain module: here the modes of torch that a call sets have ended.
        self._try(self._begin_operations)

    @property
    def _is_next_due(self) -> bool:
        return self._is_due(self._step + 1)

    def _is_due(self, step: int) -> bool:
        return step % self._every == 0 or step in self._operations

    def _begin_operations(self, _: Writer) -> None:
        self._operations.begin(self._step + 1)

    def _measure_local(self, grads: Mapping[str, torch.Tensor | None]) -> None:
        self._generators = snapshot.digest_generators(self._target.module)
        self._local = []
        snapshot.begin_sections([("local_gradients", hold.gradients(grads))], self._reader, self._local.extend)

    def _write_call(self, writer: Writer, record: SyncRecord) -> None:
        reduced: list[Section] = []
        held = hold.gradients_in(self._target.module, self._target.ignore)
        snapshot.begin_sections([("reduced_gradients", held)], self._reader, reduced.extend)
        self._reader.read()
        if record.rows[record.rank].took_part:  # otherwise the local gradients are not used
            writer.sections(self._step, self._local)
        writer.call(self._step, facts_of(record, self._generators, self._inputs))
        writer.operations(self._step, self._operations.take())
        writer.sections(self._step, reduced)
        writer.flush()

    def _snapshot_buffers(self, _: Writer) -> None:
        self._buffers = []
        held = hold.buffers(self._target.module, self._target.ignore, local=())
        snapshot.begin_sections([("buffers", held)] if held else [], self._reader, self._buffers.extend)

    def _write_result(self, writer: Writer, *, with_buffers: bool = True) -> None:
        """Write the result of the last step. ``with_buffers``: False if a forward pass may have changed them."""
        if not self._is_result_pending:
            return
        if self._buffers is None and with_buffers:
            self._snapshot_buffers(writer)
        left: list[Section] = []
        held = [
            ("settings", hold.optimizer_settings(self._optimizers, self._steps.settings_of)),
            ("optimizer", hold.optimizer_states(self._optimizers, self._target.module)),
            ("parameters", hold.parameters(self._target.module, self._target.ignore)),
        ]
        snapshot.begin_sections([(phase, items) for phase, items in held if items], self._reader, left.extend)
        self._reader.read()
        writer.sections(self._step, left)
        writer.sections(self._step, self._buffers or [])
        self._is_result_pending = False
        writer.flush()

    def _try(self, write: Callable[[Writer], None]) -> None:
        """Call ``write``. A failure ends the trace, but not the training."""
        if self._writer is None:
            return
        try:
            with torch.no_grad():
                write(self._writer)
        except Exception as error:  # noqa: BLE001 - tensors of a user, or a disk, may raise anything
            writer, self._writer = self._writer, None
            writer.abandon()
            self._operations.cancel()
            self._reader.clear()
            reason = getattr(error, "strerror", None) or error_text(error)
            warn(
                self._rank,
                f"{writer.path} ends before step {self._step + 1}, and the training goes on: cannot be recorded or "
                f"written any more ({reason})",
                _SECTION,
            )


class _OptimizerSteps:
    """Observes the steps of ``optimizers`` between :meth:`watch` and :meth:`release`.

    ``on_all_stepped`` is called once all optimizers have stepped since the last :meth:`reset`.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], on_all_stepped: Callable[[], object]) -> None:
        self._optimizers = optimizers
        self._on_all_stepped = on_all_stepped
        self._hooks: list[RemovableHandle] = []
        self._stepped: set[int] = set()
        # At the beginning of each step, because a scheduler changes the settings afterwards.
        self._settings: dict[int, list[hold.Fact]] = {}
        # Nesting depth of a running step: if step() calls super().step(), the hooks run twice.
        self._depths: dict[int, int] = {}

    def watch(self) -> None:
        for optimizer in self._optimizers:
            self._hooks.append(optimizer.register_step_pre_hook(self._begin))
            self._hooks.append(optimizer.register_step_post_hook(self._end))

    def release(self) -> None:
        while self._hooks:
            self._hooks[-1].remove()
            self._hooks.pop()

    def reset(self) -> None:
        """Forget all steps, also those that ended with an exception."""
        self._stepped.clear()
        self._settings.clear()
        self._depths.clear()

    def settings_of(self, optimizer: torch.optim.Optimizer) -> list[hold.Fact]:
        """The settings of the optimizer's step since :meth:`reset`; empty without a step."""
        return self._settings.get(id(optimizer), [])

    @internals.disable_dynamo
    def _begin(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        depth = self._depths[id(optimizer)] = self._depths.get(id(optimizer), 0) + 1
        if depth == 1:
            facts = hold.settings_in(optimizer.param_groups)
            self._settings[id(optimizer)] = [
                (name, value.clone() if isinstance(value, torch.Tensor) else value) for name, value in facts
            ]

    @internals.disable_dynamo
    def _end(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        depth = self._depths[id(optimizer)] = max(0, self._depths.get(id(optimizer), 0) - 1)
        if depth == 0:
            self._stepped.add(id(optimizer))
            if len(self._stepped) == len(self._optimizers):
                self._on_all_stepped()


def _warn_of_foreign_optimizers(rank: int, optimizers: Sequence[torch.optim.Optimizer], module: nn.Module) -> None:
    # No error, because an optimizer may hold only copies of the parameters in another precision.
    of_model = {id(parameter) for parameter in module.parameters()}
    for index, optimizer in enumerate(optimizers):
        if not any(id(held) in of_model for group in optimizer.param_groups for held in group["params"]):
            label = f"optimizer {index}" if len(optimizers) > 1 else "optimizer"
            kind = printable(type(optimizer).__name__)
            warn(
                rank,
                f"{label} ({kind}) holds no parameter of the model, so its steps need not be those "
                "of the model; give the recorder the optimizer of the model (one that holds copies of the parameters "
                "in another precision is right here)",
                _SECTION,
            )


class _OperationSteps:
    """The operations of the target's module in ``steps``.

    Each forward pass of a wrapper calls :meth:`begin_forward`. A plain module has no such event: there the capture
    starts with the step, in :meth:`begin`, and finds the first forward pass.
    """

    def __init__(self, target: Target, steps: Collection[int]) -> None:
        self._has_any = False
        self._steps = steps
        self._target = target
        self._is_plain = target.wrapper is None
        self._capture = OperationCapture(target.module, counts_forwards=self._is_plain)
        self._operations: Sequence[Operation] = ()

    def __contains__(self, step: int) -> bool:
        return step in self._steps

    def missing(self, last: int) -> str:
        """Text with reason and next step if no operations were recorded, or empty. ``last``: the last step."""
        if not self._steps or self._has_any:
            return ""
        if self._target.has_compiled_wrapper:
            return (
                "holds no operations: those of a compiled wrapper are not recorded; compile the module inside "
                "(wrapper.module.compile()), or record without torch.compile"
            )
        return (
            f"holds no operations: it ends with step {last}, and the recorder saw no training forward pass of the "
            f"model in the steps of operations=; choose steps of this run, or {self._advice}"
        )

    @property
    def _advice(self) -> str:
        if self._is_plain:
            return "give it the module that is called, torch.compile(module) if that is called"
        return "call the wrapper instead of its module; compile the module inside, not the wrapper"

    def begin(self, step: int) -> None:
        if self._is_plain and step in self._steps and not self._capture.is_running:
            self._capture.start()

    def begin_forward(self, step: int) -> None:
        """Start the capture at the first forward pass of a step, and count the micro-batch."""
        if step not in self._steps:
            return
        if not self._capture.is_running:
            self._capture.start()
        self._capture.begin_micro_batch()

    def end_backward(self) -> None:
        """End the capture, before the exchange. If the call fails, the next forward pass starts a new one."""
        if self._capture.is_running:
            self._operations = self._capture.stop()

    def take(self) -> Sequence[Operation]:
        found, self._operations = self._operations, ()
        self._has_any |= bool(found)
        return found

    def cancel(self) -> None:
        """End the capture, if there is one, without operations."""
        with suppress(LegacyDDPError):  # in another thread: the capture has ended nevertheless
            self._capture.cancel()
        self._operations = ()
