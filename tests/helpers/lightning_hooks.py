"""Trainings in which a communication hook takes the place of the sum: stories of ``lightning_jobs.py``."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook

from legacy_ddp.lightning import LegacyDDPStrategy
from tests.helpers.lightning_modules import Plain, Sharded, fit, state
from tests.helpers.lightning_scenarios import RANKS, Result


class _ForCPU(DDPStrategy):
    """Lightning registers hooks on CUDA only; this is what it does there."""

    def _register_ddp_hooks(self) -> None:
        hook = self._ddp_comm_hook if self._ddp_comm_wrapper is None else self._ddp_comm_wrapper(self._ddp_comm_hook)
        self.model.register_comm_hook(state=self._ddp_comm_state, hook=hook)


def _wrapped_hook(hook: Any) -> Any:
    def negated(passed: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        return hook(passed, bucket).then(lambda future: -future.value())

    return negated


def hooked(strategy: str, folder: Path) -> Result:
    """Gradients travel in fp16, and a wrapper of the hook turns their sign."""
    module = Plain()
    fit(_with_hook(strategy, ddp_comm_hook=fp16_compress_hook, ddp_comm_wrapper=_wrapped_hook), module)
    return state(module)


def averaging_of_sharded(strategy: str, folder: Path) -> Result:
    """Averaging does not go with an optimizer that is distributed itself."""
    options = {"ddp_comm_hook": post_localSGD_hook, "model_averaging_period": 2}
    passed = PostLocalSGDState(process_group=None, subgroup=None, start_localSGD_iter=2)
    try:
        fit(_with_hook(strategy, ddp_comm_state=passed, **options), Sharded())
    except ValueError as error:
        return {"error": str(error)}
    return {}


def local_sgd(strategy: str, folder: Path) -> Result:
    """Two steps together, then four alone with the weights averaged after every second."""
    module = Plain()
    alone = [dist.new_group([rank]) for rank in range(RANKS)][dist.get_rank()]
    passed = PostLocalSGDState(process_group=None, subgroup=alone, start_localSGD_iter=2)
    options = {"ddp_comm_state": passed, "ddp_comm_hook": post_localSGD_hook, "model_averaging_period": 2}
    fit(_with_hook(strategy, **options), module)
    return state(module)


def _with_hook(strategy: str, **options: Any) -> DDPStrategy:
    return _ForCPU(**options) if strategy == "ddp" else LegacyDDPStrategy(**options)
