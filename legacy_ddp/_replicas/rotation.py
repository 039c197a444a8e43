"""Digests of a part of the replica in every call, in turn, or of the whole replica in every Nth call.

The first is the check of level ``info``, which compares the whole replica in 16 calls. The second is the check of
``Checks("detail", every=N)``. A device computes the digests of its tensors without a wait of the host.
"""

import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

import torch
from torch import nn

from legacy_ddp import _torch as internals
from legacy_ddp._explainer import DifferingReplicas, ExplainedReplicas, explainer
from legacy_ddp._memory.layout import distinct, fingerprint
from legacy_ddp._memory.plan import Planner
from legacy_ddp._ranks.agree import ranks_where
from legacy_ddp._ranks.call import Call
from legacy_ddp._ranks.private_groups import Groups
from legacy_ddp._replicas.history import ReplicaDigests
from legacy_ddp._replicas.state import add_memory, as_bytes, begin_sums, equal_groups, gather_digests, is_digestible
from legacy_ddp._settings import Settings
from legacy_ddp._text import error_line, list_some
from legacy_ddp._torch import device as devices

MAX_PARTS = 16
SMALLEST_PART = 2**15  # bytes: less would save no time
TENSOR_COST = 2**14  # the cost of a tensor besides its bytes: a thousand small tensors go to all parts
_ALIGNMENT = 64
_KINDS = ("parameters", "buffers")
MAX_WARNINGS = 5  # in a streak
_Tensors = tuple[int, tuple[str, ...], tuple[int, ...]]  # the id of a dictionary, its keys, and the ids of its tensors
_Sides = tuple[tuple[int, ...], ...]  # groups of ranks with equal digests


class Piece(NamedTuple):
    """Bytes ``start`` to ``stop`` of the tensor with number ``tensor``."""

    tensor: int
    start: int
    stop: int


