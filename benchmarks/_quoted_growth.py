"""Tables of the quoted figures about growth with tensors, bytes and ranks."""

from collections.abc import Mapping
from types import MappingProxyType

from _table import Column, Table

_GROWING = MappingProxyType(
    {
        "bare `all_reduce`": "bare all_reduce",
        '`checks="off"`, gradients kept': "ours, off, views",
        '`checks="off"`, after `set_to_none=True`': "ours, off, to pack",
        '`checks="info"`, gradients kept': "ours, info, views",
        '`checks="info"`, likewise after `set_to_none=True`': "ours, info, to pack",
    }
)


def _tensors() -> Table:
    counts = {"100": 100, "1,000": 1000, "10,000": 10_000, "100,000": 100_000}
    return Table(
        file="scale_tensors.json",
        heading="ms of one call, 8 MiB in so many tensors",
        columns=[
            Column(title, ((f"{count} tensors", "call", "{variant}", "median_ms"),), "{:.3g}")
            for title, count in counts.items()
        ],
        rows={label: {"variant": name} for label, name in _GROWING.items()},
    )


def _replans() -> Table:
    counts = {"1,000": 1000, "16,000": 16_000, "100,000": 100_000}
    return Table(
        file="scale_replan.json",
        heading="ms of one call, gradients kept",
        columns=[
            Column(title, ((f"{count} tensors", "{variant}", "median_ms"),), "{:.3g}")
            for title, count in counts.items()
        ],
        rows={name: {"variant": name} for name in ("nothing changed", "one parameter frozen or thawed")},
    )


def _bytes() -> Table:
    return Table(
        file="scale_bytes.json",
        heading="one call, against a bare `all_reduce`",
        columns=[
            Column(f"{size} MiB", ((f"{size} MiB", "call", "{variant}", "median_ratio"),))
            for size in (1, 4, 16, 64, 256, 1024)
        ],
        rows={label: {"variant": name} for label, name in list(_GROWING.items())[1:]},
    )


def _ranks() -> Table:
    sizes = {"64 KiB": 64, "1 MiB": 1024, "4 MiB": 4096, "16 MiB": 16384}
    rows = {}
    for title, size in sizes.items():
        rows[f"{title}: bare `all_reduce`"] = {"size": str(size), "variant": "bare all_reduce"}
        rows[f'{title}: `checks="off"`'] = {"size": str(size), "variant": "ours, off, to pack"}
        rows[f'{title}: the same, `transport="gloo"`'] = {"size": str(size), "variant": "ours, off, gloo, to pack"}
    return Table(
        file="scale_ranks.json",
        heading="2 cores, ms of one call",
        columns=[
            Column(f"{ranks} ranks", (("run", f"{ranks} ranks, {{size}} KiB", "{variant}", "median_ms"),), "{:.3g}")
            for ranks in (2, 4, 8, 16)
        ],
        rows=rows,
    )


def _exchange() -> Table:
    ways = {"barrier": "barrier", "all-gather of the headers": "all_gather", "with reading them": "agree()"}
    return Table(
        file="agree_header_16.json",
        heading="2 cores, median in ms",
        columns=[
            Column(f"{size} ranks", (("run", str(size), "{way}", "median_ms"),), "{:.2g}") for size in (2, 4, 8, 16)
        ],
        rows={label: {"way": way} for label, way in ways.items()},
    )


def _computed_exchange() -> Table:
    ways = {"all_gather, a ring": "all_gather", "recursive doubling": "recursive_doubling"}
    return Table(
        file="agree_header_16.json",
        heading="ms, computed",
        columns=[
            Column(f"{size:,} ranks", (("reasoned", "0", "{way}", "exchange_ms", str(size)),), "{:.1f}")
            for size in (16, 64, 256, 1024, 4096)
        ],
        rows={label: {"way": way} for label, way in ways.items()},
    )


GROWTH: Mapping[str, Table] = MappingProxyType(
    {
        "tensors": _tensors(),
        "replan": _replans(),
        "bytes": _bytes(),
        "ranks": _ranks(),
        "header": _exchange(),
        "header, computed": _computed_exchange(),
    }
)
