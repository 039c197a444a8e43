"""Uneven inputs: the interface to torch's Join.

Every call of a rank with data begins with a notice on the user's own group, before the header. A rank without data
answers the notice and then takes part in the call without gradients. So all_reduce() must be the first communication
of a step.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from legacy_ddp import _torch as internals
from legacy_ddp._call.all_reduce import all_reduce
from legacy_ddp._call.broadcast import broadcast_buffers, broadcast_parameters
from legacy_ddp._call.pack import Arguments
from legacy_ddp._call.state import Synchronizer
from legacy_ddp._errors import LegacyDDPError, argument_errors
from legacy_ddp._interrupts import undone_by
from legacy_ddp._memory.plan import parameter_columns
from legacy_ddp._ranks.header import Flag
from legacy_ddp._ranks.private_groups import GroupHandle
from legacy_ddp._watchdog import OUT_OF_DATA, USER_CODE, process_activity

_OUTSIDE = internals.JoinConfig(enable=False, throw_on_early_termination=False, is_first_joinable=False)


class Joining(Joinable):
    """The interface of a wrapper to torch's Join."""

    module: nn.Module
    _synchronizer: Synchronizer
    _group: GroupHandle
    _joining: internals.JoinConfig | None = None  # None outside of a join(): a call tests this attribute alone

    @contextmanager
    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Iterator[None]:
        """Let ranks have different numbers of steps. A rank at the end of the block takes part in the calls of the
        other ranks, without gradients, until every rank has left.

        Collective, as torch DDP's context of the same name. Every step inside makes an :meth:`all_reduce`, which now
        begins with a further small collective, on :attr:`process_group`. A rank without data contributes no gradients
        and does not step. At the end every ``.grad`` is None (except of ``ignore=``), also gradients accumulated since
        the last call, and every rank has the parameters and buffers of the rank that left last (the highest of
        several). Optimizer state is not synchronised: with momentum, for example, replicas diverge in the next epoch
        unless you synchronise the optimizers.

        Simpler, without that collective and with equal optimizers: let every rank make the same number of steps, and
        pass ``sample_size=0`` on ranks without data.

        Make no other collective in the block. Any error ends the join: leave the block then, on every rank. A rank at
        the end of the block waits inside torch's Join, under the timeout of the process group and not under
        ``timeout_seconds``. After an error a process can end only when this timeout has passed: give the group a short
        timeout.

        Args:
            divide_by_initial_world_size: a plain mean counts the ranks that left as zeros; False: the mean is over the
                ranks with data. ``sample_size`` divides by the number of items in both cases.
            enable: False: do nothing.
            throw_on_early_termination: raise a RuntimeError on all ranks as soon as any rank has left.

        ``Join([model, zero_optimizer])`` combines the wrapper with other objects. The wrapper must be the first.

        Raises:
            LegacyDDPError: a broadcast, a check of replicas or a new process group inside: ranks at the end of the
                block would not take part.
            ValueError: the wrapper is not the first in ``Join([...])``.
        """
        before = self._joining
        with (
            undone_by(partial(process_activity.enter, USER_CODE)),
            undone_by(partial(setattr, self, "_joining", before)),
            Join(
                [self],
                enable,
                throw_on_early_termination,
                divide_by_initial_world_size=divide_by_initial_world_size,
            ),
        ):
            yield
            process_activity.enter(OUT_OF_DATA)

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Actions of a rank at the end of the block; ``divide_by_initial_world_size`` as for :meth:`join`."""
        is_counted = bool(kwargs.get("divide_by_initial_world_size", True))
        return _StandIn(self, Flag.JOINED | Flag.COUNTED if is_counted else Flag.JOINED)

    @property
    def join_device(self) -> torch.device:
        """Device of the tensors exchanged by torch's Join: the device of the parameters."""
        return next((parameter.device for parameter in self.module.parameters()), torch.device("cpu"))

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """Process group for the exchanges of torch's Join."""
        return self._group.resolve()

    @property
    def _join_config(self) -> internals.JoinConfig:
        return self._joining or _OUTSIDE

    @_join_config.setter
    @argument_errors
    def _join_config(self, config: internals.JoinConfig) -> None:
        # torch's Join() sets the configuration on every rank: early enough to refuse what would hang.
        if config.enable and not config.is_first_joinable:
            raise ValueError(
                "the wrapper is not the first in Join([...]): got it behind another object, expected it first, because "
                "ranks that left wait for a collective of the first object; write Join([model, ...])"
            )
        self._joining = config if config.enable else None

    def _notify(self) -> Any:
        """Start the notice of this rank to torch's Join. Returns a collective to wait for, or None."""
        work = Join.notify_join_context(self)
        if work is not None and self.join_device.type != "cpu":
            work.wait()  # of the stream
            return None
        return work

    def _refuse_inside_join(self, operation: str) -> None:
        if self._joining is not None:
            raise LegacyDDPError(
                f"{operation} was called inside join(): ranks that have left the block would not take part; "
                "call it before or after the block"
            )


class _StandIn(JoinHook):
    """What a rank does after its end of data, while other ranks still make calls."""

    def __init__(self, wrapper: Joining, flags: int) -> None:
        self._wrapper = wrapper
        self._synchronizer = wrapper._synchronizer
        self._flags = flags

    def main_hook(self) -> None:
        """Collective: take part in the call of a rank with data, without gradients."""
        synchronizer, wrapper = self._synchronizer, self._wrapper
        parameters = partial(synchronizer.planner.walk.columns, wrapper.module)
        part = Arguments(sample_size=0) if synchronizer.settings.reproducible else Arguments(skip=True)
        try:
            all_reduce(synchronizer, parameters, wrapper.join_process_group, part, flags=self._flags)
        except BaseException:
            wrapper._joining = None
            raise
        synchronizer.warnings.emit()
        process_activity.enter(OUT_OF_DATA)

    def post_hook(self, is_last_joiner: bool) -> None:
        """Collective: give every rank the model of the rank that left last (the highest of several)."""
        wrapper = self._wrapper
        wrapper._joining = None
        # On a rank that left, .grad holds the mean of the others. If the loop calls zero_grad() after step(), backward
        # would add to this mean in the next epoch.
        for parameter in self._synchronizer.planner.plan(parameter_columns(wrapper.module)).parameters:
            parameter.grad = None
        self._synchronizer.forget_step()
        group = wrapper.join_process_group
        rank = dist.get_rank(group)
        last = torch.tensor([rank if is_last_joiner else -1], device=wrapper.join_device)
        dist.all_reduce(last, op=dist.ReduceOp.MAX, group=group)
        source = int(last.item())
        for broadcast in (broadcast_parameters, broadcast_buffers):
            broadcast(self._synchronizer, wrapper.module, group, src=source)
