"""What a rank sends at the begin of a call: its segments of memory, and the header, 128 bytes of facts. Pure."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import IntEnum
from functools import cached_property, lru_cache
from itertools import accumulate
from operator import attrgetter
from typing import Any, NamedTuple

MAX_BUCKETS = 6  # one per supported dtype
MAX_SEGMENTS = 2 * MAX_BUCKETS


class Operation(IntEnum):
    """The kinds of calls; the value travels in the header."""

    label: str  # for error messages and reports, without a Python call

    CONSTRUCTION = 1, "construction"
    BROADCAST_PARAMETERS = 2, "broadcast_parameters()"
    BROADCAST_BUFFERS = 3, "broadcast_buffers()"
    ALL_REDUCE = 4, "all_reduce()"
    CHECK_REPLICAS = 5, "check_replicas()"
    CROSS_CHECK = 6, "cross_check()"

    def __new__(cls, value: int, label: str) -> "Operation":
        operation = int.__new__(cls, value)
        operation._value_, operation.label = value, label
        return operation

    def __str__(self) -> str:
        return self.label


_SEGMENTS = struct.Struct(f"<?3x{MAX_SEGMENTS}I4x")  # 56 bytes


class SegmentIds(NamedTuple):
    """The segments of a rank.

    ``serials``: for each shared bucket the segment of its flat tensor; 0: in ordinary memory. With
    ``reproducible=True`` then for each the segment of the sum of its micro-batches; 0: the sum is in the flat tensor.
    """

    serials: tuple[int, ...] = ()
    has_spare: bool = False  # the rank may use an earlier segment again, and the other ranks keep it mapped


@lru_cache(maxsize=16)  # most calls have the segments of the call before
def encode_segments(segments: SegmentIds) -> bytes:
    padded = segments.serials + (0,) * (MAX_SEGMENTS - len(segments.serials))
    return _SEGMENTS.pack(segments.has_spare, *padded)


def decode_segments(column: bytes) -> list[SegmentIds]:
    """The segments of all ranks, from their bytes in rank order. Every rank gets ``MAX_SEGMENTS`` serials."""
    return [SegmentIds(tuple(serials), has_spare) for has_spare, *serials in _SEGMENTS.iter_unpack(column)]


HEADER_VERSION = 3


class Participation(IntEnum):
    """How the gradients of a rank take part in an all_reduce."""

    PLAIN = 0
    SAMPLES = 1
    SKIP = 2


class Flag:
    """The bits of ``Header.flags``. Plain numbers, because an IntFlag takes six times as long."""

    FAILED = 1  # the rank failed before the exchange
    REPEAT = 2  # no backward since the last call, and gradients unchanged since then
    STEPPED = 4  # weights changed between the first backward since the last call and this call
    VALUES = 8  # ``norm_bits`` has the norm
    NONFINITE = 16  # the gradient has NaN or infinity; only with VALUES
    JOINED = 32  # the rank has left a join(); its replica may be old
    COUNTED = 64  # the zeros of this rank count in a plain mean
    SIGNED = 128  # ``replica`` has a digest
    WATCHED = 256  # the rank takes part in the report of non-finite gradients
    UNSCALED = 512  # a GradScaler has unscaled gradients before the call
    # Every gradient was written to in place before the call. In call after call the norm (NORM_CLIPPED) or the greatest
    # element (VALUE_CLIPPED) is the same.
    NORM_CLIPPED = 1024
    VALUE_CLIPPED = 2048
    REDUCED = 4096  # a call of another wrapper left the gradients
    UNCLEARED = 8192  # every gradient is the result of the last call, used by a step, plus a backward
    STEPS_KNOWN = 16384  # ``steps`` has a number
    ISSUED_KNOWN = 32768  # ``issued`` has a number
    SCALED = 65536  # with ``nonfinite="skip"``: a GradScaler skips steps with infinities on the rank
    CLEARED = 131072  # backward ran, and then every gradient was cleared
    # A gradient of the rank holds the result of an earlier call, which this call or an earlier one divides again.
    STALE = 262144
    NAMED = 2**28  # the rank compares the names of its buffers
    RENAMED = 2**29  # these names have not been compared yet


@dataclass(slots=True)
class Header:
    """The facts of a rank about a call. Written by the rank before the exchange, and only read afterwards."""

    # The facts that are equal on all ranks in most calls come first: their bytes are compared all at once.
    version: int = HEADER_VERSION
    operation: int = 0
    participation: int = Participation.PLAIN
    flags: int = 0  # bits of Flag
    wrapper_id: int = 0  # number of the wrapper on the group
    source: int = 0  # the rank that broadcasts
    call: int = 0
    layout: int = 0  # fingerprint of what all ranks must have alike
    metric_names: int = 0  # fingerprint, 0 without metrics
    micro_batches: int = 0  # backward passes since the last call
    leaves: int = 0  # micro-batches added in the order of a tree, 0 without a tree
    steps: int = 0  # optimizer steps since the last call
    issued: int = 0  # collectives that the script has issued on its own group since the last call
    sample_size: int = 0  # number of items
    mask: int = 0  # fingerprint of the kinds of all gradients
    norm_bits: int = 0  # norm of the local gradient, a double
    waited_seconds: float = 0.0  # for the headers of the last all_reduce
    # Parts of the step of the rank, from its last call to this call (``_steps/policy``); 0 with checks off.
    data_seconds: float = 0.0
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    replica: int = 0  # digest of the state that replicas share
    # In check_replicas(): the digest of the gradients. In an all_reduce on a device: which gradients of earlier calls
    # were not finite (``_call/nonfinite``).
    gradients: int = 0
    # Digest of the random generators, which may differ. In an all_reduce on a device: the digest of an earlier call
    # (``_call/replicas``).
    generators: int = 0

    @property
    def call_name(self) -> str:
        """For example ``all_reduce() call 3``."""
        labels = {int(operation): operation.label for operation in Operation}
        return f"{labels.get(self.operation, f'operation {self.operation}')} call {self.call}"

    @property
    def takes_part(self) -> bool:
        has_samples = self.participation == Participation.SAMPLES and self.sample_size > 0
        return has_samples or self.participation == Participation.PLAIN

    @property
    def samples(self) -> int | None:
        """The sample_size, None for a plain call."""
        return self.sample_size if self.participation == Participation.SAMPLES else None

    @property
    def local_norm(self) -> float | None:
        """Norm of the local gradient, None if unknown."""
        return decode_double(self.norm_bits) if self.flags & Flag.VALUES else None

    @property
    def finite(self) -> bool | None:
        """Whether the local gradient was finite, None if unknown."""
        return not self.flags & Flag.NONFINITE if self.flags & Flag.VALUES else None


_NAMES = tuple(item.name for item in fields(Header))
_values = attrgetter(*_NAMES)
# Of the facts from the flags on. Seconds are floats of 4 bytes: seven digits are enough, and no wait is too long.
_FORMATS: dict[str, Any] = dict.fromkeys(_NAMES[3:], "q")
_FORMATS |= dict.fromkeys(("flags", "wrapper_id", "source", "micro_batches", "leaves"), "I")
_FORMATS |= dict.fromkeys(("waited_seconds", "data_seconds", "forward_seconds", "backward_seconds"), "f")
_ROW = struct.Struct("<BBBx" + "".join(_FORMATS.values()))
HEADER_BYTES = _ROW.size  # 128, for ever: ranks cannot read rows of another size
_SIZES = {name: struct.calcsize(kind) for name, kind in _FORMATS.items()}
_STARTS = dict(zip(_SIZES, accumulate([*_SIZES.values()][:-1], initial=4), strict=True))
# The bytes of all facts but sizes, norms, times and digests: equal in most calls.
_ALIKE = _STARTS["sample_size"]
_OTHERS = HEADER_BYTES - _ALIKE
_DOUBLE = struct.Struct("<d")
_WORD = struct.Struct("<q")


def encode_header(header: Header) -> tuple[bytes, bytes]:
    """The row of a rank, HEADER_BYTES in two parts: the facts that are equal in most calls, and the others."""
    row = _ROW.pack(*_values(header))
    return row[:_ALIKE], row[_ALIKE:]


class Headers:
    """The headers of all ranks: the two parts of :func:`encode_header`, each of all ranks in rank order.

    Compares parts and reads facts without a Python object for each rank.
    """

    def __init__(self, alike: bytes, others: bytes) -> None:
        self._alike, self._others = alike, others
        self.size = len(alike) // _ALIKE
        self.is_alike = alike == alike[:_ALIKE] * self.size  # the first parts are equal on all ranks

    def __reduce__(self) -> tuple[type["Headers"], tuple[bytes, bytes]]:
        # Users may copy and pickle a record, which has its headers.
        return Headers, (self._alike, self._others)

    @cached_property
    def rows(self) -> Sequence[Header]:
        parts = (
            self._alike[_ALIKE * rank : _ALIKE * (rank + 1)] + self._others[_OTHERS * rank : _OTHERS * (rank + 1)]
            for rank in range(self.size)
        )
        return [Header(*_ROW.unpack(part)) for part in parts]

    def column(self, name: str) -> list[Any]:
        """The fact ``name`` of every rank: the flags, or a fact after them."""
        start, size = _STARTS[name], _SIZES[name]
        part, row_bytes = (self._alike, _ALIKE) if start < _ALIKE else (self._others, _OTHERS)
        return memoryview(part).cast(_FORMATS[name])[start % _ALIKE // size :: row_bytes // size].tolist()

    def is_equal(self, name: str) -> bool:
        values = self.column(name)
        return values.count(values[0]) == len(values)

    @property
    def flags(self) -> list[int]:
        return self.column("flags")


def encode_double(number: float) -> int:
    """The 64 bits of a double as a whole number, for a field such as ``norm_bits``."""
    return int(_WORD.unpack(_DOUBLE.pack(number))[0])


def decode_double(bits: int) -> float:
    return float(_DOUBLE.unpack(_WORD.pack(bits))[0])
