"""What a script calls: the wrapper, with the text of ``print(model)``, and the function for a plain module."""

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Never, SupportsIndex, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from legacy_ddp import _explain
from legacy_ddp._call.all_reduce import all_reduce
from legacy_ddp._call.broadcast import broadcast_buffers, broadcast_parameters, construct
from legacy_ddp._call.join import Joining
from legacy_ddp._call.pack import Arguments, Metrics
from legacy_ddp._call.state import Synchronizer, are_forwards_private, synchronizer_of
from legacy_ddp._check_settings import Checks, Level
from legacy_ddp._errors import LegacyDDPError, show_usable
from legacy_ddp._interrupts import undone_by
from legacy_ddp._log import log_construction, script_level
from legacy_ddp._memory.layout import Layout
from legacy_ddp._memory.plan import Plan, parameter_columns
from legacy_ddp._ranks.header import Operation
from legacy_ddp._ranks.private_groups import GroupHandle, resolve_group
from legacy_ddp._record import SyncRecord
from legacy_ddp._settings import (
    AbsentGradients,
    CommHook,
    Group,
    Settings,
    Transport,
    in_their_places,
    names_to_ignore,
    refuse_attribute,
    refuse_unknown,
    resolve_checks,
    resolve_timeout,
    resolve_transport,
)
from legacy_ddp._text import format_bytes, how_to_explain
from legacy_ddp._watchdog import FORWARD, process_activity

if TYPE_CHECKING:  # Python's own TypeVar has a default from 3.13 on; without a default --strict refuses the bare class
    from typing_extensions import TypeVar as DefaultedTypeVar

    ModuleT_co = DefaultedTypeVar("ModuleT_co", bound=nn.Module, covariant=True, default=nn.Module)
else:
    ModuleT_co = TypeVar("ModuleT_co", bound=nn.Module, covariant=True)

_explain.install()  # before the first call

_WORLD_SIZE = (
    "world_size is deprecated: it is only compared with the size of the process group; leave it out, and pass "
    f"process_group= and buffer_size= by keyword\n{how_to_explain('Deprecated arguments')}"
)


