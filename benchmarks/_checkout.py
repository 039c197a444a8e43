"""Which checkout is measured? The one that these scripts are in, whatever else is installed or on PYTHONPATH.

To be imported before legacy_ddp: importing it puts the checkout first on sys.path.
"""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
MEASURED = ("legacy_ddp", "benchmarks/*.py")  # results are written by the way, and change nothing

sys.path.insert(0, str(ROOT))


def environment() -> dict[str, str]:
    """What a process that is started finds the same package by; one thread per rank."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}


def commit(root: Path = ROOT) -> str:
    """The checkout's commit, with ``-dirty`` if what is measured is not as committed; unknown without git."""
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
