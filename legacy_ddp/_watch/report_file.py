"""Where do the reports of this process lie? In a file of its own that outlives it, if there was anything to say."""

import errno
import faulthandler
import os
import signal
import socket
import tempfile
from contextlib import suppress
from datetime import datetime
from functools import cache
from pathlib import Path

from legacy_ddp._log import logger_of

_CLOSED = -1
_open: list[int] = []  # descriptors of this process's report files, the newest last


class ReportFile:
    """Opened before anything is wrong, so that a process that is being ended needs no more than one write.

    Readable for its owner alone: stacks name files and functions. Removed on :meth:`close` if nothing was written.
    ``directory=None``: the one for temporary files; if none can be written to, ``path`` is the null device.

    Raises:
        OSError: it cannot be made in ``directory``.
    """

    def __init__(self, directory: str | os.PathLike[str] | None, rank: int, size: int) -> None:
        stem = f"legacy_ddp-{socket.gethostname()}-rank{rank}-pid{os.getpid()}"
        self._owner = os.getpid()
        self._is_empty = True
        try:
            folder = Path(tempfile.gettempdir() if directory is None else directory).expanduser().absolute()
            folder.mkdir(parents=True, exist_ok=True)
            self.path, self._descriptor = _create(folder, stem)
        except OSError as error:
            if directory is not None:
                raise OSError(
                    f"report_dir is not usable: got {str(directory)!r} ({error.strerror}), expected a directory to "
                    "write to; pass another one with Checks(report_dir=...)"
                ) from error
            logger_of(rank).warning("no reports on disk: %s; pass Checks(report_dir=...)", error)
            self.path, self._descriptor = Path(os.devnull), os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        with suppress(OSError):  # a full disk is no reason not to train
            self._write(
                f"rank {rank} of {size}, process {os.getpid()} on {socket.gethostname()}\n"
                "(stacks without a date below were left by a SIGTERM that ended this process)"
            )
        _open.append(self._descriptor)
        _dump_stacks_into_newest()

    def append(self, text: str) -> None:
        """Add a report; one write, so that a kill leaves all of it or none. A full disk is no reason to fail."""
        self._is_empty = False
        with suppress(OSError):
            self._write(text)

    def close(self) -> None:
        """Remove the file if it tells nothing. Stacks go to another one from now on, if there is one."""
        if self._descriptor == _CLOSED or os.getpid() != self._owner:
            return
        if self._is_empty and self.path != Path(os.devnull):
            with suppress(OSError):
                self.path.unlink()
        descriptor, self._descriptor = self._descriptor, _CLOSED  # its number may soon be somebody else's
        _open.remove(descriptor)
        _dump_stacks_into_newest()
        os.close(descriptor)

    def abandon(self) -> None:
        """In a forked child: what happens to it is not the parent's report."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, _stacks_descriptor())
        if self._descriptor != _CLOSED:
            os.dup2(nowhere, self._descriptor)
        os.close(nowhere)

    def _write(self, text: str) -> None:
        data = f"[{datetime.now().astimezone().isoformat(' ', 'seconds')}]\n{text}\n\n".encode()
        os.write(self._descriptor, data)


def _create(folder: Path, stem: str) -> tuple[Path, int]:
    """A new file, never somebody else's: the directory may be writable for all."""
    for attempt in range(1000):
        path = folder / (f"{stem}.txt" if attempt == 0 else f"{stem}-{attempt}.txt")
        with suppress(FileExistsError):
            return path, os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
    raise FileExistsError(errno.EEXIST, f"1000 files {stem}-*.txt are there; remove them")


def _dump_stacks_into_newest() -> None:
    """A launcher ends the siblings of a failed rank with SIGTERM, perhaps before they know of anything: let them leave
    their stacks. What was the last file stays it, for a process that hangs at its exit."""
    if _open:
        os.dup2(_open[-1], _stacks_descriptor(), inheritable=False)


@cache
def _stacks_descriptor() -> int:
    """Where faulthandler writes. Its handler is C, so it works whatever Python does; then it calls the one before it.
    It is never taken off again: that would take off what the user put over it, too."""
    descriptor = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    faulthandler.register(signal.SIGTERM, file=descriptor, all_threads=True, chain=True)
    return descriptor
