"""Systems other than Linux, simulated on Linux: what is missing there is taken away before the import.

Nothing here ran on a Mac or on Windows.
"""

import json
import textwrap
from pathlib import Path

import pytest

from tests.helpers.scripts import fork_ranks, fork_script

# A script here begins in a process that has imported the package on Linux.
_FRESH = """
import sys
for name in [name for name in sys.modules if name.partition(".")[0] == "legacy_ddp"]:
    del sys.modules[name]
"""
# As on Windows.
_NO_FCNTL = f"""{_FRESH}
sys.modules["fcntl"] = None
"""
# As on macOS, with torch imported before: its own modules for macOS are not here.
_MACOS = f"""{_FRESH}
import fcntl, os, select, socket
import torch, torch.distributed
sys.platform = "darwin"
missing = {{
    fcntl: [name for name in dir(fcntl) if "SEAL" in name],
    os: ["memfd_create", "posix_fallocate", "O_PATH", "sched_getaffinity", "pidfd_open"]
    + [name for name in dir(os) if name.startswith("MFD_")],
    select: ["epoll", "POLLRDHUP"] + [name for name in dir(select) if name.startswith("EPOLL")],
    socket: ["SO_PEERCRED", "SOCK_CLOEXEC", "SOCK_NONBLOCK", "MSG_CMSG_CLOEXEC", "TCP_USER_TIMEOUT"],
}}
for module, names in missing.items():
    for name in names:
        if hasattr(module, name):
            delattr(module, name)

def refuse(path):
    if isinstance(path, (str, os.PathLike)) and os.fspath(path).startswith("/proc"):
        raise FileNotFoundError(2, "No such file or directory", os.fspath(path))

def without_proc(function):
    def call(path, *arguments, **options):
        refuse(path)
        return function(path, *arguments, **options)
    return call

events = ("open", "os.listdir", "os.scandir")
sys.addaudithook(lambda event, arguments: refuse(arguments[0]) if event in events else None)
os.stat, os.readlink = without_proc(os.stat), without_proc(os.readlink)
"""
_TRAINING = """
import json, torch.distributed as dist
import legacy_ddp
from legacy_ddp import LegacyDistributedDataParallel, TransportError
from legacy_ddp.debug import Recorder

folder = sys.argv[1]
dist.init_process_group("gloo")
rank = dist.get_rank()
net = torch.nn.Linear(2, 1, bias=False)
model = LegacyDistributedDataParallel(net)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
seen = []
with Recorder(model, folder + "/trace", optimizer=optimizer):
    for step in range(3):
        optimizer.zero_grad()
        model(torch.full((1, 2), 1.0 + rank)).sum().backward()
        record = model.all_reduce()
        optimizer.step()
        seen.append([record.transport, net.weight.grad.tolist()])
with torch.no_grad():
    tree = LegacyDistributedDataParallel(torch.nn.Linear(2, 1, bias=False), reproducible=True, checks="detail")
tree(torch.full((1, 2), 1.0 + rank)).sum().backward()
record = tree.all_reduce(sample_size=1)
seen.append([record.transport, tree.module.weight.grad.tolist()])
try:
    LegacyDistributedDataParallel(torch.nn.Linear(2, 1), transport="host")
    refused = ""
except TransportError as error:
    refused = str(error)
(line,) = [text.strip() for text in repr(model).splitlines() if "transport" in text]
with open(f"{folder}/{rank}.json", "w") as file:
    json.dump([seen, line, refused], file)
dist.destroy_process_group()
"""
_REASON = "rank 0: shared memory needs Linux, got sys.platform 'darwin'"


@pytest.mark.parametrize("module", ["legacy_ddp", "legacy_ddp.debug._cli", "legacy_ddp.data"])
def test_a_system_without_fcntl_is_refused_by_name(module: str) -> None:
    """It was a ModuleNotFoundError of some module inside of the package."""
    run = fork_script("-c", f"{_NO_FCNTL}import {module}")

    assert run.returncode == 1
    assert run.stderr.rstrip().endswith(
        "ImportError: legacy_ddp does not run on this system: got a Python without fcntl (sys.platform 'linux'), "
        "expected Linux, or macOS without shared memory; on Windows use the Windows Subsystem for Linux\n"
        "meaning and next step: legacy-ddp explain ImportError"
    )


def test_on_macos_gloo_carries_and_the_reason_is_said(tmp_path: Path) -> None:
    run = fork_ranks(2, "-c", _MACOS + _TRAINING, str(tmp_path))

    assert run.returncode == 0, textwrap.indent(run.stderr, "  ")
    for rank in range(2):
        seen, line, refused = json.loads(Path(tmp_path, f"{rank}.json").read_text())
        assert seen == [["gloo", [[1.5, 1.5]]]] * 4
        assert line == f"transport: gloo ({_REASON})"
        assert _REASON in refused
    shown = fork_script(
        "-c",
        f"{_MACOS}import runpy; runpy.run_module('legacy_ddp', run_name='__main__')",
        "show",
        str(tmp_path / "trace"),
    )
    assert (shown.returncode, shown.stderr) == (0, "")
    assert ": 2 rank" in " ".join(shown.stdout.split())  # lines end where the path lets them
