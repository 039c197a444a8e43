"""Reports of check_replicas() on deviating ranks, many checks in one start of the ranks."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from importlib import import_module
from typing import NamedTuple

import torch
from torch import nn

from legacy_ddp.debug import ReplicaReport
from tests.helpers.ranks import run_ranks
from tests.helpers.replica_scenes import Element, SharedOutcomes, elements_of

Check = Callable[[bool, int], ReplicaReport]  # whether this rank deviates, and its number
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Observation(NamedTuple):
    """The parts of a report."""

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


def observe(report: ReplicaReport) -> Observation:
    names = tuple(item.name for item in report.differences)
    blame = (report.ranks, report.minority, report.implicated)
    facts = (report.identical, *blame, report.phase, names, elements_of(report))
    return Observation(*facts, dict(report.compared), report.generators, report.notes, str(report))


@cache
def observations(table: str, world_size: int, *deviating: int) -> SharedOutcomes[Observation]:
    """The reports of all ranks for each check in ``table``, "module:NAME"."""
    return SharedOutcomes(run_ranks(partial(_observe_all, table, deviating), world_size))


def _observe_all(table: str, deviating: Sequence[int], rank: int) -> dict[str, Observation]:
    module, name = table.split(":")
    checks: Mapping[str, Check] = getattr(import_module(module), name)  # a lambda cannot be pickled
    return {name: observe(check(rank in deviating, rank)) for name, check in checks.items()}


def flip_lowest(tensor: torch.Tensor, place: tuple[int, ...]) -> None:
    """Flip the lowest bit of an element (of the real part of a complex number); a bool is negated."""
    part = torch.view_as_real(tensor.detach())[..., 0] if tensor.is_complex() else tensor.detach()
    part.view(_INTEGERS[part.dtype.itemsize])[place] ^= 1


def holding(**tensors: torch.Tensor) -> nn.Module:
    """A module with floating point tensors as parameters and other tensors as buffers."""
    module = nn.Module()
    for name, tensor in tensors.items():
        if tensor.is_floating_point() or tensor.is_complex():
            module.register_parameter(name, nn.Parameter(tensor))
        else:
            module.register_buffer(name, tensor)
    return module
