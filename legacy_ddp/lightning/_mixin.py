"""The common part of the strategies of the Trainer and of Fabric: the wrapper's arguments, and the registration."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from lightning.fabric.strategies.registry import _StrategyRegistry
from torch import nn

from legacy_ddp._argument_errors import argument_errors
from legacy_ddp._checks import Checks, Level, LossScaler, as_names, resolve_checks
from legacy_ddp._errors import UnsynchronizedStepError
from legacy_ddp._settings import Settings
from legacy_ddp._unsupported import refuse_unknown
from legacy_ddp._wrapper import LegacyDistributedDataParallel
from legacy_ddp.lightning._arguments import INSTEAD
from legacy_ddp.lightning._shutdown import set_up_exit

_START_METHODS = {"legacy_ddp": "popen", "legacy_ddp_spawn": "spawn", "legacy_ddp_fork": "fork"}


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
        refuse_unknown(type(self), kwargs, StrategyMixin.__init__, super().__init__, instead=INSTEAD)
        del find_unused_parameters  # there is nothing to search
        # Check here, in a single process, before ranks are started.
        settings = Settings(
            buffer_size=buffer_size,
            gradient_as_bucket_view=gradient_as_bucket_view,
            reduce_dtype=reduce_dtype,
            ignore=frozenset(as_names(ignore, "ignore")),
            checks=resolve_checks(checks),
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