class LegacyDistributedDataParallel(nn.Module, Joining, Generic[ModuleT_co]):
    """Data parallelism with one explicit synchronisation: any number of ``backward()``, then :meth:`all_reduce`.

    Collective: construction. The ranks compare their parameters by name, then (``init_sync``) copy rank 0's values.

    Args:
        module: the module to train, later ``.module``: state-dict keys begin with ``module.``, as under torch DDP. For
            type checkers the wrapper is generic in the class of the module:
            ``LegacyDistributedDataParallel[torch.nn.Linear]``, by default ``torch.nn.Module``.
        world_size: deprecated, with a DeprecationWarning: it is only compared with the size of the group. Leave it out,
            and pass the other arguments by keyword. The class of fairseq had it in this place. The positions of the
            newer class, ``(module, process_group, buffer_size)``, are understood, too.
        process_group: a ProcessGroup, a DeviceMesh of one dimension, or None for the default group. Ranks are counted
            inside the group. Assignable between steps.
        buffer_size: maximum number of elements per collective. Changes no result except the rounding of sums over gloo:
            with three or more ranks, the order of addition may depend on the position of an element.
        init_sync: copy all parameters (also frozen ones) and buffers of rank 0. False: the caller guarantees equality.
        gradient_as_bucket_view: after a call ``.grad`` is a view of one flat tensor per device and dtype, and the next
            call copies nothing. On CPU, from 64 KiB on, ``backward()`` already makes the views, unless something holds
            the gradient. A gradient that the script keeps also keeps its flat tensor. A part of a larger tensor of the
            script stays ``.grad``. False: a call copies all gradients to a second set of tensors, and the results back
            to the tensors in ``.grad``.
        reduce_dtype: floating dtype for the exchange of real gradients over gloo, also between hosts; None: the
            gradient's dtype, but fp32 for fp16. In shared memory sums are made in at least this dtype, and fp32.
        reproducible: add gradients in an order that depends only on the micro-batches of the step: every split over
            ranks gives the same bits. Needs ``sample_size`` and one :meth:`no_sync` block per micro-batch except the
            last; docs/reproducible.md shows the loop. Takes no sparse gradient, no ``skip`` and no ``reduce_dtype``.
            Needs up to log2(micro-batches per rank) + 2 copies of all gradients, fp32 for fp16.
        absent_gradients: where no rank has a gradient, for instance of a layer that all ranks drop: ``"none"`` leaves
            None, so that a step does not change the weight; ``"zeros"`` gives zeros to every rank, as the class of
            fairseq did, so that momentum and weight decay change it. Nothing more is sent. The gradient stays None if
            no rank takes part, and after an earlier call on the group left a sparse gradient there. Must be equal on
            all ranks.
        ignore: names of parameters and buffers to leave out of every exchange and check, in addition to torch DDP's
            list in the module (``_ddp_params_and_buffers_to_ignore``). They stay in ``state_dict()``.
        transport: the carrier of dense gradients on CPU, equal on all ranks. ``"auto"``: memory shared by the ranks of
            a host, with gloo between hosts of equal numbers of ranks (two or more), else gloo alone; ``"gloo"``;
            ``"host"``: an error without shared memory. The environment variable ``LEGACY_DDP_TRANSPORT``, read here,
            overrides it. See docs/transport.md.
        checks: ``"off"``, ``"info"``, ``"detail"`` or :class:`Checks`. The environment variable ``LEGACY_DDP_CHECKS``,
            read here, overrides the level and the fields that it names. See docs/reference.md.
        timeout_seconds: limit of every wait for other ranks; None: the timeout of the group.

    Raises:
        TypeError, ValueError: an unusable argument; a lazy, meta or DTensor parameter; a wrapper inside ``module``; no
            process group.
        LayoutError: ranks hold modules of different classes, or different parameters, buffers or settings; on every
            rank, with their names.
        TransportError: ``transport="host"`` is not possible; on every rank.
        PeerError, DesyncError, LostPeerError: as for :meth:`all_reduce`.

    Example:
        >>> model = LegacyDistributedDataParallel(torch.nn.Linear(2, 1))
        >>> model(inputs).sum().backward()
        >>> record = model.all_reduce(sample_size=len(inputs))  # on every rank, between backward() and step()
        >>> model.module.weight.grad
        tensor([[1., 1.]])
    """

    _accumulation: AbstractContextManager[None] | None = None  # the block of accumulate_grads

    @show_usable
    def __init__(
        self,
        module: ModuleT_co,
        world_size: int | Group | None = None,
        process_group: Group | int | None = None,
        buffer_size: int = 2**28,
        *,
        init_sync: bool = True,
        gradient_as_bucket_view: bool = True,
        reduce_dtype: torch.dtype | None = None,
        reproducible: bool = False,
        absent_gradients: AbsentGradients = "none",
        ignore: Iterable[str] = (),
        transport: Transport = "auto",
        checks: Level | Checks = "info",
        timeout_seconds: float | None = None,
        **unknown: Never,
    ) -> None:
        super().__init__()
        self.module: ModuleT_co = module
        size, members, problem = None, None, None
        try:
            size, members, buffer_size = in_their_places(world_size, process_group, buffer_size)
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
                absent_gradients=absent_gradients,
                ignore=names_to_ignore(module, ignore),
                transport=resolve_transport(transport),
                checks=resolve_checks(checks),
                timeout_seconds=resolve_timeout(timeout_seconds),
            )
        except (TypeError, ValueError) as error:
            problem, self._settings = error, Settings()
        self._group = GroupHandle(members)
        self._synchronizer = Synchronizer(
            self._settings, self, module=module if isinstance(module, nn.Module) else None
        )
        kind, plan, settings = LegacyDistributedDataParallel, self._plan, self._settings
        with self._synchronizer.planner.released_on_failure():
            group = self._group.resolve()
            with self._synchronizer.call(Operation.CONSTRUCTION, group) as call:
                chosen = self._synchronizer.on_groups[group].transport
                construct(call, chosen, module, settings, plan, world_size=size, wrapper=kind, problem=problem)
                log_construction(call.groups.rank, self.extra_repr)
            if init_sync:
                self.broadcast_parameters()
                self.broadcast_buffers()
            self._synchronizer.note_new_buffers()
        if size is not None:  # at the end: where a filter makes it an error, all ranks have completed the construction
            warnings.warn(_WORLD_SIZE, DeprecationWarning, stacklevel=script_level())

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module. Never communicates, so evaluating on one rank is safe."""
        if torch.compiler.is_compiling():
            return self.module(*args, **kwargs)
        before, clock = process_activity.enter(FORWARD), self._synchronizer.policy.clock
        clock.begin()
        try:
            self._synchronizer.begin_forward(args, kwargs, is_training=self.training)
            return self.module(*args, **kwargs)
        finally:  # perhaps inside of an outer forward
            clock.end_forward()
            process_activity.enter(before.phase, before.call)

    def all_reduce(
        self, sample_size: SupportsIndex | float | None = None, *, skip: bool = False, metrics: Metrics = None
    ) -> SyncRecord:
        """Average the gradients over the ranks; afterwards ``.grad`` holds the same bits on every rank.

        Collective: once per step, on every rank, in this order:
        scale → backward → **all_reduce** → ``unscale_()`` → clip → step. In another order, ranks would skip or clip
        differently, and replicas would diverge. Inside :meth:`no_sync` it does nothing.

        ========================  ==================================================================================
        plain                     mean over the participating ranks
        ``sample_size=n``         gradients are sums over n items (n >= 0, may differ per rank): Σ grads / Σ n
        ``skip=True``, or n = 0   the gradients of this rank are not used
        no rank takes part        every ``.grad`` becomes None on every rank; ``record.skipped``
        ========================  ==================================================================================

        A rank without a gradient counts as zeros; a gradient that no rank has stays None (or becomes zeros, with
        ``absent_gradients="zeros"``). Sparse gradients stay sparse.
        All gradients since the last call count, also gradients assigned or edited by hand (with ``reproducible=True``
        an edit changes the micro-batch in ``.grad``). A repeated plain call averages equal values, which may change the
        last bit (of up to half of the fp32 elements at 5 to 7 ranks). A repeated call with ``sample_size`` would divide
        twice. Two cases of it are an error: no backward since, and every gradient is still the view of the last call;
        or a backward was added to the result of the last call, because ``zero_grad()`` is missing. In the second case a
        plain call adds the mean of the new gradients to that result. A tensor that the script assigns to ``.grad`` is
        never taken for a result.

        Args:
            sample_size: number of items in this rank's gradient sums; a whole number of Python, NumPy or torch, also in
                a floating dtype that holds it exactly.
            skip: leave this rank out of the mean, and ignore ``sample_size``.
            metrics: numbers of this rank by name, also tensors with one element on any device; equal names on every
                rank. ``record.metrics`` has the sums over all ranks, as doubles; docs/reference.md has the rules.

        Returns:
            The record of the call. ``record.rows`` has a row per rank.

        Raises:
            PeerError: a rank failed before the exchange (a gradient that requires grad, wrong arguments, called inside
                backward, ...). If every rank failed with the same text, every rank raises its local error instead.
            DesyncError: ranks are in different calls, mix None and int ``sample_size``, pass other names of metrics, or
                a rank skipped or repeated a call.
            LayoutError: parameters changed on some ranks only, or with ``checks="detail"`` the names of buffers.
            ReplicaDivergenceError: with ``checks="detail"``, parameters or buffers of ranks hold different bits, or a
                step since the last call used different gradients.
            NonFiniteGradientError: a rank's gradient holds NaN or infinity; only with ``Checks(nonfinite="raise")``.
            EditedGradientError: clipped or unscaled before the call; only with ``Checks(edited="raise")``.
            CommHookError: a hook (:meth:`register_comm_hook`) returned no usable gradient.
            TransportError: shared memory was asked for, and is not possible, or not any more.
            LostPeerError: a rank did not answer; the group is not usable any more. In phases ``hook`` and ``payload``
                (on the host transport also in ``agree`` and ``metrics``) every ``.grad`` becomes None.

        After all errors but LostPeerError every ``.grad`` is unchanged on every rank, and the next call may succeed.
        """
        synchronizer, group = self._synchronizer, self._group.resolve()
        if synchronizer.policy.open_blocks:
            return synchronizer.idle_call(group)
        # Not ``self.module``, which is found by a search in Python.
        parameters = partial(synchronizer.planner.walk.columns, cast(nn.Module, self._modules["module"]))
        arguments = Arguments(sample_size, skip, metrics)
        notice = None if self._joining is None else self._notify
        try:
            record = all_reduce(synchronizer, parameters, group, arguments, notice=notice)
        except BaseException:
            self._joining = None  # an error in a call ends the join, without torch's Join
            raise
        return synchronizer.end_call(record)

    def all_reduce_grads(self) -> SyncRecord:
        """The same as :meth:`all_reduce`, under its name in fairseq's class, which trainers look for."""
        return self.all_reduce()

    def broadcast_parameters(self, src: int = 0) -> None:
        """Collective: copy the parameters (also frozen ones) of rank ``src`` of the group to every rank.

        Raises: as :meth:`all_reduce`; ValueError: ``src`` is not in the group.
        """
        self._refuse_inside_join("broadcast_parameters()")
        broadcast_parameters(self._synchronizer, self.module, self._group.resolve(), src=src)

    def broadcast_buffers(self, src: int = 0) -> None:
        """Collective: copy the buffers of rank ``src`` of the group to every rank, for instance before evaluation.

        No other method synchronises buffers: between two calls, BatchNorm statistics of ranks become different. The
        first forward in eval mode with such statistics gives a warning on rank 1.

        Raises: as :meth:`all_reduce`; ValueError: ``src`` is not in the group.
        """
        self._refuse_inside_join("broadcast_buffers()")
        broadcast_buffers(self._synchronizer, self.module, self._group.resolve(), src=src)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Make :meth:`all_reduce` a no-op inside the block; a step there is local. Nests; survives exceptions.
        Blocks of several threads may overlap: calls do nothing until the last block has ended.

        With ``reproducible=True`` an outermost block is one micro-batch. At its end the wrapper keeps the gradients for
        the call, and ``.grad`` is None again, or zeros. ``zero_grad()`` between blocks drops them, if it reaches the
        smallest parameter. After an exception in a block, or a backward outside of a block and then a block, the next
        call raises on all ranks. A block without a backward counts as a micro-batch of zeros.

        Raises:
            LegacyDDPError: with ``reproducible=True``, a block of another thread is open. The next call raises on all
                ranks.
        """
        policy, leaves = self._synchronizer.policy, self._synchronizer.leaves
        if leaves is not None and are_forwards_private():
            leaves = None
        block, checks = object(), self._synchronizer.checks.with_block
        with undone_by(partial(policy.close_block, block)):
            is_outermost = policy.open_block(block)
            for check in checks if is_outermost else ():
                check.change_block(is_open=True)
            with nullcontext() if leaves is None else leaves.block(self._plan, is_outermost=is_outermost):
                yield
        for check in checks if is_outermost else ():
            check.change_block(is_open=False)

    @property
    def accumulate_grads(self) -> bool:
        """Whether a :meth:`no_sync` block is open. As in fairseq's class, an assignment of True opens a block, and an
        assignment of False ends it. A copy of the wrapper has no open block.

        Raises:
            TypeError: the value is not True or False.
            LegacyDDPError: False inside of another :meth:`no_sync` block; or as :meth:`no_sync`.
        """
        return not self._synchronizer.policy.sync_enabled

    @accumulate_grads.setter
    def accumulate_grads(self, accumulates: bool) -> None:
        if not isinstance(accumulates, bool):
            raise TypeError(f"accumulate_grads is not usable: got {accumulates!r}, expected True or False")
        opened = self._accumulation
        if accumulates and opened is None:
            block = self.no_sync()
            block.__enter__()
            self._accumulation = block
        elif not accumulates and opened is not None:
            self._accumulation = None
            opened.__exit__(None, None, None)
        if not accumulates and self.accumulate_grads:
            raise LegacyDDPError(
                "accumulate_grads=False has no effect inside of a no_sync() block, expected outside; assign it behind "
                "the block, or leave the block out"
            )

    def register_comm_hook(self, state: Any, hook: Callable[[Any, Any], "torch.futures.Future[torch.Tensor]"]) -> None:
        """Let ``hook(state, bucket)``, as for torch DDP, reduce the dense gradients in place of the default sum.

        Register one hook, and the same hook on every rank before the next call: different hooks are a LayoutError
        there. In every call with participants the hook gets one bucket per device and dtype, in the same order on all
        ranks, with the methods of ``torch.distributed.GradBucket``. ``bucket.buffer()`` is a copy of the gradients,
        shape (elements,), zeros without a gradient. The hook returns a Future of the *mean over the group*, a tensor of
        the same shape and dtype (or the dtype of ``bucket.set_buffer()``). With skipped ranks or ``sample_size``, the
        result is multiplied by group size / divisor. Sparse gradients do not go through the hook. A copy of the wrapper
        has no hook; the caller saves ``state`` in checkpoints.

        Args:
            state: first argument of the hook. For torch's default hooks: the process group; None means the default
                group and not :attr:`process_group`.
            hook: runs inside :meth:`all_reduce`, on the caller's thread, and makes its own collectives. If it raises on
                a rank, the other ranks raise a LostPeerError that names this rank: at once if they wait for their
                Future, but not out of a collective that blocks inside the hook. The group is not usable any more.
                Processes end only after the collectives that their hooks have begun; docs/faults.md has the limits.

        Raises:
            TypeError: ``hook`` is not callable.
            ValueError: a hook is registered already; ``reduce_dtype`` or ``reproducible`` was set.
        """
        settings = self._settings.with_hook(CommHook(state, hook))
        self._synchronizer.use(settings)
        self._settings = settings

    def on_sync(self, callback: Callable[[SyncRecord], object]) -> RemovableHandle:
        """Call ``callback(record)`` on this rank after every successful :meth:`all_reduce`; for logs and plots.

        If the callback raises, :meth:`all_reduce` raises its exception, with the gradients reduced. A copy of the
        wrapper has no callback. The returned handle has ``remove()``.

        Raises:
            TypeError: ``callback`` is not callable.
        """
        return self._synchronizer.observers.returned.add(callback)

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The process group on which the wrapper communicates."""
        return self._group.resolve()

    @process_group.setter
    def process_group(self, process_group: Group | None) -> None:
        self._refuse_inside_join("an assignment to process_group")
        self._group = GroupHandle(process_group)

    @property
    def world_size(self) -> int:
        """The number of ranks of the process group."""
        return dist.get_world_size(self.process_group)

    @property
    def buffer_size(self) -> int:
        """The maximum number of elements per collective."""
        return self._settings.buffer_size

    def extra_repr(self) -> str:
        """The part of ``print(model)`` about buckets, group, transport, checks and settings other than the defaults."""
        layout, group_lines = self._synchronizer.planner.layout, _group_lines(self._group, self._synchronizer)
        return "\n".join([*_layout_lines(layout), *group_lines, _settings_line(self._settings)])

    def __getattr__(self, name: str) -> torch.Tensor | nn.Module:
        """As of every module. If the wrapped module has the name, the AttributeError says so."""
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            module = self.__dict__.get("_modules", {}).get("module")  # None in an object that is being copied
            if not _has(module, name):
                raise
            raise AttributeError(
                f"{error}, but the wrapped {type(module).__name__} has: write model.module.{name}; a training step may "
                "use it, too, and needs no forward of the wrapper",
                name=name,
                obj=self,
            ) from None

    def __setattr__(self, name: str, value: Any) -> None:
        """As of every module, except an AttributeError where an assignment would do nothing: to the arguments of the
        constructor but ``module`` and ``process_group``, and to settings of torch DDP."""
        refuse_attribute(type(self), name)
        super().__setattr__(name, value)

    def __getstate__(self) -> dict[str, Any]:
        # Module and settings: the first collective of the copy makes the rest again. Wrapper[Class](...) leaves its
        # types in __orig_class__, and some of them have no pickle.
        left_out = ("_joining", "_accumulation", "__orig_class__")
        own = {name: value for name, value in self.__dict__.items() if name not in left_out}
        settings = replace(self._settings, comm_hook=None)
        return {**own, "_synchronizer": None, "_settings": settings}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._synchronizer = Synchronizer(self._settings, self, module=self.module)
        with suppress(ValueError):  # the first collective raises it; until then the plan counts backward passes
            self._plan()

    def _plan(self) -> Plan:
        return self._synchronizer.planner.plan(parameter_columns(self.module))


