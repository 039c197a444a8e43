"""Digests in turns of replicas on a device: without a wait of the host, and complete some calls later."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from legacy_ddp import _torch as internals
from legacy_ddp._buckets.layout import fingerprint
from legacy_ddp._buckets.plan import Planner
from legacy_ddp._replicas.digest import as_bytes, begin_sums, has_memory, is_digestible
from legacy_ddp._replicas.rotation import RotatingDigests
from legacy_ddp._settings import Settings
from legacy_ddp._text import error_line
from legacy_ddp._torch import device as devices
from legacy_ddp._transport.call import Call


class Reading(NamedTuple):
    """What the host knows at once of the part for a call: everything but the sums of its bytes on devices.

    ``number``: of the call. ``generation``: of the digests, as the part was read. ``place``: the turn, the number of
    parts, and the bytes of the part. ``checksum``: of the bytes on the CPU.
    """

    number: int
    generation: int
    place: tuple[int, ...]
    checksum: int

    def digest(self, sums: Sequence[int]) -> int:
        """The digest of the part, from the sums of the devices."""
        return fingerprint(repr((self.place, self.checksum, *sums)).encode())


class LateRotatingDigests(RotatingDigests):
    """As the base class, with the tensors on devices, and with digests that are complete some calls later."""

    def __init__(self, wrapper: nn.Module, settings: Settings, planner: Planner) -> None:
        super().__init__(wrapper, settings, planner)
        # Of the part that was read last.
        self._size_bytes = 0
        self._sums_of_parameters: list[torch.Tensor] = []
        self._sums_of_buffers: list[torch.Tensor] = []
        self._pieces: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []  # of parameters and buffers

    def digest_of(self, call: Call) -> None:
        """None: the devices tell the digest of this call later."""

    def begin(self, call: Call) -> tuple[Reading, list[torch.Tensor]]:
        """The digest of the part for ``call``: what is known, and the sums that the devices will tell."""
        checksum = self._digest_for(call)
        count = len(self._division.parts)
        place = (call.number % count, count, self._size_bytes)
        return Reading(call.number, self.generation, place, checksum), self._sums

    @property
    def _sums(self) -> list[torch.Tensor]:
        """The sums of the part that was read last."""
        return [*self._sums_of_parameters, *self._sums_of_buffers]

    def _read(self, number: int) -> int | None:
        """As in the base class, of the tensors on the CPU; begins the sums of the others."""
        if devices.is_capturing():
            raise RuntimeError("a graph is captured")  # in a forward: the call reads the part
        self._size_bytes, self._pieces = 0, ([], [])
        checksum = super()._read(number)
        self._sums_of_parameters, self._sums_of_buffers = map(begin_sums, self._pieces)
        self._pieces = [], []
        if any(map(internals.has_own_dispatch, self._sums)):
            raise TypeError("the tensors have no memory")
        return checksum

    def _add(self, checksum: int, index: int, tensor: torch.Tensor, start: int, stop: int) -> int:
        self._size_bytes += stop - start
        if tensor.device.type == "cpu":
            return super()._add(checksum, index, tensor, start, stop)
        tensor.data_ptr()  # an error for a tensor without memory, of a function transform
        self._pieces[index >= self._division.parameter_count].append(as_bytes(tensor)[start:stop])
        return checksum

    def _have_parameters_moved(self, number: int) -> bool:
        before, sums = self._of_parameters, self._sums_of_parameters
        if self._read(number) is None:
            return False
        read = devices.read_vectors([*sums, *self._sums_of_parameters])
        return self._of_parameters != before or read[: len(sums)] != read[len(sums) :]

    def _digest_all_parts(self) -> list[int]:
        readings = [(self._read(turn) or 0, self._sums) for turn in range(len(self._division.parts))]
        read = iter(devices.read_vectors([vector for _, sums in readings for vector in sums]))
        return [fingerprint(repr((checksum, [next(read) for _ in sums])).encode()) for checksum, sums in readings]

    def _can_read(self, tensor: torch.Tensor) -> bool:
        is_plain = tensor.layout is torch.strided and is_digestible(tensor) and not internals.has_own_dispatch(tensor)
        return has_memory(tensor) or is_plain


def devices_of(module: object) -> list[torch.device]:
    """The devices of the parameters and buffers, but the CPU."""
    if not isinstance(module, nn.Module):  # the construction refuses it later, on all ranks
        return []
    return devices.devices_of([*module.parameters(), *module.buffers()])


def find_failure(module: object) -> str:
    """Why a device of the module cannot digest, after a trial of each; empty if all can. The host waits."""
    return next(filter(None, map(_try, devices_of(module))), "")


def _try(device: torch.device) -> str:
    """Sum bytes on the device. The reason if it cannot, or if the sum is not that of the CPU."""
    data = torch.arange(100, dtype=torch.uint8, device="cpu")
    try:
        (found,), (expected,) = begin_sums([data.to(device)]), begin_sums([data])
        if found.tolist() != expected.tolist():
            return f"{device} computes other sums of integers than the CPU"
    except (RuntimeError, TypeError) as error:  # a backend without one of the operations
        return error_line(error)
    return ""
