"""Membership of parameters in optimizers: the parameters of a model that optimizers hold, and other tensors there."""

from collections.abc import Collection, Iterable, Sequence

import torch
from torch import nn

from legacy_ddp._buckets.layout import Named, distinct
from legacy_ddp._replicas.state import MEMBERSHIP, NONE, StateItem, format_type

MAX_NAMED = 3


def parameter_groups(
    optimizers: Sequence[torch.optim.Optimizer], module: nn.Module, ignore: Collection[str]
) -> list[StateItem]:
    """The parameter group of each parameter of ``module``, ``NONE`` for a parameter in no optimizer.

    Empty if there is no optimizer.
    """
    groups: dict[int, list[str]] = {}
    for number, optimizer in enumerate(optimizers):
        of = f" of optimizer {number}" if len(optimizers) > 1 else ""
        for index, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                groups.setdefault(id(parameter), []).append(f"{index}{of}")
    named = distinct(module.named_parameters(remove_duplicate=False), ignore) if optimizers else []
    return [
        StateItem("optimizer", f"{MEMBERSHIP} of {item.name!r}", ", ".join(groups.get(id(item.tensor), [NONE])))
        for item in named
    ]


def describe_membership(optimizers: Iterable[torch.optim.Optimizer], named: Sequence[Named]) -> tuple[str, bool]:
    """The parameters ``named`` and other tensors that ``optimizers`` hold, as text; and whether a parameter is stale.

    A stale parameter was replaced in the model after the optimizer was made: no optimizer holds the new parameter, but
    an optimizer holds a tensor of the same type that is not in the model.
    """
    held = {id(tensor): tensor for optimizer in optimizers for tensor in _tensors_of(optimizer)}
    known = {id(item.tensor) for item in named}
    foreign = [format_type(tensor) for key, tensor in held.items() if key not in known]
    missing = [item for item in named if item.tensor.requires_grad and id(item.tensor) not in held]
    parts = [f"{len(known & held.keys())} of the model's {len(named)} parameters"]
    if missing:
        parts.append(f"without {list_some([repr(item.name) for item in missing])}")
    if foreign:
        what = "a tensor that is" if len(foreign) == 1 else f"{len(foreign)} tensors that are"
        parts.append(f"with {what} not in the model: {list_some(foreign)}")
    return ", ".join(parts), any(format_type(item.tensor) in foreign for item in missing)


def _tensors_of(optimizer: torch.optim.Optimizer) -> Iterable[torch.Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def list_some(texts: Sequence[str]) -> str:
    """The first texts, and the number of the others."""
    more = [f"and {len(texts) - MAX_NAMED} more"] if len(texts) > MAX_NAMED else []
    return " ".join([", ".join(texts[:MAX_NAMED]), *more])
