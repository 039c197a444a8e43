"""Which micro-batches is this rank's gradient made of? The leaves of the reproducible sum.

A leaf is what one outermost no_sync() block accumulates, or what is there behind the last block when the call comes.
When a block ends its gradients wait in the flat tensors, until the next begins and they are added to the tree. Every
``.grad`` is None again but the smallest: that becomes zeros, a sentinel which shows if ``zero_grad()`` was called, for
then the leaves are dropped as gradients would be.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from legacy_ddp import _torch as internals
from legacy_ddp._buckets.flat_buffer import FlatBuffer
from legacy_ddp._buckets.gradient import ABSENT, SPARSE, has_nonzero, kinds_of
from legacy_ddp._buckets.plan import Plan
from legacy_ddp._error_text import error_line
from legacy_ddp._errors import GradientError, LegacyDDPError
from legacy_ddp._reproducible.partial_sums import PartialSums
from legacy_ddp._reproducible.sentinel import ZeroGradSentinel, place_sentinel, without_sentinel
from legacy_ddp._step_guard.backward_counter import BackwardCounter


class Leaves:
    """Those of one set of parameters since its last call."""

    def __init__(self, counter: BackwardCounter) -> None:
        self._counter = counter
        self._count = 0
        self._accumulations = 0  # of backward into any .grad, that they are made of
        self._kinds: list[int] = []  # of each slot's gradient, over all of them
        self._buffers: Sequence[FlatBuffer] = ()
        self._sums: list[PartialSums] = []  # one per buffer
        self._is_waiting = False  # the last one lies in the buffers' flat tensors, and in no sum yet
        self._sentinel: ZeroGradSentinel | None = None
        self._problem: Exception | None = None

    @contextmanager
    def block(self, plan: Callable[[], Plan], *, is_outermost: bool) -> Iterator[None]:
        """A no_sync() block. What goes wrong is raised by the call, on all ranks.

        Raises:
            LegacyDDPError: a block of another thread is open.
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

    @internals.leaves_compiled_code
    def drop_if_cleared(self) -> None:
        """Drop all leaves if the user cleared the gradients. Not asked inside a block: there that clears the block."""
        if self._sentinel is not None and self._sentinel.was_cleared(is_added_to=self._is_added_to):
            self.drop()

    def collect_last(self, plan: Plan) -> list[torch.Tensor | None]:
        """A call begins: see to it that the last leaf lies in the flat tensors. The gradients behind the last block.

        Raises:
            Exception: whatever went wrong with the leaves of this step, which are dropped.
            GradientError: a gradient that cannot be reduced.
        """
        self.drop_if_cleared()
        problem, self._problem = self._problem, None
        if problem is not None:
            self.drop()
            raise problem
        if not self._fits(plan):
            self.drop()
            raise _changed_parameters()
        grads = without_sentinel(plan.grads, self._sentinel, is_added_to=self._is_added_to)
        if any(grad is not None for grad in grads) or any(buffer.has_external_refs for buffer in plan.buffers):
            self._add_waiting_leaf()
        plan.collect(grads)
        if not self._is_waiting:
            _fill_gaps(plan, kinds_of(grads))
        return grads

    def total(self, plan: Plan, kinds: Sequence[int], *, has_peers: bool) -> tuple[int, list[int], list[torch.Tensor]]:
        """How many leaves there are, the kinds of gradient that their sum has, and the sum, a flat tensor per buffer.

        ``kinds``: of the gradients behind the last block. Changes nothing that a user can see.
        """
        is_one_more = not self._count or any(kind != ABSENT for kind in kinds)
        lies_flat = self._is_waiting or is_one_more
        flats = [
            sums.total(buffer.flat if lies_flat else None)
            for sums, buffer in zip(self._sums, plan.buffers, strict=True)
        ]
        self._reserve(flats, has_peers=has_peers)
        return self._count + is_one_more, self._joined(kinds), flats

    def zeros(self, plan: Plan, *, has_peers: bool) -> list[torch.Tensor]:
        """What a rank brings that takes no part, whatever its leaves are; they stay until the call succeeds."""
        if not self._fits(plan):
            self.drop()
            self._fits(plan)
        flats = [sums.zeros() for sums in self._sums]
        self._reserve(flats, has_peers=has_peers)
        return flats

    def recv_buffers(self, flats: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Memory for what peers send, as large as ``flats``, the result of :meth:`total`; of leaves, which end here."""
        return [sums.recv_buffer(flat) for sums, flat in zip(self._sums, flats, strict=True)]

    def end_step(self) -> None:
        """The call succeeded."""
        self.drop()
        self._problem = None

    def drop(self) -> None:
        """Begin a step anew. What went wrong before is still to be told."""
        if self._sentinel is not None:
            self._sentinel.remove()
        for sums in self._sums:
            sums.clear()
        self._set_waiting(is_waiting=False)
        self._count, self._accumulations, self._kinds, self._sentinel = 0, 0, [], None
        self._counter.policy.has_leaves = False
        self._counter.note_gradients_removed(are_kept=False)

    def release_memory(self) -> None:
        """Drop them with their memory: a broken-off collective may still write to it."""
        self.drop()
        self._sums, self._buffers = [], ()

    @internals.leaves_compiled_code
    def _run_or_defer(self, act: Callable[[], None]) -> None:
        """What fails is raised by the call, where the other ranks hear of it; until then nothing more is done."""
        if self._problem is not None:
            return
        try:
            with torch.inference_mode(False), torch.no_grad():
                act()
        except Exception as error:  # noqa: BLE001 - kept, and raised then
            self._problem = error
        except BaseException as error:  # Ctrl-C, say: some sums may have been added to and others not
            self._problem = self._incomplete(error)
            raise

    def _begin_block(self, plan: Callable[[], Plan]) -> None:
        self.drop_if_cleared()
        self._add_waiting_leaf()
        is_first = not self._count
        if not (self._is_added_to or is_first) or not any(map(_is_there, plan().grads)):
            return
        if self._is_added_to:
            raise GradientError(
                "a no_sync() block began while gradients of a backward outside of any were there: got two "
                "micro-batches that reproducible=True cannot tell apart, expected a no_sync() block for each (only the "
                "last one of a step may stand behind them); zero_grad() and do the step again, on every rank"
            )
        raise GradientError(
            "a step's first no_sync() block began while gradients were there, as the last all_reduce() left them or as "
            "assigned: they would count as part of one micro-batch; call zero_grad() before every step, on every rank"
        )

    def _check_thread(self) -> None:
        if threading.get_ident() == self._counter.policy.block_thread:
            return
        error = LegacyDDPError(
            "a no_sync() block began while a block of another thread was open: reproducible=True adds micro-batches in "
            "their order, and two threads have none; run the micro-batches of a step one after the other"
        )
        self._problem = self._problem or error  # this micro-batch is missing, whatever becomes of the thread
        raise error

    def _incomplete(self, error: BaseException) -> GradientError:
        return GradientError(
            f"an exception inside no_sync() ended this rank's micro-batch {self._count + 1} (counted from 1) "
            f"({error_line(error)}), so gradients are missing; zero_grad() and do the step again from its "
            "first micro-batch, on every rank"
        )

    @property
    def _is_added_to(self) -> bool:
        """Whether backward reached any parameter since the last block ended."""
        return self._counter.accumulations != self._accumulations

    def _end_block(self, plan: Plan) -> None:
        """What ``.grad`` holds is one more leaf."""
        if not self._fits(plan):
            raise _changed_parameters()
        grads = without_sentinel(plan.grads, self._sentinel, is_added_to=self._is_added_to)
        kinds = kinds_of(grads)
        plan.collect(grads)
        _fill_gaps(plan, kinds)
        self._set_waiting(is_waiting=True)
        for parameter in plan.parameters:
            parameter.grad = None
        self._kinds = self._joined(kinds)
        self._count += 1
        self._accumulations = self._counter.accumulations
        self._counter.policy.has_leaves = True
        self._counter.note_gradients_removed(are_kept=True)
        self._sentinel = place_sentinel(plan)
        del grads  # the last names for what lies in the buffers
        if any(buffer.has_external_refs for buffer in plan.buffers):
            self._add_waiting_leaf()  # before whoever keeps a gradient writes to it

    def _add_waiting_leaf(self) -> None:
        """Add the leaf that waits to the sums: another one comes, or somebody kept a part of it."""
        if not self._is_waiting:
            return
        self._set_waiting(is_waiting=False)
        for sums, buffer in zip(self._sums, self._buffers, strict=True):
            sums.add(buffer.flat)

    def _set_waiting(self, *, is_waiting: bool) -> None:
        self._is_waiting = is_waiting
        for buffer in self._buffers:
            buffer.moves_enabled = not is_waiting

    def _fits(self, plan: Plan) -> bool:
        """Whether the sums are of the plan's buffers; made for them if there are no leaves."""
        if self._buffers is not plan.buffers and not self._count:
            self._buffers = plan.buffers
            self._sums = [PartialSums(buffer.bucket) for buffer in plan.buffers]
        return self._buffers is plan.buffers

    def _joined(self, kinds: Sequence[int]) -> list[int]:
        return [max(pair) for pair in zip(kinds, self._kinds, strict=True)] if self._kinds else list(kinds)

    def _reserve(self, flats: Sequence[torch.Tensor], *, has_peers: bool) -> None:
        for sums, flat in zip(self._sums, flats, strict=True) if has_peers else ():
            sums.reserve(flat)


def _changed_parameters() -> GradientError:
    return GradientError(
        "parameters changed between the micro-batches of a step: gradients of the earlier ones do not fit any more; "
        "zero_grad() and do the step again from its first micro-batch, on every rank"
    )


def _is_there(grad: torch.Tensor | None) -> bool:
    return grad is not None and has_nonzero(grad)


def _fill_gaps(plan: Plan, kinds: Sequence[int]) -> None:
    """Clear the slots of a packed leaf that have no gradient: the tree adds all of them."""
    for slot, kind in zip(plan.layout.slots, kinds, strict=True):
        if kind >= SPARSE:
            raise GradientError(
                f"grad of {slot.name!r} is sparse, expected a dense one: reproducible=True adds dense gradients only; "
                "construct the layer with sparse=False, or convert the gradient",
                parameter=slot.name,
            )
    for buffer, share in plan.slot_ranges:
        buffer.zero(kinds[share], runs=[(0, buffer.bucket.numel)])
