"""``legacy-ddp port`` as its user sees it: the changed script, the diff, and the remarks."""

import re
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from legacy_ddp.debug._port import OTHERS, PAGES
from tests.helpers.command import RefusedError, command

_REMARK = re.compile(r"\S+:\d+: (decide|note): (.*?) (docs/\S+)")
ADDRESSES = {*PAGES.values(), *OTHERS.values()}  # of all findings
_NAMES = {address: name for name, address in PAGES.items()}


class Remark(NamedTuple):
    """``is_open``: the user decides. ``page``: the key of its page in ``PAGES``."""

    is_open: bool
    text: str
    page: str


class Ported(NamedTuple):
    """``is_complete``: nothing is left to the user."""

    before: str
    after: str
    diff: str
    remarks: list[Remark]
    is_complete: bool

    @property
    def texts(self) -> list[str]:
        return [remark.text for remark in self.remarks]

    def pages(self, *, is_open: bool = True) -> list[str]:
        return [remark.page for remark in self.remarks if remark.is_open is is_open]


def ported(text: str, folder: Path) -> Ported:
    """The script ``text``, as train.py of a folder, after the command.

    Raises:
        RefusedError: the command refused it; the text is its error, in one line.
    """
    script, output = folder / "train.py", folder / "ported.py"
    script.write_bytes(text.encode())
    output.unlink(missing_ok=True)
    done = command("port", script, "-o", output)
    if not output.exists():
        assert done.returncode == 2
        raise RefusedError(" ".join(done.stderr.removeprefix("legacy-ddp: error: ").split()))
    remarks = [
        Remark(kind == "decide", told, _NAMES[address])
        for kind, told, address in _REMARK.findall(" ".join(done.stderr.split()))
    ]
    return Ported(text, output.read_bytes().decode(), done.stdout, remarks, done.returncode == 0)


def end_states(rank: int, programs: list[str]) -> list[dict[str, torch.Tensor]]:
    """The weights after each program. Two ranks, so that a mean is one rounding."""
    states = []
    for program in programs:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
        args = type("Args", (), {"world_size": 2})
        torch.manual_seed(rank + 1)
        names: dict[str, Any] = {"module": module, "batches": [torch.randn(3, 5) for _ in range(6)], "args": args}
        exec(compile(program, "train.py", "exec"), names)
        states.append(module.state_dict())
    return states
