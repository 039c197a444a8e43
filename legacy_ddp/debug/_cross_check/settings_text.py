"""The lines of a report about differing settings of ranks. Pure."""

from collections.abc import Iterator, Sequence

from legacy_ddp._compare import Difference, name_ranks

MODULE, RUN = "module ", "run "  # beginnings of names
_FEW = 3  # modules with a line of their own
_Holders = tuple[tuple[str, tuple[int, ...]], ...]


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
    """The name of a setting, for the root module in words."""
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
    """The values of all ranks, by ascending ranks."""
    sides = sorted(holders, key=lambda side: min(side[1]))
    return "; ".join(f"{name_ranks(ranks)} {'have' if len(ranks) > 1 else 'has'} {value}" for value, ranks in sides)
