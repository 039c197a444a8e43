"""Strategies for Lightning. The import registers ``legacy_ddp``, ``legacy_ddp_spawn`` and ``legacy_ddp_fork``.

For the package ``lightning`` only: the Trainer of ``pytorch_lightning`` has different classes and accepts none of these
strategies.
"""

import atexit
import subprocess
import sys
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from legacy_ddp._check_settings import Checks, Level, LossScaler, as_checks, as_names
from legacy_ddp._errors import LostPeerError, UnsynchronizedStepError, argument_errors, import_error
from legacy_ddp._record import SyncRecord
from legacy_ddp._settings import INSTEAD, Settings, refuse_unknown, resolve_checks, resolve_timeout
from legacy_ddp._wrapper import LegacyDistributedDataParallel

try:
    from lightning.fabric.strategies import STRATEGY_REGISTRY
    from lightning.pytorch.strategies import StrategyRegistry
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "lightning":  # a requirement of lightning is missing
        raise
    raise import_error(
        "legacy_ddp.lightning needs the package lightning, 2.4 or newer, and it is not installed (pytorch_lightning is "
        "a different package); run: pip install 'legacy_ddp[lightning]'"
    ) from error

from lightning.fabric.strategies.ddp import DDPStrategy as _FabricStrategy
from lightning.fabric.strategies.registry import _StrategyRegistry
from lightning.fabric.strategies.strategy import _BackwardSyncControl
from lightning.pytorch.strategies import DDPStrategy as _TrainerStrategy

__all__ = ["LegacyDDPFabricStrategy", "LegacyDDPStrategy"]

_START_METHODS = {"legacy_ddp": "popen", "legacy_ddp_spawn": "spawn", "legacy_ddp_fork": "fork"}
_GRACE_SECONDS = 5.0  # for a rank that is about to end, to show its own error
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


class _StrategyMixin:
    """Takes the wrapper's arguments and makes the wrapper. A base class before a DDPStrategy of Lightning."""

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
        refuse_unknown(type(self), kwargs, _StrategyMixin.__init__, super().__init__, instead=_INSTEAD)
        del find_unused_parameters  # there is nothing to search
        # Only checks, in one process, before ranks are started; the wrapper of a rank reads the environment itself.
        resolve_checks(checks)
        resolve_timeout(timeout_seconds)
        arguments: dict[str, Any] = {
            "buffer_size": buffer_size,
            "gradient_as_bucket_view": gradient_as_bucket_view,
            "reduce_dtype": reduce_dtype,
            "ignore": frozenset(as_names(ignore, "ignore")),
            "checks": as_checks(checks),
            "timeout_seconds": timeout_seconds,
        }
        Settings(**arguments)
        if not isinstance(init_sync, bool):
            raise TypeError(f"init_sync is not usable: got {init_sync!r}, expected True or False")
        super().__init__(**kwargs)
        self._arguments = {**arguments, "init_sync": init_sync}  # of the wrapper

    def setup_environment(self) -> None:
        super().setup_environment()  # type: ignore[misc]  # of the class that comes next
        set_up_exit(self._launcher)  # type: ignore[attr-defined]

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        """Step. The error for a forgotten reduction gets a note that names the calls of Lightning."""
        try:
            return super().optimizer_step(*args, **kwargs)  # type: ignore[misc]  # of the class that comes next
        except UnsynchronizedStepError as error:
            error.add_note(
                "under Lightning replace loss.backward() by self.manual_backward(loss), with Fabric by "
                "fabric.backward(loss): all_reduce() is part of it"
            )
            raise

    def _wrap(self, module: nn.Module, scaler: LossScaler | None) -> LegacyDistributedDataParallel:
        """Collective: the wrapper. ``scaler``: of Lightning, used if ``checks`` has no scaler."""
        checks: Checks = self._arguments["checks"]
        if scaler is not None and checks.grad_scaler is None:
            checks = replace(checks, grad_scaler=scaler)
        return LegacyDistributedDataParallel(module, **{**self._arguments, "checks": checks})

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


