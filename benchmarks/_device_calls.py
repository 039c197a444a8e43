"""Waits of the host and work on the device during one call, from the events of a profile.

Calls of the CUDA runtime are recognised by name; `time` of an event is its begin and end on the host.
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
    """The used fields of a profiler event."""

    name: str
    time: tuple[float, float]
    on_device: bool


def record(run: Callable[[], object]) -> list[Event]:
    """The events of one run on host and device, including one wait after the call."""
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
    """Names of the host events between begin and end of the call.

    Raises:
        ValueError: the profile holds no call or several calls, or lacks the wait after the call: without access to the
            CUDA runtime, a profile without waits would prove nothing.
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
    """Number of waits of the host, by call of the runtime."""
    return dict(Counter(name for name in names if name in WAITS))


def launches(names: Iterable[str]) -> dict[str, int]:
    """Number of launches on the device, by call of the runtime."""
    return dict(Counter(name for name in names if name.startswith(LAUNCHES)))


def kernels(events: Iterable[Event]) -> dict[str, int]:
    """Number of kernels on the device, by kind."""
    return dict(Counter(_kind(event.name) for event in events if event.on_device and event.name != CALL))


def _kind(name: str) -> str:
    return next((kind for kind, part in KERNELS.items() if part in name), OTHER)


def complaint(run: Callable[[], object]) -> str:
    """The error of torch at the first wait in ``run``, or "none". Torch checks its own calls only."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return "none"
