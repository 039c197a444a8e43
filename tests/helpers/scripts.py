"""How does a test start an example as a user does, and compare what it leaves?"""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tests.helpers.paths import ROOT

EXAMPLES = ROOT / "examples"
LIMIT_SECONDS = 300  # several times what the longest takes: other tests run beside it


def run_script(
    *command: str,
    environment: Mapping[str, str] | None = None,
    limit_seconds: float = LIMIT_SECONDS,
    cwd: Path = ROOT,
    **options: Any,
) -> subprocess.CompletedProcess[str]:
    """Start Python with these arguments."""
    return subprocess.run(
        [sys.executable, *command],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **(environment or {})},
        capture_output=True,
        text=True,
        timeout=limit_seconds,
        check=False,
        **options,
    )


def heed_ctrl_c() -> None:
    """In a child, before it starts: hear SIGINT although whoever started the tests in the background ignores it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def torchrun(world_size: int, script: str, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Start one of the examples on several ranks."""
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world_size))
    return run_script(*launcher, str(EXAMPLES / script), *arguments, **options)


def load(path: Path) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(path, weights_only=True)
    return state


def assert_same_bits(left: Any, right: Any, where: str = "checkpoint") -> None:
    assert type(left) is type(right), where
    if isinstance(left, torch.Tensor):
        assert (left.dtype, left.shape) == (right.dtype, right.shape), where
        assert torch.equal(left.reshape(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8)), where
    elif isinstance(left, dict):
        assert left.keys() == right.keys(), where
        for key in left:
            assert_same_bits(left[key], right[key], f"{where}[{key!r}]")
    elif isinstance(left, list):
        assert len(left) == len(right), where
        for index, pair in enumerate(zip(left, right, strict=True)):
            assert_same_bits(*pair, f"{where}[{index}]")
    else:
        assert left == right, where
