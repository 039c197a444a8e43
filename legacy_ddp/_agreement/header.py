"""The 16 words that a rank shows the others before it communicates anything else. Pure."""

import struct
from enum import IntEnum, IntFlag
from typing import NamedTuple

import torch

from legacy_ddp._transport.operation import Operation

HEADER_WORDS = 16  # fixed for ever: gloo aborts the process when ranks exchange rows of different size
HEADER_VERSION = 1


class Participation(IntEnum):
    """What a rank says of its gradients in an all_reduce."""

    PLAIN = 0
    SAMPLES = 1
    SKIP = 2


class Flag(IntFlag):
    """Facts of one bit.

    REPEAT: no backward since the last call, and its gradients are what that call left.
    STEPPED: weights changed between the first backward since the last call and this call.
    JOINED: the rank has left a join(), so its replica may be old. COUNTED: it counts in a plain mean all the same.
    """

    FAILED = 1
    REPEAT = 2
    STEPPED = 4
    VALUES = 8
    FINITE = 16
    JOINED = 32
    COUNTED = 64


# As plain numbers: they are asked for in every row of every call, and an IntFlag takes six times as long.
_VALUES, _FINITE = Flag.VALUES.value, Flag.FINITE.value


class Header(NamedTuple):
    """One rank's row, every field a signed 64-bit word; the order is the wire's.

    ``state``: fingerprint of what replicas should share. ``random``: of the random generators, which need not agree.
    ``mask``: of which gradients there are, and in check_replicas() of the gradients themselves. ``leaves``: how many
    micro-batches were added in the order of a tree, 0 without.
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
        """Which call the rank is in, in words."""
        known = self.operation in list(Operation)
        return f"{Operation(self.operation) if known else f'operation {self.operation}'} call {self.call}"

    @property
    def takes_part(self) -> bool:
        """Whether the rank's gradients count."""
        has_samples = self.participation == Participation.SAMPLES and self.sample_size > 0
        return has_samples or self.participation == Participation.PLAIN

    @property
    def samples(self) -> int | None:
        """The rank's sample_size, None if it gave none."""
        return self.sample_size if self.participation == Participation.SAMPLES else None

    @property
    def local_norm(self) -> float | None:
        """Norm of the rank's local gradient, None if it was not taken."""
        return float(struct.unpack("<d", struct.pack("<q", self.norm_bits))[0]) if self.flags & _VALUES else None

    @property
    def finite(self) -> bool | None:
        """Whether that gradient was finite, None if nobody looked."""
        return bool(self.flags & _FINITE) if self.flags & _VALUES else None


def encode_norm(norm: float) -> int:
    """The bits of a norm as a header word."""
    return int(struct.unpack("<q", struct.pack("<d", norm))[0])


def encode_row(header: Header) -> torch.Tensor:
    """int64 tensor of shape (HEADER_WORDS,)."""
    return torch.tensor(header, dtype=torch.int64, device="cpu")


def decode_rows(rows: torch.Tensor) -> list[Header]:
    """Inverse of :func:`encode_row` for a tensor of shape (world size, HEADER_WORDS)."""
    return [Header(*row) for row in rows.tolist()]
