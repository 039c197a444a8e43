"""Items that replicas should share, as this rank holds them: parameters, buffers, gradients, optimizers.

Also which parameters the optimizers hold, and which buffers replicas share: all but statistics of each rank's own
data.
"""

import json
import random
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal, get_args

import torch
from torch import nn

from legacy_ddp import _torch as internals
from legacy_ddp._buckets.layout import Named, check_dense, distinct, fingerprint
from legacy_ddp._replicas.digest import digest_all, digest_each, is_digestible
from legacy_ddp._replicas.element_compare import format_element
from legacy_ddp._settings import Settings
from legacy_ddp._text import list_some
from legacy_ddp._torch import device as devices
from legacy_ddp._transport.call import Call

Fact = tuple[str, torch.Tensor | str]
NOT_COMPARED = ", not compared"  # the end of the text of a tensor whose bits cannot be read
NONE = "none"  # in place of a gradient, or of the group of a parameter that no optimizer holds
# Optimizer entries that are neither state nor hyperparameters.
MEMBERSHIP = "parameter group"
WEIGHTS = "weights"
EARLIER_STATE = "state before the last step"
Kind = Literal["parameters", "buffers", "gradients", "optimizer"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True)
class StateItem:
    """A tensor, or a setting as text. ``kind`` is in ``KINDS``; ``name`` is the name for the user."""

    kind: str
    name: str
    value: torch.Tensor | str


def parameters(module: nn.Module, ignore: Iterable[str]) -> list[StateItem]:
    """Every parameter except the names in ``ignore``, including frozen parameters, sorted by name."""
    found = distinct(module.named_parameters(remove_duplicate=False), frozenset(ignore))
    for item in found:
        check_dense(item, kind="parameter")
    return [StateItem("parameters", f"parameter {item.name!r}", comparable(item.tensor)) for item in found]


def buffers(module: nn.Module, ignore: Iterable[str], local: Sequence[str]) -> list[StateItem]:
    """Every buffer except the names in ``ignore`` and the names that a name or pattern in ``local`` matches."""
    return buffer_items(named_buffers(module, ignore, local))


def named_buffers(module: nn.Module, ignore: Iterable[str], local: Sequence[str]) -> list[Named]:
    """The buffers of :func:`buffers` with all their names, sorted."""
    found = distinct(module.named_buffers(remove_duplicate=False), frozenset(ignore))
    return [item for item in found if not any(fnmatchcase(name, pattern) for name in item.names for pattern in local)]


def buffer_items(named: Iterable[Named]) -> list[StateItem]:
    return [StateItem("buffers", f"buffer {item.name!r}", comparable(item.tensor)) for item in named]


def gradients(named: Mapping[str, torch.Tensor | None]) -> list[StateItem]:
    """The given gradients by parameter name, sorted; the value is ``NONE`` for a parameter without a gradient."""
    return [
        StateItem("gradients", f"gradient of {name!r}", NONE if grad is None else comparable(grad))
        for name, grad in sorted(named.items())
    ]


def gradients_in(module: nn.Module, ignore: Iterable[str]) -> list[StateItem]:
    """The gradient of every trainable parameter."""
    found = distinct(module.named_parameters(remove_duplicate=False), frozenset(ignore))
    return gradients({item.name: item.tensor.grad for item in found if item.tensor.requires_grad})


def optimizer_items(
    optimizers: Sequence[torch.optim.Optimizer],
    module: nn.Module,
    settings_of: Callable[[torch.optim.Optimizer], Iterable[Fact]] | None = None,
) -> list[StateItem]:
    """Hyperparameters and state: all items of :func:`optimizer_settings` and :func:`optimizer_states`."""
    # Registration order does not matter.
    found = [*optimizer_settings(optimizers, settings_of), *optimizer_states(optimizers, module)]
    return sorted(found, key=lambda item: item.name)


def optimizer_settings(
    optimizers: Sequence[torch.optim.Optimizer],
    settings_of: Callable[[torch.optim.Optimizer], Iterable[Fact]] | None = None,
) -> list[StateItem]:
    """Hyperparameters of every group, from ``settings_of``, by default the present hyperparameters."""
    return _items_of(optimizers, settings_of or (lambda optimizer: settings_in(optimizer.param_groups)))


def optimizer_states(optimizers: Sequence[torch.optim.Optimizer], module: nn.Module) -> list[StateItem]:
    """The state of every parameter, and the parameters in the optimizers that are not in the module."""
    names = {id(item.tensor): item.name for item in distinct(module.named_parameters(remove_duplicate=False))}
    return _items_of(optimizers, lambda optimizer: _states(optimizer, names))


