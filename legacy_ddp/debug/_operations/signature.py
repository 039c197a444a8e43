"""Facts about a single operation: its schema, its place in the model, its tensors and other arguments as text."""

import os
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from legacy_ddp import _torch as internals
from legacy_ddp._replicas.state import format_type
from legacy_ddp.debug._operations.operation import Stage

_ALLOCATIONS = ("empty", "_empty", "new_empty")
# Share memory with their input; their schema does not say so.
_UNSAFE_VIEWS = ("_unsafe_view", "unsafe_split", "unsafe_split_with_sizes", "unsafe_chunk")
# Write every element of their first argument, and read none.
_OVERWRITES = (
    *("copy_", "fill_", "zero_", "eye_", "random_", "uniform_", "normal_", "bernoulli_", "exponential_"),
    *("geometric_", "cauchy_", "log_normal_"),
)
# Write some elements of their first argument.
_PARTIAL_WRITES = ("index_", "_index_", "scatter", "masked_", "put_")
_RESIZES = ("resize_", "resize_as_", "_resize_output_")
# Positions of results that are memory for the kernel of the backward pass. They are not written as a whole.
_WORKSPACES: Mapping[str, tuple[int, ...]] = {
    "_batch_norm_with_update": (3,),
    "_cudnn_rnn": (3, 4),
    "cudnn_batch_norm": (3,),
    "miopen_rnn": (3, 4),
    "mkldnn_rnn_layer": (3,),
}
# Write to these arguments, if given; their schema does not say so.
_UNDECLARED_WRITES = {
    "native_batch_norm": ("running_mean", "running_var"),
    "cudnn_batch_norm": ("running_mean", "running_var"),
    "miopen_batch_norm": ("running_mean", "running_var"),
}
# Collectives return before they have written.
_ASYNCHRONOUS = ("c10d", "_c10d_functional")
_LIBRARY: Final[str] = os.path.join(str(Path(__file__).parents[2]), "")
_CAPTURE: Final[str] = str(Path(__file__).parent / "capture.py")  # its frames are of another capture around this one


@dataclass(frozen=True)
class Signature:
    """Facts about an operation, the same for every call.

    ``name``: with the overload. ``arguments``: names of positional arguments. ``written``: names of arguments that the
    operation writes to. ``overwritten``: those of them that it does not read. ``is_partial``: only some elements are
    written. ``is_view``: nothing is computed, and the results are views of the inputs. ``is_random``: a random
    generator is read. ``undefined``: positions of results without defined content; ``is_undefined``: all results.
    """

    name: str
    arguments: tuple[str, ...] = ()
    written: frozenset[str] = frozenset()
    overwritten: frozenset[str] = frozenset()
    is_partial: bool = False
    is_view: bool = False
    is_random: bool = False
    is_undefined: bool = False
    undefined: tuple[int, ...] = ()
    is_asynchronous: bool = False

    def reads(self, argument: str) -> bool:
        return not (self.is_view or self.is_undefined or argument in self.overwritten)

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        """The given arguments with their names, in order."""
        yield from zip(self.arguments, args, strict=False)
        for position in range(len(self.arguments), len(args)):
            yield str(position), args[position]
        yield from kwargs.items()


@cache
def signature_of(function: Callable[..., Any]) -> Signature:
    """The signature of an operation; for a higher-order operation only the name."""
    schema = internals.schema_of(function)
    if schema is None:
        return Signature(f"higher_order::{getattr(function, '__name__', type(function).__name__)}")
    tags = internals.tags_of(function)
    space, name = schema.name.split("::")
    is_of_torch = space == "aten"
    undeclared = _UNDECLARED_WRITES.get(name, ()) if is_of_torch else ()
    written = [
        item
        for item in schema.arguments
        if (item.alias_info is not None and item.alias_info.is_write) or item.name in undeclared
    ]
    aliases = [item for item in schema.arguments if item.alias_info is not None and not item.alias_info.is_write]
    overwrites = is_of_torch and name in _OVERWRITES
    overwritten = [item.name for item in written if item.is_out or overwrites]
    is_resize = is_of_torch and name in _RESIZES
    return Signature(
        name=internals.operation_name(schema),
        arguments=tuple(item.name for item in schema.arguments),
        written=frozenset(item.name for item in written),
        overwritten=frozenset(overwritten),
        is_partial=is_of_torch and name.startswith(_PARTIAL_WRITES),
        is_view=not is_resize
        and (bool(aliases) or (is_of_torch and name in _UNSAFE_VIEWS) or torch.Tag.inplace_view in tags),
        is_random=torch.Tag.nondeterministic_seeded in tags,
        is_undefined=is_resize or (is_of_torch and name.startswith(_ALLOCATIONS)),
        undefined=_WORKSPACES.get(name, ()) if is_of_torch else (),
        is_asynchronous=space in _ASYNCHRONOUS,
    )


class OperationPlace(NamedTuple):
    """``is_inside``: the operation runs in a forward pass of the model, or of a part of the model."""

    stage: Stage
    module: str
    is_inside: bool


