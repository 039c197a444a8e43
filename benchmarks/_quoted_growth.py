"""Tables of the quoted figures about growth with tensors, bytes and ranks."""

from collections.abc import Mapping
from types import MappingProxyType

from _table import Column, Table

HEADERS = "agree_header_64.json"
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
    ways = {
        "barrier": "barrier",
        "gloo `all_gather` of the headers": "all_gather",
        "tree": "tree",
        "tree, with reading": "agree()",
    }
    return Table(
        file=HEADERS,
        heading="8 claimed hosts on 2 cores, median in ms",
        columns=[
            Column(f"{size} ranks", (("run", str(size), "{way}", "median_ms"),), "{:.3g}")
            for size in (2, 4, 8, 16, 32, 64)
        ],
        rows={label: {"way": way} for label, way in ways.items()},
    )


def _computed_exchange() -> Table:
    ways = {
        "gloo `all_gather`, a ring": "all_gather",
        "tree, 8 ranks on each host": "tree",
        "tree, one rank on each host": "tree, hosts of 1",
    }
    return Table(
        file=HEADERS,
        heading="ms, computed",
        columns=[
            Column(f"{size:,} ranks", (("modelled", "0", "ways", "{way}", "exchange_ms", str(size)),), "{:.1f}")
            for size in (16, 64, 256, 1024, 4096, 8192)
        ],
        rows={label: {"way": way} for label, way in ways.items()},
    )


def _control() -> Table:
    facts = {"descriptors": "descriptors", "threads": "threads", "private memory, KiB": "private_kib"}
    whose = {"torch DDP with its group": "torch DDP", "the library": "ours"}
    rows = {
        f"{label}: {fact}": {"who": who, "fact": key} for fact, key in facts.items() for label, who in whose.items()
    }
    rows["the library: operations on the store"] = {"who": "ours", "fact": "store_operations"}
    rows["its group of gloo: operations on the store"] = {"who": "ours", "fact": "store_operations_of_gloo"}
    rows["a process with both: descriptors"] = {"who": "process", "fact": "descriptors"}
    return Table(
        file="scale_control.json",
        heading="one host, the median rank and the hub",
        columns=[
            Column(
                f"{size} ranks",
                tuple(("processes", str(size), "{who}", "{fact}", rank) for rank in ("median", "hub")),
                "{:.0f}, {:.0f}",
            )
            for size in (2, 4, 8, 16)
        ],
        rows=rows,
    )


def _simulated() -> Table:
    facts = {
        "read and compare equal rows, ms": "reading_ms",
        "LayoutError of two inventories: MB received": "layout_error_mb",
        "the same: processor time, s": "layout_error_cpu_s",
        "poll of all ranks, twice: s": "poll_s",
        "the same: processor time with the answers, s": "poll_cpu_s",
        "report from the answers: ms": "report_ms",
        "lines of the report": "report_lines",
        "kB of the report for another rank": "report_kb",
    }
    return Table(
        file="scale_control.json",
        heading="one rank of so many simulated ranks",
        columns=[Column(f"{ranks:,}", (("simulated", str(ranks), "{fact}"),), "{:.3g}") for ranks in (1024, 8192)],
        rows={label: {"fact": fact} for label, fact in facts.items()},
    )


GROWTH: Mapping[str, Table] = MappingProxyType(
    {
        "tensors": _tensors(),
        "replan": _replans(),
        "bytes": _bytes(),
        "ranks": _ranks(),
        "header": _exchange(),
        "header, computed": _computed_exchange(),
        "control": _control(),
        "simulated": _simulated(),
    }
)
