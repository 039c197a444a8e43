"""The tree of exceptions.

LegacyDDPError(RuntimeError)
├── AgreedError            raised on all ranks: same type, ranks and text on every rank;
│   │                      every ``.grad`` untouched, the group stays usable
│   ├── LayoutError            ranks hold different parameters, buffers or settings
│   ├── DesyncError            ranks are not at the same call, or do not mean the same by it
│   ├── PeerError              a rank failed locally before the exchange; the text has its error
│   ├── ReplicaDivergenceError  replicas hold or compute different bits; the text names tensors, phase and cause
│   ├── EditedGradientError    gradients were clipped or unscaled before the call, with ``edited="raise"``
│   ├── NonFiniteGradientError  a gradient holds NaN or infinity, with ``nonfinite="raise"``; a FloatingPointError, too
│   ├── CommHookError          a communication hook returned no usable gradient
│   └── TransportError         ``transport="host"`` is not possible, or not any more
├── LostPeerError          a rank did not answer; the group is not usable any more
│   ├── PeerLostError          its connection broke
│   └── SyncTimeoutError       it was silent for ``timeout_seconds``
├── GradientError          local: a gradient that cannot be reduced; reaches the peers as PeerError
├── UnsynchronizedStepError  local: an optimizer's step() without the call; nothing was stepped
└── TraceError             local: a trace that cannot be written, read or compared
"""

import inspect
import os
import traceback
from collections.abc import Callable, Sequence
from contextlib import ContextDecorator
from types import TracebackType
from typing import Any, ClassVar, Never, ParamSpec, TypeVar

from legacy_ddp._text import how_to_explain, printable, printable_lines

_P = ParamSpec("_P")
_T = TypeVar("_T")

_LIBRARY = os.path.join(os.path.dirname(__file__), "")


class LegacyDDPError(RuntimeError):
    """Base of all exceptions of this library.

    ``ranks``: the ranks at fault, counted inside the group; empty if they are not known. ``call``: number of the
    collective call on this wrapper, from 1. ``phase``: of the call. ``parameter``: the name of the parameter.
    ``anchor``: of the section about this class in docs/errors.md. A traceback ends with the command that prints it.

    Example:
        >>> try:
        ...     record = model.all_reduce(sample_size="3")
        ... except LegacyDDPError as error:  # any error of this library
        ...     print(error.ranks, error.call, error.phase, error.parameter)
        ... except TypeError as error:  # every rank made the same mistake
        ...     print("wrong on every rank")
        wrong on every rank
    """

    anchor: ClassVar[str] = "legacyddperror"
    _section: ClassVar[str] = "LegacyDDPError"

    def __init__(
        self,
        message: str,
        *,
        ranks: Sequence[int] = (),
        call: int | None = None,
        phase: str | None = None,
        parameter: str | None = None,
    ) -> None:
        super().__init__(printable_lines(message))
        self.ranks = tuple(ranks)
        self.call = call
        self.phase = phase
        self.parameter = parameter
        self.add_note(how_to_explain(self._section))


class AgreedError(LegacyDDPError):
    """A disagreement of the ranks that all ranks detected: the same error on every rank, nothing written.

    Example:
        >>> if rank == 1:
        ...     model.module.weight.requires_grad = False
        >>> try:
        ...     record = model.all_reduce()
        ... except AgreedError as error:
        ...     print(error.ranks)
        (1,)
    """


class LayoutError(AgreedError):
    """Ranks hold different modules, parameters, buffers or settings; the text names each difference and its ranks.

    Example:
        >>> if rank == 1:
        ...     model.module.weight.requires_grad = False
        >>> try:
        ...     record = model.all_reduce()
        ... except LayoutError as error:
        ...     print(error.ranks, error.call)
        (1,) 1
    """


class DesyncError(AgreedError):
    """Ranks met in different calls, or mean different things by the same call.

    Example:
        >>> model(inputs).sum().backward()
        >>> try:
        ...     record = model.all_reduce(sample_size=None if rank == 1 else len(inputs))
        ... except DesyncError as error:
        ...     print(error.ranks)
        (1,)
    """


