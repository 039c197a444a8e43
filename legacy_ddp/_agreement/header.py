"""The header of a call: 16 words from every rank, before all other communication. Pure."""

import struct
from enum import IntEnum, IntFlag
from typing import NamedTuple

import torch

from legacy_ddp._transport.operation import Operation

HEADER_WORDS = 16  # fixed for ever: gloo aborts the process when ranks exchange rows of different size
HEADER_VERSION = 1


class Participation(IntEnum):
    """How the gradients of a rank take part in an all_reduce."""

    PLAIN = 0
    SAMPLES = 1
    SKIP = 2


class Flag(IntFlag):
    """Facts, a bit each.

    REPEAT: no backward since the last call, and gradients unchanged since then.
    STEPPED: weights changed between the first backward since the last call and this call.
    JOINED: the rank has left a join(); its replica may be old. COUNTED: the zeros of this rank count in a plain mean.
    SIGNED: ``state`` has a digest. WATCHED: the rank takes part in the report of non-finite gradients.
    VALUES: the norm was taken. FINITE: the norm is finite. REDUCED: a call of a different wrapper left the gradients.
    UNSCALED: a GradScaler has unscaled gradients before the call. NORM_CLIPPED, VALUE_CLIPPED: every gradient was
    written to in place before the call, and the norm or the greatest element is the same in call after call.
    UNCLEARED: every gradient is the result of the last call, used by a step, plus a backward.
    """

    FAILED = 1
    REPEAT = 2
    STEPPED = 4
    VALUES = 8
    FINITE = 16
    JOINED = 32
    COUNTED = 64
    SIGNED = 128
    WATCHED = 256
    UNSCALED = 512
    NORM_CLIPPED = 1024
    VALUE_CLIPPED = 2048
    REDUCED = 4096
    UNCLEARED = 8192


# As plain numbers, for the rows of every call: an IntFlag takes six times as long.
FAILED_BIT, VALUES_BIT, FINITE_BIT, JOINED_BIT, COUNTED_BIT, SIGNED_BIT, UNCLEARED_BIT = (
    flag.value
    for flag in (Flag.FAILED, Flag.VALUES, Flag.FINITE, Flag.JOINED, Flag.COUNTED, Flag.SIGNED, Flag.UNCLEARED)
)


class Header(NamedTuple):
    """The row of a rank: signed 64-bit words, in the order of transfer.

    ``wrapper_id``: number of the wrapper on the group. ``argument``: ``src`` of a broadcast; in an all_reduce() the
    fingerprint of the names of the metrics, 0 without metrics. ``mask``: fingerprint of
    the kinds of all gradients, in check_replicas() of the gradients themselves. ``state``: fingerprint of the state
    shared by replicas. ``random``: fingerprint of the random generators, which may differ; in an all_reduce() 1 + the
    number of optimizer steps since the last call, 0 if unknown. ``leaves``: number of
    micro-batches added in the order of a tree, 0 without a tree.
    """

    version: int = HEADER_VERSION
    wrapper_id: int = 0
    operation: int = 0
    call: int = 0
    layout: int = 0
    argument: int = 0
    mask: int = 0
    participation: int = Participation.PLAIN
    sample_size: int = 0
    micro_batches: int = 0
    flags: int = 0
    norm_bits: int = 0
    waited_us: int = 0
    state: int = 0
    random: int = 0
    leaves: int = 0

    @property
    def call_name(self) -> str:
        """For example ``all_reduce() call 3``."""
        labels = {int(operation): operation.label for operation in Operation}
        return f"{labels.get(self.operation, f'operation {self.operation}')} call {self.call}"

    @property
    def src(self) -> int:
        """The source of a broadcast, 0 in an all_reduce()."""
        return 0 if self.operation == Operation.ALL_REDUCE else self.argument

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
        return float(struct.unpack("<d", struct.pack("<q", self.norm_bits))[0]) if self.flags & VALUES_BIT else None

    @property
    def finite(self) -> bool | None:
        """Whether the local gradient was finite, None if unknown."""
        return bool(self.flags & FINITE_BIT) if self.flags & VALUES_BIT else None


def encode_norm(norm: float) -> int:
    """The bits of a norm as a header word."""
    return int(struct.unpack("<q", struct.pack("<d", norm))[0])


def encode_row(header: Header) -> torch.Tensor:
    """int64 tensor of shape (HEADER_WORDS,)."""
    return torch.tensor(header, dtype=torch.int64, device="cpu")


def decode_rows(rows: torch.Tensor) -> list[Header]:
    """Inverse of :func:`encode_row` for a tensor of shape (world size, HEADER_WORDS)."""
    return [Header(*row) for row in rows.tolist()]
