"""Time of a training step on this network, in every wrapper. One rank of the job started by bench_hosts.py.

Any torchrun may start the script, too; on one host it measures the loopback:

    torchrun --standalone --nproc-per-node 2 benchmarks/_hosts_worker.py [--json FILE]

Every variant trains its own copy of one model on the same micro-batches, which differ between the ranks: zero_grad,
`update-freq` times forward and backward, synchronisation, SGD. Before the timing, a check compares one step of each
variant with the step of torch DDP; the variant without synchronisation has to differ.
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from _measure import (
    Summary,
    Variant,
    measure,
    parse,
    process_group,
    round_ratios,
    summarize,
    write_results,
)
from _workloads import LAYERS, WRAPPERS, Transformer, predict_tokens, step, tokens
from bench_agree import median_interval
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

from legacy_ddp import LegacyDistributedDataParallel

REFERENCE, CONTROL, ALONE = "torch DDP", "torch DDP again", "local compute alone"
HOOKED, OURS, OURS_INFO = "torch DDP, bf16_compress_hook", "ours, off", "ours, info"
OURS_GLOO, OURS_BF16 = "ours, off, gloo", "ours, off, reduce_dtype=bf16"
COMPARED: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "control": (CONTROL, REFERENCE),
        "off": (OURS, REFERENCE),
        "info": (OURS_INFO, REFERENCE),
        "gloo": (OURS_GLOO, REFERENCE),
        "bf16": (OURS_BF16, REFERENCE),
        "bf16, both": (OURS_BF16, HOOKED),
    }
)
# Of how far a step moves the parameters. bfloat16 rounds by up to 2^-9 on the way to the wire, in the sum and after it.
TOLERANCE, BF16_TOLERANCE, LEAST_APART = 1e-5, 2**-6, 0.1
FIRST_STEPS = 2  # of each, before the warm-up: torch DDP lays out its buckets anew in the second one
CHECKED_UPDATE_FREQ, SEED = 2, 1


def main(given: Sequence[str] | None = None) -> None:
    """Measure, write JSON if asked."""
    arguments = parse_arguments(given)
    with process_group():
        run(arguments)


def parse_arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_workload(parser)
    return parse(parser, given)


def add_workload(parser: argparse.ArgumentParser) -> None:
    """Options shared with the launcher."""
    default = [1, 4, 8, 16]
    parser.add_argument("--update-freq", type=at_least_one, nargs="+", default=default, help="default: %(default)s")
    parser.add_argument("--layers", type=at_least_one, default=LAYERS, help="of the model (default: %(default)s)")


def at_least_one(text: str) -> int:
    """The number in ``text``; for argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text}, expected a whole number of 1 or more")
    return int(text)


def run(arguments: argparse.Namespace) -> None:
    """Collective: check, then measure the network and the steps."""
    if dist.get_world_size() == 1:
        sys.exit("nothing to synchronise: got 1 rank, expected 2 or more; raise --nproc-per-node")
    distances = check_synchronization(arguments.layers)
    results: dict[str, Any] = {"distance_from_ddp": distances, "link": measure_link(arguments)}
    for update_freq in arguments.update_freq:
        variants = measure(partial(_steps, update_freq, arguments.layers), arguments)
        table = {"variants": summarize(variants), "compared": compare(variants)}
        results[f"step, update-freq {update_freq}"] = table
    write_results(arguments, results)


def compare(variants: Sequence[Variant]) -> dict[str, dict[str, Any]]:
    """The ratios of ``COMPARED``, with intervals of at least 95 % for their medians."""
    named = {variant.name: variant for variant in variants}
    compared = {}
    for what, (name, reference) in COMPARED.items():
        ratios = round_ratios(named[name], named[reference])
        compared[what] = {
            "of": f"{name} / {reference}",
            "median_ratio": statistics.median(ratios),
            "ratio_interval": median_interval(ratios),
        }
    return compared


def _with_hook(module: nn.Module) -> nn.Module:
    model = WRAPPERS[REFERENCE](module)
    model.register_comm_hook(None, _hook)
    return model


