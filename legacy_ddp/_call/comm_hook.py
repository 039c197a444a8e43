"""Communication hooks: the argument of a hook, its run, and the use of its result. Collective.

Hooks of torch DDP use only the six methods of a bucket, and run here unchanged. A hook gets a copy of the gradients
with a storage of its own, because hooks resize it and write past its end. No gradient changes before the hook of every
rank has returned a usable result.
"""

import atexit
import re
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from legacy_ddp import _torch as internals
from legacy_ddp._call.reduce import Payload, Reducer, fill_missing
from legacy_ddp._errors import CommHookError, LegacyDDPError
from legacy_ddp._interrupts import run_in_children
from legacy_ddp._memory.flat_buffer import FlatBuffer
from legacy_ddp._memory.layout import as_real
from legacy_ddp._ranks.agree import ranks_where
from legacy_ddp._ranks.call import Call
from legacy_ddp._ranks.wait import SLICE
from legacy_ddp._settings import CommHook
from legacy_ddp._text import error_text, name_ranks

# gloo raises only RuntimeError; its messages begin with a place in its own source.
_GLOO_ERROR = re.compile(r"/gloo/[\w/]+\.(cc|h):\d+")
# A Future reports its end before the thread of the process group has released the last callback.
_RELEASE_SECONDS = 0.1

_pending: list[tuple[threading.Event, float]] = []  # ends of collectives, and the time at which the exit stops waiting


class HookBucket:
    """The argument of a hook. Has the methods of ``torch.distributed.GradBucket``, which Python cannot construct.

    Complex gradients appear as real gradients with a further dimension, of size 2.
    """

    def __init__(self, index: int, buffer: FlatBuffer, parameters: Sequence[torch.Tensor], *, is_last: bool) -> None:
        self._index = index
        self._is_last = is_last
        self._bucket = buffer.bucket
        self._parameters = parameters
        self._buffer = as_real(buffer.payload).view(-1)  # a separate tensor: a hook may resize it

    def index(self) -> int:
        """Number of the bucket in this call, from 0."""
        return self._index

    def is_last(self) -> bool:
        """Whether no other bucket follows in this call."""
        return self._is_last

    def buffer(self) -> torch.Tensor:
        """All gradients of the bucket, shape (elements,)."""
        return self._buffer

    def set_buffer(self, tensor: torch.Tensor) -> None:
        """Replace the buffer by ``tensor``."""
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"set_buffer() got {type(tensor).__name__}, expected a tensor in the buffer's place")
        self._buffer = tensor

    def gradients(self) -> list[torch.Tensor]:
        """The buffer's parts as views, of the parameters' shapes and strides."""
        whole = torch.view_as_complex(self._buffer.view(-1, 2)) if self._bucket.dtype.is_complex else self._buffer
        views = [whole.as_strided(slot.shape, slot.stride, slot.offset) for slot in self._bucket.slots]
        return [torch.view_as_real(view) if view.is_complex() else view for view in views]

    def parameters(self) -> list[torch.Tensor]:
        """The parameters of the gradients, in the same order."""
        return list(self._parameters)


class HookResult(NamedTuple):
    buffer: FlatBuffer  # the flat tensor and its copy
    bucket: HookBucket  # the argument of the hook
    result: Any  # what the hook returned


class HookReducer(Reducer):
    """Runs the user's ``hook`` in place of the sum."""

    def __init__(self, buckets: Sequence[int], hook: CommHook) -> None:
        super().__init__(buckets)
        self._hook = hook

    def prepare(self, call: Call, payload: Payload) -> None:
        """Run the hook on a copy of every flat tensor: if the hook fails, every flat tensor is unchanged.

        Raises:
            LostPeerError: a rank was lost, or the hook did not finish in time.
            Exception: any error of the hook. The other ranks may be inside collectives of the hook, so the group is
                lost. Their watchdogs report the error.
        """
        with call.phase("hook"):
            for buffer, share in self.buffers_of(payload):
                buffer.payload.copy_(buffer.flat)
                fill_missing(payload, buffer, share, [(0, buffer.bucket.numel)], buffer.payload)
            parameters = payload.plan.parameters
            filled = [(buffer, parameters[share]) for buffer, share in self.buffers_of(payload) if buffer.bucket.numel]
            buckets = [
                HookBucket(index, buffer, own, is_last=index == len(filled) - 1)
                for index, (buffer, own) in enumerate(filled)
            ]
            results = _run(call, self._hook, buckets)
            payload.prepared = [
                HookResult(buffer, bucket, result)
                for (buffer, _), bucket, result in zip(filled, buckets, results, strict=True)
            ]

    def reduce(self, call: Call, payload: Payload) -> int:
        """Copy the results of the hook to the flat tensors, if usable on every rank. Returns the bytes of all buckets.

        A hook returns the sum divided by the group size, as hooks of torch DDP do. The divisor of the call may be
        another number (the ranks that take part, or the samples): the result is multiplied by group size / divisor.

        Raises:
            CommHookError: on some rank the hook's result cannot be a gradient; no flat tensor changed.
            LostPeerError: a rank was lost, perhaps because its hook has not finished.
        """
        results: list[HookResult] = payload.prepared
        # The dtype of bucket.buffer() is that of the tensor that the hook may have put in place of its copy.
        problems = (_problem(result, as_real(own.flat), bucket.buffer().dtype) for own, bucket, result in results)
        _agree_on_results(call, self._hook, next(filter(None, problems), ""))
        for own, _, result in results:
            flat = as_real(own.flat)
            flat.copy_(result)
            if payload.divisor != call.groups.size:
                flat.div_(payload.divisor / call.groups.size)
        return sum(own.payload.nbytes for own, _, _ in results)


