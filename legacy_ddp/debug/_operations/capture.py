"""Capture of the operations of forward and backward of a model, as torch's dispatcher calls them."""

import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import nn

from legacy_ddp import _torch as internals
from legacy_ddp._call.state import are_forwards_private
from legacy_ddp._errors import LegacyDDPError
from legacy_ddp._replicas.state import is_digestible
from legacy_ddp.debug._operations.digest import digest_each
from legacy_ddp.debug._operations.operation import Operation, Stage, Value
from legacy_ddp.debug._operations.signature import (
    Descriptions,
    OperationPlace,
    ParameterNames,
    Places,
    Signature,
    is_setting,
    setting,
    signature_of,
    tensors_in,
)

# Larger tensors are digested at once: only for small tensors a digest of many together saves time.
_COPY_BYTES = 2**15
_CHUNK_BYTES = 2**22
# A map of written bytes is as large as the memory. Larger memory is undefined until one operation writes all of it.
_MAX_MAP_BYTES = 2**26


class OperationCapture:
    """The operations of one thread between :meth:`start` and :meth:`stop`, in order. Also a context manager.

    Inputs are digested before the operation, outputs after it. An input is digested again even if it is the output of
    an earlier operation: the two digests differ after a write from elsewhere (a second thread, a stale pointer).
    Without a digest are:

    - inputs and outputs of views (``t``, ``view``, ``detach``), which compute nothing, and inputs of allocations: only
      their shapes, strides and settings are recorded;
    - memory that no operation has written to (as from ``aten::empty``), and inputs that an operation overwrites without
      reading (``copy_``, ``out=``);
    - workspaces of kernels, and outputs of collectives, which return before they have written;
    - tensors of classes with operations of their own (DTensor), quantized and meta tensors.

    Operations inside of a custom operation are not captured, and of other threads only those of a CUDA model's backward
    pass. Under torch.compile, code stays compiled (torch 2.8 compiles it once more, and fails in ``torch.cond``): the
    operations that it calls are captured, its generated kernels are not. Operations of this library are left out.
    Parameters are known by their memory at :meth:`start`: other tensors, given to ``functional_call``, have no names.

    The bits, generators and memory formats of the training stay the same. Other dispatch modes may be entered and left
    between start and stop. Start and stop both inside of a block of ``torch.inference_mode()`` or both outside, because
    the end of the block restores the dispatch keys of its beginning.

    Args:
        module: the model. Module paths and names of parameters are from ``named_modules()`` and
            ``named_parameters()``.
        keep: positions of operations with outputs to keep in :attr:`kept`.
        counts_forwards: leave out all operations before the first forward pass of the model. A micro-batch begins with
            the first forward pass, and with the first one after a backward pass. If False, :meth:`begin_micro_batch`
            begins it.

    Attributes:
        kept: copies of the outputs of operations, by position.

    Example:
        >>> with OperationCapture(model) as capture:
        ...     model(inputs).sum().backward()
        >>> capture.operations[0].name
        'aten::t'
    """

    def __init__(self, module: nn.Module, *, keep: Collection[int] = (), counts_forwards: bool = False) -> None:
        self.kept: dict[int, tuple[torch.Tensor, ...]] = {}
        self.operations: list[Operation] = []
        self._make_observer = partial(_Observer, module, frozenset(keep), counts_forwards=counts_forwards)
        self._mode = internals.LowestMode(self._handle)
        self._thread: int | None = None
        self._is_running = self._is_private = False
        self._observer = self._make_observer()
        self._failure: Exception | None = None

    @property
    def is_running(self) -> bool:
        return self._is_running

    def __enter__(self) -> "OperationCapture":
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.stop()
        else:
            self.cancel()

    def start(self) -> None:
        self._observer, self._failure = self._make_observer(), None
        self.kept = self._observer.kept
        self._thread, self._is_running = threading.get_ident(), True
        self._is_private = are_forwards_private()  # a cross-check inside of a captured step is no part of the step
        self._mode.install()

    def begin_micro_batch(self) -> None:
        """Count a forward pass of the model, which begins now; does nothing unless started."""
        self._observer.micro_batch += 1

    def stop(self) -> list[Operation]:
        """End the record and return the operations. Raises the first failure to record an operation, after the end."""
        self.cancel()
        if self._failure is not None:
            raise self._failure
        with internals.unseen():
            self.operations = self._observer.operations()
        return self.operations

    def cancel(self) -> None:
        """End without a record; may be called again."""
        if not self._is_running:
            return
        self._is_running = False  # first: a mode that cannot be removed then only passes operations on
        if not self._mode.remove():
            raise LegacyDDPError(
                "the capture of operations cannot end: its dispatch mode is not among those of this thread; start and "
                f"stop it in one thread (started in thread {self._thread}, this is thread {threading.get_ident()})"
            )

    def _handle(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the operation, and record it. After a failure to record, operations still run."""
        if are_forwards_private() != self._is_private:
            return function(*args, **kwargs)
        running = self._try(self._observer.before, function, args, kwargs)
        result = function(*args, **kwargs)
        if running is not None:
            self._try(self._observer.after, running, result)
        return result

    def _try(self, action: Callable[..., Any], *args: Any) -> Any:
        """The result of ``action``; None after the first failure, which :meth:`stop` raises."""
        if not self._is_running or self._failure is not None:
            return None
        try:
            with internals.unseen():
                return action(*args)
        except Exception as error:  # noqa: BLE001 - tensors of a user may raise anything
            self._failure = error
            return None


# Kind, layout, and the position of the digest in the list of digests; None without a digest.
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
class _Running:
    """An operation before its return. ``written``: the arguments that it writes to."""

    signature: Signature
    record: _Record
    written: tuple[torch.Tensor, ...]


class _Observer:
    """Collects the operations of one record while they run. Arguments as of :class:`OperationCapture`."""

    def __init__(self, module: nn.Module, keep: frozenset[int], *, counts_forwards: bool) -> None:
        self.micro_batch = 0
        self.kept: dict[int, tuple[torch.Tensor, ...]] = {}
        self._keep, self._counts_forwards = keep, counts_forwards
        self._is_new_forward = True
        self._places, self._names = Places(module), ParameterNames(module)
        self._descriptions, self._undefined = Descriptions(), _UndefinedMemory()
        self._digests = _PendingDigests()
        self._records: list[_Record] = []

    def before(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _Running | None:
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
        return _Running(signature, record, tuple([tensor for name, tensor in tensors if name in signature.written]))

    def after(self, running: _Running, result: object) -> None:
        signature, outputs = running.signature, list(tensors_in(result))
        returned = {*map(id, outputs)}
        outputs += [tensor for tensor in running.written if id(tensor) not in returned]
        self._note_memory(signature, outputs, running.written)
        is_read = not signature.is_view and not signature.is_asynchronous
        running.record.outputs = tuple([self._see(tensor, is_read=is_read) for tensor in outputs])
        if len(self._records) in self._keep:
            self.kept[len(self._records)] = tuple([tensor.detach().clone() for tensor in outputs])
        self._records.append(running.record)

    def operations(self) -> list[Operation]:
        digests = self._digests.digests()
        before = next((index for index, record in enumerate(self._records) if record.is_inside), 0)
        return [
            _operation(record, digests, number=max(0, index - before))
            for index, record in enumerate(self._records, start=1)
        ]

    def _has_begun(self, place: OperationPlace) -> bool:
        """Whether a forward pass of the model has begun. Counts a micro-batch at its first operation."""
        if place.stage == "backward":
            self._is_new_forward = True
        elif self._is_new_forward and place.is_inside:
            self.micro_batch += 1
            self._is_new_forward = False
        return self.micro_batch > 0

    def _see(self, tensor: torch.Tensor, *, is_read: bool) -> _Seen:
        kind, layout = self._descriptions.of(tensor)
        has_digest = (
            is_read
            and not internals.has_own_dispatch(tensor)
            and is_digestible(tensor)
            and not tensor.is_quantized
            and not self._undefined.holds(tensor)
        )
        return kind, layout, self._digests.add(tensor) if has_digest else None

    def _note_memory(self, signature: Signature, outputs: list[torch.Tensor], written: Iterable[torch.Tensor]) -> None:
        """Note the memory that the operation wrote or allocated."""
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


class _PendingDigests:
    """Digests of tensors at the time when they were added. Holds at most ``_CHUNK_BYTES`` of copies."""

    def __init__(self) -> None:
        self._found: dict[int, int] = {}
        self._copies: dict[int, torch.Tensor] = {}
        self._copied_bytes = 0
        self._count = 0

    def add(self, tensor: torch.Tensor) -> int:
        """The position of the digest in :meth:`digests`."""
        position, self._count = self._count, self._count + 1
        if tensor.layout is torch.strided and (size_bytes := tensor.nbytes) <= _COPY_BYTES:
            self._copies[position] = tensor.clone(memory_format=torch.contiguous_format)
            self._copied_bytes += size_bytes
            if self._copied_bytes > _CHUNK_BYTES:
                self._digest_copies()
        else:
            self._note([position], [tensor])
        return position

    def digests(self) -> list[str]:
        """16 hexadecimal digits for each added tensor."""
        self._digest_copies()
        return [f"{self._found[position] % 2**64:016x}" for position in range(self._count)]

    def _digest_copies(self) -> None:
        copies, self._copies, self._copied_bytes = self._copies, {}, 0
        self._note(copies, copies.values())

    def _note(self, positions: Iterable[int], tensors: Iterable[torch.Tensor]) -> None:
        self._found.update(zip(positions, digest_each(tensors), strict=True))


@dataclass
class _Region:
    """``storage``: prevents that its key is used again. ``written``: by byte; None: no byte was written."""

    storage: object
    written: torch.Tensor | None = None


class _UndefinedMemory:
    """The undefined bytes of the storages in :meth:`note_allocation`. Keeps no memory of tensors alive."""

    def __init__(self) -> None:
        self._regions: dict[int, _Region] = {}

    def note_allocation(self, tensor: torch.Tensor) -> None:
        """Note that no byte of the tensor's storage is defined."""
        key = internals.storage_key(tensor)
        if key is not None and tensor.numel():
            self._regions[key] = _Region(internals.weak_storage(tensor))

    def note_write(self, tensor: torch.Tensor) -> None:
        """Note that all elements of the tensor are written."""
        key = internals.storage_key(tensor) if self._regions else None
        region = None if key is None else self._regions.get(key)
        if key is None or region is None:
            return
        size_bytes = tensor.untyped_storage().nbytes()
        if tensor.nbytes == size_bytes and tensor.is_contiguous():
            del self._regions[key]
        elif size_bytes <= _MAX_MAP_BYTES:
            if region.written is None or region.written.numel() != size_bytes:
                region.written = torch.zeros(size_bytes, dtype=torch.bool, device="cpu")
            _bytes_of(tensor, region.written).fill_(True)
            if region.written.all():
                del self._regions[key]

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether any element of the tensor is undefined."""
        key = internals.storage_key(tensor) if self._regions else None
        region = None if key is None else self._regions.get(key)
        if region is None or not tensor.numel():
            return False
        written = region.written
        if written is None or written.numel() != tensor.untyped_storage().nbytes():
            return True
        return not _bytes_of(tensor, written).all()


def _bytes_of(tensor: torch.Tensor, of_storage: torch.Tensor) -> torch.Tensor:
    """The elements of ``of_storage`` for the tensor's bytes; it has one element for each byte of the storage."""
    size = tensor.itemsize
    strides = (*(stride * size for stride in tensor.stride()), 1)
    return of_storage.as_strided((*tensor.shape, size), strides, tensor.storage_offset() * size)
