"""Gradients that backward has added to the result of a call, without ``zero_grad()`` between.

A call with ``sample_size`` would divide that result a second time. The sign is that backward finds in ``.grad`` the
tensor that the last call has left; a loop that clears its gradients pays nothing. But a result that was cleared in
place is the same tensor, and its version does not tell: clipping raises the version as clearing does, and
``.data.zero_()`` does not. Therefore:

- The first addition of a step takes the norms of all results that backward has not reached yet. A result with the norm
  0 was cleared.
- The old values of the first result are lost. Its version decides: a new version means that it was cleared, and an old
  version that it was not, unless the other results show that the script clears without a new version. On CUDA
  ``torch._foreach_zero_``, which optimizers use, leaves no new version: there an old version proves nothing without
  other results.
- A clip between call and step raises the version, too. So the version of the first result is noted at the end of a
  step: only later writes count. A step looks at one tensor, the first result of the step before.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from threading import get_ident
from typing import Any, NamedTuple, Protocol

import torch

from legacy_ddp import _torch as internals


class LastResult(Protocol):
    """The gradient that the last call has left for a slot."""

    def is_in(self, grad: torch.Tensor) -> bool:
        """Whether ``grad`` is that object. Writes to the object do not matter."""

    @property
    def is_zeros(self) -> bool:
        """Whether no rank had a gradient, and the call has left zeros: to add to them is no mistake."""

    @property
    def version(self) -> int:
        """Its version at the end of the call."""

    @property
    def view(self) -> torch.Tensor | None:
        """The object, None if only the user has it."""


class _Seen(NamedTuple):
    """The norm of a result, the version of the result then, and whether it is still the version after the call."""

    norm: torch.Tensor
    version: int
    is_unwritten: bool


@dataclass(frozen=True, slots=True)
class _Addition:
    """A gradient that was the result of the last call before the first backward since.

    ``identity``: of the gradient. ``norm``: of the result before the addition, None if unknown. ``is_unwritten``:
    nothing but this backward has raised the version of the result. ``shows_writes``: every write raises the version, as
    on the CPU, but not where NumPy may write.
    ``is_as_used``: as ``is_unwritten``, since the last step.
    """

    identity: dict[str, Any]
    norm: torch.Tensor | None
    is_unwritten: bool
    shows_writes: bool
    is_as_used: bool = False


class _Look(NamedTuple):
    """The results at the first addition of a step, by slot, and the thread that added."""

    thread: int
    seen: dict[int, _Seen]


class ResultSums:
    """The additions to the results of the last call, of one counter. Keeps no parameter and no gradient alive.

    ``additions``: by slot; empty in a loop that clears its gradients. ``given``: the slots in which backward has added
    to a part of a larger tensor, or to memory from elsewhere, that no call has left. ``awaits_step``: :meth:`note_step`
    has something to note for some slot.
    """

    def __init__(self, results: Sequence[LastResult] = (), counts: Sequence[int] = ()) -> None:
        self._results = results
        self._counts = counts
        self.additions: dict[int, _Addition] = {}
        self.given: set[int] = set()
        self._look: _Look | None = None  # None until the first addition
        self._first: int | None = None  # the slot of the first addition, of this step or an earlier step
        self.awaits_step = False
        self._used_version = -1  # of the result in that slot, at the end of the last step

    def note(self, index: int, grad: torch.Tensor, version: int) -> None:
        """Backward has added to ``grad``, in slot ``index`` and now of ``version``: the first time since the call."""
        result = self._results[index]
        if (is_other := not result.is_in(grad)) or result.is_zeros:
            self.discard(index)
            if is_other and internals.is_part(grad):
                self.given.add(index)
            return
        look, used_version = self._look, -1
        if look is None:
            look = self._look = _Look(get_ident(), self._look_at_others(index))
            used_version = self._used_version if index == self._first else -1
            self._first, self.awaits_step = index, True
        seen = look.seen.get(index)
        # Another thread may have added to its results while this look was taken.
        is_known = seen is not None and version == seen.version + 1 and get_ident() == look.thread
        self.additions[index] = _Addition(
            internals.identity(grad),
            seen.norm if seen is not None and is_known else None,
            is_unwritten=version == result.version + 1,
            shows_writes=grad.is_cpu and (result.view is grad or internals.is_memory_counted(grad)),
            is_as_used=version == used_version + 1,
        )

    def note_step(self, index: int) -> None:
        """A step that used the result in slot ``index`` has ended: later writes to the results are no part of it."""
        if index == self._first:
            view = self._results[index].view
            self._used_version = -1 if view is None else view._version

    def discard(self, index: int) -> None:
        """Another gradient took the place of the result, or something other than backward wrote to it."""
        self.additions.pop(index, None)

    def clear(self) -> None:
        """Forget all additions: after a call, or when all gradients were removed."""
        self.additions.clear()
        self.given.clear()
        self._look = None

    def take_over(self, index: int, other: "ResultSums", other_index: int) -> None:
        """Note the addition of ``other``, whose parameter now has the slot ``index`` here."""
        addition = other.additions.get(other_index)
        if addition is not None or other_index in other.given:  # here no call has left that tensor
            self.given.add(index)
        if addition is not None and other.contains(other_index, addition.identity):
            self.additions[index] = replace(addition, norm=None, is_unwritten=True, is_as_used=False)

    def contains(self, index: int, identity: dict[str, Any]) -> bool:
        """Whether the gradient in slot ``index``, with this identity, contains a result that was not cleared."""
        addition = self.additions.get(index)
        if addition is None or addition.identity is not identity:
            return False
        if addition.norm is not None:
            return bool(addition.norm)
        return addition.is_unwritten and self._shows_that_versions_tell(addition)

    def contains_used(self, index: int, identity: dict[str, Any]) -> bool:
        """As :meth:`contains`, also for a result that was written to, if the last write came before the end of a step.

        For use where the norms of other results are known: they show ``.data.zero_()``, which leaves no version.
        """
        addition = self.additions.get(index)
        is_as_used = addition is not None and addition.is_as_used and addition.identity is identity
        return self.contains(index, identity) or (is_as_used and bool(self._others()))

    def may_wait(self) -> bool:
        """Whether reading the norms would wait for a device."""
        return any(seen.norm.device.type != "cpu" for seen in self._others())

    def _shows_that_versions_tell(self, addition: _Addition) -> bool:
        """Whether an old version means that a result was not cleared, as far as the other results show."""
        norms = [seen.norm for seen in self._others() if seen.is_unwritten]
        return all(map(bool, norms)) if norms else addition.shows_writes or bool(self._others())

    def _others(self) -> Collection[_Seen]:
        return () if self._look is None else self._look.seen.values()

    def _look_at_others(self, index: int) -> dict[int, _Seen]:
        views = {
            other: view
            for other, (result, count) in enumerate(zip(self._results, self._counts, strict=True))
            if not (count or result.is_zeros) and other != index and (view := result.view) is not None and view.numel()
        }
        if not views:
            return {}
        with torch.no_grad(), internals.unseen():
            norms = internals.foreach_norm(list(views.values()))
        return {
            other: _Seen(norm, view._version, is_unwritten=view._version == self._results[other].version)
            for (other, view), norm in zip(views.items(), norms, strict=True)
        }
