"""Observer of single operations: the tensors before and after each, without a reference to any."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from legacy_ddp import _torch as internals
from legacy_ddp._replicas.digest import is_digestible
from legacy_ddp.debug._operations.description import Descriptions, ParameterNames, is_setting, setting, tensors_in
from legacy_ddp.debug._operations.operation import Operation, Stage, Value
from legacy_ddp.debug._operations.pending import PendingDigests
from legacy_ddp.debug._operations.places import Place, Places
from legacy_ddp.debug._operations.signature import Signature, signature_of
from legacy_ddp.debug._operations.undefined import UndefinedMemory

# Kind, layout, and the position of the digest; None without a digest.
_Seen = tuple[str, str, int | None]


@dataclass
class _Record:
    """The fields of an :class:`Operation`, with positions of digests in place of the digests.

    ``is_inside``: in a forward pass of the model, or counted as a part of its micro-batch.
    """

    name: str
    stage: Stage
    micro_batch: int
    module: str
    parameters: tuple[str, ...]
    inputs: tuple[_Seen, ...]
    settings: str
    generator: int | None
    is_inside: bool
    outputs: tuple[_Seen, ...] = ()


@dataclass(frozen=True)
class Running:
    """An operation before its return. ``written``: the arguments written to."""

    signature: Signature
    record: _Record
    written: tuple[torch.Tensor, ...]


class Observer:
    """The operations of a record.

    ``keep``: positions of operations with outputs to copy to :attr:`kept`. ``counts_forwards``: as for the capture.
    """

    def __init__(self, module: nn.Module, keep: frozenset[int], *, counts_forwards: bool) -> None:
        self.micro_batch = 0
        self.kept: dict[int, tuple[torch.Tensor, ...]] = {}
        self._keep, self._counts_forwards = keep, counts_forwards
        self._is_new_forward = True
        self._places, self._names = Places(module), ParameterNames(module)
        self._descriptions, self._undefined = Descriptions(), UndefinedMemory()
        self._digests = PendingDigests()
        self._records: list[_Record] = []

    def before(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Running | None:
        """Note the inputs of an operation. None for an operation of this library."""
        place = self._places.find()
        if place is None or (self._counts_forwards and not self._has_begun(place)):
            return None
        signature = signature_of(function)
        arguments = list(signature.bind(args, kwargs))
        tensors = [(name, tensor) for name, value in arguments for tensor in tensors_in(value)]
        record = _Record(
            signature.name,
            place.stage,
            self.micro_batch,
            place.module,
            parameters=tuple([", ".join(self._names.of(tensor)) for _, tensor in tensors]),
            inputs=tuple([self._see(tensor, is_read=signature.reads(name)) for name, tensor in tensors]),
            settings=", ".join([f"{name}={setting(value)}" for name, value in arguments if is_setting(value)]),
            generator=self._digests.add(_generator_state(arguments)) if signature.is_random else None,
            is_inside=place.is_inside or self.micro_batch > 0,
        )
        return Running(signature, record, tuple([tensor for name, tensor in tensors if name in signature.written]))

    def after(self, running: Running, result: object) -> None:
        """Note the outputs of an operation."""
        signature, outputs = running.signature, list(tensors_in(result))
        returned = {*map(id, outputs)}
        outputs += [tensor for tensor in running.written if id(tensor) not in returned]
        self._note_memory(signature, outputs, running.written)
        is_read = not signature.is_view and not signature.is_asynchronous
        running.record.outputs = tuple([self._see(tensor, is_read=is_read) for tensor in outputs])
        if len(self._records) in self._keep:
            self.kept[len(self._records)] = tuple([tensor.detach().clone() for tensor in outputs])
        self._records.append(running.record)

    def _has_begun(self, place: Place) -> bool:
        """Whether a forward pass of the model has begun; count the pass at its first operation."""
        if place.stage == "backward":
            self._is_new_forward = True
        elif self._is_new_forward and place.is_inside:
            self.micro_batch += 1
            self._is_new_forward = False
        return self.micro_batch > 0

    def operations(self) -> list[Operation]:
        """All operations so far."""
        digests = self._digests.digests()
        before = next((index for index, record in enumerate(self._records) if record.is_inside), 0)
        return [
            _operation(record, digests, number=max(0, index - before))
            for index, record in enumerate(self._records, start=1)
        ]

    def _see(self, tensor: torch.Tensor, *, is_read: bool) -> _Seen:
        kind, layout = self._descriptions.of(tensor)
        has_digest = (
            is_read
            and not internals.has_own_dispatch(tensor)
            and is_digestible(tensor)
            and not self._undefined.holds(tensor)
        )
        return kind, layout, self._digests.add(tensor) if has_digest else None

    def _note_memory(self, signature: Signature, outputs: list[torch.Tensor], written: Iterable[torch.Tensor]) -> None:
        """Note the memory written to or allocated by the operation."""
        if not signature.is_partial and not signature.is_view:
            for tensor in written:
                self._undefined.note_write(tensor)
        for position, tensor in enumerate(outputs):
            if signature.is_undefined or position in signature.undefined:
                self._undefined.note_allocation(tensor)


def _generator_state(arguments: Iterable[tuple[str, Any]]) -> torch.Tensor:
    """The state of the random generator for an operation with these arguments."""
    values = [value for _, value in arguments]
    for value in values:
        if isinstance(value, torch.Generator):
            return value.get_state()
    devices = [value for value in values if isinstance(value, torch.device)]
    device = next(iter(devices), None) or next((tensor.device for tensor in tensors_in(values)), torch.device("cpu"))
    return torch.get_rng_state() if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)


def _operation(record: _Record, digests: list[str], *, number: int) -> Operation:
    def value(seen: _Seen) -> Value:
        kind, layout, position = seen
        return Value(kind, layout, None if position is None else digests[position])

    return Operation(
        record.name,
        record.stage,
        record.micro_batch,
        record.module,
        record.parameters,
        tuple(map(value, record.inputs)),
        tuple(map(value, record.outputs)),
        record.settings,
        "" if record.generator is None else digests[record.generator],
        number,
    )
