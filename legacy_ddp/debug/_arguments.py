"""What do the tools take? A model, wrapped or not, with its process group; and its optimizers."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from legacy_ddp._collectives.registry import synchronizer_of
from legacy_ddp._collectives.state import Synchronizer
from legacy_ddp._settings import names_to_ignore
from legacy_ddp._transport.process_group import resolve_group
from legacy_ddp._wrapper import LegacyDistributedDataParallel

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]


@dataclass(frozen=True)
class Subject:
    """What a tool looks at. ``ignore``: names of parameters and buffers that are nobody's business."""

    module: nn.Module
    synchronizer: Synchronizer
    group: dist.ProcessGroup

    @property
    def ignore(self) -> frozenset[str]:
        return self.synchronizer.settings.ignore | names_to_ignore(self.module, ())


def subject_of(model: nn.Module, process_group: dist.ProcessGroup | DeviceMesh | None) -> Subject:
    """The plain module behind ``model``, and the group: the one given, the wrapper's own, or the default one.

    Raises:
        TypeError, ValueError: no module, no group.
    """
    if isinstance(model, LegacyDistributedDataParallel):
        group = model.process_group if process_group is None else resolve_group(process_group)
        return Subject(model.module, model._synchronizer, group)
    return Subject(model, synchronizer_of(model)[0], resolve_group(process_group))


def as_optimizers(optimizer: Optimizers | None) -> list[torch.optim.Optimizer]:
    """All of them.

    Raises:
        TypeError: something else among them.
    """
    if optimizer is None:
        return []
    found = list(optimizer) if isinstance(optimizer, Iterable) else [optimizer]
    if others := [type(item).__name__ for item in found if not isinstance(item, torch.optim.Optimizer)]:
        raise TypeError(f"optimizer is of the wrong type: got {others[0]}, expected torch.optim.Optimizer or several")
    return found
