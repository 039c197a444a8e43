"""The folder of the Unix sockets that ``legacy-ddp watch`` looks for."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder for the sockets of this test, and of the processes that it starts."""
    with tempfile.TemporaryDirectory(prefix="watch-") as path:  # a short path
        monkeypatch.setattr(tempfile, "tempdir", path)
        monkeypatch.setenv("TMPDIR", path)
        yield Path(path, f"legacy_ddp-{os.geteuid()}")
