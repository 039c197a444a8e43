"""Settings of the ranks with an influence on results: the explanation of a difference."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from legacy_ddp._settings import Settings
from legacy_ddp._text import shorten
from legacy_ddp.debug._cross_check.settings_text import MODULE
from legacy_ddp.debug._trace.environment import facts_of

# They differ between ranks as they should, or have no influence on a result.
_OWN_FACTS = frozenset({"argv", "checks", "commit", "devices", "host", "pid", "seed", "transport"})
_VALUE_COLUMNS = 60


def settings_of(
    group: dist.ProcessGroup, settings: Settings, module: nn.Module, held: Mapping[str, Any]
) -> dict[str, str]:
    """The settings of this rank, as text by name. ``held``: the values inside of the user's function."""
    devices = {parameter.device for parameter in module.parameters()}
    facts = facts_of(group, settings, devices, (), "", None)
    numbers = {name: shorten(repr(value), _VALUE_COLUMNS) for name, value in held.items() if not _is_tensor(value)}
    return {
        **{name: fact for name, fact in facts.items() if name not in _OWN_FACTS},
        **{f"autocast of {kind}": _autocast(kind) for kind in sorted({"cpu", *(device.type for device in devices)})},
        **{f"{MODULE}{name!r}": "training" if child.training else "eval" for name, child in module.named_modules()},
        **numbers,
    }


def _autocast(kind: str) -> str:
    if not torch.is_autocast_enabled(kind):
        return "off"
    return str(torch.get_autocast_dtype(kind)).removeprefix("torch.")


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)
