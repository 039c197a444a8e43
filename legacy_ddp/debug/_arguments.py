"""Arguments of the tools: a model with its process group, optimizers, a folder, flags and numbers."""

import operator
import os
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import SupportsIndex

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from legacy_ddp import _torch as internals
from legacy_ddp._call.state import Synchronizer, synchronizer_of
from legacy_ddp._ranks.private_groups import resolve_group
from legacy_ddp._settings import names_to_ignore
from legacy_ddp._wrapper import LegacyDistributedDataParallel
from legacy_ddp.debug._trace.records import MAX_STEP

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]


@dataclass(frozen=True)
class Target:
    """The module and group that a tool examines.

    ``wrapper``: around the module, None for a plain module. ``was_compiled``: the tool was given
    ``torch.compile(wrapper)``. ``ignore``: names of parameters and buffers to leave out.
    """

    module: nn.Module
    synchronizer: Synchronizer
    group: dist.ProcessGroup
    wrapper: LegacyDistributedDataParallel | None = None
    was_compiled: bool = False

    @property
    def has_compiled_wrapper(self) -> bool:
        return self.wrapper is not None and (self.was_compiled or internals.has_compiled_call(self.wrapper))

    @property
    def ignore(self) -> frozenset[str]:
        return self.synchronizer.settings.ignore | names_to_ignore(self.module, ())


def target_of(model: nn.Module, process_group: dist.ProcessGroup | DeviceMesh | None) -> Target:
    """``model``: a module, a wrapper or ``torch.compile(wrapper)``. ``process_group``: None for the group of the
    wrapper, or for the default group.
    """
    wrapper = internals.inside_of_compiled(model)
    if isinstance(wrapper, LegacyDistributedDataParallel):
        group = wrapper.process_group if process_group is None else resolve_group(process_group)
        return Target(wrapper.module, wrapper._synchronizer, group, wrapper, was_compiled=wrapper is not model)
    return Target(model, synchronizer_of(model)[0], resolve_group(process_group))


def as_optimizers(optimizer: Optimizers | None) -> list[torch.optim.Optimizer]:
    if optimizer is None:
        return []
    found = list(optimizer) if isinstance(optimizer, Iterable) else [optimizer]
    if others := [type(item).__name__ for item in found if not isinstance(item, torch.optim.Optimizer)]:
        raise TypeError(f"optimizer is of the wrong type: got {others[0]}, expected torch.optim.Optimizer or several")
    return found


def as_folder(folder: str | os.PathLike[str]) -> Path:
    if not isinstance(folder, str | os.PathLike) or not os.fspath(folder):
        raise TypeError(f"folder is not usable: got {folder!r}, expected a path")
    if "\0" in str(folder):
        raise ValueError(f"folder is not usable: got {str(folder)!r}, expected a path without a null character")
    try:
        return Path(folder).expanduser()
    except RuntimeError as error:  # ~ without a home directory, or ~name of an unknown user
        raise ValueError(
            f"folder is not usable: got {str(folder)!r}, expected ~ with a known home directory; name the whole path"
        ) from error


def as_flag(argument: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{argument} is not usable: got {value!r}, expected True or False")
    return value


def as_count(argument: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_STEP:
        raise ValueError(f"{argument} is not usable: got {value!r}, expected a whole number from 1 to {MAX_STEP:,}")
    return value


def as_steps(argument: str, value: object) -> Collection[int]:
    if isinstance(value, range) and not value:
        raise ValueError(
            f"{argument} holds no step: got {value!r}, expected a first step before the end, as range(40, 42); "
            f"pass () for no {argument}"
        )
    steps = value if isinstance(value, range) else _distinct(argument, value)
    ends = [steps[0], steps[-1]] if isinstance(steps, range) else steps  # a range may be very long
    if ends and (least := min(ends)) < 1:
        raise ValueError(f"{argument} holds more than numbers of steps: got {least}, expected whole numbers from 1")
    return steps


def _distinct(argument: str, value: object) -> frozenset[int]:
    if not isinstance(value, Collection) or isinstance(value, str | bytes):
        raise TypeError(f"{argument} is of the wrong type: got {value!r}, expected numbers of steps, as range(40, 42)")
    if others := [item for item in value if isinstance(item, bool) or not isinstance(item, SupportsIndex)]:
        raise TypeError(f"{argument} holds a {type(others[0]).__name__}: got {others[0]!r}, expected numbers of steps")
    return frozenset(map(operator.index, value))
