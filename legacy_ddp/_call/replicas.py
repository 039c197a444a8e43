"""Replicas that differ between ranks: an error, or a warning, before any gradient changes.

On a device the digests in turns are compared some calls later, because the host does not wait (:class:`Ring`). The
header of a call carries two facts about the rows of a rank: which is the newest complete row, and the digest of the
next row to compare. This is the row after the last compared one, if it was complete on all ranks in the call before. So
every row is compared once, in order, at the earliest two calls after its own.

A rank has no digest of a row, and no rank compares it, if meanwhile its replica was divided into other parts, buffers
were found to be statistics, the parameters were broadcast, or a call failed.

Buffers that only some ranks hold are reported in the first call after the names have changed (:class:`BufferNames`).
"""

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from legacy_ddp import _torch as internals
from legacy_ddp._call.check import Check, LocalStep, Ring, Row, Subject
from legacy_ddp._errors import LayoutError
from legacy_ddp._explainer import ExplainedReplicas
from legacy_ddp._log import warn
from legacy_ddp._ranks.agree import Agreement, agreed_error, gather_context
from legacy_ddp._ranks.call import Call
from legacy_ddp._ranks.header import Flag
from legacy_ddp._ranks.private_groups import Groups
from legacy_ddp._replicas.history import ReplicaDigests, StepHistory
from legacy_ddp._replicas.rotation import PeriodicDigests, Reading, RotatingDigests, devices_of, find_failure
from legacy_ddp._replicas.state import named_buffers
from legacy_ddp._text import Finding, compare_groups, error_line, list_some

MAX_WARNINGS = 5  # per wrapper: a cache may have a buffer for every size of its inputs


class BufferNames(Check):
    """Compares the names of all buffers, also of buffers that are not saved: in the first call on a process group, and
    in every call in which the names of a rank have changed.

    Values are compared elsewhere (``_replicas``), which cannot compare a buffer that only some ranks hold.
    """

    section = "Buffers of some ranks"
    awaits = Flag.RENAMED

    def __init__(self, subject: Subject) -> None:
        settings, checks = subject.settings, subject.settings.checks
        self.is_on = subject.wrapper is not None and (checks.compares_replicas or checks.rotates_digests)
        self._raises = checks.compares_replicas or checks.divergence == "raise"
        self._left_out = settings.ignore, checks.local_buffers
        self._wrapper, self._walk = subject.wrapper_reference, subject.planner.walk
        self._tree: object = None  # of the walk, when the names were found: only with another may a name have changed
        self._names: list[str] = []
        self._compared: weakref.WeakKeyDictionary[Groups, list[str]] = weakref.WeakKeyDictionary()
        self._told: set[str] = set()
        self._warnings = 0

    def facts(self, step: LocalStep) -> None:
        tree, _ = self._walk.walked
        if tree is None or tree is not self._tree:
            names = self._find()
            self._names = self._names if names == self._names else names
            self._tree = tree
        step.header.flags |= Flag.NAMED
        if self._compared.get(step.call.groups) is not self._names:
            step.header.flags |= Flag.RENAMED

    def compare(self, step: LocalStep, agreement: Agreement) -> str | None:
        """Collective only if the names of a rank have changed. A warning, or a LayoutError with ``"detail"`` or
        ``divergence="raise"``."""
        text = self._compare_names(step, agreement) if agreement.common_flags & Flag.NAMED else None
        self._compared[step.call.groups] = self._names
        return text

    def _compare_names(self, step: LocalStep, agreement: Agreement) -> str | None:
        with step.call.phase("agree"):
            held = step.call.gather_distinct(self._names)
        left = agreement.ranks_with(Flag.JOINED)  # these ranks make no more forward passes
        rows = [(dict.fromkeys(names, "it"), [rank for rank in ranks if rank not in left]) for names, ranks in held]
        finding = compare_groups([(row, ranks) for row, ranks in rows if ranks])
        if self._raises and finding:
            raise agreed_error(LayoutError, agreement.rows, _text(finding), finding.ranks)
        new = Finding(tuple(item for item in finding.differences if item.name not in self._told))
        if not new or self._warnings == MAX_WARNINGS:
            return None
        self._told |= {item.name for item in new.differences}
        self._warnings += 1
        return f"{step.call}: {_text(new)}\n(warned once for each buffer; see Checks(divergence=...))"

    def _find(self) -> list[str]:
        wrapper: Any = self._wrapper()  # not None: it makes the call
        return sorted(
            f"buffer {name!r}" for item in named_buffers(wrapper.module, *self._left_out) for name in item.names
        )


