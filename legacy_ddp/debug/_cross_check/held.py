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

_DEPTH = 4  # of containers, and of functions in closures
_MOST = 1_000  # items of a container
_STEP_FOR_ITERATOR = "take the item before, and pass it in the batch"
_STEP_FOR_GENERATOR = (
    "draw from torch's default generator, which travels with the batch, or draw before and pass the result in the batch"
)


def held_values(run: object, module: nn.Module) -> dict[str, Any]:
    """Tensors, numbers and texts inside of ``run``, by place. The model's own tensors and settings are left out.

    Of a container the first thousand items are looked at. Globals of functions inside of ``run`` are not seen, and
    attributes of objects in a closure neither.

    Raises:
        TypeError: an iterator or a random generator, with different values on every rank.
    """
    own = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
    found: dict[str, Any] = {}
    for name, value in _walk(run, "run", module, _DEPTH):
        if isinstance(value, Iterator | torch.Generator):
            kind = type(value).__name__
            step = _STEP_FOR_GENERATOR if isinstance(value, torch.Generator) else _STEP_FOR_ITERATOR
            raise TypeError(f"{name} is a {kind}, which has a state of this rank alone; {step}")
        if not isinstance(value, torch.Tensor) or id(value) not in own:
            found[name] = value
    return found


def _walk(value: object, name: str, module: nn.Module, depth: int) -> Iterator[tuple[str, Any]]:
    if isinstance(value, torch.Tensor | torch.Generator | Iterator | bool | int | float | str):
        yield name, value
    elif isinstance(value, nn.Module):
        # Of the model nothing is new, and of a wrapper around the model neither.
        for key, tensor in (*value.named_parameters(), *value.named_buffers()):
            yield f"{name}.{key}", tensor
    elif depth:
        for key, item in _parts(value, is_run=name == "run"):
            yield from _walk(item, f"{name}{key}", module, depth - 1)


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
            yield from ((f".__self__.{key}", item) for key, item in _attributes(value.__self__))
    elif isinstance(value, FunctionType):
        yield from _function_parts(value, with_globals=is_run)
    elif isinstance(value, Mapping):
        yield from ((f"[{key!r}]", item) for key, item in islice(value.items(), _MOST))
    elif isinstance(value, list | tuple | set | frozenset):
        yield from ((f"[{index}]", item) for index, item in enumerate(islice(value, _MOST)))
    elif is_run and callable(value):
        yield from ((f".{key}", item) for key, item in _attributes(value))


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


def _attributes(value: object) -> Iterator[tuple[str, Any]]:
    for key, item in getattr(value, "__dict__", {}).items():
        if not isinstance(item, FunctionType | MethodType):
            yield key, item
