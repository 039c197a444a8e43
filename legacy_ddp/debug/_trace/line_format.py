"""Encoding, decoding and checksum of one line of a trace. Pure.

A line is a JSON object whose last two keys are the line number and a checksum. docs/trace-format.md describes every
line; a change of their meaning needs a new ``VERSION``. Version 2 has metrics in a call, and lines of logged values;
version 3 has lines of operations.
"""

import json
import re
import zlib
from collections.abc import Mapping
from typing import Any

from legacy_ddp._errors import TraceError

FORMAT = "legacy_ddp trace"
VERSION = 3
READABLE_VERSIONS = (1, 2, 3)

# The phases of a step in the order of training, with their labels in texts; docs/trace-format.md has the contents.
PHASE_LABELS = {
    "local_gradients": "local gradients",
    "reduced_gradients": "reduced gradients",
    "settings": "settings",
    "optimizer": "optimizer state",
    "parameters": "parameters",
    "buffers": "buffers",
}
PHASES = tuple(PHASE_LABELS)
RANK_FILE = "rank-{:05d}.jsonl"

_END = re.compile(rb',"at":(\d{1,18}),"crc32":"([0-9a-f]{8})"\}\n')
_LONGEST_END = len(',"at":,"crc32":"12345678"}\n') + 18


class DamagedLineError(TraceError):
    """The bytes of a line are not the bytes that a recorder wrote."""


def encode(values: Mapping[str, Any], at: int) -> bytes:
    """The JSON object ``values`` as line number ``at`` of a file (from 1), with the newline."""
    checked = json.dumps(values, separators=(",", ":"), allow_nan=False).encode()[:-1] + f',"at":{at}'.encode()
    return checked + f',"crc32":"{zlib.crc32(checked):08x}"}}\n'.encode()


def decode(line: bytes) -> dict[str, Any]:
    """The JSON object of a line; ``line`` includes the newline.

    Raises:
        DamagedLineError: as :func:`check`.
    """
    check(line)
    try:
        values: dict[str, Any] = json.loads(line)  # the checked end of the line is the end of an object
    except (ValueError, RecursionError) as error:
        raise DamagedLineError(f"it is no JSON ({error})") from error
    return values


def check(line: bytes) -> tuple[bytes, int]:
    """The bytes of the line before its last two keys, and the line number.

    Raises:
        DamagedLineError: the line is torn, or the checksum does not match the bytes.
    """
    if not line.endswith(b"\n"):
        raise DamagedLineError("it is torn")
    end = _END.search(line, max(0, len(line) - _LONGEST_END))
    if not end or zlib.crc32(memoryview(line)[: end.end(1)]) != int(end[2], 16):
        raise DamagedLineError("its checksum is not that of its bytes")
    return line[: end.start()], int(end[1])
