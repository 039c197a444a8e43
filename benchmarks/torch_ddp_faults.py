"""What torch DDP does in the situations of docs/comparison.md: the source of its column there and in the README.

    python benchmarks/torch_ddp_faults.py [--only ROW ...] [--limit SECONDS] [--json FILE]

Each situation of _ddp_scenes.py is a job of two processes on this host, over gloo, with torch DDP's default settings.
Of each the script prints the outcome:

works     all ranks end with the values that one process on the data of both ranks gets
silent    all ranks end, without an error, with other values: they differ between the ranks, or are wrong and equal
error     an exception on some rank; its first line, and the seconds since the fault (or since the start of the job)
abort     a process was ended by a signal
waits     a rank still waits after --limit seconds; torch's own timeout is 30 minutes on gloo

Where a rank is lost, the outcome is that of the other rank. Several hosts, NCCL and more than two ranks are not run.
`python benchmarks/tables.py --write` writes the results into the pages.
"""

import argparse
import importlib
import math
import multiprocessing
import multiprocessing.connection
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _ddp_scenes import FAULT_FILE, RIGHT, SCENES, Scene, Seen
from _interrupt import quiet_interrupt
from _measure import machine, results_path, save

RANKS = 2
LIMIT_SECONDS = 30.0
AT_ONCE_SECONDS = 2.0  # on a loaded machine, too
ROWS = tuple(dict.fromkeys(scene.row for scene in SCENES))


@dataclass(frozen=True)
class Error:
    """An exception on a rank; ``moment`` as by time.monotonic(), which all processes of a machine share."""

    moment: float
    line: str
    when: str


@dataclass(frozen=True)
class Outcome:
    """``detail``: which wrong values, the first line of the error, or the name of the signal."""

    kind: str
    detail: str = ""
    seconds: float | None = None
    when: str = ""

    @property
    def words(self) -> str:
        """The outcome as the pages tell it."""
        if self.kind == "error":
            seconds = self.seconds or 0.0
            return f"error {self.when or ('at once' if seconds < AT_ONCE_SECONDS else f'after {seconds:.0f} s')}"
        return {
            "works": "works",
            "silent": f"silent, {self.detail}",
            "abort": f"abort by {self.detail}",
            "waits": "the other ranks wait",
        }[self.kind]

    def told(self, limit: float) -> str:
        """The outcome with all that is known of it."""
        if self.kind == "waits":
            return f"still waiting after {limit:g} s; torch's timeout is 30 minutes"
        return f"{self.words}, {self.seconds:.2f} s: {self.detail}" if self.kind == "error" else self.words


def main(given: Sequence[str] | None = None) -> None:
    """Run, print a line per situation, write JSON if asked."""
    arguments = parse_arguments(given)
    importlib.import_module("torch._dynamo")  # torch DDP imports it at its first use, which takes seconds in each rank
    outcomes: dict[str, dict[str, Outcome]] = {}
    for scene in SCENES:
        if scene.row in arguments.only:
            outcome = run(scene, arguments.limit)
            outcomes.setdefault(scene.row, {})[scene.label] = outcome
            print(f"{scene.row}: {scene.label}: {outcome.told(arguments.limit)}", flush=True)
    environment = {**machine(), "world_size": RANKS, "backend": "gloo"}
    save(arguments, environment, {row: as_results(own, arguments.limit) for row, own in outcomes.items()})


def parse_arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=ROWS, default=list(ROWS), help="rows (default: all)")
    parser.add_argument("--limit", type=float, default=LIMIT_SECONDS, help="seconds of a job (default: %(default)s)")
    parser.add_argument("--json", type=results_path, help="write outcomes and the environment here")
    arguments = parser.parse_args(given)
    if not arguments.limit > 0:
        parser.error(f"--limit is a number of seconds: got {arguments.limit}, expected more than 0")
    return arguments


def as_results(outcomes: Mapping[str, Outcome], limit: float) -> dict[str, Any]:
    """The outcomes of a row, and the cell of a table that sums them up."""
    told = {label: {**asdict(own), "words": own.words, "told": own.told(limit)} for label, own in outcomes.items()}
    return {"cell": cell(outcomes), "situations": told}


def cell(outcomes: Mapping[str, Outcome]) -> str:
    """Situations with the same outcome together; no situation where all have the same outcome."""
    labels: dict[str, list[str]] = {}
    for label, outcome in outcomes.items():
        labels.setdefault(outcome.words, []).append(label)
    if len(labels) == 1:
        return next(iter(labels))
    return "; ".join(f"{', '.join(own)}: {words}" for words, own in labels.items())


