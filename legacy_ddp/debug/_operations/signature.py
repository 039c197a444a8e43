"""Kinds of operations, by their schema: written arguments, results without defined content, views."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from legacy_ddp import _torch as internals

_ALLOCATIONS = ("empty", "_empty", "new_empty")
# Share memory with their input without saying so in their schema.
_UNSAFE_VIEWS = ("_unsafe_view", "unsafe_split", "unsafe_split_with_sizes", "unsafe_chunk")
# Write every element of their first argument, and read none.
_OVERWRITES = (
    *("copy_", "fill_", "zero_", "eye_", "random_", "uniform_", "normal_", "bernoulli_", "exponential_"),
    *("geometric_", "cauchy_", "log_normal_"),
)
# Write some elements of their first argument.
_PARTIAL_WRITES = ("index_", "_index_", "scatter", "masked_", "put_")
_RESIZES = ("resize_", "resize_as_", "_resize_output_")
# Results that are memory for the kernel of the backward pass, not written as a whole: their positions.
_WORKSPACES: Mapping[str, tuple[int, ...]] = {
    "_batch_norm_with_update": (3,),
    "_cudnn_rnn": (3, 4),
    "cudnn_batch_norm": (3,),
    "miopen_rnn": (3, 4),
    "mkldnn_rnn_layer": (3,),
}
# Write to these arguments, if given, and do not say so in their schema.
_UNDECLARED_WRITES = {
    "native_batch_norm": ("running_mean", "running_var"),
    "cudnn_batch_norm": ("running_mean", "running_var"),
    "miopen_batch_norm": ("running_mean", "running_var"),
}
# Collectives return before they have written.
_ASYNCHRONOUS = ("c10d", "_c10d_functional")


@dataclass(frozen=True)
class Signature:
    """Facts about an operation, the same for every call.

    ``name``: with the overload. ``arguments``: names of positional arguments. ``written``: names of arguments written
    to by the operation. ``overwritten``: names of arguments written to, and not read. ``is_partial``: only some
    elements are written. ``is_view``: nothing is computed, and the results are other views of the inputs.
    ``is_random``: a random generator is read. ``undefined``: positions of results without defined content;
    ``is_undefined``: all results.
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
        """Whether the operation reads the elements of the argument."""
        return not (self.is_view or self.is_undefined or argument in self.overwritten)

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        """The given arguments with their names, in order."""
        yield from zip(self.arguments, args, strict=False)
        for position in range(len(self.arguments), len(args)):
            yield str(position), args[position]
        yield from kwargs.items()


@cache
def signature_of(function: Callable[..., Any]) -> Signature:
    """The signature of an operation; of a higher-order operation, which has no schema, the name alone."""
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
