"""Synchronizers of modules and parameters without a wrapper."""

from collections.abc import Callable, Iterable, MutableMapping, Sequence
from functools import cache, lru_cache, partial
from typing import Never

import torch
import torch.distributed as dist
from torch import nn

from legacy_ddp import _torch as internals
from legacy_ddp._buckets.plan import Columns
from legacy_ddp._checks import Checks, resolve_checks
from legacy_ddp._collectives.state import Synchronizer
from legacy_ddp._settings import Settings, resolve_transport
from legacy_ddp._step_guard.backward_counter import PassiveHook


def synchronizer_of(module_or_params: nn.Module | Iterable[torch.Tensor]) -> tuple[Synchronizer, Callable[[], Columns]]:
    """The synchronizer of a module or of parameters, and a function for the names of the parameters.

    The synchronizer lives as long as the module, or the first of the parameters. A wrong argument raises its error when
    the function is called: inside the call, which announces the error to the other ranks. Without a process
    group the error is raised at once.
    """
    try:
        if isinstance(module_or_params, nn.Module):
            synchronizer = _of_module(module_or_params)
            return synchronizer, partial(synchronizer.planner.walk.columns, module_or_params)
        parameters = _tensors(module_or_params)
        return _of_parameters(parameters), lambda: Columns(_numbers(len(parameters)), parameters)
    except (TypeError, ValueError) as error:
        if not dist.is_initialized():
            raise
        return Synchronizer(Settings(checks=_UNGUARDED)), partial(_raise, error)


_UNGUARDED = Checks(unsynchronized_step="allow")  # a function has no no_sync() to step in
_of_modules: MutableMapping[nn.Module, Synchronizer] = internals.WeakIdKeyDictionary()


def _new(module_class: str = "") -> Synchronizer:
    settings = Settings(transport=resolve_transport("auto"), checks=resolve_checks(_UNGUARDED))
    return Synchronizer(settings, module_class=module_class)


def _of_module(module: nn.Module) -> Synchronizer:
    if module not in _of_modules:
        _of_modules[module] = _new(type(module).__name__)
    return _of_modules[module]


@cache
def _of_nothing() -> Synchronizer:
    return _new()


class _SynchronizerHook(PassiveHook):
    """A hook without effect, which keeps a synchronizer for as long as the parameter lives. A weak reference to the
    parameter would not do: torch refuses to swap the contents of a tensor with weak references."""

    def __init__(self) -> None:
        self.synchronizer = _new()

    def __call__(self, parameter: torch.Tensor) -> None:
        pass


def _of_parameters(parameters: Sequence[torch.Tensor]) -> Synchronizer:
    if not parameters:
        return _of_nothing()
    (hooks,) = internals.accumulate_hooks(parameters[:1])
    hook = next((hook for hook in hooks.values() if isinstance(hook, _SynchronizerHook)), None)
    if hook is None:
        hook = _SynchronizerHook()
        if parameters[0].is_leaf:  # the call refuses a tensor that is no leaf
            internals.add_accumulate_hook(parameters[0], hook)
    return hook.synchronizer


def _tensors(given: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    parameters = list(given) if isinstance(given, Iterable) else [given]
    others = [type(parameter).__name__ for parameter in parameters if not isinstance(parameter, torch.Tensor)]
    if others:
        raise TypeError(f"module_or_params is unusable: got {others[0]}, expected a module or its parameters (tensors)")
    return parameters


@lru_cache(maxsize=4)
def _numbers(count: int) -> list[str]:
    """Names of parameters by their position."""
    return [f"{index:06d}" for index in range(count)]


def _raise(error: Exception) -> Never:
    raise error
