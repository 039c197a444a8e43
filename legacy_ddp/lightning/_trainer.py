"""The strategy for ``lightning.pytorch.Trainer``."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import nn

from legacy_ddp._errors import LostPeerError, argument_errors
from legacy_ddp._record import SyncRecord
from legacy_ddp._wrapper import LegacyDistributedDataParallel
from legacy_ddp.lightning._mixin import StrategyMixin, end_children


class LegacyDDPStrategy(StrategyMixin, DDPStrategy):
    """Lightning's DDPStrategy with :class:`legacy_ddp.LegacyDistributedDataParallel` in place of torch DDP.

    ``all_reduce()`` follows every backward pass, except while Lightning accumulates. It runs before
    ``on_after_backward``, unscaling and clipping. Rank 0's buffers are sent before validation and at the end of
    training; torch DDP sends them in every forward. ``trainer.model`` is the wrapper while ``fit`` runs; ``record`` is
    the result of the last ``all_reduce()``, None before the first call.

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
        """Run backward, then ``all_reduce()``, which does nothing while Lightning accumulates. Collective.

        The call is between the two halves of Lightning's own ``backward()``. After the second half gradients would be
        unscaled and clipped before the reduction, so that ranks diverge, and ``on_after_backward`` would see gradients
        of a single rank.
        """
        precision, module = self.precision_plugin, self.lightning_module
        if module is None:
            raise RuntimeError("backward() has no LightningModule; call it from a Trainer that fits one")
        self.pre_backward(closure_loss)
        loss = precision.pre_backward(closure_loss, module)
        precision.backward(loss, module, optimizer, *args, **kwargs)
        if isinstance(self.model, LegacyDistributedDataParallel):
            self.record = self.model.all_reduce()
        loss = precision.post_backward(loss, module)
        self.post_backward(loss)
        return loss

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Accumulate inside the block: its backward passes stay on this rank."""
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
        """End the ranks launched by this process as scripts when a rank is lost: a rank that hangs would live on."""
        super().on_exception(exception)
        if isinstance(exception, LostPeerError):
            end_children(self._launcher)

    def teardown(self) -> None:
        """Unwrap, then do the teardown of Lightning."""
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
