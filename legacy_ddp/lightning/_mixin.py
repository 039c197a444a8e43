"""The common part of the strategies of the Trainer and of Fabric: arguments, registration, end of the process."""

import atexit
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.strategies.registry import _StrategyRegistry
from torch import nn

from legacy_ddp._check_settings import Checks, Level, LossScaler, as_checks, as_names
from legacy_ddp._environment import resolve_checks, resolve_timeout
from legacy_ddp._errors import UnsynchronizedStepError, argument_errors
from legacy_ddp._settings import INSTEAD, Settings, refuse_unknown
from legacy_ddp._wrapper import LegacyDistributedDataParallel

_START_METHODS = {"legacy_ddp": "popen", "legacy_ddp_spawn": "spawn", "legacy_ddp_fork": "fork"}
# Enough for a rank that is about to end to show its own error. A rank that hangs takes the full time.
_GRACE_SECONDS = 5.0
_BUFFERS = (
    "leave it out: rank 0's buffers are sent before validation and at the end of training, those in ignore= are not; "
    "with Fabric call fabric.strategy.broadcast_buffers()"
)
_DEVICE = "leave it out: the module stays on the device that Lightning gave it"
_GROUP = "leave it out: the strategy trains on all ranks of the job"
_HOOK = "register it after fabric.setup(): model._forward_module.register_comm_hook(state, hook)"
# Arguments that a strategy does not take, each with the alternative.
_INSTEAD = {
    **INSTEAD,
    "broadcast_buffers": _BUFFERS,
    "forward_sync_buffers": _BUFFERS,
    "ddp_comm_hook": _HOOK,
    "ddp_comm_state": _HOOK,
    "ddp_comm_wrapper": _HOOK,
    "device_ids": _DEVICE,
    "device_mesh": _GROUP,
    "dim": _DEVICE,
    "mixed_precision": "use precision= of the Trainer or of Fabric, and reduce_dtype",
    "model_averaging_period": "with Fabric average in the loop: backward and step inside fabric.no_backward_sync()",
    "output_device": _DEVICE,
    "process_group": _GROUP,
    "reproducible": "it needs the number of items in every step, which Lightning's loop does not pass on; "
    "wrap the model in a loop of your own, as docs/reproducible.md does",
    "world_size": "use devices= and num_nodes= of the Trainer or of Fabric",
}


class StrategyMixin:
    """Takes the wrapper's arguments and makes the wrapper. A base class to the left of a DDPStrategy of Lightning."""

    @argument_errors
    def __init__(
        self,
        *,
        buffer_size: int = 2**28,
        init_sync: bool = True,
        gradient_as_bucket_view: bool = True,
        reduce_dtype: torch.dtype | None = None,
        ignore: Iterable[str] = (),
        checks: Level | Checks = "info",
        timeout_seconds: float | None = None,
        find_unused_parameters: bool = False,
        **kwargs: Any,
    ) -> None:
        refuse_unknown(type(self), kwargs, StrategyMixin.__init__, super().__init__, instead=_INSTEAD)
        del find_unused_parameters  # there is nothing to search
        # Check here, in a single process, before ranks are started; the wrapper of a rank reads the environment itself.
        resolve_checks(checks)
        resolve_timeout(timeout_seconds)
        settings = Settings(
            buffer_size=buffer_size,
            gradient_as_bucket_view=gradient_as_bucket_view,
            reduce_dtype=reduce_dtype,
            ignore=frozenset(as_names(ignore, "ignore")),
            checks=as_checks(checks),
            timeout_seconds=timeout_seconds,
        )
        if not isinstance(init_sync, bool):
            raise TypeError(f"init_sync is not usable: got {init_sync!r}, expected True or False")
        super().__init__(**kwargs)
        self._init_sync = init_sync
        self._settings = settings

    def setup_environment(self) -> None:
        """Make the process group, and set up the exit of this process."""
        super().setup_environment()  # type: ignore[misc]  # of the class that comes next
        set_up_exit(self._launcher)  # type: ignore[attr-defined]

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        """Step. The error for a forgotten reduction gets a note with the calls of Lightning."""
        try:
            return super().optimizer_step(*args, **kwargs)  # type: ignore[misc]  # of the class that comes next
        except UnsynchronizedStepError as error:
            error.add_note(
                "under Lightning replace loss.backward() by self.manual_backward(loss), with Fabric by "
                "fabric.backward(loss): all_reduce() is part of it"
            )
            raise

    def _wrap(self, module: nn.Module, scaler: LossScaler | None) -> LegacyDistributedDataParallel:
        """Collective: the wrapper. ``scaler``: of Lightning, for the checks unless ``checks`` has a scaler."""
        settings = self._settings
        checks = settings.checks
        if scaler is not None and checks.grad_scaler is None:
            checks = replace(checks, grad_scaler=scaler)
        return LegacyDistributedDataParallel(
            module,
            buffer_size=settings.buffer_size,
            init_sync=self._init_sync,
            gradient_as_bucket_view=settings.gradient_as_bucket_view,
            reduce_dtype=settings.reduce_dtype,
            ignore=settings.ignore,
            checks=checks,
            timeout_seconds=settings.timeout_seconds,
        )

    @classmethod
    def register_strategies(cls, strategy_registry: _StrategyRegistry) -> None:
        """Register the names; a second registration replaces the first."""
        for name, start_method in _START_METHODS.items():
            strategy_registry.register(
                name,
                cls,
                description=f"explicit all_reduce() after backward, processes by {start_method}",
                override=True,
                start_method=start_method,
            )


def end_children(launcher: object) -> None:
    """End the ranks launched by this process as scripts; kill the ranks that do not end within the grace time.

    Otherwise a rank that hangs outlives the process that launched the rank.
    """
    _end(_scripts(launcher))


def set_up_exit(launcher: object) -> None:
    """Destroy the process group at exit of this process. If an exception ends the process, end the launched ranks."""
    _destroy_at_exit()
    if _scripts(launcher):
        atexit.register(_end_if_failed, _scripts(launcher))  # runs before all exit functions registered earlier


def _scripts(launcher: object) -> list[subprocess.Popen[bytes]]:
    """The launcher's own list of launched scripts. Empty for multiprocessing, which ends its processes itself."""
    listed = getattr(launcher, "procs", [])
    return listed if all(isinstance(process, subprocess.Popen) for process in listed) else []


def _end(listed: list[subprocess.Popen[bytes]]) -> None:
    children = list(listed)
    # Lightning's observer thread reads this list. If it finds a failed process there, it kills this process, too,
    # before our error is shown.
    listed.clear()
    deadline = time.monotonic() + _GRACE_SECONDS
    for child in children:
        try:
            child.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def _end_if_failed(listed: list[subprocess.Popen[bytes]]) -> None:
    if getattr(sys, "last_value", None) is not None:  # the uncaught exception; Python has shown it
        _end(listed)


@cache
def _destroy_at_exit() -> None:
    # Lightning destroys the group for NCCL only. With gloo, a process that exits without destroying the group sometimes
    # aborts in a thread of torch.
    atexit.register(_destroy)


def _destroy() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
