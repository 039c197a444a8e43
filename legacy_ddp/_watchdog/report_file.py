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
from legacy_ddp._text import encodable
from legacy_ddp._watchdog.signals import is_faulthandler_s

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
        self._no_file = ""  # why there is none
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
            self._no_file = f"not on disk: {error}"
            self.path, self._descriptor = Path(os.devnull), os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        self._problem = self._no_file  # why the last report is not there
        leaves = "stacks without a date below were left by a SIGTERM that ended this process"
        if not _leave_stacks():
            leaves = (
                "a SIGTERM leaves no stacks here: faulthandler was registered for it before, with a file of its own"
            )
            logger_of(rank).info("in reports of this rank, %s", leaves)
        with suppress(OSError):  # a full disk is no reason not to train
            self._write(f"rank {rank} of {size}, process {os.getpid()} on {socket.gethostname()}\n({leaves})")
        _open.append(self._descriptor)
        _dump_stacks_into_newest()

    def append(self, text: str) -> bool:
        """Add a report; one write, so that a kill leaves all of it or none. Whether it is there: a full disk is no
        reason to fail, but the text is for the log then."""
        self._problem = self._no_file
        try:
            self._write(text)
        except OSError as error:
            self._problem = f"not written in full to {self.path}: {error.strerror}"
        self._is_empty = self._is_empty and bool(self._problem)
        return not self._problem

    def where(self, words: str) -> str:
        """``words`` and the path; in place of both, why the last report is not there."""
        return encodable(self._problem or f"{words} {self.path}")

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
        data = f"[{datetime.now().astimezone().isoformat(' ', 'seconds')}]\n{encodable(text)}\n\n".encode()
        while data:  # a disk that gets full takes a part first, and the rest is the error
            data = data[os.write(self._descriptor, data) :]


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
def _leave_stacks() -> bool:
    """Let SIGTERM leave stacks in the newest file from now on; False if faulthandler does so elsewhere, for the user.

    Its handler is C, so it works whatever Python does; then it calls the one before it. It is never taken off again:
    that would take off what the user put over it, too.
    """
    if is_faulthandler_s(signal.SIGTERM):
        return False
    faulthandler.register(signal.SIGTERM, file=_stacks_descriptor(), all_threads=True, chain=True)
    return True


@cache
def _stacks_descriptor() -> int:
    """Where faulthandler writes."""
    return os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
