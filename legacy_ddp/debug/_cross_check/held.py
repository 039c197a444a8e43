"""The values inside of a function, besides its arguments: in closure, defaults, globals, object."""

import dis
import functools
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import islice
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from legacy_ddp import _torch as internals

_DEPTH = 4  # of containers, and of functions in closures
_MOST = 1_000  # items of a container
_LEAVES = (torch.Tensor, torch.Generator, Iterator, DataLoader, nn.Module, bool, int, float, str)
_STEP_FOR_ITERATOR = "take the item before, and pass it in the batch"
_STEP_FOR_GENERATOR = (
    "draw from torch's default generator, which travels with the batch, or draw before and pass the result in the batch"
)


def held_values(run: object, module: nn.Module) -> dict[str, Any]:
    """Tensors, numbers and texts inside of ``run``, by place. The model's own tensors and settings are left out.

    Of a container the first thousand items are looked at, and of an object the attributes with names in the code of
    ``run``. Globals of functions inside of ``run`` are not seen, and attributes of objects in a closure neither.

    Raises:
        TypeError: a data loader, an iterator or a random generator, with different values on every rank.
    """
    own = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
    found: dict[str, Any] = {}
    for place, value in _walk(run, "run", _DEPTH):
        if isinstance(value, Iterator | DataLoader | torch.Generator):
            kind = type(value).__name__
            step = _STEP_FOR_GENERATOR if isinstance(value, torch.Generator) else _STEP_FOR_ITERATOR
            raise TypeError(f"{place} is a {kind}, which has a state of this rank alone; {step}")
        for name, item in _tensors(place, value) if isinstance(value, nn.Module) else [(place, value)]:
            # Of the model nothing is new, and of a wrapper around the model neither.
            if not isinstance(item, torch.Tensor) or id(item) not in own:
                found[name] = item
    return found


def held_modules(run: object) -> dict[str, nn.Module]:
    """The modules inside of ``run``, the model among them, by place."""
    return {place: value for place, value in _walk(run, "run", _DEPTH) if isinstance(value, nn.Module)}


def held_statistics(run: object, module: nn.Module) -> dict[str, torch.Tensor]:
    """The statistics of normalisation layers in modules inside of ``run``, by place; without layers of the model."""
    own = {id(buffer) for buffer in module.buffers()}
    found = {}
    for place, item in held_modules(run).items():
        buffers = dict(item.named_buffers(remove_duplicate=False))
        names = internals.statistics_names(item) & buffers.keys()
        found.update({f"{place}.{name}": buffers[name] for name in sorted(names) if id(buffers[name]) not in own})
    return found


def _tensors(place: str, module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for key, tensor in (*module.named_parameters(), *module.named_buffers()):
        yield f"{place}.{key}", tensor


def _walk(value: object, name: str, depth: int) -> Iterator[tuple[str, Any]]:
    if isinstance(value, _LEAVES):
        yield name, value
    elif depth:
        for key, item in _parts(value, is_run=name == "run"):
            yield from _walk(item, f"{name}{key}", depth - 1)


def _parts(value: object, *, is_run: bool) -> Iterator[tuple[str, Any]]:
    """The values inside a function, a partial, a method, a callable object or a container, with their places."""
    if isinstance(value, functools.partial):
        yield "", value.func
        yield from ((f" argument {index}", item) for index, item in enumerate(value.args))
        yield from ((f" argument {key!r}", item) for key, item in value.keywords.items())
    elif isinstance(value, MethodType):
        yield "", value.__func__
        yield ".__self__", value.__self__
        if not isinstance(value.__self__, nn.Module):
            found = _attributes(value.__self__, value.__func__)
            yield from ((f".__self__.{key}", item) for key, item in found)
    elif isinstance(value, FunctionType):
        yield from _function_parts(value, with_globals=is_run)
    elif isinstance(value, Mapping):
        yield from ((f"[{key!r}]", item) for key, item in islice(value.items(), _MOST))
    elif isinstance(value, list | tuple | set | frozenset):
        yield from ((f"[{index}]", item) for index, item in enumerate(islice(value, _MOST)))
    elif is_run and callable(value):
        yield from ((f".{key}", item) for key, item in _attributes(value, type(value).__call__))


def _function_parts(function: FunctionType, *, with_globals: bool) -> Iterator[tuple[str, Any]]:
    used = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=False))
    for key, cell in used.items():
        with suppress(ValueError):  # a variable without a value
            yield f" variable {key!r}", cell.cell_contents
    for key in _global_names(function.__code__) if with_globals else ():
        item = function.__globals__.get(key)
        if not isinstance(item, ModuleType | type):
            yield f" variable {key!r}", item
    for index, item in enumerate(function.__defaults__ or ()):
        yield f" default {index}", item
    for key, item in (function.__kwdefaults__ or {}).items():
        yield f" default {key!r}", item


def _global_names(code: CodeType) -> list[str]:
    """The global names in a function and in its inner functions, without names of attributes."""
    own = [instruction.argval for instruction in dis.get_instructions(code) if instruction.opname == "LOAD_GLOBAL"]
    inner = [name for constant in code.co_consts if isinstance(constant, CodeType) for name in _global_names(constant)]
    return list(dict.fromkeys([*own, *inner]))


def _attributes(value: object, method: object) -> Iterator[tuple[str, Any]]:
    """The attributes of ``value`` with a name in ``method``, or in methods with a name there."""
    names = _attribute_names(type(value), method, set())
    for key, item in getattr(value, "__dict__", {}).items():
        if key in names and not isinstance(item, FunctionType | MethodType):
            yield key, item


def _attribute_names(kind: type, method: object, found: set[str]) -> set[str]:
    """Adds the names in ``method``, and in the methods and properties of ``kind`` with these names, to ``found``."""
    method = method.fget if isinstance(method, property) else method
    if isinstance(method, FunctionType):
        new = _names_in(method.__code__) - found
        found |= new
        for name in new:
            _attribute_names(kind, getattr(kind, name, None), found)
    return found


def _names_in(code: CodeType) -> set[str]:
    inner = [_names_in(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    return set(code.co_names).union(*inner)
