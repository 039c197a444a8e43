"""Checkpoints for trainings that may be killed: a file is complete or absent, and damage is detected.

A file is the output of ``torch.save()`` followed by its SHA-256; ``torch.load()`` reads the file as usual.
"""

import hashlib
import os
import sys
from pathlib import Path
from typing import Any

import torch

DIGEST_BYTES = hashlib.sha256().digest_size
_PART_BYTES = 2**20


class CheckpointError(RuntimeError):
    """There is no checkpoint to resume, or the checkpoint belongs to a different training."""


class DamagedError(CheckpointError):
    """The contents of a file differ from the written contents."""


def save_checkpoint(folder: Path, step: int, state: dict[str, Any], *, keep: int | None = None) -> None:
    """Write ``state`` to a new file; a kill at any moment leaves no partial file under that name.

    The newest ``keep`` checkpoints up to this step stay; None: all checkpoints.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step-{step:08d}.pt"
    unfinished = path.with_suffix(".tmp")
    try:
        with open(unfinished, "w+b") as file:
            torch.save(state, file)
            file.seek(0)
            file.write(hashlib.file_digest(file, "sha256").digest())
            file.flush()
            os.fsync(file.fileno())  # before the rename: after a power cut the name must not lead to an empty file
        os.replace(unfinished, path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    sync_folder(folder)
    if keep is not None:
        for old in [other for other in checkpoints(folder) if other <= path][keep:]:
            old.unlink()


def sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoint files, complete or damaged, the newest first."""
    return sorted(folder.glob("step-*.pt"), reverse=True)


def load_checkpoint(folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """The newest complete checkpoint in ``folder``. Each newer file is reported on stderr, with its damage.

    Raises:
        CheckpointError: there is no checkpoint, or its ``"settings"`` differ from ``settings``.
    """
    found = checkpoints(folder)
    if not found:
        raise CheckpointError(f"{folder} has nothing to resume: got no step-*.pt, expected one; start without --resume")
    for path in found:
        try:
            state = read_whole(path)
        except DamagedError as error:
            print(f"{error}; trying the one before", file=sys.stderr, flush=True)
            continue
        check_settings(path, state["settings"], settings)
        return state
    raise CheckpointError(
        f"{folder} has nothing to resume: got {len(found)} step-*.pt, none of them whole, expected one; "
        "bring one back, or start in another folder"
    )


def read_whole(path: Path) -> dict[str, Any]:
    """
    Raises:
        DamagedError: the file cannot be read, is cut off, or a byte of it changed.
    """
    try:
        check_digest(path)
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise DamagedError(f"{path} cannot be read: {error}") from error
    return state


def check_digest(path: Path) -> None:
    found = hashlib.sha256()
    with open(path, "rb") as file:
        left = os.fstat(file.fileno()).st_size - DIGEST_BYTES
        if left <= 0:
            raise DamagedError(f"{path} is damaged: got {left + DIGEST_BYTES} bytes, expected more")
        while left and (part := file.read(min(left, _PART_BYTES))):  # in parts: it may be larger than memory
            found.update(part)
            left -= len(part)
        expected = file.read()
    if found.digest() != expected:
        raise DamagedError(
            f"{path} is damaged: got SHA-256 {found.hexdigest()[:16]}..., expected {expected.hex()[:16]}..."
        )


def check_settings(path: Path, saved: dict[str, Any], settings: dict[str, Any]) -> None:
    for name, expected in saved.items():
        if settings.get(name) != expected:
            raise CheckpointError(
                f"{name} is not that of {path}: got {settings.get(name)}, expected {expected}; "
                "resume with the settings it was saved with"
            )
