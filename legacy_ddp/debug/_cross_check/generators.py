"""The random generators of a run: torch on the CPU and on the model's devices, Python, NumPy, single modules."""

import random
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn


def generator_states(module: nn.Module) -> dict[str, Any]:
    """The states of the generators of this process, in values for a parcel."""
    version, internal, gauss = random.getstate()
    states: dict[str, Any] = {
        "cpu": torch.get_rng_state(),
        "devices": [torch.cuda.get_rng_state(device) for device in _devices(module)],
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
    for device, state in zip(_devices(module), states["devices"], strict=False):
        torch.cuda.set_rng_state(state, device)
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


def _devices(module: nn.Module) -> list[torch.device]:
    return sorted({parameter.device for parameter in module.parameters() if parameter.is_cuda}, key=str)
