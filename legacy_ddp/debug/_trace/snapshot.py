"""The present state of this rank, phase by phase, with tensors reduced to digests, norms and counts."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch import nn

from legacy_ddp._buckets.inventory import fingerprint
from legacy_ddp._replicas import state as hold
from legacy_ddp.debug._trace.measure import measure
from legacy_ddp.debug._trace.records import MAX_INPUTS, Names, Section, Values


def gradients(phase: str, held: Sequence[hold.StateItem]) -> list[Section]:
    """The gradients ``held``, as the section of ``phase``."""
    return _sections([(phase, held)])


def left_by_step(
    module: nn.Module,
    ignore: Collection[str],
    optimizers: Sequence[torch.optim.Optimizer],
    settings_of: Callable[[torch.optim.Optimizer], Iterable[hold.Fact]],
) -> list[Section]:
    """The settings used by a step, and the optimizer state and parameters after the step."""
    held = [
        ("settings", hold.optimizer_settings(optimizers, settings_of)),
        ("optimizer", hold.optimizer_states(optimizers, module)),
        ("parameters", hold.parameters(module, ignore)),
    ]
    return _sections([(phase, items) for phase, items in held if items])


def buffers(module: nn.Module, ignore: Collection[str]) -> list[Section]:
    """The section of all buffers; empty without buffers."""
    found = hold.buffers(module, ignore, local=())
    return _sections([("buffers", found)]) if found else []


class Inputs:
    """The arguments of the forward passes since the last call.

    ``found``: the first ``MAX_INPUTS`` values: dtype and shape of a tensor or type of a number or text, and 64 bits.
    ``complete``: no other arguments were passed.
    """

    def __init__(self) -> None:
        self.forwards = 0
        self.found: list[tuple[str, str]] = []
        self.complete = True

    def add(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Add one pass. A value without a digest makes the inputs incomplete."""
        self.forwards += 1
        try:
            room = MAX_INPUTS - len(self.found)
            values = list(islice(_leaves([args, kwargs]), room + 1))
            self.complete &= len(values) <= room and not any(isinstance(value, _Unknown) for value in values)
            known = [value for value in values[:room] if not isinstance(value, _Unknown)]
            measured = measure([value if isinstance(value, torch.Tensor) else _digest(value) for value in known])
            self.found += [(_kind(value), str(digest)) for value, (digest, _, _) in zip(known, measured, strict=True)]
        except Exception:  # noqa: BLE001 - wrapper tensors, as under vmap, are no reason to end a training
            self.complete = False


class _Unknown:
    """Placeholder for a value of an unsupported type."""


def _leaves(value: object) -> Iterator[Any]:
    if isinstance(value, Mapping):
        for key in value:
            yield from _leaves(value[key])
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(item)
    elif isinstance(value, torch.Tensor):
        yield value if isinstance(hold.comparable(value), torch.Tensor) else _Unknown()
    elif value is None or isinstance(value, bool | int | float | str):
        yield value
    else:
        yield _Unknown()


def _digest(value: object) -> str:
    """64 bits instead of the value, as a text may be confidential."""
    return f"{fingerprint(repr(value).encode()) % 2**64:016x}"


def _kind(value: object) -> str:
    return hold.format_type(value) if isinstance(value, torch.Tensor) else type(value).__name__


def _sections(held: Sequence[tuple[str, Sequence[hold.StateItem]]]) -> list[Section]:
    """The sections of all phases, measured together: few calls of torch, and one wait per device."""
    values = [item.value for _, items in held for item in items]
    measured = iter(measure([None if value is hold.NONE else value for value in values]))
    return [_section(phase, items, [next(measured) for _ in items]) for phase, items in held]


def _section(
    phase: str, items: Sequence[hold.StateItem], measured: Sequence[tuple[str | None, float | None, int]]
) -> Section:
    kinds = ["" if isinstance(item.value, str) else hold.format_type(item.value) for item in items]
    digests, norms, counts = zip(*measured, strict=True) if measured else ((), (), ())
    return Section(
        Names(phase, _distinct([item.name for item in items]), tuple(kinds)),
        Values(digests, norms, {index: count for index, count in enumerate(counts) if count}),
    )


def _distinct(names: Sequence[str]) -> tuple[str, ...]:
    """The names, with a number after each repetition (of keys ``1`` and ``"1"`` of an optimizer state, for example)."""
    counts: Counter[str] = Counter()
    distinct = []
    for name in names:
        counts[name] += 1
        distinct.append(f"{name} ({counts[name]})" if counts[name] > 1 else name)
    return tuple(distinct)
