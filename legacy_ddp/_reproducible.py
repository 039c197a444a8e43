"""Sums of the micro-batches of this rank in the order of a binary tree, the same on any number of ranks.

A leaf is the gradient of one outermost no_sync() block, or the gradient accumulated after the last block and before
the call. At the end of a block the gradients move to the flat tensors, and every ``.grad`` becomes None, except the
smallest, which becomes zeros. These zeros are a sentinel: ``zero_grad()`` changes them, and then the leaves are
dropped.

The sums are a binary counter: after n leaves there is a sum for every 1 among the binary digits of n. The digit for 2^k
has the sum of 2^k leaves, the oldest leaves first. Each sum is a node of the tree, whatever leaves follow. The last
leaf is in the flat tensors of the buffers until a new leaf comes, or the call adds all leaves.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from legacy_ddp import _torch as internals
from legacy_ddp._errors import GradientError, LegacyDDPError
from legacy_ddp._memory.flat_buffer import ABSENT, SPARSE, FlatBuffer, kinds_of
from legacy_ddp._memory.layout import Bucket, as_real, wire_dtype
from legacy_ddp._memory.plan import Plan
from legacy_ddp._memory.segment import Segment, SegmentPolicy
from legacy_ddp._steps.backward_counter import BackwardCounter
from legacy_ddp._steps.policy import check_complete
from legacy_ddp._text import error_line
from legacy_ddp._torch.device import have_nonzero

_CONVERTED_NUMEL = 2**18  # elements at a time: all at once takes five times as long, because of new memory


class PartialSums:
    """The sums, flat tensors of shape (bucket.numel,): fp16 leaves are added in fp32, other leaves in their dtype.

    Memory is kept from step to step. 2^k leaves need k + 1 tensors besides the last leaf. With the host transport the
    other ranks read the total from a segment.
    """

    def __init__(self, bucket: Bucket, policy: SegmentPolicy) -> None:
        self.dtype = wire_dtype(bucket.dtype, None)
        self._bucket = bucket
        self._policy = policy
        self._nodes: list[tuple[int, torch.Tensor]] = []  # number of leaves, and their sum
        self._total: tuple[torch.Tensor, Segment | None] | None = None  # its memory
        self._spare: list[torch.Tensor] = []
        self._recv: torch.Tensor | None = None  # for data of other ranks, if no sum is free for them

    def add(self, leaf: torch.Tensor) -> None:
        """Add a leaf to the sums. The leaf is only read."""
        size, newest = 1, leaf
        while self._nodes and self._nodes[-1][0] == size:
            _, older = self._nodes.pop()
            _add_to(older, newest)
            if newest is not leaf:
                self._spare.append(newest)
            size, newest = 2 * size, older
        self._nodes.append((size, self._take().copy_(leaf) if newest is leaf else newest))

    def total(self, last: torch.Tensor | None) -> torch.Tensor:
        """The sum of all leaves and of ``last``, a further leaf, in the dtype of the tree. At least one leaf is needed.

        No sum changes. The result is ``last`` or a sum itself if this is the only part. But a sum is copied if other
        ranks read the result from a segment: sums are in no segment.
        """
        parts = [tensor for _, tensor in self._nodes] + ([] if last is None else [last])
        newest = parts.pop()
        if not parts and newest.dtype == self.dtype and (newest is last or not self._policy.is_for(self._bucket)):
            return newest
        total = self._memory_of_total()
        if not parts or newest.dtype != self.dtype:  # an addition of two dtypes would convert in new memory
            newest = total.copy_(newest)
        while parts:  # from the end: an incomplete run is added to the run before it
            newest = torch.add(parts.pop(), newest, out=total)
        return newest

    def zeros(self) -> torch.Tensor:
        return self._memory_of_total().zero_()

    def segment_of(self, total: torch.Tensor) -> Segment | None:
        """The segment of a result of :meth:`total` or :meth:`zeros`; None for a leaf or for ordinary memory."""
        return self._total[1] if self._total is not None and total is self._total[0] else None

    def reserve(self, total: torch.Tensor) -> None:
        """Allocate a :meth:`recv_buffer` if needed: with the host transport the other ranks send nothing."""
        if self._policy.carries(self._bucket) or self._idle(total) is not None:
            self._recv = None
        elif self._recv is None:
            self._recv = self._new()

    def recv_buffer(self, total: torch.Tensor) -> torch.Tensor:
        """Memory for data of other ranks. May be that of a sum. ``total``: as for :meth:`reserve`, called before."""
        idle = self._idle(total)
        if idle is None:
            idle = self._recv
        return self._new() if idle is None else idle

    def clear(self) -> None:
        """Drop all leaves; the memory stays."""
        nodes, self._nodes = self._nodes, []
        self._spare += [tensor for _, tensor in nodes]  # last, so that no memory is in both after an interrupt

    def _memory_of_total(self) -> torch.Tensor:
        # Not one of the spare tensors: the other ranks have mapped this segment.
        if self._total is None or not self._policy.fits(self._bucket, self._total[1]):
            self._total = self._policy.allocate(self._bucket, self.dtype)
        return self._total[0]

    def _idle(self, total: torch.Tensor) -> torch.Tensor | None:
        held = [*self._spare, *(tensor for _, tensor in self._nodes)]
        return next((tensor for tensor in held if tensor is not total), None)

    def _take(self) -> torch.Tensor:
        return self._spare.pop() if self._spare else self._new()

    def _new(self) -> torch.Tensor:
        return torch.empty(self._bucket.numel, dtype=self.dtype, device=self._bucket.device)


def _add_to(total: torch.Tensor, leaf: torch.Tensor) -> None:
    if leaf.dtype == total.dtype:
        total.add_(leaf)
        return
    # A leaf of a narrower dtype is added in pieces: torch would convert the whole leaf in new memory.
    wide = total.new_empty(min(_CONVERTED_NUMEL, total.numel()))
    for sums, narrow in zip(torch.split(total, _CONVERTED_NUMEL), torch.split(leaf, _CONVERTED_NUMEL), strict=True):
        sums.add_(wide[: narrow.numel()].copy_(narrow))


class LeafSums:
    """The leaves since the last call, with a sum per buffer."""

    def __init__(self, policy: SegmentPolicy) -> None:
        self.count = 0  # of leaves
        self._policy = policy
        self.is_waiting = False  # the last leaf is in the flat tensors, and in no sum yet
        self._kinds: list[int] = []  # the largest kind of gradient per slot
        self._for: tuple[Sequence[FlatBuffer], list[PartialSums]] = (), []  # buffers, with the sums of each

    def fits(self, plan: Plan) -> bool:
        """Whether the sums are for the buffers of the plan. Makes new sums for the plan if there are no leaves."""
        if self._buffers is not plan.buffers and not self.count:
            self._for = plan.buffers, [PartialSums(buffer.bucket, self._policy) for buffer in plan.buffers]
        return self._buffers is plan.buffers

    def hold(self, kinds: Sequence[int]) -> None:
        """Count the gradients in the flat tensors, of these kinds, as a further leaf. No sum changes."""
        self._set_waiting(is_waiting=True)
        self._kinds = self._joined(kinds)
        self.count += 1

    def add_waiting(self) -> None:
        """Add the waiting leaf to the sums, before another leaf or the user writes to the flat tensors."""
        if not self.is_waiting:
            return
        self._set_waiting(is_waiting=False)
        for sums, buffer in zip(self._sums, self._buffers, strict=True):
            sums.add(buffer.flat)

    def total(self, plan: Plan, kinds: Sequence[int], *, has_peers: bool) -> tuple[int, list[int], list[torch.Tensor]]:
        """The number of leaves, the kinds of gradient in their sum, and the sum, a flat tensor per buffer.

        ``kinds``: of the gradients after the last block. Changes nothing that a user can see.
        """
        is_one_more = not self.count or any(kind != ABSENT for kind in kinds)
        lies_flat = self.is_waiting or is_one_more
        flats = [
            sums.total(buffer.flat if lies_flat else None)
            for sums, buffer in zip(self._sums, plan.buffers, strict=True)
        ]
        if has_peers:
            self.reserve(flats)
        return self.count + is_one_more, self._joined(kinds), flats

    def zeros(self, *, has_peers: bool) -> list[torch.Tensor]:
        """Zeros in place of the sum, for a rank that takes no part. The leaves stay: the call may fail."""
        flats = [sums.zeros() for sums in self._sums]
        if has_peers:
            self.reserve(flats)
        return flats

    def segments(self, flats: Sequence[torch.Tensor]) -> list[Segment | None]:
        """The segments of ``flats``, the result of :meth:`total` or :meth:`zeros`; None for a buffer's flat tensor."""
        return [sums.segment_of(flat) for sums, flat in zip(self._sums, flats, strict=True)]

    def reserve(self, flats: Sequence[torch.Tensor]) -> None:
        """Allocate the receive buffers for ``flats``, the result of :meth:`total` or :meth:`zeros`, if needed."""
        for sums, flat in zip(self._sums, flats, strict=True):
            sums.reserve(flat)

    def recv_buffer(self, index: int, flat: torch.Tensor) -> torch.Tensor:
        """Receive buffer as large as ``flat``, the result of :meth:`total` for the buffer with this number. Its use
        overwrites leaves: the step ends here."""
        return self._sums[index].recv_buffer(flat)

    def clear(self) -> None:
        """Drop all leaves; the memory stays."""
        for sums in self._sums:
            sums.clear()
        self._set_waiting(is_waiting=False)
        self.count, self._kinds = 0, []

    def release_memory(self) -> None:
        """Drop the memory, after :meth:`clear`."""
        self._for = (), []

    @property
    def _buffers(self) -> Sequence[FlatBuffer]:
        return self._for[0]

    @property
    def _sums(self) -> list[PartialSums]:
        return self._for[1]

    def _set_waiting(self, *, is_waiting: bool) -> None:
        self.is_waiting = is_waiting
        for buffer in self._buffers:
            buffer.moves_enabled = not is_waiting

    def _joined(self, kinds: Sequence[int]) -> list[int]:
        return [max(pair) for pair in zip(kinds, self._kinds, strict=True)] if self._kinds else list(kinds)


