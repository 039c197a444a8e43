"""Comparison of the computation of all ranks: every rank also runs the batch of the rank before."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from legacy_ddp import _torch as internals
from legacy_ddp._check_settings import as_names
from legacy_ddp._errors import ReplicaDivergenceError, argument_errors
from legacy_ddp._explain.compare import DETAILS, LocalState, compare_headers, describe_items, divergence_error
from legacy_ddp._memory.layout import build_inventory, distinct, inventory_digest
from legacy_ddp._ranks.agree import agree, announcing_failures
from legacy_ddp._ranks.call import Call, check_can_communicate
from legacy_ddp._ranks.header import Header, Operation
from legacy_ddp._replicas import state as replica_state
from legacy_ddp._text import format_bytes
from legacy_ddp._wrapper import LegacyDistributedDataParallel
from legacy_ddp.debug._arguments import Target, as_count, as_flag, target_of
from legacy_ddp.debug._cross_check.batch import Classes, pack
from legacy_ddp.debug._cross_check.run import (
    Passes,
    Run,
    generator_states,
    held_modules,
    held_statistics,
    held_values,
    state_set_aside,
)
from legacy_ddp.debug._cross_check.trial import locate, run_ring, try_batch
from legacy_ddp.debug._cross_check.verdict import CrossCheckReport, choose_batch, differing_batches, report_of
from legacy_ddp.debug._trace.environment import RankSettings, differing_settings, settings_of

MAX_BYTES = 2**30
_LAYOUT_ADVICE = (
    "make the model and the arguments equal on all ranks; pass a tensor with other values on other ranks in the batch, "
    "and not in run"
)


@internals.disable_dynamo
@argument_errors
@internals.keeps_grad_mode
def cross_check(
    model: nn.Module,
    run: Run,
    batch: Any,
    *,
    operations: bool = False,
    local_buffers: Iterable[str] | None = None,
    max_bytes: int = MAX_BYTES,
    raises: bool = False,
    process_group: dist.ProcessGroup | DeviceMesh | None = None,
) -> CrossCheckReport:
    """Compare the computation of the ranks: every rank runs its own batch, and the batch of the rank before.

    Collective: on every rank of the group, at any moment outside of backward. With a batch, its rank sends the states
    of the random generators and the buffers in which ranks have their own values (statistics of normalisation layers,
    ``local_buffers``), so dropout and BatchNorm make no difference. The ranks compare 64-bit digests of the loss, of
    every gradient, and of buffers and random generators after the run. If all agree, a check costs two passes forward
    and backward, and 16 bytes for each result and rank.

    After a difference one batch is sent to all ranks. Every rank runs it twice more with all operations captured (8 to
    20 times the cost of a pass), and once or twice more for the elements. The report names the ranks with results
    outside of a majority, or with changing results; the first different operation with its module; the elements of its
    output.

    Afterwards these are bit for bit as before: gradients, parameters, buffers, training flags, version counters, the
    counters of the wrapper, and the random generators of torch, Python, NumPy and single modules; for other modules
    that ``run`` uses, gradients, buffers and flags. Other state is not restored: a counter in Python, a cache on disk.
    A check needs memory for a copy of parameters and buffers, another set of gradients, and two batches. Hooks after
    the accumulation of a gradient do not run.

    Args:
        model: a :class:`legacy_ddp.LegacyDistributedDataParallel`, compared on its group, or any module. Of a
            torch DistributedDataParallel the module inside is taken, on the default group.
        run: ``run(model, batch)`` returns the loss, one element, of a forward pass; without ``backward()``,
            ``all_reduce()`` or ``step()``. A tensor in the closure, defaults, globals or object of ``run`` must be
            equal on all ranks; an iterator or a generator there is refused.
        batch: tensors, numbers and texts in lists, tuples, dicts, named tuples, dataclasses, or mappings with the
            constructor of dict; None on a rank without a batch. ``run`` has a copy, with equal strides.
        operations: capture operations in all passes, so that the report can name the operation of a single event.
        local_buffers: names or patterns of buffers in which each rank has values of its own, in addition to the
            statistics of normalisation layers; None: ``Checks(local_buffers=)`` of the wrapper.
        max_bytes: limit for the size of a batch with its generators and buffers.
        raises: whether a difference is an error.
        process_group: of a plain module; None for the default group, and with a wrapper, which has its own.

    Raises:
        ReplicaDivergenceError: parameters or buffers differ before the first run; with ``raises``, ranks compute
            differently. Its text is the report.
        TypeError, ValueError: wrong arguments; a batch of an unknown type, or too large; no batch on any rank. On
            some ranks only: PeerError on all, before anything runs.
        PeerError: ``run`` failed on a rank; the text has its error.
        LayoutError: arguments, parameters or tensors of ``run`` differ between ranks.
        DesyncError, LostPeerError: as for ``all_reduce()``.

    Example:
        >>> cross_check(model, lambda model, batch: model(batch).sum(), inputs).agrees
        True
    """
    if isinstance(inner := internals.inside_of_compiled(model), DistributedDataParallel):
        model = inner.module  # the forward of DDP would make backward communicate
    _check_group(model, process_group)
    target = target_of(model, process_group)
    if target.wrapper is not None:
        target.wrapper._refuse_inside_join("cross_check()")
    synchronizer, module = target.synchronizer, target.module
    with torch.inference_mode(False), synchronizer.call(Operation.CROSS_CHECK, target.group) as call:
        with torch.no_grad(), announcing_failures(call):
            check_can_communicate(call)
            _check_functions(module, run)
            _check_initialised(module)
            options = _check_options(operations, local_buffers, max_bytes, raises)
            local: Sequence[str] | None = options["local_buffers"]
            if local is None:
                local = synchronizer.settings.checks.local_buffers
            replica_state.check_local_buffers(module, local)
            statistics = held_statistics(run, module)
            held = {name: value for name, value in held_values(run, module).items() if name not in statistics}
            own = _own_tensors(target, local)
            data, classes = _pack(batch, module, {**own, **statistics}, max_bytes)
            request = _describe(module, held, {**options, "local_buffers": ", ".join(sorted(local)) or "none"})
            with call.phase("digest"):
                state = _shared_state(target, own)
                header = Header(layout=inventory_digest(request))
                state.add_digests(header)
        with torch.no_grad():
            agreement = agree(call, header, request, layout_advice=_LAYOUT_ADVICE)
            replicas = compare_headers(call, agreement.rows, state, details=DETAILS)
        if not replicas.identical:
            raise divergence_error(call, replicas)
        settings = partial(settings_of, target.group, synchronizer.settings, module, held)
        with state_set_aside(module, [model, *held_modules(run).values()], statistics) as saved:
            passes = Passes(run, model, module, saved, classes)
            report = _compare_runs(call, passes, data, settings, with_operations=operations)
        if raises and not report.agrees:
            raise _error(call, report)
    return report


class CrossCheck:
    """:func:`cross_check` in every Nth call, for a training loop.

    Every rank calls the object once per step, at the same place. Each rank counts its calls. If the counts differ, the
    ranks make different collectives, and a call raises a DesyncError.

    Args:
        model, run: as of :func:`cross_check`, and so are all arguments below ``every``.
        every: the number of steps from a check to the next; the first check is in call ``every``.
        operations, local_buffers, max_bytes, process_group: with the same defaults.
        raises: True by default.

    Raises:
        TypeError, ValueError: an argument is not usable; only on this rank, before any call.

    Example:
        >>> check = CrossCheck(model, lambda model, batch: model(batch).sum(), every=2)
        >>> [check(inputs) is not None for step in range(5)]
        [False, True, False, True, False]
    """

    @argument_errors
    def __init__(
        self,
        model: nn.Module,
        run: Run,
        *,
        every: int,
        operations: bool = False,
        local_buffers: Iterable[str] | None = None,
        max_bytes: int = MAX_BYTES,
        raises: bool = True,
        process_group: dist.ProcessGroup | DeviceMesh | None = None,
    ) -> None:
        self.calls = 0
        self._every = as_count("every", every)
        _check_functions(model, run)
        _check_group(model, process_group)
        options = _check_options(operations, local_buffers, max_bytes, raises)
        self._check: Callable[..., CrossCheckReport] = partial(
            cross_check, model, run, **options, process_group=process_group
        )

    def __call__(self, batch: Any) -> CrossCheckReport | None:
        """The report of a check; None if this call makes none."""
        self.calls += 1
        return None if self.calls % self._every else self._check(batch=batch)


def _check_options(
    operations: bool, local_buffers: Iterable[str] | None, max_bytes: int, raises: bool
) -> dict[str, Any]:
    """The options of :func:`cross_check` by name, with a tuple for ``local_buffers`` that is not None."""
    expected = "expected a whole number of bytes, 1 or more"
    if not isinstance(max_bytes, int) or isinstance(max_bytes, bool):
        raise TypeError(f"max_bytes is of the wrong type: got {max_bytes!r}, {expected}")
    if max_bytes < 1:
        raise ValueError(f"max_bytes is not usable: got {max_bytes}, {expected}")
    return {
        "operations": as_flag("operations", operations),
        "local_buffers": None if local_buffers is None else as_names(local_buffers, "local_buffers"),
        "max_bytes": max_bytes,
        "raises": as_flag("raises", raises),
    }


def _check_functions(module: object, run: object) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(f"model is of the wrong type: got {type(module).__name__}, expected torch.nn.Module")
    if not callable(run):
        got = repr(run) if run is None or isinstance(run, int | float | str) else f"a {type(run).__name__}"
        raise TypeError(f"run is not callable: got {got}, expected run(model, batch)")


def _check_group(model: nn.Module, process_group: object) -> None:
    if process_group is not None and isinstance(internals.inside_of_compiled(model), LegacyDistributedDataParallel):
        raise ValueError(
            "process_group is the wrapper's own, expected None; leave it out, or pass the module inside of the wrapper"
        )


def _check_initialised(module: nn.Module) -> None:
    for kind, named in (("parameter", module.named_parameters()), ("buffer", module.named_buffers())):
        if lazy := [name for name, tensor in named if is_lazy(tensor)]:
            raise ValueError(
                f"{kind} {lazy[0]!r} is not initialised yet (lazy module), expected a model with values; run one "
                "forward pass before cross_check()"
            )


def _own_tensors(target: Target, local: Iterable[str]) -> dict[str, torch.Tensor]:
    """The parameters and buffers in which this rank has values of its own: ignored, statistics, or ``local``."""
    module, statistics = target.module, internals.statistics_names(target.module)
    parameters = distinct(module.named_parameters(remove_duplicate=False))
    buffers = distinct(module.named_buffers(remove_duplicate=False))
    own = [item for item in (*parameters, *buffers) if target.ignore.intersection(item.names)]
    own += [
        item
        for item in buffers
        if statistics.intersection(item.names)
        or any(fnmatchcase(name, pattern) for name in item.names for pattern in local)
    ]
    return {item.name: item.tensor.detach() for item in own}


def _shared_state(target: Target, own: Mapping[str, torch.Tensor]) -> LocalState:
    buffers = distinct(target.module.named_buffers(remove_duplicate=False))
    return LocalState(
        [
            *replica_state.parameters(target.module, target.ignore),
            *replica_state.buffer_items(item for item in buffers if item.name not in own),
        ]
    )


def _pack(
    batch: Any, module: nn.Module, own: Mapping[str, torch.Tensor], max_bytes: int
) -> tuple[torch.Tensor, Classes]:
    """The parcel of this rank, empty without a batch, and the classes in the batch."""
    if batch is None:
        return torch.empty(0, dtype=torch.uint8, device="cpu"), {}
    data, classes = pack(batch, generator_states(module), own)
    if data.numel() > max_bytes:
        raise ValueError(
            f"batch is too large: got {format_bytes(data.numel())} with generators and buffers, expected at most "
            f"{format_bytes(max_bytes)}; pass a smaller batch, or a larger max_bytes="
        )
    return data, classes


def _describe(module: nn.Module, run_values: Mapping[str, Any], arguments: Mapping[str, object]) -> dict[str, str]:
    """What the ranks compare before the runs, as text: arguments, parameters, buffers, and tensors inside of ``run``.

    ``run_values``: see :func:`held_values`.
    """
    tensors = {name: value for name, value in run_values.items() if isinstance(value, torch.Tensor)}
    items = [replica_state.StateItem("", name, replica_state.comparable(value)) for name, value in tensors.items()]
    return {
        **{f"argument {name}": str(value) for name, value in arguments.items()},
        **build_inventory(distinct(module.named_parameters(remove_duplicate=False)), kind="parameter"),
        **build_inventory(distinct(module.named_buffers(remove_duplicate=False)), kind="buffer"),
        **{f"tensor in {name}": text for name, text in describe_items(items).items()},
    }


def _compare_runs(
    call: Call,
    passes: Passes,
    data: torch.Tensor,
    settings: Callable[[], RankSettings],
    *,
    with_operations: bool,
) -> CrossCheckReport:
    """The report, equal on all ranks.

    ``data``: the parcel of this rank, empty without a batch. ``settings``: of this rank, called after a difference.
    """
    size, compared = call.groups.size, len(passes.names)
    ring = run_ring(call, passes, data, with_operations=with_operations)
    batches = differing_batches(ring.on_its_rank, ring.on_next_rank)
    if not batches:
        return CrossCheckReport(str(call), size, compared=compared)
    trial = try_batch(call, passes, ring, choose_batch(batches, size), data)
    place = locate(call, passes, trial)
    with call.phase("compare"):
        differences = differing_settings([RankSettings(*row) for row in call.gather_objects(settings())])
    return report_of(str(call), size, compared, trial.batch, trial.verdict, trial.differing, place, differences)


def _error(call: Call, report: CrossCheckReport) -> ReplicaDivergenceError:
    error = ReplicaDivergenceError(str(report), ranks=report.ranks, call=call.number, phase="run")
    error.report = report
    return error
