"""The process of one rank: one job after the other, each in a process group of its own."""

import faulthandler
import gc
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from legacy_ddp._log import ShortDisplay
from tests.helpers import devices, logged_warnings
from tests.helpers.processes import process_state

# faulthandler.dump_traceback_later is one timer per process, and the code under test may own it.
STACK_SIGNAL = signal.SIGUSR2
_LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
# Threads and connections of a destroyed group end a moment after it.
_SETTLE_SECONDS = 0.5


@dataclass(frozen=True)
class Job:
    """One call of a function on one rank. ``is_last``: the process ends after it."""

    rank: int
    world_size: int
    call: bytes  # pickled function and arguments
    store: str
    directory: Path
    is_last: bool
    environment: Mapping[str, str]


def serve(pipe: Connection, stack_path: Path, device: str) -> None:
    """Child: run jobs from ``pipe`` until the last one, the first failure, or the end of the pipe.

    ``device``: the kind of device of all jobs.
    """
    faulthandler.register(STACK_SIGNAL, file=os.open(stack_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND))
    os.environ["GLOO_SOCKET_IFNAME"] = _LOOPBACK
    torch.set_num_threads(1)
    logged_warnings.listen()
    backends = devices.enter(device)
    gc.freeze()  # what is loaded by now stays: a collection after each job looks at the job's objects alone
    generator_state = torch.get_rng_state()
    with suppress(EOFError):
        while message := pipe.recv_bytes():
            job: Job = pickle.loads(message)
            warnings.resetwarnings()
            warnings.simplefilter("error")
            warnings.filterwarnings("ignore", "Guards may run slower on Python 3.13.0", RuntimeWarning)  # torch.compile
            warnings.filterwarnings("ignore", "Sparse invariant checks are implicitly disabled")  # torch 2.11 and 2.12
            before = None if job.is_last else process_state()
            torch.set_rng_state(generator_state)  # as in a new process
            groups = _run(job, pipe, backends)
            if groups is None or before is None:
                return
            # torch keeps other groups than the default one in places of its own, and its DDP may then crash.
            more = [f"{groups} process groups"] if groups > 1 else []
            tell(pipe, "settled", more or _changes(before))


def _run(job: Job, pipe: Connection, backends: str) -> int | None:
    """The number of process groups at the end of the job; None after an exception.

    A result is sent before the groups are destroyed, which may block.
    """
    tempfile.tempdir = str(job.directory)  # what a rank leaves behind when it is killed goes with the test
    own_hook = torchs_hook = sys.excepthook
    os.environ.update(job.environment)
    try:
        devices.choose(job.rank)
        function, arguments = devices.from_bytes(job.call)
        store = _meet(job)
        dist.init_process_group(backends, store=store, rank=job.rank, world_size=job.world_size)
        torchs_hook = sys.excepthook  # set by each start of a group, and by no end
        tell(pipe, "ready", None)
        pipe.recv_bytes()  # all are ready: a rank that dies at once cannot disturb another's start
        result = function(job.rank, *arguments)
        logged_warnings.assert_nothing_left()
        devices.assert_no_races()
        tell(pipe, "returned", devices.to_bytes(result))
        return len(distributed_c10d._world.pg_map)
    except SystemExit:
        raise  # an exit code is a way to die, not an exception
    except BaseException:  # noqa: BLE001 - all of it is reported, and pytest.fail() is no Exception
        tell(pipe, "raised", traceback.format_exc())
        return None
    finally:
        for name in job.environment:
            del os.environ[name]
        if dist.is_initialized():
            dist.destroy_process_group()
        # The library's own hook comes with the first error of a call, and stays until the process ends.
        if sys.excepthook is torchs_hook or isinstance(sys.excepthook, ShortDisplay):
            sys.excepthook = own_hook


def _meet(job: Job) -> dist.Store:
    shared = dist.FileStore(str(job.directory / "store"), job.world_size)
    if job.store == "file":
        return shared
    if job.rank > 0:
        return dist.TCPStore("127.0.0.1", int(shared.get("port")), job.world_size, wait_for_workers=False)
    server = dist.TCPStore("127.0.0.1", 0, job.world_size, is_master=True, wait_for_workers=False)
    shared.set("port", str(server.port))
    return server


def _changes(before: dict[str, object]) -> list[str]:
    """What the job left changed in this process, some time after its group was destroyed."""
    give_up = time.monotonic() + _SETTLE_SECONDS
    while True:
        gc.collect()
        now = process_state()
        changed = [f"{name}: {before[name]} -> {now[name]}" for name in before if before[name] != now[name]]
        if not changed or time.monotonic() > give_up:
            return changed
        time.sleep(0.02)


def tell(pipe: Connection, kind: str, payload: object) -> None:
    """Send a message with the time. Not pipe.send(): torch's pickler shares tensors through descriptors, which die
    with the rank."""
    pipe.send_bytes(pickle.dumps((kind, payload, time.monotonic())))
