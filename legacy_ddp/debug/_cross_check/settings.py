"""The settings of the ranks, and those that differ, as text. Pure."""

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from legacy_ddp._settings import Settings
from legacy_ddp._text import Difference, compare_rows, name_ranks, shorten
from legacy_ddp.debug._trace.environment import facts_of

MODULE, RUN = "module ", "run "  # beginnings of names
_FEW = 3  # modules with a line of their own
_Holders = tuple[tuple[str, tuple[int, ...]], ...]
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
    devices = {parameter.device for parameter in module.parameters()}
    facts = facts_of(group, settings, devices, (), "", None)
    numbers = {
        name: shorten(repr(value), _VALUE_COLUMNS)
        for name, value in held.items()
        if not isinstance(value, torch.Tensor)
    }
    values = {
        **{name: fact for name, fact in facts.items() if name not in _OWN_FACTS},
        **{f"autocast of {kind}": _autocast(kind) for kind in sorted({"cpu", *(device.type for device in devices)})},
        **{f"{MODULE}{name!r}": "training" if child.training else "eval" for name, child in module.named_modules()},
        **numbers,
    }
    return RankSettings(values, _numbers_of_rank(group))


def _numbers_of_rank(group: dist.ProcessGroup) -> dict[str, int]:
    """The number of this rank in the group, in the job and, where a launcher such as torchrun tells it, on its host."""
    numbers = {"rank": dist.get_rank(group), "global rank": dist.get_rank()}
    local = os.environ.get("LOCAL_RANK", "")
    return {**numbers, "local rank": int(local)} if local.isdecimal() else numbers


def _autocast(kind: str) -> str:
    if not torch.is_autocast_enabled(kind):
        return "off"
    return str(torch.get_autocast_dtype(kind)).removeprefix("torch.")


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


def describe_settings(differences: Sequence[Difference]) -> Iterator[str]:
    """A line for each setting; many modules with equal values on the same ranks have one line together."""
    groups: dict[tuple[_Holders, str], list[str]] = {}
    for item in differences:
        kind = MODULE if item.name.startswith(MODULE) else item.name
        groups.setdefault((item.holders, kind), []).append(item.name)
    for (holders, _), names in groups.items():
        for name in names if len(names) <= _FEW else [_name_modules(names)]:
            yield f"{name_setting(name)}: {_values(holders)}"


def name_setting(name: str) -> str:
    return "the model" if name == f"{MODULE}{''!r}" else name


def _name_modules(names: Sequence[str]) -> str:
    paths = [name.removeprefix(MODULE).strip("'") for name in names]
    if "" in paths:
        return f"the model and {len(paths) - 1} modules inside"
    prefix = _common_prefix(paths)
    return f"{len(paths)} modules of {prefix!r}" if prefix else f"{len(paths)} modules, first {paths[0]!r}"


def _common_prefix(paths: Sequence[str]) -> str:
    """The path of the innermost module around all modules of ``paths``; empty for the model."""
    common = []
    for parts in zip(*(path.split(".") for path in paths), strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    return ".".join(common)


def _values(holders: _Holders) -> str:
    sides = sorted(holders, key=lambda side: min(side[1]))
    return "; ".join(f"{name_ranks(ranks)} {'have' if len(ranks) > 1 else 'has'} {value}" for value, ranks in sides)
