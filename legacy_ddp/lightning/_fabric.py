"""The strategy for ``lightning.fabric.Fabric``."""

import weakref
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from lightning.fabric.strategies.ddp import DDPStrategy
from lightning.fabric.strategies.strategy import _BackwardSyncControl
from torch import nn

from legacy_ddp._errors import LostPeerError, argument_errors
from legacy_ddp._wrapper import LegacyDistributedDataParallel
from legacy_ddp.lightning._mixin import StrategyMixin, end_children


class LegacyDDPFabricStrategy(StrategyMixin, DDPStrategy):
    """Fabric's DDPStrategy with :class:`legacy_ddp.LegacyDistributedDataParallel` in place of torch DDP.

    ``fabric.backward(loss)`` ends with ``all_reduce()``, which does nothing inside ``fabric.no_backward_sync()``. With
    several models ``all_reduce()`` runs for every model that a backward has reached since the model's last call;
    ``model=`` names a single model.

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
        # In the order of set-up, which is the same on all ranks; a set would have a different order on each rank.
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
        """Load into the wrapped module."""
        super().load_module_state_dict(_unwrapped(module), dict(state_dict), strict)

    def _to_reduce(self, module: nn.Module | None) -> list[LegacyDistributedDataParallel]:
        """The wrappers to reduce after a backward.

        A single model is always reduced: if the loss of a rank did not reach the model, the rank counts as zeros. With
        several models only models with new gradients are reduced: a model out of use may be garbage-collected on some
        ranks and not on others.
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
            end_children(self._launcher)
            raise


class _SyncControl(_BackwardSyncControl):
    """The implementation of ``fabric.no_backward_sync()``."""

    @argument_errors
    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        """The wrapper's ``no_sync()``, if ``enabled``."""
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
