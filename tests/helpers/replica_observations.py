"""What does check_replicas() say on ranks of which some deviate? Many looks in one start of the ranks."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from importlib import import_module
from typing import NamedTuple

import torch
from torch import nn

from legacy_ddp.debug import ReplicaReport
from tests.helpers.ranks import run_ranks
from tests.helpers.replica_scenes import Element, Sights, elements_of

Look = Callable[[bool, int], ReplicaReport]  # whether this rank deviates, and its number
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Seen(NamedTuple):
    """A report, by its parts."""

    identical: bool
    ranks: tuple[int, ...]
    minority: tuple[int, ...]
    implicated: tuple[int, ...]
    phase: str
    names: tuple[str, ...]
    elements: tuple[Element, ...]
    compared: dict[str, int]
    generators: tuple[tuple[int, ...], ...]
    notes: tuple[str, ...]
    text: str


def seen_in(report: ReplicaReport) -> Seen:
    names = tuple(item.name for item in report.differences)
    blame = (report.ranks, report.minority, report.implicated)
    facts = (report.identical, *blame, report.phase, names, elements_of(report))
    return Seen(*facts, dict(report.compared), report.generators, report.notes, str(report))


@cache
def looked(table: str, world_size: int, *deviating: int) -> Sights[Seen]:
    """What the ranks saw of each look in ``table``, "module:NAME"."""
    return Sights(run_ranks(partial(_look_at_all, table, deviating), world_size))


def _look_at_all(table: str, deviating: Sequence[int], rank: int) -> dict[str, Seen]:
    module, name = table.split(":")
    looks: Mapping[str, Look] = getattr(import_module(module), name)  # by name: a lambda in it cannot be pickled
    return {name: seen_in(look(rank in deviating, rank)) for name, look in looks.items()}


def flip_lowest(tensor: torch.Tensor, place: tuple[int, ...]) -> None:
    """The lowest bit of an element, whatever the strides; of the real part of a complex number, of a bool its truth."""
    part = torch.view_as_real(tensor.detach())[..., 0] if tensor.is_complex() else tensor.detach()
    part.view(_INTEGERS[part.dtype.itemsize])[place] ^= 1


def holding(**tensors: torch.Tensor) -> nn.Module:
    """A module with these as parameters, or as buffers if they cannot be that."""
    module = nn.Module()
    for name, tensor in tensors.items():
        if tensor.is_floating_point() or tensor.is_complex():
            module.register_parameter(name, nn.Parameter(tensor))
        else:
            module.register_buffer(name, tensor)
    return module
