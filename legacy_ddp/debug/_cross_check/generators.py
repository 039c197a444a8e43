"""The random generators of a process: torch's on the CPU and on the model's devices, Python's, NumPy's."""

import random
import sys
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
    if (numpy := sys.modules.get("numpy")) and "numpy" in states:
        name, keys, position, has_gauss, gauss = states["numpy"]
        numpy.random.set_state((name, keys, int(position), int(has_gauss), gauss))


def _devices(module: nn.Module) -> list[torch.device]:
    return sorted({parameter.device for parameter in module.parameters() if parameter.is_cuda}, key=str)
