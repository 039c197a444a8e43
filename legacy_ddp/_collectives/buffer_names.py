"""Buffers that some ranks alone hold: a warning, or an error, in the first call after the names have changed."""

import weakref
from typing import Any

from legacy_ddp._agreement.agree import Agreement, agreed_error
from legacy_ddp._agreement.header import Flag
from legacy_ddp._collectives.check_interface import Check, LocalStep, Subject
from legacy_ddp._errors import LayoutError
from legacy_ddp._replicas.state import named_buffers
from legacy_ddp._text import Finding, compare_groups
from legacy_ddp._transport.private_groups import Groups

MAX_WARNINGS = 5  # of a wrapper: a cache may have a buffer for every size of its inputs


class BufferNames(Check):
    """Compares the names of all buffers, also of buffers that are not saved: in the first call on a process group, and
    in every call in which the names of a rank have changed.

    The walk over the parameters tells whether a name may have changed: other calls cost a comparison. Values are
    compared elsewhere (``_replicas``), where a buffer of some ranks alone cannot be.
    """

    section = "Buffers of some ranks"

    def __init__(self, subject: Subject) -> None:
        settings, checks = subject.settings, subject.settings.checks
        self.is_on = subject.wrapper is not None and (checks.compares_replicas or checks.rotates_digests)
        self._raises = checks.compares_replicas or checks.divergence == "raise"
        self._left_out = settings.ignore, checks.local_buffers
        self._wrapper, self._walk = subject.wrapper_reference, subject.planner.walk
        self._tree: object = None  # of the walk, as of the names
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
        """Collective only if the names of a rank have changed.

        Raises:
            LayoutError: ranks hold different buffers, with ``"detail"`` or ``divergence="raise"``.
        """
        if not (agreement.common_flags & Flag.NAMED and agreement.some_flags & Flag.RENAMED):
            return None
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

    def end(self, step: LocalStep) -> None:
        if self._compared.get(step.call.groups) is not self._names:
            self._compared[step.call.groups] = self._names

    def _find(self) -> list[str]:
        """The names of this rank, sorted."""
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