def _run(call: Call, hook: CommHook, buckets: Sequence[HookBucket]) -> list[Any]:
    """The result of the hook for each bucket: the value of a Future, or any other object itself."""
    returned, ends = [], []
    try:
        for bucket in buckets:
            with call.profiled(f"bucket {bucket.index()}"), _attributing_errors(call, hook):
                returned.append(hook.function(hook.state, bucket))
            ends.append(_end_of(returned[-1]))
        start = time.perf_counter()  # no wait before the hook has run on every bucket
        return [_wait(call, hook, item, end, start) for item, end in zip(returned, ends, strict=True)]
    except BaseException:
        wait_before_exit(ends, call.timeout.total_seconds())
        raise


def _end_of(item: Any) -> threading.Event:
    """An event, set at the end of a Future, and at once for any other object."""
    end = threading.Event()
    if isinstance(item, internals.Future):
        item.add_done_callback(lambda _: end.set())
    else:
        end.set()
    return end


def _wait(call: Call, hook: CommHook, item: Any, end: threading.Event, start: float) -> Any:
    while not end.wait(SLICE.total_seconds()):
        call.check_deadline(time.perf_counter() - start, f"the communication hook {hook} did not finish")
    if not isinstance(item, internals.Future):
        return item
    with _attributing_errors(call, hook):
        value = item.wait()  # on a GPU this makes the stream wait, and not the host
    return value[0] if isinstance(value, list) and len(value) == 1 else value


@contextmanager
def _attributing_errors(call: Call, hook: CommHook) -> Iterator[None]:
    """Name the hook in its error. An error of the transport becomes a LostPeerError."""
    start = time.perf_counter()
    try:
        yield
    except LegacyDDPError as error:
        # Raised by another wrapper's call inside the hook. The ranks of this call have not agreed on it and have not
        # found any rank lost, so neither AgreedError nor LostPeerError may leave this call.
        text = f"{call}: the communication hook {hook} failed with {error_text(error)}"
        raise LegacyDDPError(text, call=call.number, phase=call.phase_name) from error
    except Exception as error:
        if isinstance(error, dist.DistError) or (
            isinstance(error, RuntimeError) and _GLOO_ERROR.search(error_text(error))
        ):
            raise call.lost_error(error, time.perf_counter() - start) from error
        error.add_note(
            f"raised by the communication hook {hook} in {call}; the others may wait in its collectives, so every "
            ".grad is None now and the process group cannot be used any more"
        )
        raise


def _problem(result: Any, wanted: torch.Tensor, set_dtype: torch.dtype) -> str:
    """Why the result cannot be a gradient; empty if it can.

    Its dtype must be the dtype of ``wanted``, or ``set_dtype``: the dtype of the tensor given to set_buffer().
    """
    if not isinstance(result, torch.Tensor):
        return f"got {type(result).__name__}, expected a torch.futures.Future of a tensor"
    is_like = result.shape == wanted.shape and result.device == wanted.device and result.layout is torch.strided
    if not is_like or result.dtype not in (wanted.dtype, set_dtype):
        return f"got {_describe(result)}, expected {_describe(wanted)}, as bucket.buffer() was"
    return ""


def _describe(tensor: torch.Tensor) -> str:
    layout = "" if tensor.layout is torch.strided else f"{tensor.layout} "
    return f"{layout}{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)} on {tensor.device}"


def _agree_on_results(call: Call, hook: CommHook, problem: str) -> None:
    """Collective: raise a CommHookError if any rank has a ``problem``."""
    if problem:  # for the report: hooks of other ranks may wait for the hook of this rank, and never return
        call.set_phase(f"its hook returned what cannot be a gradient: {problem}")
    ranks = ranks_where(call, bool(problem))
    if not ranks:
        return
    texts = call.gather_objects(problem)
    details = "; ".join(f"rank {rank}: {texts[rank]}" for rank in ranks)
    raise CommHookError(
        f"{call}: the communication hook {hook} returned what cannot be a gradient on {name_ranks(ranks)}: {details}; "
        "no gradient changed",
        ranks=ranks,
        call=call.number,
        phase=call.phase_name,
    )


def wait_before_exit(ends: Iterable[threading.Event], seconds: float) -> None:
    """Delay the exit of this process until all of ``ends`` are set, at most ``seconds`` from now.

    A started collective cannot be cancelled. At its end a thread of the process group runs its callbacks
    (``Future.then``). If the interpreter is finalizing at that time, the process aborts.
    """
    deadline = time.monotonic() + seconds
    if left := [(end, deadline) for end in ends if not end.is_set()]:
        _pending.extend(left)
        _wait_at_exit()


@cache
def _wait_at_exit() -> None:
    atexit.register(_wait_for_pending)
    run_in_children(_pending.clear)  # the collectives are the parent's


def _wait_for_pending() -> None:
    for end, deadline in _pending:
        end.wait(max(0.0, deadline - time.monotonic()))
    if _pending:
        time.sleep(_RELEASE_SECONDS)
