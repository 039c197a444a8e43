"""A training independent of the number of ranks: equal micro-batches on 1, 2, 4 and 8 ranks, compared bit for bit.

python examples/replay.py

Afterwards a training with a planted mistake on two ranks, as a test of the comparison.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from _lm_options import positive_int
from _planted import Mistake

from legacy_ddp.data import aligned_splits

EXAMPLES = Path(__file__).parent
BATCH_SIZE = 4  # windows in a micro-batch: small, for eight ranks on two cores
HELD_OUT = 512  # windows, a twelfth of all: what is compared are weights


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on other numbers of ranks, and compare all bits.")
    parser.add_argument("--steps", type=positive_int, default=20, help="optimizer steps (default: 20)")
    parser.add_argument("--micro-batches", type=positive_int, default=8, metavar="M", help="per step (default: 8)")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the traces here, in a new folder")
    args = parser.parse_args()
    if args.micro_batches == 1:
        parser.error("--micro-batches cannot be split: got 1, expected 2 or more")
    try:
        if args.keep:
            args.keep.mkdir(parents=True)
            sys.exit(replay(args.keep, args.steps, args.micro_batches))
        with tempfile.TemporaryDirectory() as folder:
            sys.exit(replay(Path(folder), args.steps, args.micro_batches))
    except FileExistsError:
        parser.error(f"--keep folder exists: got {args.keep}, expected a new one")
    except KeyboardInterrupt:
        sys.exit(130)


def replay(folder: Path, steps: int, micro_batches: int) -> int:
    """Exit status: 0 if all splits agree and the comparison finds the mistake."""
    splits = [f"{ranks}x{each}" for ranks, each in aligned_splits(micro_batches)]
    say(f"{steps} steps of {micro_batches} micro-batches, as {', '.join(splits)} (ranks x micro-batches each)\n")
    hashes = [train(folder / split, split, steps, micro_batches) for split in splits]
    first, *others = splits
    statuses = [compare(folder / first, folder / split)[0] for split in others]
    is_same = len(set(hashes)) == 1 and not any(statuses)
    say(f"\n{'the same weights, bit for bit' if is_same else 'DIFFERENT WEIGHTS'}: {', '.join(dict.fromkeys(hashes))}")
    is_found = find_mistake(folder, others[0], first, steps, micro_batches)
    say(f"\n{'FOUND' if is_found else 'MISSED'}")
    return 0 if is_same and is_found else 1


def find_mistake(folder: Path, split: str, other: str, steps: int, micro_batches: int) -> bool:
    """Train with a mistake. Comparison with another split finds step and parameter; with its own split, the rank."""
    mistake = Mistake(rank=1, step=(steps + 1) // 2, parameter="gru.weight_hh_l0")
    say(f"\nonce more, with a mistake: {mistake}")
    train(folder / "mistaken", split, steps, micro_batches, mistake)
    found = [compare(folder / name, folder / "mistaken") for name in (other, split)]
    phases = ("reduced_gradients", "local_gradients")
    return found[1][1].get("ranks") == [mistake.rank] and all(
        status == 1
        and (first["step"], first["phase"]) == (mistake.step, phase)
        and mistake.parameter in str(first["name"])
        for (status, first), phase in zip(found, phases, strict=True)
    )


def train(trace: Path, split: str, steps: int, micro_batches: int, mistake: Mistake | None = None) -> str:
    """Run train_lm.py on the ranks of a split; return the hash of its weights."""
    script = EXAMPLES / ("_planted.py" if mistake else "train_lm.py")
    asked = ["--reproducible", "--micro-batches", str(micro_batches), "--batch-size", str(BATCH_SIZE)]
    asked += ["--held-out", str(HELD_OUT)]
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", split.partition("x")[0]]
    environment = {"OMP_NUM_THREADS": "1", **os.environ, **(mistake.environment if mistake else {})}
    run = subprocess.run(
        [sys.executable, *launch, str(script), *asked, "--steps", str(steps), "--record", str(trace)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if run.returncode:
        sys.exit(f"the training as {split} failed:\n{run.stderr}")
    result, weights = run.stdout.splitlines()[-2:]
    say(f"{split:>6}: {result.removeprefix('done: ').partition(' (')[0]}, {weights}")
    return weights.removeprefix("weights ")


def compare(one: Path, other: Path) -> tuple[int, dict[str, object]]:
    """Exit status and first difference of ``legacy-ddp diff``."""
    command: Sequence[str] = [sys.executable, "-m", "legacy_ddp", "diff", str(one), str(other)]
    say(f"\n$ legacy-ddp diff {one.name} {other.name}")
    told = subprocess.run(command, capture_output=True, text=True, check=False)
    say(told.stdout.partition("\n  A: ")[0] + told.stderr.strip())  # the headline
    found = json.loads(subprocess.run([*command, "--json"], capture_output=True, text=True, check=False).stdout or "{}")
    return told.returncode, found.get("first") or {}


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    main()
