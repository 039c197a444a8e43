"""Digests in turns: a part of the replica in every call, the whole replica in 16 calls. The check of level ``info``."""

import weakref
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import nn

from legacy_ddp._buckets.inventory import distinct
from legacy_ddp._buckets.plan import Planner
from legacy_ddp._replicas.attribution import AT_START
from legacy_ddp._replicas.compare import LARGE_BYTES_BY_DEFAULT, compare_items
from legacy_ddp._replicas.forward_digests import ForwardDigests
from legacy_ddp._replicas.memory_checksum import add_memory, has_memory
from legacy_ddp._replicas.parts import MAX_PARTS, Piece, divide
from legacy_ddp._replicas.report import ReplicaReport
from legacy_ddp._settings import Settings
from legacy_ddp._transport.call import Call
from legacy_ddp._transport.groups import Groups

_CAUSE = (
    "a write outside of a step(), another start (seed, checkpoint), a step() of its own (learning rate, optimizer "
    "state, gradients changed after the call), or memory that does not keep its bits"
)

_Tensors = tuple[int, tuple[str, ...], tuple[int, ...]]


class _Place(NamedTuple):
    """A tensor of the replica, found through its owner: a new tensor of equal size may take its place."""

    owner: Mapping[str, torch.Tensor | None]
    key: str
    size_bytes: int


@dataclass
class _GroupMemory:
    """Results on a process group; but for ``agreed`` equal on all ranks, because they decide about collectives.

    ``agreed``: for each part the last call in which the digests were equal. ``streak_end``: the number of the call
    until which differences belong to a reported streak. ``pause_end``: the same after a comparison without a result.
    """

    agreed: dict[int, int] = field(default_factory=dict)
    streak_end: int = 0
    pause_end: int = 0

    def is_known(self, number: int) -> bool:
        """Whether the difference in call ``number`` needs no comparison. In a streak it prolongs the streak."""
        if number <= self.streak_end:
            self.streak_end = number + MAX_PARTS
            return True
        # A pause is not prolonged: the digest was of a moment that has passed, and a real difference may follow.
        return number <= self.pause_end


