"""Accuracy of narrower gradients on the wire: the main job, trained with each dtype, seed by seed.

    python benchmarks/bench_wire.py [--json FILE]

Each training is examples/train_lm.py on two ranks: the same data, weights and dropout per seed, gradients reduced in
their own dtype, in bfloat16 or in float16, over gloo: in shared memory nothing is rounded. Printed are the held-out
loss of each training in bits per byte, and the difference from the same seed with gradients in their own dtype. The
spread between seeds is the noise. bench_hosts.py measures the speed.
"""

import argparse
import re
import statistics
import subprocess
import sys
from typing import Any

from _checkout import ROOT, environment
from _interrupt import quiet_interrupt
from _measure import machine, results_path, save

from legacy_ddp._settings import TRANSPORT_VARIABLE

MAIN_JOB = ROOT / "examples" / "train_lm.py"
OWN = "their own"
WIRES = (OWN, "bfloat16", "float16")
RANKS = 2
LIMIT_SECONDS = 1200.0


def main(given: list[str] | None = None) -> None:
    """Train, print a line per training, write JSON if asked."""
    arguments = parse_arguments(given)
    bits: dict[str, dict[str, float]] = {wire: {} for wire in arguments.wires}
    for seed in arguments.seeds:
        for wire in arguments.wires:
            bits[wire][str(seed)] = train(wire, seed, arguments.steps)
            print(f"seed {seed}, gradients travel in {wire:10}{bits[wire][str(seed)]:8.3f} bits/byte", flush=True)
    results = summarize(bits)
    for wire, row in results.items():
        print(f"{wire:12} mean {row['mean_bits']:.4f}, seeds differ by {row['seed_spread']:.4f}", end="")
        print("" if wire == OWN else f", difference to {OWN} dtype {row['mean_difference']:+.4f}")
    save(arguments, {**machine(), "world_size": RANKS}, results)


def parse_arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="default: %(default)s")
    parser.add_argument("--wires", nargs="+", choices=WIRES, default=list(WIRES), help="default: all")
    parser.add_argument("--steps", type=int, default=250, help="of each training (default: %(default)s)")
    parser.add_argument("--json", type=results_path, help="write results and the environment here")
    arguments = parser.parse_args(given)
    if OWN not in arguments.wires:
        parser.error(f"--wires has nothing to compare with: got {arguments.wires}, expected {OWN!r} among them")
    if arguments.steps < 1:
        parser.error(f"--steps is a count: got {arguments.steps}, expected 1 or more")
    return arguments


def train(wire: str, seed: int, steps: int) -> float:
    """Bits per byte at the end of one training."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    choice = [] if wire == OWN else ["--reduce-dtype", wire]
    command = [*launch, str(MAIN_JOB), "--seed", str(seed), "--steps", str(steps), *choice]
    variables = {**environment(), TRANSPORT_VARIABLE: "gloo"}
    run = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_SECONDS, env=variables, check=False)
    found = re.search(r"done: ([0-9.]+) bits/byte", run.stdout)
    if run.returncode or not found:
        sys.exit(f"training failed with exit code {run.returncode}: {' '.join(command)}\n{run.stderr[-2000:]}")
    return float(found[1])


def summarize(bits: dict[str, dict[str, float]]) -> dict[str, Any]:
    """Per wire: all values, their mean, the spread between seeds, and the mean difference seed by seed."""
    results = {}
    for wire, of_seeds in bits.items():
        differences = [value - bits[OWN][seed] for seed, value in of_seeds.items()]
        results[wire] = {
            "bits_per_byte": of_seeds,
            "mean_bits": statistics.mean(of_seeds.values()),
            "seed_spread": max(of_seeds.values()) - min(of_seeds.values()),
            "mean_difference": statistics.mean(differences),
        }
    return results


if __name__ == "__main__":
    with quiet_interrupt():
        main()
