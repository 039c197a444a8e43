"""Settings of the ranks with an influence on results: the explanation of a difference."""

import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from legacy_ddp._compare import Difference, compare_rows
from legacy_ddp._settings import Settings
from legacy_ddp._text import shorten
from legacy_ddp.debug._cross_check.settings_text import MODULE, RUN
from legacy_ddp.debug._trace.environment import facts_of

# They differ between ranks as they should, or have no influence on a result.
_OWN_FACTS = frozenset({"argv", "checks", "commit", "devices", "host", "pid", "seed", "transport"})
_VALUE_COLUMNS = 60


class RankSettings(NamedTuple):
    """The settings of a rank. ``values``: as text by name. ``numbers``: of the rank itself, by the way of counting."""

    values: Mapping[str, str]
    numbers: Mapping[str, int]


def settings_of(
    group: dist.ProcessGroup, settings: Settings, module: nn.Module, held: Mapping[str, Any]
) -> RankSettings:
    """The settings of this rank. ``held``: the values inside of the user's function."""
    devices = {parameter.device for parameter in module.parameters()}
    facts = facts_of(group, settings, devices, (), "", None)
    numbers = {name: shorten(repr(value), _VALUE_COLUMNS) for name, value in held.items() if not _is_tensor(value)}
    values = {
        **{name: fact for name, fact in facts.items() if name not in _OWN_FACTS},
        **{f"autocast of {kind}": _autocast(kind) for kind in sorted({"cpu", *(device.type for device in devices)})},
        **{f"{MODULE}{name!r}": "training" if child.training else "eval" for name, child in module.named_modules()},
        **numbers,
    }
    return RankSettings(values, _numbers_of_rank(group))


def differing_settings(rows: Sequence[RankSettings]) -> tuple[Difference, ...]:
    """The settings that differ between ranks. ``rows``: of each rank.

    A value in the user's function that is on every rank the rank's own number differs as it should: it is left out.
    """
    differences = compare_rows([row.values for row in rows]).differences
    return tuple(item for item in differences if not (item.name.startswith(RUN) and _is_own_number(item.name, rows)))


def _is_own_number(name: str, rows: Sequence[RankSettings]) -> bool:
    """Whether the value is on all ranks the rank's number in one way of counting, as an int or as text."""
    return any(
        all(row.values.get(name, "").strip("'") == str(row.numbers.get(way)) for row in rows) for way in rows[0].numbers
    )


def _numbers_of_rank(group: dist.ProcessGroup) -> dict[str, int]:
    """The number of this rank in the group, in the job and, where a launcher such as torchrun tells it, on its host."""
    numbers = {"rank": dist.get_rank(group), "global rank": dist.get_rank()}
    local = os.environ.get("LOCAL_RANK", "")
    return {**numbers, "local rank": int(local)} if local.isdecimal() else numbers


def _autocast(kind: str) -> str:
    if not torch.is_autocast_enabled(kind):
        return "off"
    return str(torch.get_autocast_dtype(kind)).removeprefix("torch.")


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)