class ReplicaDivergenceError(AgreedError):
    """Replicas hold different bits, or compute different bits (``phase`` is ``run``, see below).

    ``minority``: the ranks outside the strict majority, by counting alone; empty without a majority. ``implicated``:
    the ranks with evidence of a fault, such as parameters that changed outside of a step; empty without evidence, or
    with evidence about all ranks. ``ranks``: the ranks at fault, from both: ``minority``, or without a majority
    ``implicated``, and ranks with evidence of a second fault. Empty if the evidence of the first fault names a rank of
    the majority: evidence outranks counting, so the minority may be the good ranks; look at both attributes. In an
    error of a cross-check: the ranks of its report, without a majority all of them.
    ``report``: the :class:`legacy_ddp.debug.ReplicaReport` with the same text. ``phase``: the first phase with a
    difference, one of ``start``, ``all_reduce``, ``gradients``, ``step``, ``outside``, ``buffers``, ``unknown``; or
    ``run`` in an error of :func:`legacy_ddp.debug.cross_check`, whose ``report`` is a
    :class:`legacy_ddp.debug.CrossCheckReport`.

    Example:
        >>> model = LegacyDistributedDataParallel(torch.nn.Linear(2, 1), checks="detail")
        >>> if rank == 1:
        ...     model.module.bias.data += 1.0
        >>> model(inputs).sum().backward()
        >>> try:
        ...     record = model.all_reduce()
        ... except ReplicaDivergenceError as error:
        ...     print(error.minority, error.implicated, error.phase)
        (1,) () start
    """

    report: Any = None
    minority: tuple[int, ...] = ()
    implicated: tuple[int, ...] = ()


class PeerError(AgreedError):
    """A rank failed locally before the exchange, so nothing was exchanged.

    Example:
        >>> if rank == 1:
        ...     model.module.weight.grad = torch.ones(1, 2, requires_grad=True)
        >>> try:
        ...     record = model.all_reduce()
        ... except PeerError as error:
        ...     print(error.ranks)
        (1,)
    """


class NonFiniteGradientError(AgreedError, FloatingPointError):
    """A local gradient held NaN or infinity before the exchange; only with ``Checks(nonfinite="raise")``.

    Trainers that skip such a step catch Python's FloatingPointError, and this one with it.
    ``ranks``: the ranks with such a gradient. ``parameter``: the first such parameter on the first of these ranks.

    Example:
        >>> model = LegacyDistributedDataParallel(torch.nn.Linear(2, 1), checks=Checks(nonfinite="raise"))
        >>> (model(inputs) * (float("nan") if rank == 1 else 1.0)).sum().backward()
        >>> try:
        ...     record = model.all_reduce()
        ... except NonFiniteGradientError as error:
        ...     print(error.ranks, error.parameter)
        (1,) bias
    """


class EditedGradientError(AgreedError):
    """Gradients were clipped or unscaled between backward and the call; only with ``Checks(edited="raise")``.

    ``ranks``: the ranks with such gradients.

    Example:
        >>> model = LegacyDistributedDataParallel(torch.nn.Linear(2, 1), checks=Checks(edited="raise"))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> scaler = torch.amp.GradScaler("cpu")
        >>> try:
        ...     for step in range(2):  # a scaler is known from its first step on
        ...         scaler.scale(model(inputs).sum()).backward()
        ...         scaler.unscale_(optimizer)  # belongs behind all_reduce()
        ...         record = model.all_reduce()
        ...         scaler.step(optimizer)
        ...         scaler.update()
        ... except EditedGradientError as error:
        ...     print(error.ranks)
        (0, 1, 2)
    """


class CommHookError(AgreedError):
    """A communication hook returned no usable gradient; the text names the ranks and the expected result.

    Example:
        >>> model.register_comm_hook(None, lambda state, bucket: bucket.buffer()[1:])  # too short
        >>> model(inputs).sum().backward()
        >>> try:
        ...     record = model.all_reduce()
        ... except CommHookError as error:
        ...     print(error.ranks)
        (0, 1, 2)
    """


class TransportError(AgreedError):
    """``transport="host"`` is not possible, or not any more; the text has the reason of the first rank with one.

    Example:
        >>> try:
        ...     model = LegacyDistributedDataParallel(torch.nn.Linear(2, 1), transport="host")
        ... except TransportError as error:
        ...     print(error)  # the reason
    """


