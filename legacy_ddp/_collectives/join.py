"""Uneven inputs: what does a rank do for the others when it has run out of data? torch's Join asks.

Every call of a rank that still has data begins with a notice on the user's own group. A rank without answers it there,
and then stands in for one call, so the notice comes before the header, and all_reduce() has to come first of all that
communicates in a step.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from legacy_ddp import _torch as internals
from legacy_ddp._agreement.header import Flag
from legacy_ddp._errors import LegacyDDPError
from legacy_ddp._watchdog import OUT_OF_DATA, USER_CODE, process_activity

_OUTSIDE = internals.JoinConfig(enable=False, throw_on_early_termination=False, is_first_joinable=False)


class Joining(Joinable):
    """A wrapper as torch's Join sees it."""

    module: nn.Module

    @contextmanager
    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Iterator[None]:
        """Let ranks have different numbers of steps: who leaves the block stands in for the others until all did.

        Collective, as torch DDP's context of the same name. Every step inside makes one :meth:`all_reduce` (which now
        begins with one more small collective, on :attr:`process_group`). A rank that ran out of data gives nothing to
        it and does not step. In the end every ``.grad`` (but of ``ignore=``) is None, also what was accumulated since
        the last call, and all have the parameters and buffers of the highest rank among those that left last. Optimizer
        state is not synchronised: with momentum, say, replicas part in the next epoch unless you see to it.

        Simpler, without that collective and with equal optimizers: let every rank make as many steps, and those
        without data pass ``sample_size=0``.

        No other collective belongs into the block, and any error ends it: leave it then, on every rank. A rank that has
        left waits inside torch's Join, under the timeout of the process group and not under ``timeout_seconds``; and a
        process that an error took out of the block can only end when that has passed. So give the group a short one.

        Args:
            divide_by_initial_world_size: a plain mean counts the ranks that left as zeros; False: it is the mean over
                those that still have data. ``sample_size`` divides by the items there are either way.
            enable: False: do nothing.
            throw_on_early_termination: raise a RuntimeError on all ranks as soon as one has left.

        ``Join([model, zero_optimizer])`` composes it with others. It has to be the first of them.

        Raises:
            LegacyDDPError: a broadcast, a check of replicas or another process group inside: ranks that left would not
                take part.
            ValueError: it is not the first in ``Join([...])``.
        """
        before = self._join_config
        try:
            with Join(
                [self],
                enable,
                throw_on_early_termination,
                divide_by_initial_world_size=divide_by_initial_world_size,
            ):
                yield
                process_activity.enter(OUT_OF_DATA)
        finally:
            process_activity.enter(USER_CODE)
            self._join_config = before

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """What a rank that left does; ``divide_by_initial_world_size`` as for :meth:`join`."""
        return _StandIn(self, is_counted=bool(kwargs.get("divide_by_initial_world_size", True)))

    @property
    def join_device(self) -> torch.device:
        """Where torch's Join keeps what it exchanges: with the parameters."""
        return next((parameter.device for parameter in self.module.parameters()), torch.device("cpu"))

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """The group that torch's Join exchanges it on."""
        return self.process_group

    @property
    @abstractmethod
    def process_group(self) -> dist.ProcessGroup:
        """The group that the ranks meet in."""

    @abstractmethod
    def _stand_in(self, flags: Flag) -> None:
        """Make the call that other ranks make, without gradients."""

    @abstractmethod
    def _drop_gradients(self) -> None:
        """Make every ``.grad`` that is reduced here None, and forget what was accumulated."""

    @abstractmethod
    def broadcast_parameters(self, src: int = 0) -> None:
        """Collective: give every rank those of ``src``."""

    @abstractmethod
    def broadcast_buffers(self, src: int = 0) -> None:
        """Collective: likewise."""

    @property
    def _join_config(self) -> internals.JoinConfig:
        found: internals.JoinConfig = self.__dict__.get("_joining", _OUTSIDE)
        return found

    @_join_config.setter
    def _join_config(self, config: internals.JoinConfig) -> None:
        """torch's Join sets it when it is constructed, on every rank: early enough to refuse what would hang."""
        if config.enable and not config.is_first_joinable:
            raise ValueError(
                "Join([...]) has this wrapper behind another one, where ranks that left would wait elsewhere than in "
                "all_reduce(), expected it first; write Join([model, ...])"
            )
        self.__dict__["_joining"] = config

    @property
    def _notice(self) -> Callable[[], Any] | None:
        """What tells torch's Join that this rank still has data, and returns a collective to wait for, or None."""
        return self._notify if self._join_config.enable else None

    def _notify(self) -> Any:
        work = Join.notify_join_context(self)
        if work is not None and self.join_device.type != "cpu":
            work.wait()  # of the stream
            return None
        return work

    @contextmanager
    def _ending_join(self) -> Iterator[None]:
        """An error in a call ends the join for all, as torch's Join does not hear of it."""
        try:
            yield
        except BaseException:
            self._join_config = _OUTSIDE
            raise

    def _refuse_inside_join(self, what: str) -> None:
        """Refuse a collective that ranks which left would not take part in.

        Raises:
            LegacyDDPError: inside a join.
        """
        if self._join_config.enable:
            raise LegacyDDPError(
                f"{what} was called inside join(): ranks that have left it would not take part; "
                "call it before or behind the block"
            )


class _StandIn(JoinHook):
    def __init__(self, wrapper: Joining, *, is_counted: bool) -> None:
        self._wrapper = wrapper
        self._flags = Flag.JOINED | Flag.COUNTED if is_counted else Flag.JOINED

    def main_hook(self) -> None:
        """Another rank takes a step."""
        self._wrapper._stand_in(self._flags)
        process_activity.enter(OUT_OF_DATA)

    def post_hook(self, is_last_joiner: bool) -> None:
        """All have left: the last ones' model is everybody's."""
        wrapper = self._wrapper
        wrapper._join_config = _OUTSIDE
        # Who stood in holds the others' mean; where zero_grad() follows step(), it would be added to the next epoch.
        wrapper._drop_gradients()
        group = wrapper.process_group
        rank = dist.get_rank(group)
        last = torch.tensor([rank if is_last_joiner else -1], device=wrapper.join_device)
        dist.all_reduce(last, op=dist.ReduceOp.MAX, group=group)
        wrapper.broadcast_parameters(int(last.item()))
        wrapper.broadcast_buffers(int(last.item()))