def _has(module: nn.Module | None, name: str) -> bool:
    """As hasattr(), without running the properties of the module."""
    if module is None or name.startswith("__"):
        return False
    own = (module.__dict__, module._parameters, module._buffers, module._modules)
    return any(name in names for names in (*own, *map(vars, type(module).__mro__)))


def _layout_lines(layout: Layout | None) -> Iterator[str]:
    if layout is None:
        yield "no layout planned yet"
        return
    for index, bucket in enumerate(layout.buckets):
        size = format_bytes(bucket.numel * bucket.dtype.itemsize)
        yield f"bucket {index}: {bucket.label}, {len(bucket.slots):,} tensors, {bucket.numel:,} elements, {size}"
    if not layout.buckets:
        yield "no trainable parameters"


def _group_lines(group: GroupHandle, synchronizer: Synchronizer) -> list[str]:
    with suppress(ValueError, TypeError, RuntimeError):  # no group, or a destroyed group
        found = group.resolve()
        lines = [f"group: rank {dist.get_rank(found)} of {dist.get_world_size(found)}, {dist.get_backend(found)}"]
        transport = synchronizer.transport_on(found)
        return [*lines, f"transport: {transport.text}"] if transport is not None and transport.text else lines
    return ["group: none available"]


def _settings_line(settings: Settings) -> str:
    defaults = Settings()
    changed = {name: value for name, value in vars(settings).items() if value != getattr(defaults, name)}
    changed.pop("transport", None)  # shown with the group
    checks = changed.pop("checks", None) or repr(settings.checks.level)
    return ", ".join([*(f"{name}={value!r}" for name, value in changed.items()), f"checks={checks}"])