class LostPeerError(LegacyDDPError):
    """A rank did not answer; the process group is not usable any more.

    ``report``: the activity of every rank, the same text on all ranks that raise; empty with checks off.

    Example:
        >>> try:
        ...     record = model.all_reduce()
        ... except LostPeerError as error:  # save nothing here: gradients may be gone
        ...     print(error.report)
        ...     raise SystemExit(1)
    """

    report = ""


class PeerLostError(LostPeerError):
    """The connection to a rank broke: its process ended or its host vanished.

    Example:
        >>> try:
        ...     record = model.all_reduce()
        ... except PeerLostError as error:
        ...     raise SystemExit(f"lost ranks {error.ranks} in phase {error.phase}")
    """


class SyncTimeoutError(LostPeerError):
    """A rank did not arrive within ``timeout_seconds``.

    Example:
        >>> model = LegacyDistributedDataParallel(torch.nn.Linear(2, 1), timeout_seconds=300.0)
        >>> try:
        ...     record = model.all_reduce()
        ... except SyncTimeoutError as error:
        ...     raise SystemExit(f"ranks {error.ranks} were silent for 300 seconds")
    """


class GradientError(LegacyDDPError):
    """A gradient of this rank cannot be reduced: it requires grad, or ``sample_size`` would divide it a second time.

    The second division is found in the tensor that a call has left as ``.grad``, and not in a tensor that the script
    has made from it and assigned.

    Example:
        >>> model.module.weight.grad = torch.ones(1, 2, requires_grad=True)  # on every rank
        >>> try:
        ...     record = model.all_reduce()
        ... except GradientError as error:
        ...     print(error.parameter)
        weight
    """


class UnsynchronizedStepError(LegacyDDPError):
    """An optimizer step would use gradients without a call of ``all_reduce()``. Nothing changed.

    Example:
        >>> model(inputs).sum().backward()
        >>> try:
        ...     optimizer.step()
        ... except UnsynchronizedStepError:
        ...     print("call all_reduce() first")
        call all_reduce() first
    """


class TraceError(LegacyDDPError):
    """A trace cannot be written, read or compared; the text names the file and the next step.

    Example:
        >>> with Recorder(model, folder):
        ...     record = model.all_reduce()
        >>> try:
        ...     with Recorder(model, folder):
        ...         pass
        ... except TraceError as error:
        ...     print("this folder holds a trace")
        this folder holds a trace
    """


# Tracebacks, pickles and logs name the public module. The heading of a section is the name of its class.
for _item in tuple(globals().values()):
    if isinstance(_item, type) and issubclass(_item, LegacyDDPError):
        _item.__module__ = "legacy_ddp"
        _item.anchor, _item._section = _item.__name__.lower(), _item.__name__


class ArgumentErrors(ContextDecorator):
    """Adds the command to a TypeError or ValueError raised by the library inside the block or the decorated function.

    The section is about both classes, which are Python's own, and thus cannot bring the command themselves. Errors
    raised by other code inside the block (a module, a hook) stay as they are.
    """

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            add_explanation(error)


def add_explanation(error: BaseException) -> None:
    """Add the command to ``error``, and make its text printable, if the library raised this TypeError or ValueError."""
    if not isinstance(error, TypeError | ValueError) or not _is_of_library(error.__traceback__):
        return
    error.args = tuple(printable(item) if isinstance(item, str) else item for item in error.args)
    note = how_to_explain("TypeError" if isinstance(error, TypeError) else "ValueError")
    if note not in getattr(error, "__notes__", ()):  # of an inner block
        error.add_note(note)


def _is_of_library(trace: TracebackType | None) -> bool:
    """Whether the frame that raised belongs to the library."""
    return all(frame.f_code.co_filename.startswith(_LIBRARY) for frame, _ in list(traceback.walk_tb(trace))[-1:])


argument_errors = ArgumentErrors()


def import_error(text: str) -> ImportError:
    """An ImportError with the command that explains it at its end, as all errors of the library."""
    error = ImportError(text)
    error.add_note(how_to_explain("ImportError"))
    return error


def show_usable(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Leave parameters of type Never out of the displayed signature: they are there for a better error."""
    signature = inspect.signature(function)
    usable = [each for each in signature.parameters.values() if each.annotation is not Never]
    vars(function)["__signature__"] = signature.replace(parameters=usable)
    return function