class RotatingDigests(ForwardDigests):
    """Digests a part of the parameters and shared buffers for every call, and compares everything after a difference.

    Without a forward since the last call, the call takes the digest.
    """

    def __init__(self, wrapper: nn.Module, settings: Settings, planner: Planner) -> None:
        super().__init__(wrapper, settings, planner.counter.policy)
        self._planner = planner
        self._places: list[_Place] = []
        self._parts: list[list[Piece]] = []
        self._layout: object = None  # of the parts
        self._found: list[_Tensors] = []  # the tensors of the modules, when they were divided
        self._memories: weakref.WeakKeyDictionary[Groups, _GroupMemory] = weakref.WeakKeyDictionary()

    def digest_of(self, call: Call) -> int:
        """The digest for ``call``."""
        self.forget_failed_step()
        taken, self._taken, self._next_call = self._taken, None, call.number + 1
        with call.phase("digest"):
            if taken is not None and taken[0] == call.number and self._is_divided:
                return taken[1]
            return self._digest(call.number)

    def compare(self, call: Call, left_out: Collection[int], *, is_equal: bool) -> ReplicaReport | None:
        """The report if replicas differ. ``is_equal``: whether the digests of this call are equal on all ranks.

        Collective after a difference that is not known yet, and with ``divergence="raise"`` after every difference.
        """
        memory = self._memories.setdefault(call.groups, _GroupMemory())
        if is_equal:
            memory.agreed[self._turn_of(call.number)] = call.number
            return None
        if memory.is_known(call.number) and self._settings.checks.divergence == "warn":
            return None
        with call.phase("compare"):
            has_new_statistics = self.buffers.learn(call, self._module, left_out)
            if has_new_statistics:
                self._find_parts()
                if not self._find_differing(call, left_out)[0].any():
                    memory.agreed.update(dict.fromkeys(range(len(self._parts)), call.number))
                    return None
        report = compare_items(call, list(self._items()), None, largest_bytes=LARGE_BYTES_BY_DEFAULT, left_out=left_out)
        # Optimizers may differ by design (sharded state).
        if not any(item.kind in ("parameters", "buffers") for item in report.differences):
            memory.pause_end = 0 if has_new_statistics else call.number + MAX_PARTS
            return None
        memory.streak_end = call.number + MAX_PARTS
        differs, agreed = self._find_differing(call, left_out)
        # The lowest of the ranks: a rank that divided its tensors again has forgotten its earlier calls.
        return with_evidence(call, report, int((agreed.amin(dim=0) * differs).max()))

    def end_call(self, _: Call) -> None:
        """Begin with the time after a successful call."""
        self.optimizers.clear()

    @property
    def _is_divided(self) -> bool:
        """Whether the parts belong to the present parameters."""
        return self._layout is not None and self._layout is self._planner.layout

    def _is_due(self, _: int) -> bool:
        return True

    def _digest(self, number: int) -> int:
        digest = self._read(number) if self._is_divided and not self._has_new_tensors(number) else None
        if digest is None:
            self._find_parts()
            digest = self._read(number) or 0
        return digest

    def _has_new_tensors(self, number: int) -> bool:
        """Whether modules or tensors are new; looked for at the start of a rotation."""
        return number % MAX_PARTS == 0 and _tensors_of(self._module) != self._found

    def _turn_of(self, number: int) -> int:
        return number % len(self._parts)

    def _read(self, number: int) -> int | None:
        """The checksum of the part for call ``number``; None after a change of a size."""
        checksum = 0
        for index, start, stop in self._parts[self._turn_of(number)]:
            owner, key, size_bytes = self._places[index]
            tensor = owner.get(key)
            if tensor is None or tensor.nbytes != size_bytes:
                return None
            checksum = add_memory(checksum, tensor, start, stop)
        return checksum

    def _find_parts(self) -> None:
        """Find the tensors of the replica, and divide them. Tensors on other devices than the CPU are left out."""
        module, ignore = self._module, self._settings.ignore
        parameters = distinct(module.named_parameters(remove_duplicate=False), ignore)
        self.ids = frozenset(id(item.tensor) for item in parameters)
        owners = _owners(module)
        self._places = [
            # A module may show tensors under names of its own choice, or tensors of no module.
            _Place(*owners.get(id(item.tensor), ({item.name: item.tensor}, item.name)), item.tensor.nbytes)
            for item in (*parameters, *self.buffers.named(module))
            if has_memory(item.tensor)
        ]
        self._layout = self._planner.layout
        # Tensors of no module cannot be looked for.
        self._found = _tensors_of(module) if all(id(item.tensor) in owners for item in parameters) else []
        before, self._parts = self._parts, divide([place.size_bytes for place in self._places])
        if self._parts != before:
            for memory in self._memories.values():
                memory.agreed.clear()

    def _find_differing(self, call: Call, left_out: Collection[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Collective: whether each part differs now, and the last call in which it agreed, by rank; 0 without one."""
        agreed_in = self._memories[call.groups].agreed
        turns = range(len(self._parts))
        padding = [0] * (MAX_PARTS - len(turns))
        digests = [self._read(turn) or 0 for turn in turns]
        agreed = [agreed_in.get(turn, 0) for turn in turns]
        rows = call.gather(torch.tensor([digests + padding, agreed + padding], dtype=torch.int64, device="cpu"))
        compared = rows[[rank for rank in range(len(rows)) if rank not in left_out]]
        return (compared[:, 0] != compared[0, 0]).any(dim=0), compared[:, 1]


def with_evidence(call: Call, report: ReplicaReport, last: int) -> ReplicaReport:
    """``report`` with the calls between which the difference came about, and its possible causes."""
    since = f"between {f'call {last}' if last else 'the start'} and this call"
    verdict = replace(report.verdict, since=since)
    if call.number == 1:
        verdict = replace(verdict, phase="start", since=AT_START.since, cause=AT_START.cause)
    elif verdict.phase == "unknown":
        verdict = replace(verdict, cause=_CAUSE)
    return replace(report, verdict=verdict)


def _tensors_of(module: nn.Module) -> list[_Tensors]:
    """The dictionaries of parameters and buffers of the submodules: the id, the keys, and the ids of the tensors."""
    return [(id(owner), tuple(owner), tuple(map(id, owner.values()))) for owner in _dictionaries(module) if owner]


def _owners(module: nn.Module) -> dict[int, tuple[Mapping[str, torch.Tensor | None], str]]:
    """By the id of each parameter and buffer: the dictionary of a submodule with the tensor, and the key there."""
    return {
        id(tensor): (owner, key)
        for owner in _dictionaries(module)
        for key, tensor in owner.items()
        if tensor is not None
    }


def _dictionaries(module: nn.Module) -> Iterator[Mapping[str, torch.Tensor | None]]:
    for child in module.modules():
        for owner in (child._parameters, child._buffers):
            if isinstance(owner, dict):  # not of a scripted module, which has no dictionaries
                yield owner
