"""The header of a call: the facts of a rank in 128 bytes, sent before all other communication. Pure."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import IntEnum
from itertools import accumulate, pairwise
from operator import attrgetter

from legacy_ddp._transport.rows import Operation

HEADER_VERSION = 2


class Participation(IntEnum):
    """How the gradients of a rank take part in an all_reduce."""

    PLAIN = 0
    SAMPLES = 1
    SKIP = 2


class Flag:
    """The bits of ``Header.flags``. Plain numbers, because an IntFlag takes six times as long.

    FAILED: the rank failed before the exchange. REPEAT: no backward since the last call, and gradients unchanged since
    then. STEPPED: weights changed between the first backward since the last call and this call. VALUES: the norm was
    taken. NONFINITE: the gradient has NaN or infinity; only with VALUES. JOINED: the rank has left a join(); its
    replica may be old. COUNTED: the zeros of this rank count in a plain mean. SIGNED: ``replica`` has a digest.
    WATCHED: the rank takes part in the report of non-finite gradients. UNSCALED: a GradScaler has unscaled gradients
    before the call. NORM_CLIPPED, VALUE_CLIPPED: every gradient was written to in place before the call, and the norm
    or the greatest element is the same in call after call. REDUCED: a call of a different wrapper left the gradients.
    UNCLEARED: every gradient is the result of the last call, used by a step, plus a backward. STEPS_KNOWN,
    ISSUED_KNOWN: ``steps`` or ``issued`` has a number. SCALED: with ``nonfinite="skip"``, a GradScaler skips steps with
    infinities on the rank.
    """

    FAILED = 1
    REPEAT = 2
    STEPPED = 4
    VALUES = 8
    NONFINITE = 16
    JOINED = 32
    COUNTED = 64
    SIGNED = 128
    WATCHED = 256
    UNSCALED = 512
    NORM_CLIPPED = 1024
    VALUE_CLIPPED = 2048
    REDUCED = 4096
    UNCLEARED = 8192
    STEPS_KNOWN = 16384
    ISSUED_KNOWN = 32768
    SCALED = 65536


@dataclass(slots=True)
class Header:
    """The facts of a rank about a call. Written by the rank before the exchange, and only read afterwards.

    ``flags``: bits of :class:`Flag`. ``wrapper_id``: number of the wrapper on the group. ``layout``: fingerprint of
    what all ranks must have alike. ``source``: the rank that broadcasts. ``metric_names``: fingerprint of the names of
    the metrics, 0 without metrics. ``micro_batches``: backward passes since the last call. ``leaves``: number of
    micro-batches added in the order of a tree, 0 without a tree. ``steps``: optimizer steps since the last call.
    ``issued``: collectives that the script has issued on its own group since the last call. ``sample_size``: number of
    items. ``mask``: fingerprint of the kinds of all gradients. ``norm_bits``: norm of the local gradient.
    ``waited_us``: microseconds of the wait for the headers of the last call. ``replica``: digest of the state that
    replicas share. ``gradients``: digest of the gradients in check_replicas(); in an all_reduce on a device what is
    known there about the gradients of earlier calls (``_collectives/late_nonfinite``). ``generators``: digest of the
    random generators, which may differ; in an all_reduce on a device the digest of an earlier call
    (``_collectives/replicas``).
    """

    # The facts that are equal on all ranks in most calls come first: their bytes are compared all at once.
    version: int = HEADER_VERSION
    operation: int = 0
    participation: int = Participation.PLAIN
    flags: int = 0
    wrapper_id: int = 0
    call: int = 0
    layout: int = 0
    source: int = 0
    metric_names: int = 0
    micro_batches: int = 0
    leaves: int = 0
    steps: int = 0
    issued: int = 0
    sample_size: int = 0
    mask: int = 0
    norm_bits: int = 0
    waited_us: int = 0
    replica: int = 0
    gradients: int = 0
    generators: int = 0

    @property
    def call_name(self) -> str:
        """For example ``all_reduce() call 3``."""
        labels = {int(operation): operation.label for operation in Operation}
        return f"{labels.get(self.operation, f'operation {self.operation}')} call {self.call}"

    @property
    def takes_part(self) -> bool:
        """Whether the gradients of the rank count."""
        has_samples = self.participation == Participation.SAMPLES and self.sample_size > 0
        return has_samples or self.participation == Participation.PLAIN

    @property
    def samples(self) -> int | None:
        """The sample_size of the rank, None for a plain call."""
        return self.sample_size if self.participation == Participation.SAMPLES else None

    @property
    def local_norm(self) -> float | None:
        """Norm of the local gradient, None if unknown."""
        return decode_double(self.norm_bits) if self.flags & Flag.VALUES else None

    @property
    def finite(self) -> bool | None:
        """Whether the local gradient was finite, None if unknown."""
        return not self.flags & Flag.NONFINITE if self.flags & Flag.VALUES else None


_ROW = struct.Struct("<BBBxI5q2I9q")
HEADER_BYTES = _ROW.size  # fixed for ever: gloo aborts the process when ranks exchange rows of different size
_NAMES = tuple(item.name for item in fields(Header))
_values = attrgetter(*_NAMES)
_SHORT = ("micro_batches", "leaves")  # 4 bytes each, all other facts behind the flags 8
_ENDS = tuple(accumulate((4 if name in _SHORT else 8 for name in _NAMES[4:]), initial=8))
# The bytes of each fact behind the flags, in the row of a rank.
PLACES = {name: slice(*ends) for name, ends in zip(_NAMES[4:], pairwise(_ENDS), strict=True)}
ALIKE = slice(0, PLACES["sample_size"].start)  # all facts but sizes, norms, times and digests: equal in most calls
_SHORT_WORD = struct.Struct("<I")
_WORD = struct.Struct("<q")
_DOUBLE = struct.Struct("<d")


def encode_header(header: Header) -> bytes:
    """The row of a rank: HEADER_BYTES bytes."""
    return _ROW.pack(*_values(header))


def decode_header(row: bytes) -> Header:
    """Inverse of :func:`encode_header`."""
    return Header(*_ROW.unpack(row))


def encode_double(number: float) -> int:
    """The 64 bits of a double as a whole number, for a field such as ``norm_bits``."""
    return int(_WORD.unpack(_DOUBLE.pack(number))[0])


def decode_double(bits: int) -> float:
    """Inverse of :func:`encode_double`."""
    return float(_DOUBLE.unpack(_WORD.pack(bits))[0])


def is_equal(rows: Sequence[bytes], place: slice) -> bool:
    """Whether the facts at ``place`` (:data:`PLACES`, :data:`ALIKE`) are equal on all ranks."""
    first = rows[0][place]
    for row in rows:  # noqa: SIM110 - a generator would cost more than the comparison
        if row[place] != first:
            return False
    return True


def column(rows: Sequence[bytes], name: str) -> list[int]:
    """The fact ``name``, behind the flags, of every rank."""
    start = PLACES[name].start
    number = _SHORT_WORD if name in _SHORT else _WORD
    return [number.unpack_from(row, start)[0] for row in rows]


def flags_of(rows: Sequence[bytes]) -> list[int]:
    """The flags of every rank."""
    return [_SHORT_WORD.unpack_from(row, 4)[0] for row in rows]
