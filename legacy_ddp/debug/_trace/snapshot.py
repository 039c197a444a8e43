"""What does this rank hold right now, phase by phase? Tensors become words, norms and counts."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch import nn

from legacy_ddp._buckets.layout import fingerprint
from legacy_ddp._replicas import state as hold
from legacy_ddp.debug._trace.measure import measure
from legacy_ddp.debug._trace.records import MAX_INPUTS, Names, Section, Values

Held = tuple[str, Sequence[hold.StateItem]]


def gradients(phase: str, held: Sequence[hold.StateItem]) -> list[Section]:
    """These gradients, called those of ``phase``."""
    return _sections([(phase, held)])


def left_by_step(
    module: nn.Module,
    ignore: Collection[str],
    optimizers: Sequence[torch.optim.Optimizer],
    settings_of: Callable[[torch.optim.Optimizer], Iterable[hold.Fact]],
) -> list[Section]:
    """What a step used and leaves: settings and state of the optimizers, and parameters."""
    held = [
        ("settings", hold.optimizer_settings(optimizers, settings_of)),
        ("optimizer", hold.optimizer_states(optimizers, module)),
        ("parameters", hold.parameters(module, ignore)),
    ]
    return _sections([(phase, holdings) for phase, holdings in held if holdings])


def buffers(module: nn.Module, ignore: Collection[str]) -> list[Section]:
    """All buffers, if there are any."""
    found = hold.buffers(module, ignore, local=())
    return _sections([("buffers", found)]) if found else []


class Inputs:
    """What the forward passes since the last call were given.

    ``found``: the first ``MAX_INPUTS`` values: what each is (dtype and shape of a tensor, or type), and 64 bits.
    ``complete``: there was nothing else.
    """

    def __init__(self) -> None:
        self.forwards = 0
        self.found: list[tuple[str, str]] = []
        self.complete = True

    def add(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Take one more pass. A value that cannot be told makes it incomplete."""
        self.forwards += 1
        try:
            room = MAX_INPUTS - len(self.found)
            values = list(islice(_leaves([args, kwargs]), room + 1))
            self.complete &= len(values) <= room and not any(isinstance(value, _Unknown) for value in values)
            told = [value for value in values[:room] if not isinstance(value, _Unknown)]
            measured = measure([value if isinstance(value, torch.Tensor) else _word(value) for value in told])
            self.found += [(_kind(value), str(word)) for value, (word, _, _) in zip(told, measured, strict=True)]
        except Exception:  # noqa: BLE001 - tensors that only look like some, as under vmap: no reason to end a training
            self.complete = False


class _Unknown:
    """In place of a value that may hold anything."""


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


def _word(value: object) -> str:
    """Not the value: a text may be anybody's business."""
    return f"{fingerprint(repr(value).encode()) % 2**64:016x}"


def _kind(value: object) -> str:
    return hold.format_type(value) if isinstance(value, torch.Tensor) else type(value).__name__


def _sections(held: Sequence[Held]) -> list[Section]:
    """All of it measured at once: few calls of torch, and one wait for a device."""
    values = [holding.value for _, holdings in held for holding in holdings]
    measured = iter(measure([None if value is hold.NONE else value for value in values]))
    return [_section(phase, holdings, [next(measured) for _ in holdings]) for phase, holdings in held]


def _section(
    phase: str, holdings: Sequence[hold.StateItem], measured: Sequence[tuple[str | None, float | None, int]]
) -> Section:
    kinds = ["" if isinstance(holding.value, str) else hold.format_type(holding.value) for holding in holdings]
    words, norms, counts = zip(*measured, strict=True) if measured else ((), (), ())
    return Section(
        Names(phase, _distinct([holding.name for holding in holdings]), tuple(kinds)),
        Values(words, norms, {index: count for index, count in enumerate(counts) if count}),
    )


def _distinct(names: Sequence[str]) -> tuple[str, ...]:
    """The names; where one comes again (keys ``1`` and ``"1"`` of a state, say) with a number."""
    seen: Counter[str] = Counter()
    told = []
    for name in names:
        seen[name] += 1
        told.append(f"{name} ({seen[name]})" if seen[name] > 1 else name)
    return tuple(told)
