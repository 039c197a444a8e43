"""The state of the model and of the process around runs of a batch: set aside before, and put back bit for bit."""

import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from legacy_ddp import _torch as internals
from legacy_ddp._interrupts import undone_by
from legacy_ddp._replicas.digest import as_bytes, is_digestible
from legacy_ddp._torch import device as devices

_NOTHING: Mapping[str, torch.Tensor] = {}


@contextmanager
def state_set_aside(
    module: nn.Module, others: Sequence[nn.Module] = (), statistics: Mapping[str, torch.Tensor] = _NOTHING
) -> Iterator["SavedState"]:
    """Inside the block every ``.grad`` of the model is None, and backward runs no hook after it adds to a gradient.

    Afterwards every ``.grad`` is the same tensor as before, with its bits. Parameters, buffers, their version counters,
    training flags and random generators are as before. ``others``: modules beside the model, with buffers and training
    flags to put back. ``statistics``: buffers of these modules, which travel with a batch, by name. Not put back: state
    outside of torch modules, for example a counter in Python.
    """
    parameters = list(module.parameters())
    saved = SavedState(module, others, statistics)
    with ExitStack() as stack:
        stack.enter_context(internals.without_accumulate_hooks(parameters))
        stack.callback(torch.clear_autocast_cache)
        stack.enter_context(undone_by(saved.restore))
        stack.enter_context(internals.preserved_versions(saved.tensors))
        yield saved


class SavedState:
    """The state of a module and of the modules beside it, and of the random generators.

    Holds a copy of all parameters and buffers of the module, and of the buffers of the other modules.
    """

    def __init__(
        self, module: nn.Module, others: Sequence[nn.Module] = (), statistics: Mapping[str, torch.Tensor] = _NOTHING
    ) -> None:
        self.generators = generator_states(module)
        self._module, self._statistics = module, statistics
        self._is_restored = False
        self._gradients = [(parameter, parameter.grad) for parameter in module.parameters()]
        held = [*module.parameters(), *(buffer for item in (module, *others) for buffer in item.buffers())]
        self._tensors = [(item, item.detach().clone()) for item in {id(item): item for item in held}.values()]
        children = {id(child): child for item in (module, *others) for child in item.modules()}
        self._modules = [
            (child, child.training, dict(child._parameters), dict(child._buffers)) for child in children.values()
        ]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors whose values are put back."""
        return [tensor for tensor, _ in self._tensors]

    def begin_run(self, generators: Mapping[str, Any], own: Mapping[str, torch.Tensor]) -> None:
        """Begin with the saved state again: no gradients, ``generators``, and the values ``own`` by tensor name."""
        self._restore_module()
        for parameter, _ in self._gradients:
            parameter.grad = None
        restore_generators(self._module, dict(generators))
        parameters = self._module.named_parameters(remove_duplicate=False)
        buffers = self._module.named_buffers(remove_duplicate=False)
        tensors = {**dict(parameters), **dict(buffers), **self._statistics}
        for name, value in own.items():
            tensors[name].data.copy_(value)
        torch.clear_autocast_cache()  # a cached copy of a weight would save the second run an operation

    def restore(self) -> None:
        """Put everything back, once; again, if an exception came before the end."""
        if self._is_restored:
            return
        self._restore_module()
        for parameter, grad in self._gradients:
            parameter.grad = grad
        restore_generators(self._module, self.generators)
        self._is_restored = True
        self._gradients.clear()  # an error may keep this object alive, but no gradient

    def _restore_module(self) -> None:
        for child, is_training, parameters, buffers in self._modules:
            child.training = is_training
            _put_back(child._parameters, parameters)
            _put_back(child._buffers, buffers)
        for tensor, copy in self._tensors:
            if not (is_digestible(copy) and torch.equal(as_bytes(tensor.detach()), as_bytes(copy))):
                tensor.data.copy_(copy)  # raises no version, which counts as a step elsewhere


def _put_back(present: dict[str, Any], before: Mapping[str, Any]) -> None:
    """Give a module the same tensors under the same names, if they were replaced."""
    if any(present.get(name) is not tensor for name, tensor in before.items()) or len(present) != len(before):
        present.clear()
        present.update(before)


def generator_states(module: nn.Module) -> dict[str, Any]:
    """The states of the generators of this process, in values for a parcel."""
    version, internal, gauss = random.getstate()
    states: dict[str, Any] = {
        "cpu": torch.get_rng_state(),
        "devices": [devices.generator_state(device) for device in devices.devices_of(module.parameters())],
        "python": (version, internal, gauss),
        "modules": {name: generator.get_state() for name, generator in _held_by_modules(module)},
    }
    if numpy := sys.modules.get("numpy"):
        name, keys, *rest = numpy.random.get_state()
        states["numpy"] = (name, keys.tolist(), *map(float, rest))
    return states


def restore_generators(module: nn.Module, states: dict[str, Any]) -> None:
    """The inverse of :func:`generator_states`, also for the states of a different rank."""
    torch.set_rng_state(states["cpu"])
    for device, state in zip(devices.devices_of(module.parameters()), states["devices"], strict=False):
        devices.set_generator_state(device, state)
    random.setstate(states["python"])
    for name, generator in _held_by_modules(module):
        if name in states["modules"]:
            generator.set_state(states["modules"][name])
    if (numpy := sys.modules.get("numpy")) and "numpy" in states:
        name, keys, position, has_gauss, gauss = states["numpy"]
        numpy.random.set_state((name, keys, int(position), int(has_gauss), gauss))


def _held_by_modules(module: nn.Module) -> Iterator[tuple[str, torch.Generator]]:
    """Attributes of modules, by path."""
    for path, child in module.named_modules():
        for name, value in vars(child).items():
            if isinstance(value, torch.Generator):
                yield f"{path}.{name}", value
