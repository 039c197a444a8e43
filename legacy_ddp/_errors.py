"""The tree of exceptions.

LegacyDDPError(RuntimeError)
├── AgreedError            raised on all ranks: same type, ranks and text on every rank;
│   │                      every ``.grad`` untouched, the group stays usable
│   ├── LayoutError            ranks hold different parameters, buffers or settings
│   ├── DesyncError            ranks are not at the same call, or do not mean the same by it
│   ├── PeerError              a rank failed locally before the exchange; the text has its error
│   ├── ReplicaDivergenceError  replicas hold different bits; the text names tensors, phase and cause
│   ├── EditedGradientError    gradients were clipped or unscaled before the call, with ``edited="raise"``
│   ├── NonFiniteGradientError  a gradient holds NaN or infinity, with ``nonfinite="raise"``
│   ├── CommHookError          a communication hook returned no usable gradient
│   └── TransportError         ``transport="host"`` is not possible, or not any more
├── LostPeerError          a rank did not answer; the group is not usable any more
│   ├── PeerLostError          its connection broke
│   └── SyncTimeoutError       it was silent for ``timeout_seconds``
├── GradientError          local: a gradient that cannot be reduced; reaches the peers as PeerError
├── UnsynchronizedStepError  local: an optimizer's step() without the call; nothing was stepped
└── TraceError             local: a trace that cannot be written, read or compared
"""

from collections.abc import Sequence
from typing import Any

from legacy_ddp._text import encodable


class LegacyDDPError(RuntimeError):
    """Base of all exceptions of this library.

    ``ranks``: the ranks at fault, counted inside the group; empty if they are not known. ``call``: number of the
    collective call on this wrapper, from 1. ``phase``: of the call. ``parameter``: the name of the parameter.
    """

    def __init__(
        self,
        message: str,
        *,
        ranks: Sequence[int] = (),
        call: int | None = None,
        phase: str | None = None,
        parameter: str | None = None,
    ) -> None:
        super().__init__(encodable(message))  # parameter and file names may hold lone surrogates
        self.ranks = tuple(ranks)
        self.call = call
        self.phase = phase
        self.parameter = parameter


class AgreedError(LegacyDDPError):
    """A disagreement of the ranks that all ranks detected: the same error on every rank, nothing written."""


class LayoutError(AgreedError):
    """Ranks hold different parameters, buffers or settings; the text names each difference and its ranks."""


class DesyncError(AgreedError):
    """Ranks met in different calls, or mean different things by the same call."""


class ReplicaDivergenceError(AgreedError):
    """Replicas hold different bits.

    ``minority``: the ranks outside the strict majority, by counting alone; empty without a majority. ``implicated``:
    the ranks with evidence of a fault, such as parameters that changed outside of a step; empty without evidence, or
    with evidence about all ranks. ``ranks``: the ranks at fault, from both: ``minority``, or without a majority
    ``implicated``, and ranks with evidence of a second fault. Empty if the evidence of the first fault names a rank of
    the majority: evidence outranks counting, so the minority may be the good ranks; look at both attributes.
    ``report``: the :class:`legacy_ddp.debug.ReplicaReport` with the same text. ``phase``: the first phase with a
    difference, one of ``start``, ``all_reduce``, ``gradients``, ``step``, ``outside``, ``buffers``, ``unknown``.
    """

    report: Any = None
    minority: tuple[int, ...] = ()
    implicated: tuple[int, ...] = ()


class PeerError(AgreedError):
    """A rank failed locally before the exchange, so nothing was exchanged."""


class NonFiniteGradientError(AgreedError):
    """A local gradient held NaN or infinity before the exchange; only with ``Checks(nonfinite="raise")``.

    ``ranks``: the ranks with such a gradient. ``parameter``: the first such parameter on the first of these ranks.
    """


class EditedGradientError(AgreedError):
    """Gradients were clipped or unscaled between backward and the call; only with ``Checks(edited="raise")``.

    ``ranks``: the ranks with such gradients.
    """


class CommHookError(AgreedError):
    """A communication hook returned no usable gradient; the text names the ranks and the expected result."""


class TransportError(AgreedError):
    """``transport="host"`` is not possible, or not any more; the text has the reason of the first rank with one."""


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
    """A gradient of this rank cannot be reduced."""


class UnsynchronizedStepError(LegacyDDPError):
    """An optimizer step would use gradients without a call of :meth:`all_reduce`. Nothing changed."""


class TraceError(LegacyDDPError):
    """A trace cannot be written, read or compared; the text names the file and the next step."""


# Tracebacks, pickles and logs name the public module.
for _item in tuple(globals().values()):
    if isinstance(_item, type) and issubclass(_item, LegacyDDPError):
        _item.__module__ = "legacy_ddp"