def divide(sizes: Sequence[int], max_parts: int = MAX_PARTS) -> list[list[Piece]]:
    """At most ``max_parts`` parts, which together have every byte of tensors with these ``sizes`` once.

    Large tensors are cut at multiples of 64 bytes. The parts depend on the sizes alone: they are equal on all ranks.
    """
    total = sum(size + TENSOR_COST for size in sizes)
    count = max(1, min(max_parts, total // SMALLEST_PART))
    # The size of a part, with room for the cost of its two cuts.
    share = total // count + 2 * TENSOR_COST + _ALIGNMENT
    parts: dict[int, list[Piece]] = {}
    used = 0
    for index, size in enumerate(sizes):
        start = 0
        while start < size:
            part = used // share
            room = (part + 1) * share - used - TENSOR_COST
            if room < min(size - start, _ALIGNMENT):
                used = (part + 1) * share
                continue
            stop = size if room >= size - start else start + room - room % _ALIGNMENT
            parts.setdefault(part, []).append(Piece(index, start, stop))
            used += TENSOR_COST + stop - start
            start = stop
    return list(parts.values()) or [[]]


class _Place(NamedTuple):
    """A tensor of the replica is ``owner[key]``. It is not kept here: the script may replace it by a new tensor."""

    name: str
    owner: Mapping[str, torch.Tensor | None]
    key: str
    size_bytes: int


class _Division(NamedTuple):
    """The replica, divided into parts. Replaced as a whole: an exception leaves no half of a change."""

    layout: object = None  # of the plan at the time of the division
    found: Sequence[_Tensors] = ()  # the tensors of the modules at that time
    places: Sequence[_Place] = ()  # of the tensors in `parts`: parameters, then buffers
    parameter_count: int = 0  # in `places`
    parts: Sequence[Sequence[Piece]] = ()


class _Differing(NamedTuple):
    """The parts that differ now. Equal on all ranks."""

    sides: Sequence[tuple[int, _Sides]]  # each part that differs, with its sides
    agreed: Sequence[int]  # for every part, the last call in which it agreed; 0 without one
    part_count: int


@dataclass
class _Streak:
    """The calls from a warning on, until 16 calls in a row agree. Inside, only a new difference gives a warning."""

    start: int
    end: int = 0
    # In this call everything is compared again, each time after twice as many calls: a new difference in a part that
    # differs already does not change the sides of the part.
    next_look: int = 0
    part_count: int = MAX_PARTS
    told: set[tuple[str, str]] = field(default_factory=set)  # name and sides of each difference in a warning
    seen: set[tuple[int, _Sides]] = field(default_factory=set)  # parts that differed in a comparison of everything
    warnings: int = 0

    def is_known(self, number: int, sides: _Sides) -> bool:
        """Whether the difference in call ``number`` needs no comparison. Extends the streak."""
        self.end = number + MAX_PARTS
        is_seen = (number % self.part_count, sides) in self.seen
        return self.warnings >= MAX_WARNINGS or (is_seen and number < self.next_look)

    def look(
        self, number: int, sides: _Sides, found: Sequence[tuple[str, str]], differing: _Differing
    ) -> tuple[str, ...]:
        """Note a comparison of everything. Returns the names of new differences, and of those with new sides.

        ``found``: name and sides of each difference. All arguments, and the result, are equal on all ranks.
        """
        new = tuple(dict.fromkeys(item[0] for item in found if item not in self.told))
        self.told |= set(found)
        self.part_count = differing.part_count
        self.seen |= {(number % self.part_count, sides), *differing.sides}
        self.end = number + MAX_PARTS
        self.next_look = self.start + 2 * max(number - self.start, MAX_PARTS // 2)
        self.warnings += bool(new)
        return new


@dataclass
class _GroupMemory:
    """Results on a process group. All but ``agreed`` are equal on all ranks, because they decide about collectives."""

    agreed: dict[int, int] = field(default_factory=dict)  # for each part, the last call in which it agreed
    streak: _Streak | None = None  # since the last warning; may have ended
    pause_end: int = 0  # a comparison found nothing: until this call nothing is compared


class Reading(NamedTuple):
    """The part for a call, as the host knows it at once: all but the sums of the bytes on devices."""

    number: int  # of the call
    generation: int  # of the digests when the part was read
    place: tuple[int, ...]  # the turn, the number of parts, and the bytes of the part
    checksum: int  # of the bytes on the CPU

    def digest(self, sums: Sequence[int]) -> int:
        return fingerprint(repr((self.place, self.checksum, *sums)).encode())


class RotatingDigests(ReplicaDigests):
    """Digests a part of the parameters and shared buffers for every call, and compares everything after a difference.

    Without a forward since the last call, the call takes the digest. ``generation``: rises as soon as earlier digests
    say nothing about later calls.
    """

    max_parts = MAX_PARTS

    def __init__(self, wrapper: nn.Module, settings: Settings, planner: Planner) -> None:
        super().__init__(wrapper, settings, planner.counter.policy)
        self.generation = 0
        self._planner = planner
        self._warns = settings.checks.divergence == "warn" and not settings.checks.compares_replicas
        # Of the part that was read last: its bytes, the checksum of its parameters, and the sums of parameters and
        # buffers on devices.
        self._size_bytes = self._of_parameters = 0
        self._sums: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
        self._division = _Division()
        self._memories: weakref.WeakKeyDictionary[Groups, _GroupMemory] = weakref.WeakKeyDictionary()

    def digest_of(self, call: Call) -> int | None:
        reading, vectors = self.begin(call)
        if not vectors:
            return reading.checksum
        return reading.digest([number for numbers in devices.read_vectors(vectors) for number in numbers])

    def begin(self, call: Call) -> tuple[Reading, list[torch.Tensor]]:
        """The digest of the part for ``call``: what the host knows, and vectors with the sums of the devices."""
        with call.phase("digest"):  # in every call, so that records have the same phases
            self.forget_failed_step()
            taken, self._taken, self._next_call = self._taken, None, call.number + 1
            is_taken = taken is not None and taken[0] == call.number and self._is_divided
            checksum: int = taken[1] if taken and is_taken else self._digest(call.number)
        count = len(self._division.parts)
        place = (call.number % count, count, self._size_bytes)
        return Reading(call.number, self.generation, place, checksum), [*chain(*self._sums)]

    def note_agreement(self, groups: Groups, number: int) -> None:
        memory = self._memories.setdefault(groups, _GroupMemory())
        memory.agreed[number % len(self._division.parts)] = number

    def compare(
        self, call: Call, left_out: Collection[int], digests: Mapping[int, int], number: int | None = None
    ) -> ExplainedReplicas | None:
        """As in the base class; collective only after a difference that is not known yet, and with
        ``divergence="raise"`` after every difference. ``number``: of the call of the digests, by default ``call``."""
        number = number or call.number
        memory, sides = self._memories.setdefault(call.groups, _GroupMemory()), equal_groups(digests)
        if len(sides) <= 1:
            self.note_agreement(call.groups, number)
            return None
        streak = memory.streak if self._warns and memory.streak and number <= memory.streak.end else None
        # Do not extend the pause: it began with an old digest, and a real difference may follow.
        if self._warns and (number <= memory.pause_end or (streak and streak.is_known(number, sides))):
            return None
        with call.phase("compare"):
            has_learned = self.buffers.learn(call, self._module, left_out)
        self.generation += has_learned
        if has_learned and (self._warns or number != call.number):
            return None  # any other difference of this part shows again in the next rotation
        moved = ranks_where(call, self._have_parameters_moved(call.number))
        if has_learned:
            if moved:
                return None
            digests = gather_digests(call, self.digest_of(call) or 0, left_out)
            sides = equal_groups(digests)
            if len(sides) <= 1:
                self.note_agreement(call.groups, number)
                return None
        streak = streak or _Streak(number)
        items = self._items(with_groups=True)
        differing_replicas = DifferingReplicas(
            call, items, digests, left_out, moved, told=streak.told, is_brief=self._warns
        )
        explained = explainer().replicas(differing_replicas)
        shared = [item for item in explained.differences if item.kind in _KINDS]
        if not shared:  # optimizers may differ by design (sharded state)
            memory.pause_end = number + MAX_PARTS
            return None
        memory.streak = streak
        differing = self._find_differing(call, left_out)
        found = [(item.name, item.sides) for item in shared]
        if moved:  # the present parameters are not those of the digest: only the sides of this part are known
            turn = number % differing.part_count
            differing = differing._replace(sides=[(turn, sides)])
            found = [(f"part {turn + 1} of {differing.part_count} of the parameters and buffers", str(sides))]
        new = streak.look(number, sides, found, differing)
        if not new:
            return None
        last = max((differing.agreed[turn] for turn, _ in differing.sides), default=0)
        return explained.between(last, number, _news(streak, new))

    def end_call(self, _: Call, /) -> None:
        self.optimizers.clear()

    def restart(self) -> None:
        super().restart()
        self.generation += 1

    @property
    def _is_divided(self) -> bool:
        layout = self._division.layout
        return layout is not None and layout is self._planner.layout

    def _digest(self, number: int) -> int:
        # New modules and tensors are looked for at the start of a rotation.
        has_new = number % self.max_parts == 0 and _tensors_of(self._module) != self._division.found
        digest = self._read(number) if self._is_divided and not has_new else None
        if digest is None:
            self._find_parts()
            digest = self._read(number) or 0
        return digest

    def _read(self, number: int) -> int | None:
        """Begin the sums of the part for call ``number``; its checksum on the CPU; None if a size has changed."""
        checksum = size_bytes = of_parameters = 0
        away: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []  # bytes of parameters and buffers on devices
        _, _, places, parameter_count, parts = self._division
        for index, start, stop in parts[number % len(parts)]:
            name, owner, key, place_bytes = places[index]
            if name in self.buffers.statistics:
                continue
            tensor = owner.get(key)
            if tensor is None or tensor.nbytes != place_bytes:
                return None
            size_bytes += stop - start
            if tensor.device.type == "cpu":
                checksum = add_memory(checksum, tensor, start, stop)
                of_parameters = checksum if index < parameter_count else of_parameters
                continue
            if not any(away) and devices.is_capturing():
                raise RuntimeError("a graph is captured")  # in a forward; the call will read the part
            tensor.data_ptr()  # raises for a tensor without memory, of a function transform
            away[index >= parameter_count].append(as_bytes(tensor)[start:stop])
        sums = (begin_sums(away[0]), begin_sums(away[1])) if any(away) else ([], [])
        if any(map(internals.has_own_dispatch, chain(*sums))):
            raise TypeError("the tensors have no memory")
        self._size_bytes, self._of_parameters, self._sums = size_bytes, of_parameters, sums
        return checksum

    def _have_parameters_moved(self, number: int) -> bool:
        """Whether the parameters of the part for call ``number`` have changed since their digest."""
        before, sums = self._of_parameters, self._sums[0]
        if self._read(number) is None:
            return False
        read = devices.read_vectors([*sums, *self._sums[0]])
        return self._of_parameters != before or read[: len(sums)] != read[len(sums) :]

    def _digest_all_parts(self) -> list[int]:
        readings = [(self._read(turn) or 0, [*chain(*self._sums)]) for turn in range(len(self._division.parts))]
        read = iter(devices.read_vectors([vector for _, vectors in readings for vector in vectors]))
        return [fingerprint(repr((checksum, [next(read) for _ in vectors])).encode()) for checksum, vectors in readings]

    def _find_parts(self) -> None:
        module, ignore = self._module, self._settings.ignore
        parameters = distinct(module.named_parameters(remove_duplicate=False), ignore)
        owners, statistics = _owners(module), internals.statistics_names(module)
        # Includes buffers found to be statistics. They are not read, but without them the parts would be others.
        buffers = sorted(self.buffers.saved(module), key=lambda item: item.name in statistics)
        found = [item for item in (*parameters, *buffers) if _can_read(item.tensor)]
        places = [
            # A module may override named_parameters(), and return other names, or tensors of no module.
            _Place(item.name, *owners.get(id(item.tensor), ({item.name: item.tensor}, item.name)), item.tensor.nbytes)
            for item in found
        ]
        # New tensors of no module cannot be found in the dictionaries.
        tensors = _tensors_of(module) if all(id(item.tensor) in owners for item in parameters) else []
        parts = divide([item.tensor.nbytes for item in found if item.name not in statistics], self.max_parts)
        # Added to the parts of the others: no part then has only statistics, which are mostly not read.
        for index, place in enumerate(places):
            if place.name in statistics and place.size_bytes:
                parts[index % len(parts)].append(Piece(index, 0, place.size_bytes))
        if parts != self._division.parts:
            self.generation += 1
            for memory in self._memories.values():
                memory.agreed.clear()
        self.ids = frozenset(id(item.tensor) for item in parameters)
        parameter_count = sum(_can_read(item.tensor) for item in parameters)
        self._division = _Division(self._planner.layout, tensors, places, parameter_count, parts)

    def _find_differing(self, call: Call, left_out: Collection[int]) -> _Differing:
        """Collective: the parts that differ now."""
        agreed_in = self._memories[call.groups].agreed
        digests = self._digest_all_parts()
        turns = range(len(digests))
        rest = [*[0] * (MAX_PARTS - len(turns)), len(turns)]
        agreed = [agreed_in.get(turn, 0) for turn in turns]
        rows = call.gather(torch.tensor([digests + rest, agreed + rest], dtype=torch.int64, device="cpu"))
        ranks = [rank for rank in range(len(rows)) if rank not in left_out]
        compared = rows[ranks]
        sides = [equal_groups(dict(zip(ranks, column, strict=True))) for column in compared[:, 0].T.tolist()]
        # The minimum over the ranks: a rank that divided its tensors again has forgotten its earlier calls.
        *agreed_in_all, part_count = compared[:, 1].amin(dim=0).tolist()
        differing = [(turn, of_part) for turn, of_part in enumerate(sides[:-1]) if len(of_part) > 1]
        return _Differing(differing, agreed_in_all, part_count)


class PeriodicDigests(RotatingDigests):
    """As the base class with a single part, in calls 1, N + 1, 2 N + 1, ... only."""

    max_parts = 1

    def digest_of(self, call: Call) -> int | None:
        if self._is_due(call.number):
            return super().digest_of(call)
        self.forget_failed_step()
        self._taken, self._next_call = None, call.number + 1
        return None

    def end_call(self, call: Call, /) -> None:
        if self._is_due(call.number):
            super().end_call(call)

    def _is_due(self, number: int, /) -> bool:
        return (number - 1) % self._settings.checks.every == 0


def _can_read(tensor: torch.Tensor) -> bool:
    is_plain = tensor.layout is torch.strided and not internals.has_own_dispatch(tensor)
    return is_plain and is_digestible(tensor)


def devices_of(module: object) -> list[torch.device]:
    """Of the parameters and buffers, without the CPU."""
    if not isinstance(module, nn.Module):  # the construction refuses it later, on all ranks
        return []
    return devices.devices_of([*module.parameters(), *module.buffers()])


def find_failure(module: object) -> str:
    """Why a device of the module cannot digest, from a trial on each; empty if all can. The host waits."""
    return next(filter(None, map(_try, devices_of(module))), "")


def _try(device: torch.device) -> str:
    data = torch.arange(100, dtype=torch.uint8, device="cpu")
    try:
        (found,), (expected,) = begin_sums([data.to(device)]), begin_sums([data])
        if found.tolist() != expected.tolist():
            return f"{device} computes other sums of integers than the CPU"
    except (RuntimeError, TypeError) as error:  # a backend without one of the operations
        return error_line(error)
    return ""


def _news(streak: _Streak, new: Sequence[str]) -> str:
    """A note about the things that differ for the first time, in a later warning of a streak; else empty."""
    if streak.warnings <= 1:
        return ""
    note = f"new since the last warning, or on other ranks: {list_some(new)}"
    if streak.warnings == MAX_WARNINGS:
        note += f"; this is the last warning until {MAX_PARTS} calls in a row agree"
    return note


def _tensors_of(module: nn.Module) -> list[_Tensors]:
    """Of each dictionary of parameters or buffers: its id, its keys, and the ids of the tensors."""
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