@dataclass(frozen=True)
class ZeroGradSentinel:
    """Zeros in place of ``parameter.grad``, the gradient of slot ``index``: a change shows a ``zero_grad()``.

    The zeros are -0.0. Scaling and clipping keep -0.0, and ``zero_grad()`` leaves 0.0 or None. If backward adds to
    -0.0, the result has the bits of the new gradient.
    """

    index: int
    parameter: torch.Tensor
    zeros: torch.Tensor
    version: int

    def is_alone(self, *, is_added_to: bool) -> bool:
        """Whether ``.grad`` is the sentinel without an added gradient. ``is_added_to``: backward ran since."""
        if self.parameter.grad is not self.zeros:
            return False
        # After a backward any write was the addition. Otherwise a write that left -0.0 was clipping or scaling.
        return self.zeros._version == self.version or (not is_added_to and self._is_negative_zero)

    def was_cleared(self, *, is_added_to: bool) -> bool:
        """Whether ``zero_grad()`` was called since. After a backward only a ``.grad`` of None shows this."""
        grad = self.parameter.grad
        if grad is None:
            return True
        if is_added_to or grad is not self.zeros:  # or the user assigned a gradient by hand
            return False
        real = as_real(grad)
        return not bool((torch.signbit(real) | (real != 0)).any())

    def remove(self) -> None:
        """Clear ``.grad`` if the sentinel is still there, unchanged."""
        if self.is_alone(is_added_to=False):
            self.parameter.grad = None

    @property
    def _is_negative_zero(self) -> bool:
        real = as_real(self.zeros)
        return bool((torch.signbit(real) & (real == 0)).all())


