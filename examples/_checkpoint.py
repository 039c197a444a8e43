"""How does a training survive being killed? Checkpoints are whole or not there, and say what they are of."""

import os
import pickle
from pathlib import Path
from typing import Any

import torch


class CheckpointError(RuntimeError):
    """There is no checkpoint to go on from, or it belongs to another training."""


def save_checkpoint(folder: Path, step: int, state: dict[str, Any]) -> None:
    """Write ``state`` to a file of its own; killed at any moment, no half of it is left under that name."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step-{step:08d}.pt"
    unfinished = path.with_suffix(".tmp")
    try:
        with open(unfinished, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())  # before the rename: after a power cut the name must not lead to an empty file
        os.replace(unfinished, path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    sync_folder(folder)


def sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def newest_checkpoint(folder: Path) -> Path | None:
    return max(folder.glob("step-*.pt"), default=None)


def load_checkpoint(folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """The newest checkpoint in ``folder``.

    Raises:
        CheckpointError: there is none, it cannot be read, or its ``"settings"`` are not ``settings``.
    """
    path = newest_checkpoint(folder)
    if path is None:
        raise CheckpointError(f"{folder} has nothing to resume: got no step-*.pt, expected one; start without --resume")
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, EOFError, RuntimeError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}; delete it to resume from the one before") from error
    for name, expected in state["settings"].items():
        if settings.get(name) != expected:
            raise CheckpointError(
                f"{name} is not that of {path}: got {settings.get(name)}, expected {expected}; "
                "resume with the settings it was saved with"
            )
    return state
