"""The strategy for ``lightning.fabric.Fabric``."""

import weakref
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from lightning.fabric.strategies.ddp import DDPStrategy
from lightning.fabric.strategies.strategy import _BackwardSyncControl
from torch import nn

from legacy_ddp._errors import LostPeerError
from legacy_ddp._wrapper import LegacyDistributedDataParallel
from legacy_ddp.lightning._ending import end_children
from legacy_ddp.lightning._wrapping import Wrapping


class LegacyDDPFabricStrategy(Wrapping, DDPStrategy):
    """Fabric's DDPStrategy with :class:`legacy_ddp.LegacyDistributedDataParallel` in place of torch DDP.

    ``fabric.backward(loss)`` ends with ``all_reduce()``, which does nothing inside ``fabric.no_backward_sync()``. Of
    several models it reduces those that this backward, or one since their last call, reached; ``model=`` says which.

    Args:
        buffer_size, init_sync, gradient_as_bucket_view, reduce_dtype, ignore, checks, timeout_seconds: the wrapper's.
            ``checks`` are told of the GradScaler of ``precision="16-mixed"``.
        find_unused_parameters: accepted and without effect: a parameter that no rank used needs no search.
        kwargs: those that Fabric's DDPStrategy names: ``accelerator``, ``parallel_devices``, ``cluster_environment``,
            ``checkpoint_io``, ``precision``, ``process_group_backend``, ``timeout`` (of the process group) and
            ``start_method``.

    Raises:
        TypeError: an argument of torch DDP alone, of nobody, or of the wrong type.
        ValueError: an unusable value.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._backward_sync_control = _SyncControl()
        # In the order of their set-up, which ranks share; a set of references has an order of its own on each.
        self._wrapped: list[weakref.ref[LegacyDistributedDataParallel]] = []

    def setup_module(self, module: nn.Module) -> LegacyDistributedDataParallel:  # type: ignore[override]  # no torch DDP
        """Wrap. Collective."""
        with self._ending_children():
            wrapper = self._wrap(module, getattr(self.precision, "scaler", None))
        self._wrapped.append(weakref.ref(wrapper))
        return wrapper

    def backward(self, tensor: torch.Tensor, module: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        """Run backward, then ``all_reduce()`` of ``module``, or of what it reached. Collective."""
        super().backward(tensor, module, *args, **kwargs)
        with self._ending_children():
            for wrapper in self._to_reduce(module):
                wrapper.all_reduce()

    def broadcast_buffers(self) -> None:
        """Collective: give every rank the buffers of rank 0, for instance before evaluation.

        Nothing else does: BatchNorm statistics drift apart.
        """
        with self._ending_children():
            for wrapper in self._alive():
                wrapper.broadcast_buffers()

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """State of the module itself: keys without a prefix."""
        return super().get_module_state_dict(_unwrapped(module))

    def load_module_state_dict(self, module: nn.Module, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Load into the module itself."""
        super().load_module_state_dict(_unwrapped(module), dict(state_dict), strict)

    def _to_reduce(self, module: nn.Module | None) -> list[LegacyDistributedDataParallel]:
        """Of one model every backward is reduced, so that a rank whose loss did not reach it counts as zeros.

        Of several, one that is out of use may be garbage that one rank has collected and another has not.
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
        """When a rank is lost: end those launched from here. Fabric has no other place for it."""
        try:
            yield
        except LostPeerError:
            end_children(self._launcher)
            raise


class _SyncControl(_BackwardSyncControl):
    """What ``fabric.no_backward_sync()`` asks."""

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
