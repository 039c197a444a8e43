"""What can go wrong, drawn as one tree.

LegacyDDPError(RuntimeError)
├── AgreedError            found by all ranks together: same type, ranks and text on every rank;
│   │                      every ``.grad`` untouched, the group stays usable
│   ├── LayoutError            ranks hold different parameters, buffers or settings
│   ├── DesyncError            ranks are not at the same call, or do not mean the same by it
│   ├── PeerError              a rank failed on its own before the exchange; the text says how
│   ├── ReplicaDivergenceError  ranks hold other bits in what replicas share; the text says which, since when and why
│   ├── NonFiniteGradientError  a gradient holds NaN or infinity, and that was to be an error
│   └── CommHookError          a communication hook returned what cannot be a gradient
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
    """Base of everything raised here; the attributes say what is known.

    ``ranks``: the ranks at fault, counted inside the group; empty where nothing tells them apart. ``call``: number of
    the collective call on this wrapper, from 1. ``phase``: where in the call. ``parameter``: its name.
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
        super().__init__(encodable(message))  # it names parameters and files; to be written anywhere
        self.ranks = tuple(ranks)
        self.call = call
        self.phase = phase
        self.parameter = parameter


class AgreedError(LegacyDDPError):
    """The ranks disagree, and all of them know it: the same error everywhere, nothing written."""


class LayoutError(AgreedError):
    """Ranks hold different parameters, buffers or settings; the text names them and who holds what."""


class DesyncError(AgreedError):
    """Ranks met in different calls, or mean different things by the same call."""


class ReplicaDivergenceError(AgreedError):
    """Ranks hold other bits in what replicas should share.

    ``minority``: the ranks outside the strict majority, by counting alone; empty if there is no majority.
    ``implicated``: the ranks with evidence against them, such as parameters that changed outside of a step; empty if
    there is none, or against all ranks. ``ranks``: the ranks at fault, from both: ``minority``, or where there is no
    majority ``implicated``, and ranks with evidence of a second fault. Empty if the evidence of the first fault names a
    rank of the majority: evidence outranks counting, so the minority may be the good ranks; look at both attributes.
    ``report``: the :class:`legacy_ddp.debug.ReplicaReport`, whose text this error's is. ``phase``: since when, one of
    ``start``, ``all_reduce``, ``gradients``, ``step``, ``outside``, ``buffers``, ``unknown``.
    """

    report: Any = None
    minority: tuple[int, ...] = ()
    implicated: tuple[int, ...] = ()


class PeerError(AgreedError):
    """A rank failed locally before the exchange, so nobody exchanged anything."""


class NonFiniteGradientError(AgreedError):
    """A local gradient holds NaN or infinity, seen before it was exchanged; only with ``Checks(nonfinite="raise")``.

    ``ranks``: those that hold one. ``parameter``: the only one concerned, or the first of them on the first rank.
    """


class CommHookError(AgreedError):
    """A communication hook returned what cannot be a gradient; the text says where, what, and what was expected."""


class LostPeerError(LegacyDDPError):
    """A rank did not answer; this process group cannot be used any more.

    ``report``: what every rank was doing, the same text on all that raise; empty with checks off.
    """

    report = ""


class PeerLostError(LostPeerError):
    """The connection to a rank broke: its process ended or its host vanished."""


class SyncTimeoutError(LostPeerError):
    """A rank did not arrive within ``timeout_seconds``."""


class GradientError(LegacyDDPError):
    """A gradient of this rank cannot be reduced."""


class UnsynchronizedStepError(LegacyDDPError):
    """An optimizer was about to use gradients of this rank alone: :meth:`all_reduce` was forgotten. Nothing changed."""


class TraceError(LegacyDDPError):
    """A trace cannot be written, read or compared; the text names the file and says what to do."""
