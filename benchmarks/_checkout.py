"""The measured checkout: the checkout of these scripts, regardless of installed packages and PYTHONPATH.

Import before legacy_ddp: the import puts the checkout first on sys.path.
"""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
MEASURED = ("legacy_ddp", "benchmarks/*.py")  # results are written by the way, and change nothing

sys.path.insert(0, str(ROOT))


def environment() -> dict[str, str]:
    """Environment variables for a child process: the same package, one thread per rank."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}


def commit(root: Path = ROOT) -> str:
    """The checkout's commit, with ``-dirty`` after uncommitted changes of measured files; unknown without git."""
    head = _git(root, "rev-parse", "HEAD")
    if not head:
        return "unknown"
    return f"{head}-dirty" if _git(root, "status", "--porcelain", "--", *MEASURED) else head


def _git(root: Path, *words: str) -> str:
    try:
        run = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=False)
    except OSError:  # there is no git
        return ""
    return run.stdout.strip() if run.returncode == 0 else ""
