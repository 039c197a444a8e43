"""A communication hook in place of our sum: what it is shown, and what is made of what it returns. Collective.

torch DDP's hooks know nothing of a bucket but its six methods, so they run here as they are. What a hook may write to
is a copy under a storage of its own (hooks resize it, and write past the end): until every rank's hook has returned
something usable no gradient changes.
"""

import re
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from legacy_ddp import _torch as internals
from legacy_ddp._buckets.flat_buffer import FlatBuffer
from legacy_ddp._buckets.plan import Plan
from legacy_ddp._buckets.wire import as_real
from legacy_ddp._collectives.pending import end_before_exit
from legacy_ddp._compare import name_ranks
from legacy_ddp._error_text import error_text
from legacy_ddp._errors import CommHookError, LegacyDDPError
from legacy_ddp._settings import CommHook
from legacy_ddp._transport.call import Call
from legacy_ddp._transport.wait import SLICE

# gloo raises RuntimeError and nothing else, but begins with a place in its own source.
_SAID_BY_GLOO = re.compile(r"/gloo/[\w/]+\.(cc|h):\d+")


class HookBucket:
    """What a hook sees of one bucket: the methods of ``torch.distributed.GradBucket``, which Python cannot construct.

    Complex gradients are shown as real ones with one more dimension, of size 2.
    """

    def __init__(self, index: int, buffer: FlatBuffer, parameters: Sequence[torch.Tensor], *, is_last: bool) -> None:
        self._index = index
        self._is_last = is_last
        self._bucket = buffer.bucket
        self._parameters = parameters
        self._buffer = as_real(buffer.payload).view(-1)  # a tensor of its own: a hook may resize it

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
        """Put another tensor in the buffer's place."""
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"set_buffer() got {type(tensor).__name__}, expected a tensor in the buffer's place")
        self._buffer = tensor

    def gradients(self) -> list[torch.Tensor]:
        """The buffer's parts as views, of the parameters' shapes and strides."""
        whole = torch.view_as_complex(self._buffer.view(-1, 2)) if self._bucket.dtype.is_complex else self._buffer
        views = [whole.as_strided(slot.shape, slot.stride, slot.offset) for slot in self._bucket.slots]
        return [torch.view_as_real(view) if view.is_complex() else view for view in views]

    def parameters(self) -> list[torch.Tensor]:
        """The parameters that the gradients belong to, in the same order."""
        return list(self._parameters)


class Shown(NamedTuple):
    """A buffer, what the hook saw of it, and what it returned."""

    buffer: FlatBuffer
    bucket: HookBucket
    result: Any


def show_to_hook(call: Call, hook: CommHook, plan: Plan) -> list[Shown]:
    """Let the hook bring together what travels, bucket by bucket. No flat tensor changes.

    Raises:
        LostPeerError: a rank was lost on the way, or the hook did not finish in time.
        Exception: whatever the hook raised. The other ranks hear of it, but they may be inside its collectives, so that
            the group is lost.
    """
    filled = [(buffer, plan.parameters[share]) for buffer, share in plan.slot_ranges if buffer.bucket.numel]
    buckets = [
        HookBucket(index, buffer, parameters, is_last=index == len(filled) - 1)
        for index, (buffer, parameters) in enumerate(filled)
    ]
    results = _run(call, hook, buckets)
    return [Shown(buffer, *made) for (buffer, _), *made in zip(filled, buckets, results, strict=True)]


def accept_results(call: Call, hook: CommHook, shown: Sequence[Shown], divisor: int) -> int:
    """Leave the hook's mean, times group size / ``divisor``, in the flat tensors, if it is of use on every rank.

    Returns the bytes that the hook was shown.

    Raises:
        CommHookError: on some rank the hook returned what cannot be a gradient; no flat tensor changed.
        LostPeerError: a rank was lost on the way, perhaps because its hook has not finished.
    """
    problems = (_problem(result, as_real(buffer.flat), bucket.buffer().dtype) for buffer, bucket, result in shown)
    _agree_on_results(call, hook, next(filter(None, problems), ""))
    for buffer, _, result in shown:
        as_real(buffer.flat).copy_(result)
        if divisor != call.groups.size:
            buffer.flat.div_(divisor / call.groups.size)
    return sum(buffer.payload.nbytes for buffer, _, _ in shown)


def _run(call: Call, hook: CommHook, buckets: Sequence[HookBucket]) -> list[Any]:
    """What the hook's Futures hold, or what it returned if that is none. All are begun before the first is awaited."""
    returned, ends = [], []
    try:
        for bucket in buckets:
            with call.profiled(f"bucket {bucket.index()}"), _blaming(call, hook):
                returned.append(hook.function(hook.state, bucket))
            ends.append(_end_of(returned[-1]))
        start = time.perf_counter()
        return [_wait(call, hook, item, end, start) for item, end in zip(returned, ends, strict=True)]
    except BaseException:
        end_before_exit(ends, call.timeout.total_seconds())
        raise


def _end_of(item: Any) -> threading.Event:
    """Set when a Future has ended, and for anything else."""
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
    with _blaming(call, hook):
        value = item.wait()  # on a GPU this makes the stream wait, and not the host
    return value[0] if isinstance(value, list) and len(value) == 1 else value


@contextmanager
def _blaming(call: Call, hook: CommHook) -> Iterator[None]:
    """Say what an error of the hook's is: a lost peer, or its own."""
    start = time.perf_counter()
    try:
        yield
    except LegacyDDPError as error:
        # Of another wrapper's call inside the hook. No rank of ours has agreed on it, and nobody knows that it is lost.
        text = f"{call}: the communication hook {hook} failed with {error_text(error)}"
        raise LegacyDDPError(text, call=call.number, phase=call.phase_name) from error
    except Exception as error:
        if isinstance(error, dist.DistError) or (
            isinstance(error, RuntimeError) and _SAID_BY_GLOO.search(error_text(error))
        ):
            raise call.lost_error(error, time.perf_counter() - start) from error
        error.add_note(
            f"raised by the communication hook {hook} in {call}; the others may wait in its collectives, so every "
            ".grad is None now and the process group cannot be used any more"
        )
        raise


def _problem(result: Any, wanted: torch.Tensor, set_dtype: torch.dtype) -> str:
    """What is wrong with a hook's result, in words. It may be of the dtype that the hook gave set_buffer(), too."""
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
    if problem:  # should the others not come, because their hooks wait for this rank's, that is why
        call.set_phase(f"its hook returned what cannot be a gradient: {problem}")
    bad = call.gather(torch.tensor([bool(problem)], dtype=torch.int64, device="cpu")).flatten().tolist()
    if not any(bad):
        return
    texts = call.gather_objects(problem)
    ranks = [rank for rank, is_bad in enumerate(bad) if is_bad]
    said = "; ".join(f"rank {rank}: {texts[rank]}" for rank in ranks)
    raise CommHookError(
        f"{call}: the communication hook {hook} returned what cannot be a gradient on {name_ranks(ranks)}: {said}; "
        "no gradient changed",
        ranks=ranks,
        call=call.number,
        phase=call.phase_name,
    )