def place_sentinel(plan: Plan) -> ZeroGradSentinel | None:
    """Put a sentinel in place of the smallest gradient. Returns None if no parameter has elements."""
    slots = plan.layout.slots
    index = min((i for i, slot in enumerate(slots) if slot.numel), key=lambda i: slots[i].numel, default=None)
    if index is None:
        return None
    parameter, dtype = plan.parameters[index], plan.bucket_of(index).dtype
    zeros = -torch.zeros(slots[index].shape, dtype=dtype, device=parameter.device)
    parameter.grad = zeros
    return ZeroGradSentinel(index, parameter, zeros, zeros._version)


class Leaves:
    """The leaves of one set of parameters since its last call."""

    def __init__(self, counter: BackwardCounter, policy: SegmentPolicy) -> None:
        self.sums = LeafSums(policy)
        self._counter = counter
        self._accumulations = 0  # of backward into any .grad, at the end of the last block
        self._sentinel: ZeroGradSentinel | None = None
        self._plan: Plan | None = None  # of the first leaf
        self._problem: Exception | None = None
        self._is_dropping = False  # also after an exception in drop(), until the leaves are dropped

    @contextmanager
    def block(self, plan: Callable[[], Plan], *, is_outermost: bool) -> Iterator[None]:
        """A no_sync() block. If it fails, the next call raises its error, on all ranks.

        Raises a LegacyDDPError at once if a block of another thread is open.
        """
        if not is_outermost:
            self._check_thread()
            yield
            return
        self._run_or_defer(lambda: self._begin_block(plan))
        try:
            yield
        except BaseException as error:
            self._problem = self._problem or self._incomplete(error)
            raise
        self._run_or_defer(lambda: self._end_block(plan()))

    @internals.disable_dynamo
    def drop_if_cleared(self) -> None:
        """Drop all leaves if the user cleared the gradients. Not to be called inside a block, where ``zero_grad()``
        drops only the gradients of the block."""
        sentinel = self._sentinel
        if self._is_dropping or (sentinel is not None and sentinel.was_cleared(is_added_to=self._is_added_to)):
            self.drop()

    def collect_last(self, plan: Plan) -> list[torch.Tensor | None]:
        """Pack the last leaf into the flat tensors, at the start of a call. Returns the gradients after the last block.

        Raises:
            Exception: the first failure in a block of this step. The leaves are dropped.
            GradientError: a gradient cannot be reduced.
        """
        self.drop_if_cleared()
        if (problem := self._problem) is not None:
            self.drop()
            self._problem = None  # last, so that incomplete sums are never used
            raise problem
        if not self.sums.fits(plan):
            error = _changed_parameters(self._plan, plan)
            self.drop()
            raise error
        grads = self._grads_of(plan)
        if any(grad is not None for grad in grads) or _changes_memory(plan):
            self._add_waiting()
        plan.collect(grads)
        if not self.sums.is_waiting:
            _zero_absent_slots(plan, kinds_of(grads))
        return grads

    def zeros(self, plan: Plan, *, has_peers: bool) -> list[torch.Tensor]:
        """Zeros in place of the sum, for a rank that takes no part; a flat tensor per buffer."""
        if self._is_dropping or not self.sums.fits(plan):
            self.drop()
            self.sums.fits(plan)
        if _changes_memory(plan):
            self._add_waiting()
        plan.collect(plan.grads, are_used=False)
        return self.sums.zeros(has_peers=has_peers)

    def end_step(self) -> None:
        """Drop all leaves and failures, after a successful call."""
        self.drop()
        self._problem = None

    def drop(self) -> None:
        """Drop all leaves. The next call still raises the failure of an earlier block."""
        self._is_dropping = True
        if self._sentinel is not None:
            self._sentinel.remove()
        self.sums.clear()
        self._accumulations, self._sentinel, self._plan = 0, None, None
        self._counter.policy.has_leaves = False
        self._counter.note_gradients_removed(keep_counts=False)
        self._is_dropping = False

    def release_memory(self) -> None:
        """Drop all leaves with their memory: an unfinished collective may still write to it."""
        self.drop()
        self.sums.release_memory()

    @internals.disable_dynamo
    def _run_or_defer(self, act: Callable[[], None]) -> None:
        """Run ``act``, and keep its error for the call, where all ranks raise together. After an error do nothing."""
        if self._problem is not None:
            return
        try:
            with torch.inference_mode(False), torch.no_grad():
                act()
        except Exception as error:  # noqa: BLE001 - kept, and raised by the call
            self._problem = error
        except BaseException as error:  # Ctrl-C, for example: only some of the sums may contain the leaf
            self._problem = self._incomplete(error)
            raise

    def _begin_block(self, plan: Callable[[], Plan]) -> None:
        self.drop_if_cleared()
        self._add_waiting()
        is_first = not self.sums.count
        if not (self._is_added_to or is_first):
            return
        if not have_nonzero(grad for grad in plan().grads if grad is not None):
            return
        if self._is_added_to:
            raise GradientError(
                "a no_sync() block began while .grad held gradients of a backward outside of any block: got two "
                "micro-batches in one gradient, expected a no_sync() block for each micro-batch of a step, except the "
                "last; zero_grad() and do the step again, on every rank"
            )
        raise GradientError(
            "the first no_sync() block of a step began with gradients in .grad, left by the last all_reduce() or "
            "assigned: they would be added to the first micro-batch; call zero_grad() before every step, on every rank"
        )

    def _end_block(self, plan: Plan) -> None:
        if not self.sums.fits(plan):
            raise _changed_parameters(self._plan, plan)
        check_complete(self._counter.incomplete(plan.parameters))
        grads = self._grads_of(plan)
        kinds = kinds_of(grads)
        plan.collect(grads)
        _zero_absent_slots(plan, kinds)
        self.sums.hold(kinds)
        self._plan = self._plan or plan
        for parameter in plan.parameters:
            parameter.grad = None
        self._accumulations = self._counter.accumulations
        self._counter.policy.has_leaves = True
        self._counter.note_gradients_removed(keep_counts=True)
        self._sentinel = place_sentinel(plan)
        del grads  # references to the views would keep the flat tensors from being used again
        if _changes_memory(plan):
            self._add_waiting()  # before the user writes to a kept gradient

    def _add_waiting(self) -> None:
        try:
            self.sums.add_waiting()
        except BaseException as error:  # only some of the sums may contain the leaf
            self._problem = self._problem or self._incomplete(error, "in the sum of micro-batches")
            raise

    def _grads_of(self, plan: Plan) -> list[torch.Tensor | None]:
        """The gradient of every slot; None for a sentinel without an added gradient."""
        grads, sentinel = list(plan.grads), self._sentinel
        if sentinel is not None and sentinel.is_alone(is_added_to=self._is_added_to):
            grads[sentinel.index] = None
        return grads

    def _check_thread(self) -> None:
        if threading.get_ident() == self._counter.policy.block_thread:
            return
        error = LegacyDDPError(
            "a no_sync() block began while a block of another thread was open: reproducible=True adds micro-batches in "
            "their order, and blocks of two threads have no order; run the micro-batches of a step one after the other"
        )
        self._problem = self._problem or error  # this micro-batch is missing, even if the thread catches the error
        raise error

    def _incomplete(self, error: BaseException, where: str = "inside no_sync()") -> GradientError:
        return GradientError(
            f"an exception {where} ended this rank's micro-batch {self.sums.count + 1} (counted from 1) "
            f"({error_line(error)}), so gradients are missing; zero_grad() and do the step again from its "
            "first micro-batch, on every rank"
        )

    @property
    def _is_added_to(self) -> bool:
        """Whether backward reached any parameter since the last block ended."""
        return self._counter.accumulations != self._accumulations


