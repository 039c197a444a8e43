"""Names and texts with escape sequences, newlines and marks of direction, on their way to terminal, log and file."""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.helpers.scripts import fork_script, fork_scripts
from tests.helpers.tiers import thorough

# A forged line, a colour, a mark of direction, a bell, a lone surrogate.
BAD = "x\nFAKE\x1b[31m\u202e\x07\udcff"
# Root gives its host such a name, with a slash.
_START = f"""
import ctypes, logging, os, socket, sys, time
import torch, torch.distributed as dist
from legacy_ddp import Checks, LegacyDDPError, LegacyDistributedDataParallel
from legacy_ddp.debug import Recorder, check_replicas

BAD = {BAD!a}
NAME = BAD[:-1]  # a part of JSON in UTF-8
rank = int(os.environ["RANK"])
if os.geteuid() == 0 and ctypes.CDLL(None).unshare(0x04000000) == 0:  # CLONE_NEWUTS
    socket.sethostname(("/" + NAME).encode())
dist.init_process_group("gloo", init_method="file://" + os.path.abspath("store"), rank=rank, world_size=2)
Module = type("M" + NAME, (torch.nn.Module,), {{"forward": lambda self, x: x @ next(self.parameters())}})
SGD = type("S" + NAME, (torch.optim.SGD,), {{}})
x = torch.ones(1, 3)

def new():
    torch.manual_seed(0)
    module = Module()
    module.register_parameter(NAME, torch.nn.Parameter(torch.randn(3, 1)))
    module.register_buffer("b" + NAME, torch.zeros(1))
    checks = Checks(level="detail", report_dir="reports", warn_after_seconds=0.3)
    return LegacyDistributedDataParallel(module, checks=checks)
"""
_TRAINING = """
model = new()
optimizer = SGD(model.parameters(), lr=0.1)
with Recorder(model, "trace", optimizer=[optimizer, SGD([torch.ones(1)], lr=0.1)]) as recorder:
    for step in range(4):
        model(x * (float("nan") if rank == 1 and step == 1 else 1)).sum().backward()
        if rank == 1 and step == 3:
            time.sleep(1.5)  # being late is the fault
        model.all_reduce(metrics={"loss" + NAME: 1.0})
        recorder.log(**{"log" + NAME: "text" + NAME})
        optimizer.step()
        optimizer.zero_grad()
"""
_ERRORS = """
for fault in ("layout", "replicas", "step", "calls"):
    other = new()
    weight = next(other.parameters())
    try:
        if fault == "replicas" and rank == 1:
            weight.data += 1
        other(x).sum().backward()
        if fault == "layout" and rank == 1:
            weight.requires_grad = False
        if fault == "step":
            SGD(other.parameters(), lr=0.1).step()
        if fault == "calls" and rank == 1:
            model(x).sum().backward()
        (model if fault == "calls" and rank == 1 else other).all_reduce()
    except LegacyDDPError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
for wrong in (lambda: LegacyDistributedDataParallel(SGD([x], lr=0.1)), lambda: new().all_reduce(metrics=Module())):
    try:
        wrong()
    except TypeError as error:
        print(error, file=sys.stderr)
with torch.no_grad():
    next(model.parameters()).add_(rank)
print(check_replicas(model, optimizer), file=sys.stderr)
"""
_LOSS = """
third = new()
if rank == 1:
    sys.stderr = open(os.devnull, "w")  # Python shows the text as it is
    raise type("E" + NAME, (ValueError,), {})(NAME)
try:
    for _ in range(2):
        third.all_reduce()
except LegacyDDPError as error:
    print(f"{type(error).__name__}: {error}", file=sys.stderr)
"""


def _check(text: str) -> None:
    """No line is forged, and none has more than a terminal shows."""
    for line in text.split("\n"):
        assert line.isprintable(), ascii(line)
        assert not line.lstrip(" |").startswith("FAKE"), line


@pytest.mark.parametrize("form", ["text", thorough("json")])
def test_names_and_texts_of_other_origin_are_escaped_at_every_exit(form: str, tmp_path: Path) -> None:
    """They went raw to the terminal and the log, and a slash in the name of the host lost the report file."""
    (tmp_path / "script.py").write_text(_START + _TRAINING + _ERRORS + _LOSS)
    # Without the interface gloo asks a name server for the host.
    common = {"GLOO_SOCKET_IFNAME": "lo", "LEGACY_DDP_LOG": f"{form},debug"}
    places = [{"RANK": str(rank), **common} for rank in range(2)]
    runs = fork_scripts([("script.py",)] * 2, places, cwd=tmp_path)
    commands = [
        fork_script("-m", "legacy_ddp", *words, cwd=tmp_path) for words in (["show", "trace"], ["diff", "trace"])
    ]
    reports = [report.read_text() for report in (tmp_path / "reports").iterdir()]

    assert [run.returncode for run in runs] == [0, 1], runs[0].stderr
    for run in [*runs, *commands]:
        _check(run.stdout)
        _check(run.stderr)
    for kind in ("WARNING", "LayoutError", "ReplicaDivergenceError", "UnsynchronizedStepError", "DesyncError"):
        assert kind in runs[0].stderr
    assert "PeerLostError" in runs[0].stderr
    assert "Sx\\nFAKE" in runs[0].stderr  # of an optimizer
    assert "Mx\\nFAKE" in runs[0].stderr  # of a module
    assert [command.returncode for command in commands] == [0, 0]
    assert "FAKE" in commands[0].stdout
    if find_spec("bokeh"):  # the tests of the core run without it
        page = fork_script("-m", "legacy_ddp", "report", "trace", cwd=tmp_path)
        assert page.returncode == 0, page.stderr
        assert {*"\x1b\u202e\x07"}.isdisjoint((tmp_path / "report.html").read_text())
    (report,) = reports
    _check(report)
    assert os.geteuid() != 0 or "/x\\nFAKE" in report