def settings_in(parameter_groups: Iterable[Mapping[str, Any]]) -> Iterator[Fact]:
    for index, group in enumerate(parameter_groups):
        for key in sorted(set(group) - {"params", "param_names"}):  # these two depend on the order of registration
            yield from flatten(f"{key} of parameter group {index}", group[key])


def check_local_buffers(module: nn.Module, local: Sequence[str]) -> None:
    """Refuse a name that is not a buffer of ``module``. A pattern may match no buffer, so models can share patterns."""
    names = [name for name, _ in module.named_buffers(remove_duplicate=False)]
    if unknown := [name for name in local if name not in names and not set(name) & set("*?[")]:
        expected = f"expected some of {names}" if names else "and the module has no buffers; leave local_buffers out"
        raise ValueError(f"local_buffers names what the module does not have: got {unknown}, {expected}")


def digest_items(items: Sequence[StateItem]) -> int:
    """A 64-bit digest of all items, as cheap as possible: equal on two ranks that hold equal items."""
    bits = digest_all([item.value for item in items if isinstance(item.value, torch.Tensor)])
    return fingerprint(json.dumps([bits, [(item.name, describe_value(item.value)) for item in items]]).encode())


def describe_items(items: Sequence[StateItem]) -> dict[str, str]:
    """The text of each item by name; of a tensor, its type and its digest; of a scalar in an optimizer, its number."""
    tensors = {index: item.value for index, item in enumerate(items) if isinstance(item.value, torch.Tensor)}
    scalars = {
        index
        for index, tensor in tensors.items()
        if items[index].kind == "optimizer" and tensor.ndim == 0 and tensor.layout is torch.strided
    }
    contents = {index: format_element(tensors[index]) for index in scalars}
    hashed = {index: tensor for index, tensor in tensors.items() if index not in scalars}
    digests = zip(hashed, digest_each(hashed.values()), strict=True)
    contents |= {index: f"{digest % 2**64:016x}" for index, digest in digests}
    return {
        item.name: describe_value(item.value) + (f" {contents[index]}" if index in contents else "")
        for index, item in enumerate(items)
    }


def digest_generators(module: nn.Module) -> int:
    """A digest of the random generators of this process: of torch, of Python, and the global one of NumPy."""
    states: list[object] = [digest_all(torch_generators(module)), random.getstate()]
    if numpy := sys.modules.get("numpy"):
        _, key, *rest = numpy.random.get_state()
        states.append((key.tobytes(), rest))
    return fingerprint(repr(states).encode())


def torch_generators(module: nn.Module) -> list[torch.Tensor]:
    """The states of torch's generators, of the CPU and of the devices of ``module``. Dropout uses these generators."""
    return [torch.get_rng_state(), *map(devices.generator_state, devices.devices_of(module.parameters()))]


def _items_of(
    optimizers: Sequence[torch.optim.Optimizer], facts_of: Callable[[torch.optim.Optimizer], Iterable[Fact]]
) -> list[StateItem]:
    found = []
    for index, optimizer in enumerate(optimizers):
        prefix = f"optimizer {index}: " if len(optimizers) > 1 else ""
        found += [StateItem("optimizer", prefix + name, value) for name, value in facts_of(optimizer)]
    return sorted(found, key=lambda item: item.name)