class LegacyDDPStrategy(_StrategyMixin, _TrainerStrategy):
    """Lightning's DDPStrategy with :class:`legacy_ddp.LegacyDistributedDataParallel` in place of torch DDP.

    ``all_reduce()`` follows every backward pass, except while Lightning accumulates. It runs before
    ``on_after_backward``, unscaling and clipping. Rank 0 sends its buffers before validation and at the end of
    training; with torch DDP it sends them in every forward. ``trainer.model`` is the wrapper while ``fit`` runs.
    ``record`` is the result of the last ``all_reduce()``, None before the first call.

    Args:
        buffer_size, init_sync, gradient_as_bucket_view, reduce_dtype, ignore, checks, timeout_seconds: as for the
            wrapper. ``checks`` use the GradScaler of ``precision="16-mixed"``.
        find_unused_parameters: accepted and without effect: unused parameters need no search.
        kwargs: arguments of Lightning's DDPStrategy: ``accelerator``, ``parallel_devices``,
            ``cluster_environment``, ``checkpoint_io``, ``precision_plugin``, ``ddp_comm_state``, ``ddp_comm_hook``,
            ``ddp_comm_wrapper``, ``model_averaging_period``, ``process_group_backend``, ``timeout`` (of the process
            group) and ``start_method``.

    Raises:
        TypeError: an argument is unknown, only for torch DDP, or of the wrong type.
        ValueError: an unusable value.

    Example:
        >>> strategy = LegacyDDPStrategy(checks="detail", timeout_seconds=600.0)
        >>> trainer = Trainer(strategy=strategy, accelerator="cpu", devices=2, logger=False)
    """

    @argument_errors
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.record: SyncRecord | None = None
        if self._ddp_comm_hook is not None and not callable(self._ddp_comm_hook):
            raise TypeError(f"ddp_comm_hook is not callable: got {self._ddp_comm_hook!r}, expected hook(state, bucket)")
        if self._ddp_comm_hook is None and (self._ddp_comm_state is not None or self._ddp_comm_wrapper is not None):
            raise ValueError(
                "ddp_comm_hook is missing: got None, and a ddp_comm_state or ddp_comm_wrapper; pass the hook, too"
            )

    def backward(
        self, closure_loss: torch.Tensor, optimizer: torch.optim.Optimizer | None, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """Run backward, then ``all_reduce()``. Collective, except while Lightning accumulates."""
        precision, module = self.precision_plugin, self.lightning_module
        if module is None:
            raise RuntimeError("backward() has no LightningModule; call it from a Trainer that fits one")
        self.pre_backward(closure_loss)
        loss = precision.pre_backward(closure_loss, module)
        precision.backward(loss, module, optimizer, *args, **kwargs)
        # Before post_backward(): after it, each rank would unscale and clip its own gradients before the reduction, so
        # that ranks diverge, and `on_after_backward` would see the gradients of one rank.
        if isinstance(self.model, LegacyDistributedDataParallel):
            self.record = self.model.all_reduce()
        loss = precision.post_backward(loss, module)
        self.post_backward(loss)
        return loss

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Accumulate gradients inside the block, without ``all_reduce()``."""
        with self.model.no_sync() if isinstance(self.model, LegacyDistributedDataParallel) else nullcontext():
            yield

    def on_validation_start(self) -> None:
        """Collective: validate with rank 0's buffers."""
        super().on_validation_start()
        self._broadcast_buffers()

    def on_train_end(self) -> None:
        """Collective: leave rank 0's buffers on every rank."""
        super().on_train_end()
        self._broadcast_buffers()

    def on_exception(self, exception: BaseException) -> None:
        """If a rank is lost, end the ranks that this process launched as scripts: one that hangs would go on."""
        super().on_exception(exception)
        if isinstance(exception, LostPeerError):
            _end(_scripts(self._launcher))

    def teardown(self) -> None:
        module = self.lightning_module
        if module is not None and isinstance(self.model, LegacyDistributedDataParallel):
            self.connect(module)
        super().teardown()

    def _setup_model(self, model: nn.Module) -> LegacyDistributedDataParallel:  # type: ignore[override]  # no torch DDP
        return self._wrap(model, getattr(self.precision_plugin, "scaler", None))

    def _register_ddp_hooks(self) -> None:
        if self._ddp_comm_hook is None or not isinstance(self.model, LegacyDistributedDataParallel):
            return
        hook = self._ddp_comm_hook if self._ddp_comm_wrapper is None else self._ddp_comm_wrapper(self._ddp_comm_hook)
        self.model.register_comm_hook(state=self._ddp_comm_state, hook=hook)

    def _broadcast_buffers(self) -> None:
        if isinstance(self.model, LegacyDistributedDataParallel):
            self.model.broadcast_buffers()


class LegacyDDPFabricStrategy(_StrategyMixin, _FabricStrategy):
    """Fabric's DDPStrategy with :class:`legacy_ddp.LegacyDistributedDataParallel` in place of torch DDP.

    ``fabric.backward(loss)`` ends with ``all_reduce()``, except inside ``fabric.no_backward_sync()``. With several
    models, it runs for each model that a backward has reached since the model's last call; ``model=`` names one model.

    Args:
        buffer_size, init_sync, gradient_as_bucket_view, reduce_dtype, ignore, checks, timeout_seconds: as for the
            wrapper. ``checks`` use the GradScaler of ``precision="16-mixed"``.
        find_unused_parameters: accepted and without effect: unused parameters need no search.
        kwargs: arguments of Fabric's DDPStrategy: ``accelerator``, ``parallel_devices``, ``cluster_environment``,
            ``checkpoint_io``, ``precision``, ``process_group_backend``, ``timeout`` (of the process group) and
            ``start_method``.

    Raises:
        TypeError: an argument is unknown, only for torch DDP, or of the wrong type.
        ValueError: an unusable value.

    Example:
        >>> strategy = LegacyDDPFabricStrategy(checks="detail", timeout_seconds=600.0)
        >>> fabric = Fabric(strategy=strategy, accelerator="cpu", devices=2)
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._backward_sync_control = _SyncControl()
        # In the order of set-up, equal on all ranks. A set would have another order on each rank.
        self._wrapped: list[weakref.ref[LegacyDistributedDataParallel]] = []

    def setup_module(self, module: nn.Module) -> LegacyDistributedDataParallel:  # type: ignore[override]  # no torch DDP
        """The wrapped module. Collective."""
        with self._ending_children():
            wrapper = self._wrap(module, getattr(self.precision, "scaler", None))
        self._wrapped.append(weakref.ref(wrapper))
        return wrapper

    def backward(self, tensor: torch.Tensor, module: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        """Run backward, then ``all_reduce()`` of ``module``, or of the models with new gradients. Collective."""
        super().backward(tensor, module, *args, **kwargs)
        with self._ending_children():
            for wrapper in self._to_reduce(module):
                wrapper.all_reduce()

    def broadcast_buffers(self) -> None:
        """Collective: give every rank the buffers of rank 0, for instance before evaluation.

        Without this call the BatchNorm statistics of the ranks drift apart.
        """
        with self._ending_children():
            for wrapper in self._alive():
                wrapper.broadcast_buffers()

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """State of the wrapped module: keys without a prefix."""
        return super().get_module_state_dict(_unwrapped(module))

    def load_module_state_dict(self, module: nn.Module, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        super().load_module_state_dict(_unwrapped(module), dict(state_dict), strict)

    def _to_reduce(self, module: nn.Module | None) -> list[LegacyDistributedDataParallel]:
        """The wrappers to reduce after a backward.

        A single model is always reduced: a rank whose loss did not reach the model counts as zeros. Of several models,
        only those with new gradients are reduced: an unused model may be garbage-collected on some ranks only.
        """
        if isinstance(module, LegacyDistributedDataParallel):
            return [module]
        alive = self._alive()
        return [wrapper for wrapper in alive if wrapper._synchronizer.planner.counter.micro_batches] or alive

    def _alive(self) -> list[LegacyDistributedDataParallel]:
        self._wrapped = [reference for reference in self._wrapped if reference() is not None]
        return [wrapper for reference in self._wrapped if (wrapper := reference()) is not None]

    @contextmanager
    def _ending_children(self) -> Iterator[None]:
        """End the launched ranks when a rank is lost. Fabric has no callback for errors."""
        try:
            yield
        except LostPeerError:
            _end(_scripts(self._launcher))
            raise


class _SyncControl(_BackwardSyncControl):
    """The implementation of ``fabric.no_backward_sync()``."""

    @argument_errors
    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        if not enabled:
            return nullcontext()
        if not isinstance(module, LegacyDistributedDataParallel):
            raise TypeError(
                f"no_backward_sync() got a {type(module).__name__}, expected a model that fabric.setup() returned; "
                "set it up with this strategy first"
            )
        return module.no_sync()


def _unwrapped(module: nn.Module) -> nn.Module:
    return module.module if isinstance(module, LegacyDistributedDataParallel) else module


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
    """Wait for the end of launched scripts; kill those that do not end within the grace time."""
    children = list(listed)
    # Lightning's observer thread reads this list. If it finds a failed process in it, it also kills this process,
    # before the error is shown.
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
    # Lightning destroys the group for NCCL only. With gloo, a process that exits with its group sometimes aborts in a
    # thread of torch.
    atexit.register(_destroy)


def _destroy() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


LegacyDDPStrategy.register_strategies(StrategyRegistry)
LegacyDDPFabricStrategy.register_strategies(STRATEGY_REGISTRY)