def _text(finding: Finding) -> str:
    pattern = "*" + finding.differences[0].name.removeprefix("buffer ")[1:-1].rpartition(".")[2]
    return (
        f"ranks hold different buffers:\n{finding}\n"
        "state dicts differ, and broadcast_buffers() raises: register buffers on every rank, at best in the\n"
        f"constructor; one that is meant for some ranks alone belongs in Checks(local_buffers=[{pattern!r}])"
    )


_WARNED_ONCE = (
    '(warned once for these tensors and ranks; checks="detail" finds the step;\n    see Checks(divergence=...))'
)
# A word in the header: a digest of 55 bits, and the age of a row.
_DIGESTS = 2**55
_AGE_BITS = 8
_OLDEST = 255


class _Ring(Ring[Reading]):
    """The digests of calls on a process group."""

    def __init__(self) -> None:
        super().__init__()
        self.compared = 0  # the newest row that was compared; equal on all ranks
        self.has_next = False  # the headers of the present call have the digests of the next row; equal on all ranks
        self.digests: dict[int, tuple[Reading, int]] = {}  # of complete rows that were not compared, by number

    def take(self, row: Row[Reading]) -> None:
        # Copied, because the integers of a part are not aligned for 64 bits.
        sums = [number for part in row.parts for number in part.integers.clone().view(torch.int64).tolist()]
        self.digests[row.number] = row.subject, row.subject.digest(sums) % _DIGESTS or 1

    def word(self, generation: int) -> int:
        """What the header of this rank carries: the digest of the next row (0 if that is of an earlier generation), and
        the age of the newest complete row."""
        reading, value = self.digests[self.compared + 1] if self.has_next else (None, 0)
        value = value if reading is not None and reading.generation == generation else 0
        age: int = min(self.agreed - self.ready, _OLDEST)
        return value << _AGE_BITS | age

    def go_on(self, words: Sequence[int]) -> tuple[int, Sequence[int]] | None:
        """Note that the ranks agree on a call, whose headers have ``words``. Returns the number of the call whose
        digests are compared, and the digest of each rank; None without such a call."""
        newest = self.agreed - max(word & _OLDEST for word in words)
        self.agreed += 1
        found = None
        if self.has_next:
            self.compared += 1
            reading, _ = self.digests.pop(self.compared)
            found = reading.number, [word >> _AGE_BITS for word in words]
        self.has_next = self.compared < newest
        return found


