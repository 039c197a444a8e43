"""The commit of a working directory."""

import os
import re
import subprocess
from pathlib import Path

UNKNOWN = "not known"

_LIMIT_SECONDS = 3.0
# One process for commit and changes, and no further program that the repository names. Untracked files are left out: to
# find them, git walks through all folders.
_COMMAND = (
    *("git", "-c", "core.fsmonitor=false", "status", "--porcelain=v2", "--branch", "--no-ahead-behind"),
    *("--untracked-files=no", "--ignore-submodules=all"),
)
_COMMIT = re.compile(r"# branch\.oid ([0-9a-f]{40,64})")


def commit_of(folder: Path) -> str:
    """Hash of the commit checked out in ``folder``, with ``, modified`` if a tracked file differs from the commit.

    ``not known`` outside of a repository, without git, for an answer that takes more than three seconds, and before the
    first commit. Writes nothing and never raises an exception for the state of ``folder``.
    """
    try:
        status = subprocess.run(
            _COMMAND,
            cwd=folder,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},  # git would write to the index otherwise
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_LIMIT_SECONDS,
            check=True,
        ).stdout.decode(errors="replace")
    except (OSError, subprocess.SubprocessError):
        return UNKNOWN
    found = _COMMIT.match(status)
    if found is None:
        return UNKNOWN
    is_modified = any(not line.startswith("#") for line in status.splitlines())
    return f"{found[1]}, modified" if is_modified else found[1]