def all_reduce_gradients(
    module_or_params: nn.Module | Iterable[torch.Tensor],
    *,
    process_group: Group | None = None,
    sample_size: SupportsIndex | float | None = None,
    skip: bool = False,
    metrics: Metrics = None,
) -> SyncRecord:
    """The same as :meth:`LegacyDistributedDataParallel.all_reduce`, of a plain module without this wrapper.

    Collective. The state between calls (flat buffers, counts) lives as long as the module, or the first of the
    parameters. The ranks compare nothing before the first call. Parameters given without a module are named by their
    position. The checks are the default checks, except for ``unsynchronized_step="allow"``; replicas and steps
    are not compared.

    Args:
        module_or_params: a module, or parameters (not their gradients) of any shapes, in the same order on every rank.
        process_group: a ProcessGroup, a DeviceMesh of one dimension, or None for the default group.
        sample_size, skip, metrics: as for the wrapper.

    Raises:
        As :meth:`LegacyDistributedDataParallel.all_reduce`; TypeError: neither a module nor tensors; ValueError: no
        tensor of the list requires grad.

    Example:
        >>> layer = torch.nn.Linear(2, 1)
        >>> layer(inputs * rank).sum().backward()
        >>> record = all_reduce_gradients(layer)
        >>> layer.weight.grad  # the mean of 0, 3 and 6
        tensor([[3., 3.]])
    """
    synchronizer, parameters = synchronizer_of(module_or_params)
    arguments = Arguments(sample_size, skip, metrics)
    return synchronizer.end_call(all_reduce(synchronizer, parameters, resolve_group(process_group), arguments))
