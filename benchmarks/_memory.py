"""Present and peak memory of a process, measured by torch's allocator, by the kernel, or by the device.

A meter cuts a run into spans: `mark("step")` ends the span "step", which began at the previous mark, or on entering.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch.profiler import ProfilerActivity, profile, record_function

MARK = "end of span: "
STATUS, PEAK_RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
SHARES = Path("/proc/self/smaps_rollup")


@dataclass(frozen=True)
class Span:
    """``allocations``: number of allocations, -1 for a meter that cannot count them."""

    end_bytes: int
    peak_bytes: int
    allocations: int = -1


@dataclass(frozen=True)
class Use:
    """Bytes of one rank beyond parameters and batches; ``later``: from the end of backward to the end of the step."""

    backward_peak: int
    later_peak: int
    first_backward_peak: int
    first_later_peak: int
    kept: int
    allocations: int


class Meter:
    """``spans``, by name, available after the ``with`` block. The base class counts nothing."""

    def __init__(self) -> None:
        self.spans: dict[str, Span] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        pass

    def mark(self, name: str) -> None:
        """End the span ``name`` here."""


class AllocatorMeter(Meter):
    """Tensors on the CPU, to the byte, as torch's allocator counts them for the profiler, and this process's share of
    memory that processes share, which has no allocator.

    The profiler follows some threads only. Allocations by threads of a transport are not counted, and a tensor that
    such a thread happens to free last is counted for ever. Therefore the least of several runs is right.
    """

    def __init__(self) -> None:
        super().__init__()
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self._shared: dict[str, int] = {}

    def __enter__(self) -> Self:
        self._profile.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._profile.__exit__(kind, error, at)
        if kind is None:
            # Only the raw events know the totals.
            told = _told(self._profile.profiler.kineto_results.experimental_event_tree())
            self.spans = with_shared(spans_of(told), self._shared)

    def mark(self, name: str) -> None:
        self._shared[name] = _shared_bytes()
        with record_function(MARK + name):
            pass


class ResidentMeter(Meter):
    """Memory of the whole process as the kernel counts it: VmRSS, and VmHWM set back at each mark; without RssFile, and
    with this process's share of memory that processes share in place of RssShmem.

    RssFile counts pages of files, above all code of libraries, loaded at first use: 3 MiB at a time. If the kernel
    does not allow a reset of the peak, the peak is since the start of the process: too high, never too low.
    """

    def __enter__(self) -> Self:
        _reset_peak()
        return self

    def mark(self, name: str) -> None:
        told = _status_bytes()
        others = told["RssFile"] + told["RssShmem"] - _shared_bytes()
        self.spans[name] = Span(told["VmRSS"] - others, told["VmHWM"] - others)
        _reset_peak()


class DeviceMeter(Meter):
    """Tensors on the current CUDA device, as torch's allocator counts them."""

    def __enter__(self) -> Self:
        torch.cuda.reset_peak_memory_stats()
        self._allocations = self._count()
        return self

    def mark(self, name: str) -> None:
        count = self._count()
        self.spans[name] = Span(
            torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated(), count - self._allocations
        )
        self._allocations = count
        torch.cuda.reset_peak_memory_stats()

    @staticmethod
    def _count() -> int:
        return torch.cuda.memory_stats().get("allocation.all.allocated", 0)


def spans_of(told: Iterable[tuple[str, int, int]]) -> dict[str, Span]:
    """Spans from events of an allocator, in order: (mark, 0, 0), or ("", change in bytes, total after the change)."""
    spans: dict[str, Span] = {}
    held = peak = allocations = 0
    for mark, size, total in told:
        if mark:
            spans[mark] = Span(held, peak, allocations)
            peak, allocations = held, 0
        else:
            held, peak, allocations = total, max(peak, total), allocations + (size > 0)
    return spans


def with_shared(spans: Mapping[str, Span], shared: Mapping[str, int]) -> dict[str, Span]:
    """Spans with the shared bytes at each mark added. In a span the greater of the bytes at its two ends counts."""
    found, before = {}, 0
    for name, span in spans.items():
        after = shared[name]
        found[name] = Span(span.end_bytes + after, span.peak_bytes + max(before, after), span.allocations)
        before = after
    return found


def use_of(spans: Mapping[str, Span], steps: int) -> Use:
    """Memory minus parameters and batches, which are the memory at the mark "built"."""
    built = spans["built"].end_bytes
    backward, later = spans[f"backward {steps}"], spans[f"later {steps}"]
    return Use(
        backward_peak=backward.peak_bytes - built,
        later_peak=later.peak_bytes - built,
        first_backward_peak=spans["backward 1"].peak_bytes - built,
        first_later_peak=max(spans["wrapped"].peak_bytes, spans["later 1"].peak_bytes) - built,
        kept=later.end_bytes - built,
        allocations=backward.allocations + later.allocations,
    )


def greatest(uses: Sequence[Use]) -> Use:
    """The greatest value of each figure."""
    return Use(*(max(getattr(use, field.name) for use in uses) for field in fields(Use)))


def least(uses: Sequence[Use]) -> Use:
    """The least value of each figure."""
    return Use(*(min(getattr(use, field.name) for use in uses) for field in fields(Use)))


def gradients(use: Use, without: Use) -> int:
    """Bytes for gradients in a step; ``without``: use of the same model without gradients."""
    return max(use.backward_peak - without.backward_peak, use.later_peak)


def first_gradients(use: Use, without: Use) -> int:
    """Bytes for gradients in the first step."""
    return max(use.first_backward_peak - without.first_backward_peak, use.first_later_peak)


def _told(tree: Iterable[Any]) -> Iterator[tuple[str, int, int]]:
    for event in sorted(_flatten(tree), key=lambda event: event.start_time_ns):
        if event.name.startswith(MARK):
            yield event.name.removeprefix(MARK), 0, 0
        elif event.tag.name == "Allocation" and event.extra_fields.device.type == "cpu":
            yield "", event.extra_fields.alloc_size, event.extra_fields.total_allocated


def _flatten(tree: Iterable[Any]) -> Iterator[Any]:
    for event in tree:
        yield event
        yield from _flatten(event.children)


def _shared_bytes() -> int:
    """Memory shared with other processes: the kernel divides each page among the processes that use it."""
    return kernel_bytes(SHARES)["Pss_Shmem"] if SHARES.exists() else 0


def _status_bytes() -> dict[str, int]:
    return kernel_bytes(STATUS)


def kernel_bytes(path: Path) -> dict[str, int]:
    """All fields of the kernel with unit kB, in bytes."""
    words = [line.split() for line in path.read_text().splitlines()]
    return {line[0].removesuffix(":"): int(line[1]) * 1024 for line in words if line[-1] == "kB"}


def _reset_peak() -> None:
    with suppress(OSError):
        PEAK_RESET.write_text("5")
