"""Observer of optimizer steps since the last call, with their settings; a warning about optimizers of other models."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from legacy_ddp import _torch as internals
from legacy_ddp._log import warn
from legacy_ddp._replicas import state as hold


class OptimizerSteps:
    """Observes the steps of ``optimizers`` between :meth:`watch` and :meth:`release`.

    ``on_all_stepped`` is called once all optimizers have stepped since the last :meth:`reset`.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], on_all_stepped: Callable[[], object]) -> None:
        self._optimizers = optimizers
        self._on_all_stepped = on_all_stepped
        self._hooks: list[RemovableHandle] = []
        self._stepped: set[int] = set()
        # As of the beginning of each step: a scheduler changes the settings afterwards.
        self._settings: dict[int, list[hold.Fact]] = {}
        # Nesting depth of a running step: a step that calls super().step() runs the hooks twice.
        self._depths: dict[int, int] = {}

    def watch(self) -> None:
        for optimizer in self._optimizers:
            self._hooks.append(optimizer.register_step_pre_hook(self._begin))
            self._hooks.append(optimizer.register_step_post_hook(self._end))

    def release(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    def reset(self) -> None:
        """Start counting for the next call; steps ended by an exception are dropped, too."""
        self._stepped.clear()
        self._settings.clear()
        self._depths.clear()

    def settings_of(self, optimizer: torch.optim.Optimizer) -> list[hold.Fact]:
        """The settings of the optimizer's step since the last call; empty without a step."""
        return self._settings.get(id(optimizer), [])

    @internals.disable_dynamo
    def _begin(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        depth = self._depths[id(optimizer)] = self._depths.get(id(optimizer), 0) + 1
        if depth == 1:
            facts = hold.settings(optimizer)
            self._settings[id(optimizer)] = [
                (name, value.clone() if isinstance(value, torch.Tensor) else value) for name, value in facts
            ]

    @internals.disable_dynamo
    def _end(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        depth = self._depths[id(optimizer)] = max(0, self._depths.get(id(optimizer), 0) - 1)
        if depth == 0:
            self._stepped.add(id(optimizer))
            if len(self._stepped) == len(self._optimizers):
                self._on_all_stepped()


def warn_of_foreign_optimizers(rank: int, optimizers: Sequence[torch.optim.Optimizer], module: nn.Module) -> None:
    """Warn, as an error would be wrong: an optimizer may hold copies of the parameters in another precision only."""
    of_model = {id(parameter) for parameter in module.parameters()}
    for index, optimizer in enumerate(optimizers):
        if not any(id(held) in of_model for group in optimizer.param_groups for held in group["params"]):
            label = f"optimizer {index}" if len(optimizers) > 1 else "optimizer"
            warn(
                rank,
                f"{label} ({type(optimizer).__name__}) holds no parameter of the model, so its steps need not be those "
                "of the model; give the recorder the optimizer of the model (one that holds copies of the parameters "
                "in another precision is right here)",
            )
