"""Digests of the whole replica in every Nth call. The check of ``Checks("detail", every=N)``."""

import weakref
from collections.abc import Collection, Mapping

from torch import nn

from legacy_ddp._buckets.layout import fingerprint
from legacy_ddp._replicas import state
from legacy_ddp._replicas.compare import add_moved, compare_items, find_moved
from legacy_ddp._replicas.forward_digests import ForwardDigests
from legacy_ddp._replicas.report import ReplicaReport
from legacy_ddp._replicas.rotation import with_evidence
from legacy_ddp._replicas.shared_buffers import gather_digests
from legacy_ddp._settings import Settings
from legacy_ddp._step_guard.backward_counter import StepPolicy
from legacy_ddp._transport.call import Call
from legacy_ddp._transport.groups import Groups


class PeriodicDigests(ForwardDigests):
    """Digests parameters and shared buffers for call 1, N + 1, 2 N + 1, ..., and nothing for the calls between.

    As in every call at level ``"detail"``, parameters are digested in the first training forward since the last call.
    """

    def __init__(self, wrapper: nn.Module, settings: Settings, policy: StepPolicy) -> None:
        super().__init__(wrapper, settings, policy)
        self._of_parameters = 0  # the part of the last digest
        self._agreed: weakref.WeakKeyDictionary[Groups, int] = weakref.WeakKeyDictionary()  # the last call that agreed

    def digest_of(self, call: Call) -> int | None:
        """The digest for ``call``; None for a call between."""
        self.forget_failed_step()
        if not self._is_due(call.number):
            return None
        with call.phase("digest"):
            self.ids = frozenset(map(id, self._module.parameters()))
            if self._taken is None or self._taken[0] != call.number:
                self._taken = call.number, self._digest(call.number)
            return self._taken[1]

    def note_agreement(self, call: Call) -> None:
        """Remember the last call that agreed."""
        self._agreed[call.groups] = call.number

    def compare(self, call: Call, left_out: Collection[int], digests: Mapping[int, int]) -> ReplicaReport | None:
        """The report if replicas differ. ``digests``: of the compared ranks. Collective after a difference."""
        last = self._agreed.get(call.groups, 0)
        if len(set(digests.values())) <= 1:
            self.note_agreement(call)
            return None
        self._taken = None
        with call.phase("compare"):
            if self.buffers.learn(call, self._module, left_out):
                digests = gather_digests(call, self._join_digests(), left_out)
        if len(set(digests.values())) <= 1:
            self.note_agreement(call)
            return None
        moved = find_moved(call, self._digest_parameters() != self._of_parameters)
        report = compare_items(call, list(self._items()), None, left_out=left_out)
        # Optimizers may differ by design (sharded state); a digest may belong to a moment that has passed.
        if not any(item.kind in ("parameters", "buffers") for item in report.differences):
            return None
        return add_moved(with_evidence(call, report, last), moved, digests)

    def end_call(self, call: Call) -> None:
        """Begin with the time after a successful call."""
        self._taken, self._next_call = None, call.number + 1
        if self._is_due(call.number):
            self.optimizers.clear()

    def _is_due(self, number: int) -> bool:
        return (number - 1) % self._settings.checks.every == 0

    def _digest(self, _: int) -> int:
        self._of_parameters = self._digest_parameters()
        return self._join_digests()

    def _join_digests(self) -> int:
        """One digest of the parameters, as of their last digest, and of the present buffers."""
        return fingerprint(f"{self._of_parameters} {state.digest_items(self.buffers.items(self._module))}".encode())

    def _digest_parameters(self) -> int:
        return state.digest_items(state.parameters(self._module, self._settings.ignore))