def _changed_parameters(before: Plan | None, plan: Plan) -> GradientError:
    changes = [] if before is None else list(_changes(before, plan))
    first, how = changes[0] if changes else ("", "")
    more = f", and {len(changes) - 1} more" if len(changes) > 1 else ""
    return GradientError(
        f"parameters changed between the micro-batches of a step{first and f' ({first} {how}{more})'}: gradients of "
        "the earlier micro-batches do not fit any more; freeze, thaw and replace parameters between two steps; "
        "zero_grad() and do the step again from its first micro-batch, on every rank",
        parameter=first.removeprefix("parameter ").strip("'") or None,
    )


def _changes(before: Plan, now: Plan) -> Iterator[tuple[str, str]]:
    """Each parameter that differs between two plans, and how."""
    facts = [plan.layout.inventory for plan in (before, now)]
    tensors = [
        {f"parameter {slot.name!r}": tensor for slot, tensor in zip(plan.layout.slots, plan.parameters, strict=True)}
        for plan in (before, now)
    ]
    for name in dict.fromkeys([*facts[0], *facts[1]]):
        old, new = (of_plan.get(name) for of_plan in facts)
        if old is None or new is None:
            yield name, "is new" if old is None else "is not there any more"
        elif (", frozen" in old) is not (", frozen" in new):
            yield name, "was frozen, and is trainable now" if ", frozen" in old else "was trainable, and is frozen now"
        elif old != new:
            yield name, f"was {old}, and is {new} now"
        elif tensors[0].get(name) is not tensors[1].get(name):
            yield name, "is another tensor now"


def _changes_memory(plan: Plan) -> bool:
    """Whether the next packing will use other memory than the present flat tensors."""
    return any(buffer.will_change_memory for buffer in plan.buffers)


def _zero_absent_slots(plan: Plan, kinds: Sequence[int]) -> None:
    """Clear the slots of a packed leaf without a gradient: the tree adds all slots."""
    for slot, kind in zip(plan.layout.slots, kinds, strict=True):
        if kind >= SPARSE:
            raise GradientError(
                f"grad of {slot.name!r} is sparse, expected a dense one: reproducible=True adds dense gradients only; "
                "construct the layer with sparse=False, or convert the gradient",
                parameter=slot.name,
            )
    for buffer, slots in plan.slot_ranges:
        buffer.zero(kinds[slots], runs=[(0, buffer.bucket.numel)])