def run(scene: Scene, limit: float = LIMIT_SECONDS) -> Outcome:
    """The outcome of one job. The limit is counted from the moment at which both ranks are connected."""
    context = multiprocessing.get_context("fork")  # torch is imported and has not computed: no threads are lost
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(RANKS)]
        processes = [
            context.Process(target=_rank, args=(scene, rank, folder, pipe[1]), daemon=True)
            for rank, pipe in enumerate(pipes)
        ]
        for process, (_, own) in zip(processes, pipes, strict=True):
            process.start()
            own.close()
        try:
            for end, _ in pipes:
                end.recv()
            start = time.monotonic()
            counted = range(RANKS - scene.loses_rank)  # the last rank is the one with the fault
            reports = _reports([pipes[rank][0] for rank in counted], start + limit)
            for process in processes:
                process.join(1.0 if len(reports) == len(counted) else 0.0)
            signals = [-(processes[rank].exitcode or 0) for rank in counted]
        finally:
            for process in processes:
                process.kill()
                process.join()
        fault = Path(folder, FAULT_FILE)
        begin = float(fault.read_text()) if fault.exists() else start
    return judge([reports.get(rank) for rank in counted], signals, begin)


def _reports(ends: Sequence[multiprocessing.connection.Connection], deadline: float) -> dict[int, Seen | Error | None]:
    """What the ranks told until the deadline: None from a process that ended without a word."""
    reports: dict[int, Seen | Error | None] = {}
    while len(reports) < len(ends) and time.monotonic() < deadline:
        silent = [end for rank, end in enumerate(ends) if rank not in reports]
        for end in multiprocessing.connection.wait(silent, max(0.0, deadline - time.monotonic())):
            rank = next(rank for rank, own in enumerate(ends) if own is end)
            try:
                reports[rank] = ends[rank].recv()
            except EOFError:
                reports[rank] = None
    return reports


def judge(reports: Sequence[Seen | Error | None], signals: Sequence[int], begin: float) -> Outcome:
    """The outcome, by what the ranks told, the signals that ended them (0: none), and the moment of the fault."""
    errors = [report for report in reports if isinstance(report, Error)]
    seen = [report for report in reports if isinstance(report, Seen)]
    ended = [number for report, number in zip(reports, signals, strict=True) if report is None and number > 0]
    if ended:
        return Outcome("abort", signal.Signals(ended[0]).name)
    if errors:
        first = min(errors, key=lambda error: error.moment)
        return Outcome("error", first.line, max(0.0, first.moment - begin), first.when)
    if len(seen) < len(reports):
        return Outcome("waits")
    return _judge_values([each.values for each in seen], seen[0].named)


def _judge_values(values: Sequence[Sequence[float]], named: Mapping[str, Sequence[float]]) -> Outcome:
    if all(any(map(math.isnan, own)) for own in values):
        return Outcome("silent", "NaN on all ranks")
    if any(list(own) != list(values[0]) for own in values[1:]):
        return Outcome("silent", "the ranks differ")
    for name, expected in named.items():
        if len(expected) == len(values[0]) and all(map(_close, values[0], expected)):
            return Outcome("works") if name == RIGHT else Outcome("silent", name)
    return Outcome("silent", "wrong values, equal on all ranks")


def _close(own: float, expected: float) -> bool:
    return math.isclose(own, expected, rel_tol=1e-9, abs_tol=1e-12)


def _rank(scene: Scene, rank: int, folder: str, end: multiprocessing.connection.Connection) -> None:
    """The life of a rank: what it has seen, or its error, goes to ``end``."""
    os.chdir(folder)
    with open(os.devnull, "w") as nowhere:  # C++ writes warnings and traces to the descriptor
        os.dup2(nowhere.fileno(), sys.stderr.fileno())
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    dist.barrier()
    end.send("connected")
    try:
        report: Seen | Error = scene.run(rank)
    except BaseException as error:  # noqa: BLE001 - SystemExit, too: whatever ends the script ends the rank
        report = Error(time.monotonic(), first_line(error), "".join(getattr(error, "__notes__", [])))
    end.send(report)
    end.close()
    os._exit(0)  # as a process that ends: its connections close, and nothing waits for the other rank


def first_line(error: BaseException) -> str:
    """Type and first sentence, without the place in gloo's source."""
    line = re.sub(r"^\[\S+:\d+\] ", "", (str(error).splitlines() or [""])[0])
    return f"{type(error).__name__}: {line.split('. ')[0].rstrip('.')}"


if __name__ == "__main__":
    with quiet_interrupt():
        main()