def _states(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> Iterator[Fact]:
    for index, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            name = repr(names.get(id(parameter), f"parameter {position} of group {index}"))
            if id(parameter) not in names:  # a copy in another precision, for instance
                yield f"{WEIGHTS} of {name}", parameter
            state = optimizer.state.get(parameter, {})
            for key in sorted(state, key=str) if isinstance(state, Mapping) else ():
                yield from flatten(f"{key} of {name}", state[key])


def flatten(name: str, value: object) -> Iterator[Fact]:
    """The comparable values inside ``value``. Functions and other objects are left out."""
    if isinstance(value, torch.Tensor):
        yield name, comparable(value)
    elif isinstance(value, Mapping):
        for key in sorted(value, key=str):
            yield from flatten(f"{key} in {name}", value[key])
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from flatten(f"{index} in {name}", item)
    elif value is None or isinstance(value, bool | int | float | str):
        yield name, repr(value)


def comparable(tensor: torch.Tensor) -> torch.Tensor | str:
    """The tensor, or its type as text if its bits cannot be digested; a meta tensor has none."""
    if is_digestible(tensor):
        return tensor
    return f"{tensor.dtype} {tuple(tensor.shape)} {tensor.layout}{' on meta' if tensor.is_meta else NOT_COMPARED}"


def unread(items: Iterable[StateItem]) -> list[str]:
    return [item.name for item in items if isinstance(item.value, str) and item.value.endswith(NOT_COMPARED)]


def describe_value(value: torch.Tensor | str) -> str:
    """The text of a setting; of a tensor, its type and its device unless that is the CPU."""
    if isinstance(value, str):
        return value
    return format_type(value, "" if value.device.type == "cpu" else f" on {value.device.type}")


def format_type(tensor: torch.Tensor, device: str = "") -> str:
    layout = " sparse" if tensor.is_sparse else ""
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}{device}{layout}"


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
    held = {
        id(parameter): parameter
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
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


class SharedBuffers:
    """Chooses the buffers to compare.

    Left out are ``ignore``, ``Checks(local_buffers=)``, buffers that are not saved, and statistics of each rank's own
    data, which :meth:`learn` finds. Running statistics of a frozen normalisation layer are compared, because no rank
    updates them.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._marks: dict[str, int] | None = None
        self.statistics: set[str] = set()
        self.has_run = False  # a forward or a backward of this rank has begun since the mark

    def named(self, module: nn.Module) -> list[Named]:
        return [item for item in self.saved(module) if item.name not in self.statistics]

    def saved(self, module: nn.Module) -> list[Named]:
        """The buffers to compare, and those that :meth:`learn` has found to be statistics."""
        left_out = {*self._settings.ignore, *internals.unsaved_buffer_names(module)}
        return named_buffers(module, left_out, self._settings.checks.local_buffers)

    def items(self, module: nn.Module) -> list[StateItem]:
        return buffer_items(self.named(module))

    def mark(self, module: nn.Module) -> None:
        """Remember the present bits: the buffers are equal on all ranks now, or are meant to be.

        In a copy of a wrapper, which has no marks, every buffer counts as changed, because the earlier training may
        have changed it.
        """
        self._marks = _digest(self.named(module))
        self.has_run = False

    def begin_forward(self, module: nn.Module) -> None:
        """A forward with gradients begins. The first forward marks again: a checkpoint may have been loaded since."""
        if not self.has_run and self._marks is not None:
            with torch.no_grad():
                self._marks = _digest(self.named(module))
        self.has_run = True

    def learn(self, call: Call, module: nn.Module, left_out: Collection[int]) -> bool:
        """Collective: find the buffers that are statistics of each rank's own data.

        Such a buffer differs now, and its bits have changed since the mark on every rank. For a buffer of a
        normalisation layer one rank is enough, if the layer is in training there. A buffer that the script has written
        on some ranks alone has the bits of the mark on the other ranks, and is therefore not taken for statistics.
        A buffer that a rank does not have, or left out before, is left out, too: ``_collectives/buffer_names`` tells.
        Returns whether there are new statistics; equal on all ranks that compare the same buffers.
        """
        present, marks = _digest(self.named(module)), self._marks or {}
        updated = internals.updated_statistics_names(module)
        changed = {name for name, bits in present.items() if marks.get(name) != bits}
        # Whether the buffer may have changed (a rank without data until now cannot tell), whether it has changed in a
        # layer in training, and its bits.
        own = {
            name: [not self.has_run or name in changed, name in changed & updated, bits]
            for name, bits in present.items()
        }
        rows: list[dict[str, Any]] = call.gather_objects(own)
        compared = [row for rank, row in enumerate(rows) if rank not in left_out]
        found = set()
        for name in set[str]().union(*compared):  # not of this rank alone: every rank finds the same names
            if not all(name in row for row in compared):
                found.add(name)
                continue
            may_have_changed, is_updated, bits = zip(*(row[name] for row in compared), strict=True)
            if len(set(bits)) > 1 and (all(may_have_changed) or any(is_updated)):
                found.add(name)
        self.statistics |= found
        return bool(found)


def gather_digests(call: Call, digest: int, left_out: Collection[int]) -> dict[int, int]:
    """Collective: the digest of every rank but ``left_out``."""
    digests = call.gather(torch.tensor([digest], device="cpu")).flatten().tolist()
    return {rank: value for rank, value in enumerate(digests) if rank not in left_out}


def _digest(named: Collection[Named]) -> dict[str, int]:
    tensors = {item.name: item.tensor for item in named if is_digestible(item.tensor)}
    return dict(zip(tensors, digest_each(tensors.values()), strict=True))
