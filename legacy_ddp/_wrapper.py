"""The wrapper: what a user constructs and calls."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Any, Never

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.hooks import RemovableHandle

from legacy_ddp._agreement.header import Flag
from legacy_ddp._buckets.inventory import distinct
from legacy_ddp._buckets.plan import Plan
from legacy_ddp._collectives.all_reduce import all_reduce
from legacy_ddp._collectives.broadcast import broadcast
from legacy_ddp._collectives.construct import construct
from legacy_ddp._collectives.join import Joining
from legacy_ddp._collectives.observers import show_forward
from legacy_ddp._collectives.state import NamedTensors, Synchronizer
from legacy_ddp._describe import describe_wrapper
from legacy_ddp._log import log_construction
from legacy_ddp._record import SyncRecord
from legacy_ddp._settings import Checks, CommHook, Settings, names_to_ignore, resolve_checks
from legacy_ddp._transport.operation import Operation
from legacy_ddp._transport.process_group import GroupHandle
from legacy_ddp._unsupported import refuse_unknown
from legacy_ddp._watchdog import HERE


class LegacyDistributedDataParallel(nn.Module, Joining):
    """Data parallelism with one explicit meeting: ``backward()`` as often as you like, then :meth:`all_reduce`.

    Collective: construction. The ranks compare their parameters by name, then (``init_sync``) take rank 0's values.

    Args:
        module: what to train; reached as ``.module``, so state-dict keys carry ``module.`` as under torch DDP.
        world_size: only checked against the group.
        process_group: a ProcessGroup, a DeviceMesh of one dimension, or None for the default group. Ranks are counted
            inside it. Assignable between steps.
        buffer_size: the most elements that one collective carries. No result depends on it but for the rounding of the
            sum: from three ranks on, a backend's order of addition may depend on an element's place.
        init_sync: take all parameters (frozen ones, too) and buffers of rank 0. Without it the caller guarantees
            equality.
        gradient_as_bucket_view: after a call ``.grad`` lies in one flat tensor per device and dtype and need not be
            copied for the next; on CPU, from 64 KiB on, since ``backward()``, unless it is held. One that you keep
            keeps it all. False: ``.grad`` has memory of its own, a second copy of all gradients, copied in and out.
        reduce_dtype: floating dtype that real gradients travel in; None: their own, and fp32 for fp16 ones.
        reproducible: add gradients in an order that depends on the step's micro-batches alone: any split of them over
            ranks gives the same bits. Needs ``sample_size`` and one :meth:`no_sync` block per micro-batch, the last
            excepted; docs/reproducible.md shows the loop. Takes no sparse gradient, no ``skip`` and no
            ``reduce_dtype``, and up to log2(micro-batches per rank) + 2 copies of all gradients, of fp16 ones in fp32.
        ignore: names of parameters and buffers to leave out, besides those that torch DDP would be told to ignore
            (the module's ``_ddp_params_and_buffers_to_ignore``).
        checks: ``"off"``, ``"info"``, ``"detail"`` or :class:`Checks`. The environment variable ``LEGACY_DDP_CHECKS``,
            read here, overrides the level.
        timeout_seconds: how long to wait for the other ranks in any call; None: the group's own timeout.

    Raises:
        TypeError, ValueError: an unusable argument; a lazy, meta or DTensor parameter; a wrapper inside ``module``; no
            process group.
        LayoutError: ranks hold different parameters, buffers or settings; on every rank, naming them.
        PeerError, DesyncError, LostPeerError: as for :meth:`all_reduce`.
    """

    def __init__(
        self,
        module: nn.Module,
        world_size: int | None = None,
        process_group: dist.ProcessGroup | DeviceMesh | None = None,
        buffer_size: int = 2**28,
        *,
        init_sync: bool = True,
        gradient_as_bucket_view: bool = True,
        reduce_dtype: torch.dtype | None = None,
        reproducible: bool = False,
        ignore: Iterable[str] = (),
        checks: str | Checks = "info",
        timeout_seconds: float | None = None,
        **unknown: Never,
    ) -> None:
        super().__init__()
        self.module = module
        self._group = GroupHandle(process_group)
        problem = None
        try:
            refuse_unknown(type(self), unknown, LegacyDistributedDataParallel.__init__)
            if not isinstance(module, nn.Module):
                raise TypeError(f"module is of the wrong type: got {type(module).__name__}, expected torch.nn.Module")
            if not isinstance(init_sync, bool):
                raise TypeError(f"init_sync is not usable: got {init_sync!r}, expected True or False")
            self._settings = Settings(
                buffer_size=buffer_size,
                gradient_as_bucket_view=gradient_as_bucket_view,
                reduce_dtype=reduce_dtype,
                reproducible=reproducible,
                ignore=names_to_ignore(module, ignore),
                checks=resolve_checks(checks),
                timeout_seconds=timeout_seconds,
            )
        except (TypeError, ValueError) as error:
            problem, self._settings = error, Settings()
        self._synchronizer = Synchronizer(self._settings, self)
        kind, plan = LegacyDistributedDataParallel, self._plan
        with self._synchronizer.planner.released_on_failure():
            with self._synchronizer.call(Operation.CONSTRUCTION, self._group.resolve()) as call:
                construct(call, module, self._settings, plan, world_size=world_size, wrapper=kind, problem=problem)
                log_construction(call.groups.rank, self.extra_repr)
            if init_sync:
                self.broadcast_parameters()
                self.broadcast_buffers()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module. Never communicates, so evaluating on one rank is safe."""
        if torch.compiler.is_compiling():
            return self.module(*args, **kwargs)
        with HERE.forward():
            if self._synchronizer.leaves is not None and self._synchronizer.policy.sync_enabled:
                self._synchronizer.leaves.drop_if_cleared()
            show_forward(self._synchronizer.observers, args, kwargs)
            return self.module(*args, **kwargs)

    def all_reduce(self, sample_size: int | None = None, *, skip: bool = False) -> SyncRecord:
        """Average the gradients over the ranks; afterwards ``.grad`` holds the same bits on every rank.

        Collective: once per step, on every rank, in this order:
        scale → backward → **all_reduce** → unscale_ → clip → step. Later than that, ranks skip or clip differently
        and part. Inside :meth:`no_sync` it does nothing.

        ========================  ==================================================================================
        plain                     mean over the ranks that took part
        ``sample_size=n``         gradients are sums over n items (n >= 0, may differ per rank): Σ grads / Σ n
        ``skip=True``, or n = 0   this rank's gradients are not used, whatever they hold
        nobody took part          every ``.grad`` becomes None on every rank; ``record.skipped``
        ========================  ==================================================================================

        A rank without a gradient counts as zeros; a gradient that no rank has stays None. Sparse gradients stay sparse.
        The whole window's gradients count, also those assigned or edited by hand (with ``reproducible=True`` an edit
        reaches the micro-batch that ``.grad`` holds). A plain call repeated averages equal values, which may change
        their last bit (up to half of the fp32 elements at 5 to 7 ranks); one with ``sample_size`` would divide twice,
        which is an error where it shows: no backward since, and every gradient still the view left.

        Args:
            sample_size: number of items this rank's gradients are sums over, a host int.
            skip: leave this rank out of the mean; ``sample_size`` is then not looked at.

        Returns:
            What the call did. ``record.rows`` has a row per rank.

        Raises:
            PeerError: a rank failed before the exchange (a gradient that requires grad, wrong arguments, called inside
                backward, ...). If every rank failed with the same words, each raises its own error instead.
            DesyncError: ranks are in different calls, mix None and int ``sample_size``, or one of them skipped or
                repeated a call.
            LayoutError: parameters changed on some ranks only.
            ReplicaDivergenceError: with ``checks="detail"``, ranks hold other bits in parameters or buffers, or used
                other gradients in a step since the last call.
            NonFiniteGradientError: a rank's gradient holds NaN or infinity; only with ``Checks(nonfinite="raise")``.
            CommHookError: a hook (:meth:`register_comm_hook`) returned what cannot be a gradient.
            LostPeerError: a rank did not answer; the group is lost. In phases ``hook`` and ``payload`` every ``.grad``
                becomes None.

        After all but the last every ``.grad`` is untouched on every rank and the next call may succeed.
        """
        if not self._synchronizer.policy.sync_enabled:
            return SyncRecord(call=0, synchronized=False)
        named, group = self._named_parameters(), self._group.resolve()
        with self._ending_join():
            record = all_reduce(self._synchronizer, named, group, sample_size, skip, notice=self._notice)
        self._synchronizer.emit_warning()
        self._synchronizer.tell(record)
        return record

    def broadcast_parameters(self, src: int = 0) -> None:
        """Collective: give every rank the parameters (frozen ones, too) of rank ``src`` of the group.

        Raises:
            As :meth:`all_reduce`; ValueError: ``src`` is no rank of the group.
        """
        self._broadcast(Operation.BROADCAST_PARAMETERS, self._named_parameters(), "parameter", src)

    def broadcast_buffers(self, src: int = 0) -> None:
        """Collective: give every rank the buffers of rank ``src`` of the group, for instance before evaluation.

        Nothing else synchronises buffers: BatchNorm statistics drift apart between two calls.

        Raises:
            As :meth:`all_reduce`; ValueError: ``src`` is no rank of the group.
        """
        named = self.module.named_buffers(remove_duplicate=False)
        self._broadcast(Operation.BROADCAST_BUFFERS, named, "buffer", src)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Make :meth:`all_reduce` a no-op inside the block; a step there is a local one. Nests; survives exceptions.
        Blocks of several threads may overlap: no call does anything until the last of them has ended.

        With ``reproducible=True`` an outermost block is one micro-batch: when it ends its gradients are taken away
        (``.grad`` is None again, or zeros) and wait for the call. ``zero_grad()`` between blocks drops them, if it
        reaches the smallest parameter. After an exception in it, or a backward outside of a block and then a block, the
        next call raises on all ranks. A block without a backward counts as one of zeros.

        Raises:
            LegacyDDPError: with ``reproducible=True``, a block of another thread is open; so does the next call, on all
                ranks.
        """
        policy, leaves = self._synchronizer.policy, self._synchronizer.leaves
        is_outermost = policy.open_block()
        try:
            with nullcontext() if leaves is None else leaves.block(self._plan, is_outermost=is_outermost):
                yield
        finally:
            policy.close_block()

    def register_comm_hook(self, state: Any, hook: Callable[[Any, Any], "torch.futures.Future[torch.Tensor]"]) -> None:
        """Let ``hook(state, bucket)`` bring the dense gradients together, in place of our sum; torch DDP's hooks fit.

        Once, and alike on every rank before the next call: other hooks on some ranks are a LayoutError there. In every
        call that somebody takes part in it gets one bucket per device and dtype, in the same order on all ranks, with
        the methods of ``torch.distributed.GradBucket``. ``bucket.buffer()`` is a copy of the gradients, shape
        (elements,), zeros where this rank has none. The hook returns a Future of their *mean over the group*, a tensor
        of the same shape, and dtype (or that of ``bucket.set_buffer()``); where ranks sit out, or with ``sample_size``,
        we multiply it by group size / divisor. Sparse gradients do not go through it. A copy of the wrapper has no
        hook; ``state`` is the caller's to keep in checkpoints.

        Args:
            state: what the hook wants: for torch's default hooks the process group, where None means the default one
                and not :attr:`process_group`.
            hook: runs inside :meth:`all_reduce`, on the caller's thread. Its collectives are its own: a rank that
                raises in it loses the group, and the others raise a LostPeerError that names it; at once if they wait
                for its Future, but not out of a collective that blocks inside the hook. Their processes then end
                after the collectives that their hooks have begun; docs/faults.md has the limits.

        Raises:
            TypeError: ``hook`` is not callable.
            ValueError: there is one already; ``reduce_dtype`` or ``reproducible`` was set.
        """
        self._settings = self._settings.with_hook(CommHook(state, hook))
        self._synchronizer.use(self._settings)

    def on_sync(self, callback: Callable[[SyncRecord], object]) -> RemovableHandle:
        """Call ``callback(record)`` on this rank after every :meth:`all_reduce` that succeeded; for logs and plots.

        What it raises leaves :meth:`all_reduce`, with the gradients reduced. A copy of the wrapper has none.

        Returns:
            A handle whose ``remove()`` ends it.

        Raises:
            TypeError: it is not callable.
        """
        return self._synchronizer.listen(callback)

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The group that the ranks meet in."""
        return self._group.resolve()

    @process_group.setter
    def process_group(self, process_group: dist.ProcessGroup | DeviceMesh | None) -> None:
        self._refuse_inside_join("an assignment to process_group")
        self._group = GroupHandle(process_group)

    def extra_repr(self) -> str:
        """What ``print(model)`` says besides the module: buckets, group, checks and what differs from the defaults."""
        return describe_wrapper(self._synchronizer.planner.layout, self._group, self._settings)

    def __getstate__(self) -> dict[str, Any]:
        """Module and settings; what belongs to this process appears anew at the copy's first collective."""
        own = {name: value for name, value in self.__dict__.items() if name != "_joining"}
        return {**own, "_synchronizer": None, "_settings": replace(self._settings, comm_hook=None)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._synchronizer = Synchronizer(self._settings, self)
        with suppress(ValueError):  # told at the first collective; until then backward passes are counted already
            self._plan()

    def _plan(self) -> Plan:
        return self._synchronizer.planner.plan(self._named_parameters())

    def _named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return self.module.named_parameters(remove_duplicate=False)

    def _stand_in(self, flags: Flag) -> None:
        """Collective: what torch's Join lets a rank that left :meth:`join` do, where others call :meth:`all_reduce`."""
        part = (0, False) if self._settings.reproducible else (None, True)
        with self._ending_join():
            all_reduce(self._synchronizer, self._named_parameters(), self._group.resolve(), *part, flags=flags)
        self._synchronizer.emit_warning()

    def _drop_gradients(self) -> None:
        for parameter in self._plan().parameters:  # not of those that are left out
            parameter.grad = None
        self._synchronizer.forget_step()

    def _broadcast(self, operation: Operation, named: NamedTensors, kind: str, src: int) -> None:
        self._refuse_inside_join(str(operation))
        with torch.no_grad(), self._synchronizer.call(operation, self._group.resolve()) as call:
            broadcast(call, distinct(named, self._settings.ignore), kind=kind, src=src)
        if operation is Operation.BROADCAST_PARAMETERS:
            self._synchronizer.note_new_parameters(self._plan())
