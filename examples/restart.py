"""A training with ranks killed at random moments, compared with an undisturbed training by the last checkpoints.

python examples/restart.py

Needs Linux: the processes of the ranks, and their start, are read from /proc.
"""

import argparse
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from _checkpoint import checkpoints, read_whole
from _lm_options import positive_int
from train_lm import ByteModel, hash_of

EXAMPLES = Path(__file__).parent
SETTINGS = ("--update-freq", "1", "--batch-size", "4", "--save-every", "1", "--keep", "2", "--held-out", "512")
POLL_SECONDS = 0.01


class JobError(RuntimeError):
    """The training did not end as expected."""


@dataclass(frozen=True)
class Pace:
    """Seconds from the start of the ranks to their first checkpoint, and between checkpoints."""

    start_seconds: float
    step_seconds: float


def main() -> None:
    parser = argparse.ArgumentParser(description="Kill ranks of a training, and compare its weights in the end.")
    parser.add_argument("--kills", type=positive_int, default=5, metavar="N", help="how often (default: 5)")
    parser.add_argument("--ranks", type=positive_int, default=2, metavar="N", help="ranks of the job (default: 2)")
    parser.add_argument("--steps", type=positive_int, metavar="N", help="optimizer steps (default: 25 and 3 per kill)")
    parser.add_argument("--seed", type=int, help="of ranks and moments (default: another one each time)")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the last checkpoints here, in a new folder")
    args = parser.parse_args()
    if args.steps is None:
        args.steps = 25 + 3 * args.kills
    if args.seed is None:
        args.seed = random.randrange(2**31)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the job, too
    try:
        if args.keep:
            args.keep.mkdir(parents=True)
            sys.exit(survive(args.keep, args))
        with tempfile.TemporaryDirectory() as folder:
            sys.exit(survive(Path(folder), args))
    except FileExistsError:
        parser.error(f"--keep folder exists: got {args.keep}, expected a new one")
    except JobError as error:
        sys.exit(f"{error}\nseed {args.seed}")
    except KeyboardInterrupt:
        sys.exit(130)


def survive(folder: Path, args: argparse.Namespace) -> int:
    """Exit status: 0 if the final weights have the same bits."""
    say(f"{args.steps} steps on {args.ranks} ranks, undisturbed")
    pace = train_undisturbed(folder / "undisturbed", args)
    say(f"the same with {args.kills} kills, seed {args.seed}")
    train_killed(folder / "killed", args, pace)
    hashes = [weights_in(folder / name) for name in ("undisturbed", "killed")]
    is_same = hashes[0] == hashes[1]
    words = "equal to" if is_same else "DIFFERENT from"
    say(f"weights {words} the undisturbed run, after {args.kills} kills: {', '.join(dict.fromkeys(hashes))}")
    return 0 if is_same else 1


def train_undisturbed(folder: Path, args: argparse.Namespace) -> Pace:
    with training(folder, args) as job:
        job.wait_for_ranks(0)
        began = time.monotonic()
        job.wait_for_step(1)
        first = time.monotonic()
        job.wait_for_step(args.steps)
        step_seconds = (time.monotonic() - first) / max(1, args.steps - 1)
        job.wait()
    return Pace(first - began, step_seconds)


def train_killed(folder: Path, args: argparse.Namespace, pace: Pace) -> None:
    """Kill one rank in each start of the job, except the last start."""
    draw = random.Random(args.seed)
    # In the first half: the job must not end before it was killed often enough.
    after = sorted(draw.randrange(max(1, args.steps // 2)) for _ in range(args.kills))
    with training(folder, args) as job:
        for start, step in enumerate(after):
            ranks = job.wait_for_ranks(start)
            done = job.newest_step()
            job.wait_for_step(step)
            # Anywhere in the start if the step is taken already, else in two steps; no later if the pace changes.
            seconds = draw.uniform(0, pace.start_seconds if done >= step else 2 * pace.step_seconds)
            job.wait_for_step(max(done + 1, step + 2), at_most_seconds=seconds)
            victim = draw.randrange(args.ranks)
            job.kill(ranks[victim])
            say(f"  start {start}: killed rank {victim}, newest checkpoint: step {job.newest_step()}")
        job.wait()


class Job:
    """train_lm.py under torchrun, restarted by torchrun after each kill."""

    def __init__(self, folder: Path, args: argparse.Namespace) -> None:
        self._folder = folder
        self._ranks = args.ranks
        self._errors = folder.with_suffix(".log").open("w+b")
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(args.ranks)]
        launch += ["--max-restarts", str(args.kills)]
        asked = [*SETTINGS, "--steps", str(args.steps), "--save", str(folder), "--resume", "auto"]
        environment = {
            "OMP_NUM_THREADS": "1",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # else a start may meet the addresses of the one before
            **os.environ,
            "TMPDIR": str(folder.parent),
            "RESTART_JOB": str(folder),
        }
        self._process = subprocess.Popen(
            [sys.executable, *launch, str(EXAMPLES / "train_lm.py"), *asked],
            env=environment,
            stdout=self._errors,
            stderr=self._errors,
        )

    def wait_for_ranks(self, start: int) -> list[int]:
        """The process ids of the ranks of a start, counted from 0."""
        marks = {f"RESTART_JOB={self._folder}", f"TORCHELASTIC_RESTART_COUNT={start}"}
        while True:
            found = {}
            for path in Path("/proc").glob("[0-9]*/environ"):
                with suppress(OSError):
                    variables = path.read_text(errors="replace").split("\0")
                    if marks.issubset(variables):
                        found.update({v: int(path.parent.name) for v in variables if v.startswith("RANK=")})
            if len(found) == self._ranks:
                return [found[f"RANK={rank}"] for rank in range(self._ranks)]
            self._pause(f"start {start} of the job")

    def wait_for_step(self, step: int, *, at_most_seconds: float = math.inf) -> None:
        give_up = time.monotonic() + at_most_seconds
        while self.newest_step() < step and (left := give_up - time.monotonic()) > 0:
            self._pause(f"step {step}", min(left, POLL_SECONDS))

    def newest_step(self) -> int:
        return max((int(path.stem.removeprefix("step-")) for path in checkpoints(self._folder)), default=0)

    def kill(self, pid: int) -> None:
        try:
            is_alive = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
            os.kill(pid, signal.SIGKILL)
        except (FileNotFoundError, ProcessLookupError):
            is_alive = False
        if not is_alive:
            raise JobError(f"a rank ended before it was killed:\n{self._tail()}")

    def wait(self) -> None:
        if self._process.wait():
            raise JobError(f"the training failed:\n{self._tail()}")

    def close(self) -> None:
        self._process.terminate()  # which ends the ranks, too; nothing happens to one that has ended
        self._process.wait()
        self._errors.close()

    def _pause(self, awaited: str, seconds: float = POLL_SECONDS) -> None:
        if self._process.poll() is not None:
            raise JobError(f"the training ended before {awaited}:\n{self._tail()}")
        time.sleep(seconds)

    def _tail(self) -> str:
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace")[-4000:]


@contextmanager
def training(folder: Path, args: argparse.Namespace) -> Iterator[Job]:
    job = Job(folder, args)
    try:
        yield job
    finally:
        job.close()


def weights_in(folder: Path) -> str:
    model = ByteModel()
    model.load_state_dict(read_whole(checkpoints(folder)[0])["model"])
    return hash_of(model)


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    main()