class Places:
    """The places of a thread's operations, in the order of execution.

    In the backward pass an operation belongs to the module whose forward pass made its node. Nodes are numbered in the
    order in which they are made, so the number is noted where the module changes. The node of a leaf belongs to the
    module with the parameter.
    """

    def __init__(self, module: nn.Module) -> None:
        self._paths = {id(child): path for path, child in module.named_modules()}
        self._owners = {id(parameter): name.rpartition(".")[0] for name, parameter in module.named_parameters()}
        self._first_numbers: list[int] = []  # of nodes of a module, ascending
        self._modules: list[str] = []
        self._next_number = 0

    def find(self) -> OperationPlace | None:
        """The place of the present operation; None for an operation of this library itself."""
        module, file = internals.caller_of_operation(self._paths, ignored=_CAPTURE)
        if file.startswith(_LIBRARY):
            return None
        stage: Stage = "backward" if internals.inside_backward() else "forward"
        is_inside = module is not None
        if not file and not is_inside and stage == "forward":
            return None  # in a thread without Python code: gloo's threads copy tensors
        if module is None:
            module = self._module_of_node() if stage == "backward" else ""
        self._note(module)
        return OperationPlace(stage, module, is_inside)

    def _note(self, module: str) -> None:
        """Assign the current node and the nodes after it to ``module``."""
        next_number = internals.next_node_number()
        if not self._modules or self._modules[-1] != module:
            self._first_numbers.append(max(next_number - 1, self._next_number))
            self._modules.append(module)
        self._next_number = next_number

    def _module_of_node(self) -> str:
        node = internals.current_node()
        if node is None:
            return ""
        number = internals.node_number(node)
        if number == internals.LEAF_NUMBER:
            return self._owners.get(id(internals.leaf_of(node)), "")
        index = bisect_right(self._first_numbers, number) - 1
        return self._modules[index] if index >= 0 else ""


class Descriptions:
    """Texts of tensors: dtype and shape, and layout."""

    def __init__(self) -> None:
        self._known: dict[object, tuple[str, str]] = {}

    def of(self, tensor: torch.Tensor) -> tuple[str, str]:
        """``kind`` and ``layout`` of :class:`Value`."""
        if tensor.layout is not torch.strided or internals.has_own_dispatch(tensor) or tensor.is_nested:
            return _foreign(tensor)
        key = tensor.dtype, tensor.shape, tensor.stride(), tensor.device.type, tensor.is_conj(), tensor.is_neg()
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = format_type(tensor), ", ".join(_layout(tensor))
        return found


def _layout(tensor: torch.Tensor) -> Iterator[str]:
    if not tensor.is_contiguous():
        yield f"strides {tensor.stride()}"
    if tensor.device.type != "cpu":
        yield f"on {tensor.device.type}"
    if tensor.is_conj():
        yield "conjugated"
    if tensor.is_neg():
        yield "negated"


def _foreign(tensor: torch.Tensor) -> tuple[str, str]:
    """Kind and layout of a sparse tensor, or of a tensor of a subclass."""
    name = type(tensor).__name__
    try:
        kind = format_type(tensor)
    except Exception:  # noqa: BLE001 - a class of a user may raise anything
        return name, ""
    layout = "" if tensor.layout is torch.strided else str(tensor.layout).removeprefix("torch.")
    return kind, layout if type(tensor) in (torch.Tensor, nn.Parameter) else f"{name} {layout}".strip()


class ParameterNames:
    """Names of the parameters and buffers of a module, by memory."""

    def __init__(self, module: nn.Module) -> None:
        self._names: dict[int, list[tuple[int, int, str]]] = {}
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            key = internals.storage_key(tensor)
            if key is not None and not internals.has_own_dispatch(tensor):
                self._names.setdefault(key, []).append((*_span(tensor), name))

    def of(self, tensor: torch.Tensor) -> list[str]:
        """The names of parameters and buffers that share memory with the tensor."""
        key = internals.storage_key(tensor)
        held = self._names.get(key, ()) if key is not None else ()
        if len(held) < 2:
            return [name for _, _, name in held]
        first, last = _span(tensor)
        return [name for begin, end, name in held if begin <= last and first <= end]


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """The first and the last byte of the tensor's elements in its storage."""
    begin = int(tensor.storage_offset()) * tensor.itemsize
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + int(last + 1) * tensor.itemsize - 1


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """The tensors in an argument or a result, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)


def setting(value: object) -> str:
    """An argument as text without its tensors, equal from run to run; for other objects the name of the type."""
    if isinstance(value, torch.Tensor):
        return "tensor"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(setting, value))}]"
    if value is None or isinstance(value, bool | int | float | complex | str):
        return repr(value)
    if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
        return str(value).removeprefix("torch.")
    if isinstance(value, torch.device):
        return value.type
    return type(value).__name__


def is_setting(value: Any) -> bool:
    """Whether an argument holds anything but tensors."""
    if isinstance(value, list | tuple):
        return not value or any(map(is_setting, value))
    return not isinstance(value, torch.Tensor)