def _hook(group: dist.ProcessGroup | None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    # Torch refuses the hook without NCCL, by its name, though gloo sums bfloat16 well.
    return bf16_compress_hook(group, bucket)


VARIANTS: Mapping[str, Callable[[nn.Module], nn.Module]] = MappingProxyType(
    {
        REFERENCE: WRAPPERS[REFERENCE],
        CONTROL: WRAPPERS[REFERENCE],
        "torch DDP, bucket views": WRAPPERS["torch DDP, bucket views"],
        HOOKED: _with_hook,
        OURS: WRAPPERS[OURS],
        OURS_INFO: WRAPPERS[OURS_INFO],
        OURS_GLOO: partial(LegacyDistributedDataParallel, checks="off", transport="gloo"),
        OURS_BF16: partial(LegacyDistributedDataParallel, checks="off", reduce_dtype=torch.bfloat16),
        ALONE: lambda module: module,
    }
)


def _steps(update_freq: int, layers: int) -> list[Variant]:
    """The variants, the reference first."""
    batches = _batches(update_freq)
    variants = []
    for name, wrap in VARIANTS.items():
        model = wrap(Transformer(layers))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
        timed = partial(step, model, optimizer, predict_tokens, batches, set_to_none=True)
        for _ in range(FIRST_STEPS):
            timed()
        variants.append(Variant(name, timed))
    return variants


def _batches(update_freq: int) -> Sequence[torch.Tensor]:
    torch.manual_seed(SEED + dist.get_rank())
    return tokens(update_freq)


def check_synchronization(
    layers: int, variants: Mapping[str, Callable[[nn.Module], nn.Module]] = VARIANTS
) -> dict[str, float]:
    """Collective: distance of every variant's step from torch DDP's step, relative to its length, on the worst rank.

    Raises:
        RuntimeError: a distance above rounding, or, without synchronisation, too small to be visible.
    """
    batches = _batches(CHECKED_UPDATE_FREQ)
    moves = {name: _move(wrap, layers, batches) for name, wrap in variants.items()}
    length = moves[REFERENCE].norm()
    apart = torch.stack([(move - moves[REFERENCE]).norm() / length for move in moves.values()])
    dist.all_reduce(apart, dist.ReduceOp.MAX)
    distances = dict(zip(moves, apart.tolist(), strict=True))
    for name, distance in distances.items():
        least, most = allowed_distance(name)
        if not least <= distance <= most:  # NaN, too
            raise RuntimeError(
                f"a step of {name!r} is off that of torch DDP: got a relative distance of {distance:.2g}, expected "
                f"{least:g} to {most:g}; what is timed would not be the same work"
            )
    return distances


def allowed_distance(name: str) -> tuple[float, float]:
    if name == ALONE:
        return LEAST_APART, float("inf")
    return 0.0, BF16_TOLERANCE if "bf16" in name else TOLERANCE


def _move(wrap: Callable[[nn.Module], nn.Module], layers: int, batches: Sequence[torch.Tensor]) -> torch.Tensor:
    """Change of all parameters in one step, as one vector, from equal initial parameters."""
    torch.manual_seed(SEED)
    model = wrap(Transformer(layers))
    before = nn.utils.parameters_to_vector(model.parameters()).detach()
    step(model, torch.optim.SGD(model.parameters(), lr=1.0), _predict_next, batches, set_to_none=True)
    return nn.utils.parameters_to_vector(model.parameters()).detach() - before


def _predict_next(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    # The loss that is timed asks for the token that went in: a model of few layers knows it from the start, and does
    # not move at all.
    return nn.functional.cross_entropy(model(batch)[:, :-1].flatten(0, 1), batch[:, 1:].flatten())


def measure_link(arguments: argparse.Namespace) -> Summary:
    """Collective: speed of the network without a wrapper, for tensors of the size of all gradients."""
    numel = sum(parameter.numel() for parameter in Transformer(arguments.layers).parameters())
    summary = summarize(measure(partial(_transfers, numel), arguments))
    for name, row in summary.items():
        bytes_each_way = numel * (2 if "bf16" in name else 4)
        if "send" not in name:
            # In a ring every rank sends this much, and receives as much.
            bytes_each_way *= 2 * (dist.get_world_size() - 1) / dist.get_world_size()
        row["gigabits_per_second"] = 8 * bytes_each_way / row["median_ms"] / 1e6
    return summary


def _transfers(numel: int) -> list[Variant]:
    flat = torch.ones(numel)
    halved = torch.ones(numel, dtype=torch.bfloat16)
    return [
        Variant("bare all_reduce", partial(dist.all_reduce, flat)),
        Variant("bare all_reduce, bf16", partial(dist.all_reduce, halved)),
        Variant(f"send, rank 0 to {_first_of_second_host()}", partial(_send, flat)),
    ]


def _first_of_second_host() -> int:
    return dist.get_world_size() // 2


def _send(tensor: torch.Tensor) -> None:
    """Send and wait for an answer: without an answer the tensor might still be queued."""
    answer = torch.zeros(1)
    other = _first_of_second_host()
    if dist.get_rank() == 0:
        dist.send(tensor, other)
        dist.recv(answer, other)
    elif dist.get_rank() == other:
        dist.recv(tensor, 0)
        dist.send(answer, 0)


if __name__ == "__main__":
    main()
