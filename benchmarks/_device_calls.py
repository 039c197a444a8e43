"""What did one call make the host wait for, and what did it start on the device? Read from a profile's events.

Calls of the CUDA runtime are told by their names; `time` of an event is where it began and ended on the host.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

CALL = "the measured call"
# The host stands still in these until the device, or its allocator, is done.
WAITS = frozenset(
    {
        "cudaDeviceSynchronize",
        "cudaStreamSynchronize",
        "cudaEventSynchronize",
        "cuCtxSynchronize",
        "cuStreamSynchronize",
        "cuEventSynchronize",
        "cudaMemcpy",
        "cudaMemcpy2D",
        "cudaMalloc",
        "cudaFree",
        "cudaHostAlloc",
        "cudaFreeHost",
    }
)
LAUNCHES = ("cudaLaunch", "cuLaunch", "cudaGraphLaunch", "cudaMemcpy", "cudaMemset")
# By a part of the kernel's name, the first that fits; nobody promises these names.
KERNELS = {
    "copy to the host": "DtoH",
    "copy to the device": "HtoD",
    "copy on the device": "DtoD",
    "fill": "Memset",
    "nccl": "nccl",
    "many tensors at once": "multi_tensor",
    "reduction": "reduce",
    "elementwise": "elementwise",
}
OTHER = "other"


@dataclass(frozen=True)
class Event:
    """What is used of a profiler's event."""

    name: str
    time: tuple[float, float]
    on_device: bool


def record(run: Callable[[], object]) -> list[Event]:
    """The events of one run, and of all that it started on the device; a wait outside of the call is among them."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        with record_function(CALL):
            run()
        torch.cuda.synchronize()
    return [
        Event(event.name, (event.time_range.start, event.time_range.end), event.device_type == DeviceType.CUDA)
        for event in profiler.events()
    ]


def during_call(events: Sequence[Event]) -> list[str]:
    """Names of what the host did between the begin and the end of the call.

    Raises:
        ValueError: not exactly one call is in the profile, or no wait at all, though one follows the call: where a
            profiler cannot see the CUDA runtime, no wait seen would mean nothing.
    """
    calls = [event for event in events if event.name == CALL and not event.on_device]
    if len(calls) != 1:
        raise ValueError(f"the profile holds {len(calls)} calls, expected 1")
    if not any(event.name in WAITS for event in events):
        raise ValueError("the profile holds no call of the CUDA runtime; the profiler needs the right to see them")
    begin, end = calls[0].time
    host = [event for event in events if not event.on_device and event is not calls[0]]
    return [event.name for event in host if begin <= event.time[0] and event.time[1] <= end]


def waits(names: Iterable[str]) -> dict[str, int]:
    """How often the host waited, by the runtime's call."""
    return dict(Counter(name for name in names if name in WAITS))


def launches(names: Iterable[str]) -> dict[str, int]:
    """How often something was started on the device, by the runtime's call."""
    return dict(Counter(name for name in names if name.startswith(LAUNCHES)))


def kernels(events: Iterable[Event]) -> dict[str, int]:
    """What ran on the device, by kind."""
    return dict(Counter(_kind(event.name) for event in events if event.on_device and event.name != CALL))


def _kind(name: str) -> str:
    return next((kind for kind, part in KERNELS.items() if part in name), OTHER)


def complaint(run: Callable[[], object]) -> str:
    """What torch itself says of the first wait in ``run``, or "none": it looks at its own calls only."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return "none"
