"""What is one line of a trace? A JSON object that ends in its number and a checksum of itself. Pure.

docs/trace-format.md describes every line; a change to what they mean is a new ``VERSION``.
"""

import json
import re
import zlib
from collections.abc import Mapping
from typing import Any

from legacy_ddp._errors import TraceError

FORMAT = "legacy_ddp trace"
VERSION = 1

# The phases in the order in which they come about in a step, and what a reader calls them; docs/trace-format.md says
# what each holds.
SAYS = {
    "local_gradients": "local gradients",
    "reduced_gradients": "reduced gradients",
    "settings": "settings",
    "optimizer": "optimizer state",
    "parameters": "parameters",
    "buffers": "buffers",
}
PHASES = tuple(SAYS)
RANK_FILE = "rank-{:05d}.jsonl"

_END = re.compile(rb',"at":(\d{1,18}),"crc32":"([0-9a-f]{8})"\}\n')
_LONGEST_END = len(',"at":,"crc32":"12345678"}\n') + 18


class DamagedLineError(TraceError):
    """A line that is not what was written."""


def encode(members: Mapping[str, Any], at: int) -> bytes:
    """Line number ``at``, from 1, of a file, with its newline."""
    checked = json.dumps(members, separators=(",", ":"), allow_nan=False).encode()[:-1] + f',"at":{at}'.encode()
    return checked + f',"crc32":"{zlib.crc32(checked):08x}"}}\n'.encode()


def decode(line: bytes) -> dict[str, Any]:
    """The members of a line, given with its newline.

    Raises:
        DamagedLineError: as :func:`check`.
    """
    check(line)
    try:
        members: dict[str, Any] = json.loads(line)  # it ends like an object, so that it can be nothing else
    except (ValueError, RecursionError) as error:
        raise DamagedLineError(f"it is no JSON ({error})") from error
    return members


def check(line: bytes) -> tuple[bytes, int]:
    """What the line says before its last two members, and which number it has.

    Raises:
        DamagedLineError: the line is torn, or its checksum is not that of its bytes.
    """
    if not line.endswith(b"\n"):
        raise DamagedLineError("it is torn")
    end = _END.search(line, max(0, len(line) - _LONGEST_END))
    if not end or zlib.crc32(memoryview(line)[: end.end(1)]) != int(end[2], 16):
        raise DamagedLineError("its checksum is not that of its bytes")
    return line[: end.start()], int(end[1])
