"""Real text without a download: the source of Python's standard library, and its bigram model."""

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

SKIPPED_FOLDERS = {
    *("site-packages", "dist-packages", "__pycache__"),  # not the standard library
    *("test", "tests", "idle_test", "idlelib", "lib2to3", "turtledemo"),  # not in every distribution
    *("encodings", "pydoc_data"),  # generated tables
}
HELD_OUT_EVERY = 20
MIN_SIZE_BYTES = 1_000_000
BYTE_VALUES = 256


class TextError(RuntimeError):
    """There is too little text to learn from."""


@dataclass(frozen=True)
class Text:
    """Bytes as uint8 tensors; each file is used for training or held out as a whole. ``digest`` covers both parts."""

    train: torch.Tensor
    held_out: torch.Tensor
    digest: str


def read_text(folder: Path | None = None) -> Text:
    """The standard library's source: the same bytes in the same order for the same Python version.

    Raises:
        TextError: less than ``MIN_SIZE_BYTES`` of source is installed.
    """
    folder = folder or Path(sysconfig.get_paths()["stdlib"])
    contents = [path.read_bytes() for path in sorted(source_files(folder))]
    size_bytes = sum(map(len, contents))
    if size_bytes < MIN_SIZE_BYTES:
        raise TextError(
            f"text in {folder} is too short: got {size_bytes} bytes in {len(contents)} .py files, "
            f"expected at least {MIN_SIZE_BYTES}; use a Python that ships its library's source"
        )
    held_out = b"".join(contents[::HELD_OUT_EVERY])
    train = b"".join(content for index, content in enumerate(contents) if index % HELD_OUT_EVERY)
    digest = hashlib.blake2b(train + held_out, digest_size=8).hexdigest()
    return Text(as_tensor(train), as_tensor(held_out), digest)


def source_files(folder: Path) -> Iterator[Path]:
    for parent, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name not in SKIPPED_FOLDERS]  # os.walk does not enter the others
        yield from (Path(parent, name) for name in files if name.endswith(".py"))


def as_tensor(text: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def cut_windows(text: torch.Tensor, context: int) -> torch.Tensor:
    """Rows of ``context + 1`` bytes, as a view. Neighbours share a byte: all but the first are a target once."""
    return text.unfold(0, context + 1, context)


def bigram_bits(text: torch.Tensor, *, add: float = 0.1) -> torch.Tensor:
    """Cost in bits of each next byte (column) after each byte (row), from the counts in ``text`` plus ``add``."""
    pairs = text[:-1].int() * BYTE_VALUES + text[1:]
    counts = torch.bincount(pairs, minlength=BYTE_VALUES**2).double().view(BYTE_VALUES, BYTE_VALUES) + add
    return -(counts / counts.sum(1, keepdim=True)).log2()


def bigram_bits_per_byte(bits: torch.Tensor, windows: torch.Tensor) -> float:
    """Mean cost of the windows' targets under the table of :func:`bigram_bits`."""
    return bits[windows[:, :-1].int(), windows[:, 1:].int()].mean().item()