class Replicas(Check):
    """Compares the replicas of all ranks."""

    section = "Replicas differ"

    def __init__(self, subject: Subject) -> None:
        settings, planner, wrapper = subject.settings, subject.planner, subject.wrapper
        checks = settings.checks
        self.digests: ReplicaDigests | None = None  # of this rank; None if nothing is compared
        self._failure = ""  # of the trial of a device, until it is told
        self._late: RotatingDigests | None = None  # ``digests``, if they are compared some calls later
        if checks.compares_replicas and wrapper is not None and checks.every == 1:
            self.digests = StepHistory(wrapper, settings, planner.counter.policy)
        elif checks.compares_replicas and wrapper is not None:
            self.digests = PeriodicDigests(wrapper, settings, planner)
        elif checks.rotates_digests and wrapper is not None:
            module: Any = wrapper.module
            self._failure = find_failure(module)
            self.digests = rotating = None if self._failure else RotatingDigests(wrapper, settings, planner)
            self._late = rotating if devices_of(module) else None
        self.is_on = self.digests is not None or self._failure != ""
        self._wrapper = subject.wrapper_reference
        self._rings: weakref.WeakKeyDictionary[Groups, _Ring] = weakref.WeakKeyDictionary()

    def facts(self, step: LocalStep) -> None:
        if self._failure:
            self._close(step.call, self._failure)
        elif self._late is not None:
            self._begin_row(step, self._late)
        elif self.digests is not None and (digest := self.digests.digest_of(step.call)) is not None:
            step.header.replica = digest
            step.header.flags |= Flag.SIGNED

    def compare(self, step: LocalStep, agreement: Agreement) -> str | None:
        """Collective only if the digests differ."""
        call, digests = step.call, self.digests
        if digests is None:
            return None
        # Also after a forward that is not seen: of the module itself, or of a compiled wrapper.
        digests.buffers.has_run |= step.header.micro_batches > 0
        explained = None
        if self._late is not None:
            explained = self._compare_row(call, self._late, agreement)
        # Otherwise nothing is due in this call, or checks are off on some rank (perhaps on a rank that left).
        elif agreement.common_flags & Flag.SIGNED:
            of_ranks = agreement.headers.column("replica")
            if of_ranks.count(of_ranks[0]) == len(of_ranks):
                digests.note_agreement(call.groups, call.number)
            else:
                left = agreement.ranks_with(Flag.JOINED)  # these ranks make no more steps
                compared = {rank: digest for rank, digest in enumerate(of_ranks) if rank not in left}
                explained = digests.compare(call, left, compared)
        if explained is None:
            return None
        _, notes = gather_context(call)
        error = explained.error(notes)
        if call.checks.compares_replicas or call.checks.divergence == "raise":
            raise error
        return f"{error}\n  {_WARNED_ONCE}"

    def end(self, step: LocalStep) -> None:
        if self.digests is not None:
            self.digests.end_call(step.call)

    def observe(self, step: LocalStep, _: Agreement) -> str | None:
        if self.digests is None or step.call.groups.size == 1:
            return None
        if not (names := self.digests.unread()):
            return ""
        return (
            f"{step.call}: tensors whose bits cannot be read are not compared between ranks (told once):\n"
            f"{list_some(names)}; list them in ignore="
        )

    @internals.keeps_grad_mode
    def begin_forward(self, *, is_training: bool) -> None:
        # A traced forward would record the operations of the digest.
        if self.digests is not None and torch.is_grad_enabled() and not internals.is_tracing():
            self.digests.begin_forward(is_training=is_training)

    def restart(self) -> None:
        if self.digests is not None:
            self.digests.restart()

    def restart_buffers(self) -> None:
        wrapper: Any = self._wrapper()
        if self.digests is not None and wrapper is not None:
            with torch.no_grad():
                self.digests.buffers.mark(wrapper.module)

    def _begin_row(self, step: LocalStep, digests: RotatingDigests) -> None:
        call = step.call
        ring = self._rings.get(call.groups)
        if ring is None:
            ring = self._rings[call.groups] = _Ring()
        if ring.drop_failed():
            digests.generation += 1
        ring.look()
        try:
            reading, sums = digests.begin(call)
            parts = [ring.begin_part(vector.view(torch.int32)) for vector in sums]
        except (RuntimeError, TypeError) as error:  # no memory, for example
            self._close(call, error_line(error))
            return
        ring.add(reading, parts)
        step.header.generators = ring.word(digests.generation)

    def _close(self, call: Call, reason: str) -> None:
        """Compare no replicas any more, on any rank: the digest of this rank is missing from now on."""
        self.digests, self._late, self.is_on, self._failure = None, None, False, ""
        text = (
            f"{call}: replicas on this device cannot be digested ({reason}); not tried again, and not compared on any "
            'rank; see Checks("detail", every=N)'
        )
        warn(call.groups.rank, text, self.section)

    def _compare_row(self, call: Call, digests: RotatingDigests, agreement: Agreement) -> ExplainedReplicas | None:
        """Compare the digests of the next row, if it was complete on all ranks and every rank has a digest of it."""
        found = self._rings[call.groups].go_on(agreement.column("generators"))
        if found is None or not all(found[1]):
            return None
        left = agreement.ranks_with(Flag.JOINED)
        compared = {rank: digest for rank, digest in enumerate(found[1]) if rank not in left}
        explained = digests.compare(call, left, compared, found[0])
        if explained is not None and call.checks.divergence == "raise":
            digests.generation += 1  # the rows on the way have the same difference
        return explained
