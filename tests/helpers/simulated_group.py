"""Process groups for the simulated device: their collectives run in a thread, some time after they were issued.

The wait of a collective orders the later operations of the device, and does not stop the host, as with NCCL. The group
counts the collectives that were issued on it, in order, for all threads of the process.
"""

import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroupGloo, Work

from legacy_ddp._torch.process_groups import COUNTING_BACKENDS
from tests.helpers.simulated_device import NAME, InFlight, device, extents, install, on_cpu

BACKEND = "simccl"


class SimulatedWork(Work):
    def __init__(self, collective: InFlight, results: list[torch.Tensor], *, waits: bool) -> None:
        super().__init__()
        self._collective = collective
        self._results = results
        self._waits = waits

    def wait(self, _timeout: timedelta = timedelta()) -> bool:
        """Order later operations of the device after the collective; the host goes on."""
        self._collective.is_awaited |= self._waits
        return True

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """A future that is there at once: what uses its value is ordered after the collective, as with NCCL."""
        self.wait()
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        future.set_result(self._results)
        return future

    def is_completed(self) -> bool:
        return self._collective.done.is_set()

    def is_success(self) -> bool:
        return self.is_completed()

    def synchronize(self) -> None:
        self.wait()


class SimulatedGroup(dist.ProcessGroup):
    """``delay_seconds``: from the issue of a collective to its begin. ``waits``: False makes every wait do nothing.

    ``before_issue``: called before a collective is issued.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        # Two groups: gloo matches collectives by the order of issue, and the thread and the host have no common order.
        self._of_device = ProcessGroupGloo(dist.PrefixStore("device", store), rank, size, timeout)
        self._of_host = ProcessGroupGloo(dist.PrefixStore("host", store), rank, size, timeout)
        self._timeout = timeout
        self._queue: queue.SimpleQueue[tuple[Callable[[], Any], InFlight] | None] = queue.SimpleQueue()
        self.issued = 0
        self.delay_seconds = 0.02
        self.waits = True
        self.before_issue: Callable[[], object] = lambda: None
        self._held: list[InFlight] = []
        self._released = threading.Event()
        self._released.set()
        threading.Thread(target=self._serve, daemon=True).start()

    def shutdown(self) -> None:
        self._queue.put(None)

    def hold(self) -> None:
        """Keep the next collectives of this rank from running, until :meth:`release`.

        The host goes on. What the device computes meanwhile means nothing; copies to the host that it does not wait for
        come after the collectives.
        """
        self._released.clear()

    def release(self) -> None:
        """Run the collectives that were held, and what the device has to do behind them."""
        self._released.set()
        for collective in self._held:
            collective.done.wait()
            collective.is_held = False
        self._held.clear()
        device.run_copies()

    @property
    def options(self) -> Any:
        return type("Options", (), {"_timeout": self._timeout})

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(NAME), torch.device("cpu")]

    def _get_backend(self, _where: torch.device) -> Any:
        return self

    def name(self) -> str:
        return BACKEND

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return BACKEND

    def _get_sequence_number_for_group(self) -> int:
        return self.issued

    def allreduce(self, tensors: Any, opts: Any = None) -> Work:
        return self._issue([*tensors], lambda group, values: group.allreduce(values, opts or dist.AllreduceOptions()))

    def broadcast(self, tensors: Any, opts: Any = None) -> Work:
        return self._issue([*tensors], lambda group, values: group.broadcast(values, opts or dist.BroadcastOptions()))

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        (out,), (own,) = outputs, inputs
        options = opts or dist.AllgatherOptions()
        return self._issue([own, *out], lambda group, values: group.allgather([values[1:]], values[:1], options))

    def alltoall_base(self, output: Any, own: Any, out_sizes: Any, own_sizes: Any, opts: Any = None) -> Work:
        options = opts or dist.AllToAllOptions()
        return self._issue(
            [output, own], lambda group, values: group.alltoall_base(*values, out_sizes, own_sizes, options)
        )

    def barrier(self, opts: Any = None) -> Work:
        return self._of_host.barrier(opts or dist.BarrierOptions())

    def all_gather_single(self, output: torch.Tensor, own: torch.Tensor, opts: Any = None) -> Work:
        """What torch 2.15 calls for objects, on the CPU."""
        return self.allgather([[*output.view(self.size(), -1)]], [own.view(-1)], opts)

    def send(self, tensors: Any, dst: int, tag: int) -> Work:
        return self._of_host.send([*tensors], dst, tag)

    def recv(self, tensors: Any, src: int, tag: int) -> Work:
        return self._of_host.recv([*tensors], src, tag)

    def _issue(self, tensors: list[torch.Tensor], collective: Callable[[Any, list[torch.Tensor]], Any]) -> Work:
        values = [on_cpu(tensor) for tensor in tensors]
        if all(tensor.device.type == "cpu" for tensor in tensors):
            return collective(self._of_host, values)  # type: ignore[no-any-return]
        self.before_issue()
        self.issued += 1
        flight = InFlight(extents(tensors), group=self, is_held=not self._released.is_set())
        if flight.is_held:
            self._held.append(flight)
        device.before(sys._getframe(1).f_code.co_name, tensors, group=self)
        device.in_flight.append(flight)
        self._queue.put((lambda: collective(self._of_device, values).wait(), flight))
        return SimulatedWork(flight, tensors, waits=self.waits)

    def _serve(self) -> None:
        while (issued := self._queue.get()) is not None:
            run, flight = issued
            time.sleep(self.delay_seconds)
            self._released.wait()
            run()
            flight.done.set()


def register() -> None:
    """Let torch make groups of this kind: ``init_process_group("cpu:gloo,sim:simccl")``."""
    install()
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "0")  # torch 2.15 cannot attach its flight recorder to such a group
    if BACKEND.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(BACKEND, SimulatedGroup, devices=[NAME])
        COUNTING_BACKENDS.add(BACKEND)


def new_group(ranks: list[int] | None = None) -> SimulatedGroup:
    """Collective: a group of ``ranks``, None for all, for tensors of the device."""
    register()
    return dist.new_group(ranks, backend=BACKEND)
