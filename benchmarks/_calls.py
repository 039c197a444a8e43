"""Synthetic gradients for benchmarks of the call alone, with a given number of tensors and bytes."""

import argparse
import gc
import statistics
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from types import MappingProxyType

import torch
import torch.distributed as dist
from _measure import Variant
from torch import nn

from legacy_ddp import Checks, LegacyDistributedDataParallel

BARE, LEVELS = "bare all_reduce", ("off", "info")
# Of the gradients, on a rank: one bare, for the model of each level parameters and flat tensor, and one to pack.
COPIES = 2 + 2 * len(LEVELS)


class Gradients:
    """A model of ``count`` tensors of ``size_bytes`` in all, in the wrapper, with synthetic gradients."""

    def __init__(
        self, level: str, size_bytes: int, count: int, group: dist.ProcessGroup | None, transport: str = "auto"
    ) -> None:
        module = nn.ParameterList(torch.zeros(size_bytes // 4 // count) for _ in range(count))
        # All ranks write the same numbers.
        checks = Checks(level, same_data="allow")
        self.model = LegacyDistributedDataParallel(module, process_group=group, transport=transport, checks=checks)
        self.parameters = list(module.parameters())
        self.make()
        self.model.all_reduce()  # connects, and leaves the views that keep() writes into

    def make(self) -> None:
        """Assign new gradients, to be packed by the next call."""
        for parameter in self.parameters:
            parameter.grad = torch.ones_like(parameter)

    def keep(self) -> None:
        """Write into the views assigned by the last call."""
        torch._foreach_copy_([p.grad for p in self.parameters], [torch.ones(())] * len(self.parameters))

    def reduce(self, seconds: list[Mapping[str, float]]) -> None:
        """The timed call; appends the seconds of each phase."""
        seconds.append(self.model.all_reduce().seconds)


STATES: Mapping[str, Callable[[Gradients], None]] = MappingProxyType(
    {"views": Gradients.keep, "to pack": Gradients.make}
)


class Calls:
    """The variants of a call; ``phases``: by variant the seconds of each phase, of all calls so far.

    ``with_gloo``: measure every level with ``transport="gloo"``, too.
    """

    def __init__(
        self,
        size_bytes: int,
        count: int,
        group: dist.ProcessGroup | None = None,
        *,
        states: Sequence[str] = tuple(STATES),
        with_gloo: bool = False,
    ) -> None:
        self._transports = ("auto", "gloo") if with_gloo else ("auto",)
        self._size_bytes, self._count, self._group, self._states = size_bytes, count, group, states
        self._models: dict[str, Gradients] = {}
        self._flat = torch.empty(0)
        self.phases: dict[str, list[Mapping[str, float]]] = {}

    def build(self) -> list[Variant]:
        """Collective: the variants, the reference first."""
        # What was built before goes first, because a gibibyte is not there twice; its variants reach it through self.
        self._models, self._flat = {}, torch.empty(0)
        gc.collect()
        self._flat = torch.ones(self._size_bytes // 4 // self._count * self._count)
        variants = [Variant(BARE, self._reduce_bare, lambda: self._flat.fill_(1.0))]
        for transport, level in product(self._transports, LEVELS):
            name = f"ours, {level}" if transport == "auto" else f"ours, {level}, {transport}"
            self._models[name] = Gradients(level, self._size_bytes, self._count, self._group, transport)
            variants += [self._variant(name, state) for state in self._states]
        return variants

    def median_phases(self, arguments: argparse.Namespace) -> dict[str, dict[str, float]]:
        """Median milliseconds of each phase, by variant."""
        return {name: median_phases(calls, arguments) for name, calls in self.phases.items()}

    def _variant(self, model: str, state: str) -> Variant:
        name = f"{model}, {state}"
        seconds = self.phases.setdefault(name, [])
        return Variant(
            name,
            lambda: self._models[model].reduce(seconds),
            lambda: STATES[state](self._models[model]),
        )

    def _reduce_bare(self) -> None:
        dist.all_reduce(self._flat, group=self._group)


def median_phases(calls: Sequence[Mapping[str, float]], arguments: argparse.Namespace) -> dict[str, float]:
    """Medians per phase in milliseconds, without the warm-up calls of each repeat."""
    per_building = arguments.warm_up + arguments.rounds
    timed = [seconds for index, seconds in enumerate(calls) if index % per_building >= arguments.warm_up]
    return {phase: 1e3 * statistics.median(seconds[phase] for seconds in timed) for phase in timed[0]}
