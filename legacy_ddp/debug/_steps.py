"""Have all optimizers stepped since the last call, and with which settings?"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from legacy_ddp import _torch as internals
from legacy_ddp._replicas import state as hold


class Steps:
    """Looks on at the steps of some optimizers, between :meth:`watch` and :meth:`release`.

    ``when_done`` is called at the end of the step by which all of them have stepped.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], when_done: Callable[[], object]) -> None:
        self._optimizers = optimizers
        self._when_done = when_done
        self._hooks: list[RemovableHandle] = []
        self._stepped: set[int] = set()
        # As each step began: a scheduler changes them after it, and a resumed training begins behind that.
        self._settings: dict[int, list[hold.Fact]] = {}
        # Of steps under way: one that calls super().step() begins and ends a second one inside.
        self._depths: dict[int, int] = {}

    def watch(self) -> None:
        for optimizer in self._optimizers:
            self._hooks.append(optimizer.register_step_pre_hook(self._begin))
            self._hooks.append(optimizer.register_step_post_hook(self._end))

    def release(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    def start_anew(self) -> None:
        """Forget who has stepped, and steps that an exception ended."""
        self._stepped.clear()
        self._settings.clear()
        self._depths.clear()

    def settings_of(self, optimizer: torch.optim.Optimizer) -> list[hold.Fact]:
        """The settings of its step since the last call; none if it has not stepped."""
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
                self._when_done()
