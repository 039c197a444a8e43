"""Membership of parameters in optimizers: the parameters of a model that optimizers hold, and other tensors there."""

from collections.abc import Collection, Iterable, Sequence

import torch
from torch import nn

from legacy_ddp._buckets.inventory import Named, distinct
from legacy_ddp._replicas.state import NONE, Holding, what_it_is

MAX_NAMED = 3


def parameter_groups(
    several: Sequence[torch.optim.Optimizer], module: nn.Module, ignore: Collection[str]
) -> list[Holding]:
    """The parameter group of each parameter of ``module``, ``NONE`` for a parameter in no optimizer.

    Empty if there is no optimizer.
    """
    places: dict[int, list[str]] = {}
    for number, optimizer in enumerate(several):
        of = f" of optimizer {number}" if len(several) > 1 else ""
        for index, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                places.setdefault(id(parameter), []).append(f"{index}{of}")
    named = distinct(module.named_parameters(remove_duplicate=False), ignore) if several else []
    return [
        Holding("optimizer", f"parameter group of {item.name!r}", ", ".join(places.get(id(item.tensor), [NONE])))
        for item in named
    ]


def describe_members(several: Iterable[torch.optim.Optimizer], named: Sequence[Named]) -> tuple[str, bool]:
    """What ``several`` hold of the parameters ``named`` and besides, in words; and whether a parameter got lost.

    A parameter is lost if no optimizer holds it, but one holds a tensor like it that is not in the model: the optimizer
    was made before the parameter was replaced.
    """
    held = {id(tensor): tensor for optimizer in several for tensor in _tensors_of(optimizer)}
    known = {id(item.tensor) for item in named}
    strangers = [what_it_is(tensor) for key, tensor in held.items() if key not in known]
    missing = [item for item in named if item.tensor.requires_grad and id(item.tensor) not in held]
    words = [f"{len(known & held.keys())} of the model's {len(named)} parameters"]
    if missing:
        words.append(f"without {_list_some([repr(item.name) for item in missing])}")
    if strangers:
        what = "a tensor that is" if len(strangers) == 1 else f"{len(strangers)} tensors that are"
        words.append(f"with {what} not in the model: {_list_some(strangers)}")
    return ", ".join(words), any(what_it_is(item.tensor) in strangers for item in missing)


def _tensors_of(optimizer: torch.optim.Optimizer) -> Iterable[torch.Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _list_some(texts: Sequence[str]) -> str:
    more = [f"and {len(texts) - MAX_NAMED} more"] if len(texts) > MAX_NAMED else []
    return " ".join([", ".join(texts[:MAX_NAMED]), *more])
