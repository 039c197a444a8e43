"""Exceptions; explanations of argument errors; and for the import of the package: lazy names, refused systems.

LegacyDDPError(RuntimeError)
├── AgreedError            raised on all ranks: same type, ranks and text on every rank;
│   │                      every ``.grad`` untouched, the group stays usable
│   ├── LayoutError            ranks hold different parameters, buffers or settings
│   ├── DesyncError            ranks are in different calls, or mean different things by the same call
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
import sys
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ContextDecorator
from importlib import import_module
from types import TracebackType
from typing import Any, ClassVar, Never, ParamSpec, TypeVar

from legacy_ddp._text import how_to_explain, printable, printable_lines

_P = ParamSpec("_P")
_T = TypeVar("_T")

_LIBRARY = os.path.join(os.path.dirname(__file__), "")


class LegacyDDPError(RuntimeError):
    """Base of all exceptions of this library.

    ``ranks``: the ranks at fault, counted inside the group; empty if they are not known. ``call``: number of the
    collective call on this wrapper, from 1. ``phase``: of the call. ``parameter``: its name. ``anchor``: of the section
    about this class in docs/errors.md. A traceback ends with the command that prints this section.
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
    """An error that all ranks raise with the same text; every ``.grad`` is unchanged."""


class LayoutError(AgreedError):
    """Ranks hold different modules, parameters, buffers or settings; the text names each difference and its ranks."""


class DesyncError(AgreedError):
    """Ranks are in different calls, or mean different things by the same call."""


class ReplicaDivergenceError(AgreedError):
    """Replicas hold different bits, or compute different bits (``phase`` is ``run``, see below).

    ``minority``: the ranks outside the strict majority, by counting alone; empty without a majority. ``implicated``:
    the ranks with evidence of a fault, such as parameters that changed outside of a step; empty without evidence, or
    with evidence against all ranks. ``ranks``: the ranks at fault: ``minority``, or without a majority ``implicated``,
    and ranks with evidence of a second fault. Empty if there is evidence against a rank of the majority. Then the
    minority may be right: compare ``minority`` with ``implicated``. In an error of a cross-check ``ranks`` are the
    ranks of its report, without a majority all of them.
    ``report``: the :class:`legacy_ddp.debug.ReplicaReport` with the same text. ``phase``: the first phase with a
    difference, one of ``start``, ``all_reduce``, ``gradients``, ``step``, ``outside``, ``buffers``, ``unknown``; or
    ``run`` in an error of :func:`legacy_ddp.debug.cross_check`, whose ``report`` is a
    :class:`legacy_ddp.debug.CrossCheckReport`.
    """

    report: Any = None
    minority: tuple[int, ...] = ()
    implicated: tuple[int, ...] = ()


class PeerError(AgreedError):
    """A rank failed locally before the exchange, so nothing was exchanged."""


class NonFiniteGradientError(AgreedError, FloatingPointError):
    """A local gradient held NaN or infinity before the exchange; only with ``Checks(nonfinite="raise")``.

    A FloatingPointError, too, because trainers that skip such a step catch this class.
    ``ranks``: the ranks with such a gradient. ``parameter``: the first such parameter on the first of these ranks.
    """


class EditedGradientError(AgreedError):
    """Gradients were clipped or unscaled between backward and the call; only with ``Checks(edited="raise")``.

    ``ranks``: the ranks with such gradients.
    """


class CommHookError(AgreedError):
    """A communication hook returned no usable gradient; the text names the ranks and the expected result."""


class TransportError(AgreedError):
    """``transport="host"`` is not possible, or not any more; the text has the reason of the first rank that has one."""


class LostPeerError(LegacyDDPError):
    """A rank did not answer; the process group is not usable any more.

    ``report``: the activity of every rank, the same text on all ranks that raise; empty with checks off.
    """

    report = ""


class PeerLostError(LostPeerError):
    """The connection to a rank broke: its process ended or its host vanished."""


class SyncTimeoutError(LostPeerError):
    """A rank did not arrive within ``timeout_seconds``."""


class GradientError(LegacyDDPError):
    """A gradient of this rank cannot be reduced: it requires grad, or ``sample_size`` would divide it a second time.

    Only the tensor that the last call left in ``.grad`` is recognised, not a copy that the script assigns.
    """


class UnsynchronizedStepError(LegacyDDPError):
    """An optimizer step would use gradients without a call of ``all_reduce()``. Nothing changed."""


class TraceError(LegacyDDPError):
    """A trace cannot be written, read or compared; the text names the file and the next step."""


# Tracebacks, pickles and logs name the public module. The heading of a section is the name of its class.
for _item in tuple(globals().values()):
    if isinstance(_item, type) and issubclass(_item, LegacyDDPError):
        _item.__module__ = "legacy_ddp"
        _item.anchor, _item._section = _item.__name__.lower(), _item.__name__


class ArgumentErrors(ContextDecorator):
    """Decorates a function: :func:`add_explanation` to the error that leaves it. Also for a block."""

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            add_explanation(error)


def add_explanation(error: BaseException) -> None:
    """Add the command that explains it to a TypeError or ValueError, and make its text printable.

    Only if the library raised the error, and not other code such as a module or a hook.
    """
    if not isinstance(error, TypeError | ValueError) or not _is_of_library(error.__traceback__):
        return
    error.args = tuple(printable(item) if isinstance(item, str) else item for item in error.args)
    note = how_to_explain("TypeError" if isinstance(error, TypeError) else "ValueError")
    if note not in getattr(error, "__notes__", ()):  # an inner block may have added it
        error.add_note(note)


def _is_of_library(trace: TracebackType | None) -> bool:
    frames = [frame for frame, _ in traceback.walk_tb(trace)]
    return not frames or frames[-1].f_code.co_filename.startswith(_LIBRARY)


argument_errors = ArgumentErrors()


def import_error(text: str) -> ImportError:
    """An ImportError with the command that explains it."""
    error = ImportError(text)
    error.add_note(how_to_explain("ImportError"))
    return error


def show_usable(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Leave parameters of type Never out of the displayed signature: they exist only for a better error."""
    signature = inspect.signature(function)
    usable = [each for each in signature.parameters.values() if each.annotation is not Never]
    vars(function)["__signature__"] = signature.replace(parameters=usable)
    return function


def lazy_names(package: str, modules: Mapping[str, str], submodules: Collection[str] = ()) -> Callable[[str], Any]:
    """A ``__getattr__`` for ``package`` (PEP 562): imports a name at its first use, from its module in ``modules``."""

    def find(name: str) -> Any:
        if name in submodules:
            return import_module(f"{package}.{name}")  # the import makes it an attribute of the package
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(modules[name]), name)
        setattr(sys.modules[package], name, value)  # the next use costs no call
        return value

    return find


def check_system() -> None:
    """ImportError on a system that is neither Linux nor like it, such as Windows."""
    try:
        import_module("fcntl")
    except ModuleNotFoundError:
        raise import_error(
            "legacy_ddp does not run on this system: got a Python without fcntl "
            f"(sys.platform {sys.platform!r}), expected Linux, or macOS without shared memory; "
            "on Windows use the Windows Subsystem for Linux"
        ) from None
