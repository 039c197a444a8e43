"""What does the explicit call cost? Ours, torch DDP, a bare all_reduce and one collective per parameter, in one run.

    torchrun --standalone --nproc-per-node 2 benchmarks/bench_all_reduce.py [--json FILE]

Every variant has its own copy of one model; all are run once per round, in an order that rotates from round to round,
so that whatever else the machine does hits all of them alike, and everything is built several times, because where
memory happens to lie is worth some per cent. A ratio is the median of the rounds' ratios. Two questions:

call   all_reduce() alone, the ranks aligned by a barrier first, so that waiting for a late rank is not counted;
       "fresh" is the memory that one run allocates on its rank, as torch's profiler counts it (in a step: activations
       and gradients, too)
step   a whole training step: zero_grad, `update-freq` times forward and backward, synchronisation, SGD
"""

import argparse
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from _measure import (
    Variant,
    count_fresh_bytes,
    measure,
    parse,
    print_table,
    process_group,
    summarize,
    write_results,
)
from _model import SEQUENCE, Transformer, random_tokens, step
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from legacy_ddp import LegacyDistributedDataParallel


def main() -> None:
    """Measure, print two tables on rank 0, write JSON if asked."""
    arguments = _arguments()
    with process_group():
        tables: dict[str, Callable[[], list[Variant]]] = {"call": _calls}
        for update_freq in (1, 4):
            for set_to_none in (True, False):
                name = f"step, update-freq {update_freq}, zero_grad(set_to_none={set_to_none})"
                tables[name] = partial(_steps, update_freq, set_to_none)
        results = {}
        for title, build in tables.items():
            results[title] = summarize(count_fresh_bytes(measure(build, arguments)))
            if dist.get_rank() == 0:
                print_table(title, results[title])
        write_results(arguments, results)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    return parse(parser)


def _calls() -> list[Variant]:
    """The first variant is what the others are compared with."""
    reference = Transformer()
    flat = torch.ones(sum(parameter.numel() for parameter in reference.parameters()))
    tensors = [torch.ones_like(parameter) for parameter in reference.parameters()]
    variants = [Variant("bare all_reduce of the same bytes", partial(dist.all_reduce, flat))]
    for level in ("off", "info"):
        held = LegacyDistributedDataParallel(Transformer(), checks=level)
        variants.append(Variant(f"ours, {level}, gradients are views", held.all_reduce, partial(_refill, held, False)))
    loose = LegacyDistributedDataParallel(Transformer(), checks="off")
    variants.append(Variant("ours, off, gradients to pack", loose.all_reduce, partial(_refill, loose, True)))
    copied = LegacyDistributedDataParallel(Transformer(), checks="off", gradient_as_bucket_view=False)
    prepare = partial(_refill, copied, False)
    variants.append(Variant("ours, off, gradient_as_bucket_view=False", copied.all_reduce, prepare))
    variants.append(Variant("one collective per parameter", lambda: [dist.all_reduce(tensor) for tensor in tensors]))
    return variants


def _refill(model: nn.Module, set_to_none: bool) -> None:
    """A real backward pass, into gradients that are kept or made anew."""
    model.zero_grad(set_to_none=set_to_none)
    tokens = torch.arange(SEQUENCE)[None]
    nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()


def _steps(update_freq: int, set_to_none: bool) -> list[Variant]:
    wrappers: dict[str, Callable[[nn.Module], nn.Module]] = {
        "torch DDP": DistributedDataParallel,
        "torch DDP, gradient_as_bucket_view": partial(DistributedDataParallel, gradient_as_bucket_view=True),
        "ours, off": partial(LegacyDistributedDataParallel, checks="off"),
        "ours, info": partial(LegacyDistributedDataParallel, checks="info"),
        "local compute alone": lambda module: module,
    }
    tokens = random_tokens(update_freq)
    variants = []
    for name, wrap in wrappers.items():
        model = wrap(Transformer())
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
        variants.append(Variant(name, partial(step, model, optimizer, tokens, set_to_none)))
    return variants


if __name__ == "__main__":
    main()
