"""The hint about an evaluation with running statistics that every rank has updated on its own data."""

import weakref
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from legacy_ddp import _torch as internals
from legacy_ddp._log import warn
from legacy_ddp._settings import Settings
from legacy_ddp._transport.call import GroupState
from legacy_ddp._transport.rows import Operation

_SPEAKER = 1  # the rank that warns


class EvaluationHint:
    """Given once, at the first forward in eval mode after training and a call, by rank 1.

    Rank 0 may evaluate alone: it has the statistics that torch DDP would give to all ranks. If all ranks evaluate, rank
    1 is among them.

    Nothing is communicated: statistics that a rank has updated on data of its own differ from those of the other ranks.
    Whether a rank has updated them is known from the version counters of the buffers. Layers with a buffer that is
    ignored, or named in ``Checks(local_buffers=)``, do not count.

    ``awaits_training``: the mode of the next forward to tell of, so that all other forwards cost one comparison.
    """

    def __init__(self, wrapper: nn.Module, settings: Settings) -> None:
        self.awaits_training = True
        self._wrapper = weakref.ref(wrapper)
        self._left_out = (*settings.ignore, *settings.checks.local_buffers)
        self._versions: dict[str, int] | None = None  # by layer, at the first training forward since a broadcast

    def restart(self) -> None:
        """All ranks hold equal buffers, or are meant to."""
        self.awaits_training, self._versions = True, None

    def begin_awaited(self, states: Iterable[GroupState]) -> bool:
        """A forward in the awaited mode begins. Returns whether nothing is left to tell.

        ``states``: of the wrapper, on all groups of its calls.
        """
        layers = self._layers()
        if self.awaits_training:
            self.awaits_training = False
            if self._versions is None:
                self._versions = {name: version for name, (_, version) in layers.items()}
            return not layers
        self.awaits_training = True
        group = next((state.groups for state in states if _has_reduced(state)), None)
        marks = self._versions or {}
        updated = {name: kind for name, (kind, version) in layers.items() if version > marks.get(name, version)}
        if group is None or not updated:
            return False
        if group.rank == _SPEAKER:
            warn(_SPEAKER, _describe(updated))
        return True

    def _layers(self) -> dict[str, tuple[str, int]]:
        """Kind and version of each layer with statistics that count."""
        wrapper: Any = self._wrapper()  # its forward runs
        return {
            layer: (kind, sum(map(internals.version_of, buffers.values())))
            for layer, kind, buffers in internals.running_statistics(wrapper.module)
            if not any(fnmatchcase(name, pattern) for name in buffers for pattern in self._left_out)
        }


def _has_reduced(state: GroupState) -> bool:
    return state.groups.size > 1 and state.calls[Operation.ALL_REDUCE] > 0


def _describe(layers: dict[str, str]) -> str:
    name, kind = next(iter(layers.items()))
    return (
        f"evaluation after training: the running statistics of {len(layers)} layer{'s' * (len(layers) > 1)}, "
        f"first {name!r} ({kind}), are of each rank's own data;\n"
        "in eval mode ranks give different results, and so does a checkpoint of each rank (told once);\n"
        "call broadcast_buffers() on every rank before an evaluation and before a checkpoint"
    )
