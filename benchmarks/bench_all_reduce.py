"""Cost of the explicit call, against a bare all_reduce and one collective per parameter; and of its parts.

    torchrun --standalone --nproc-per-node 2 benchmarks/bench_all_reduce.py [--models transformer] [--json FILE]

Every variant has its own copy of one model. All variants run once per round, in an order that rotates from round to
round, so that other load affects all variants alike. Everything is built several times, as the placement of memory
changes times by some per cent. A ratio is the median of the rounds' ratios. bench_step.py measures whole steps. Two
tables:

call    the ranks aligned by a barrier first, so that waiting for a late rank is not counted; gradients come from a real
        backward before the call, on different data per rank. A check before the timing: the explicit calls and one
        collective per parameter leave the mean over the ranks

        bare all_reduce              one all_reduce of a tensor of the gradients' bytes: a sum, without
                                     packing or division. The reference of the table
        bare all_reduce again        the control: its distance from 1 is noise
        ours, ..., views             .grad is a view assigned by the last call, backward adds to the view
        ours, ..., to pack           after zero_grad(set_to_none=True). Packing during backward is not part of
                                     this time, only of bench_step.py
        ours, off, gradient_as_bucket_view=False
                                     .grad is a separate tensor: copied in and out
        one collective per parameter all_reduce and a division for each gradient, in place

parts   the parts of a call, each alone, compared with a bare all_reduce as well. Caches are colder or warmer than
        inside a call, so the parts add up only roughly. Assigning views frees the previous gradients

Aims, for the transformer on one host, by the bare all_reduce: off with views <= 0.42, info with views <= 0.55.
"phases" are the medians of record.seconds over the timed calls. Seconds are those of rank 0.
"""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from _interrupt import quiet_interrupt
from _measure import (
    Variant,
    measure,
    parse,
    print_aims,
    print_phases,
    print_table,
    process_group,
    summarize,
    verdicts,
    write_results,
)
from _parity import check_mean
from _ways import EACH, SEED, average_each, flat_like, own_batches
from _workloads import LAYERS, Workload, workload_named
from torch import nn

from legacy_ddp import LegacyDistributedDataParallel
from legacy_ddp._call.state import Synchronizer
from legacy_ddp._ranks.agree import agree
from legacy_ddp._ranks.header import Header, Operation
from legacy_ddp._settings import Settings

MODELS = ("transformer", "resnet", "tiny")
TRANSFORMER_AIMS = {"ours, off, views": 0.42, "ours, info, views": 0.55}


def main(given: Sequence[str] | None = None) -> None:
    """Measure, print two tables per model on rank 0, write JSON if asked."""
    arguments = parse_arguments(given)
    with process_group():
        run(arguments)


def run(arguments: argparse.Namespace) -> None:
    """Collective: the call, then its parts, model by model."""
    if dist.get_world_size() == 1:
        sys.exit("nothing to reduce: got 1 rank, expected 2 or more; raise --nproc-per-node")
    results: dict[str, Any] = {}
    for model in arguments.models:
        workload = workload_named(model, layers=arguments.layers)
        for name, reducing in _reducings(workload).items():
            check_mean(name, reducing.model, reducing.fill, reducing.call)
        for table, build, aims in (("call", _calls, aims_for(model)), ("parts", _parts, {})):
            title = f"{table}, {model}, {dist.get_world_size()} ranks"
            summary = summarize(measure(partial(build, workload), arguments))
            ratios = {name: summary[name]["median_ratio"] for name in aims}
            results[title] = {"aims": aims, "verdicts": verdicts(ratios, aims), "variants": summary}
            if dist.get_rank() == 0:
                print_table(title, summary)
                print_phases(summary)
                print_aims(ratios, aims)
    write_results(arguments, results)


def parse_arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[MODELS[0]], help="default: %(default)s")
    parser.add_argument("--layers", type=int, default=LAYERS, help="of the transformer (default: %(default)s)")
    arguments = parse(parser, given)
    if arguments.layers < 1:
        parser.error(f"--layers is a count: got {arguments.layers}, expected 1 or more")
    return arguments


def aims_for(model: str) -> Mapping[str, float]:
    """Upper limits of the ratios of a table of calls."""
    return TRANSFORMER_AIMS if model == "transformer" else {}


@dataclass(frozen=True)
class Reducing:
    """A model, the function that makes gradients, and the call that averages gradients."""

    model: nn.Module
    fill: Callable[[], object]
    call: Callable[[], object]


def _reducings(workload: Workload) -> dict[str, Reducing]:
    """Collective: a new model for each way to average, with equal weights."""
    wrap = partial(LegacyDistributedDataParallel, checks="off")
    wrap_info = partial(LegacyDistributedDataParallel, checks="info")
    ours = {
        "ours, off, views": (wrap, False),
        "ours, info, views": (wrap_info, False),
        "ours, off, to pack": (wrap, True),
        "ours, info, to pack": (wrap_info, True),
        "ours, off, gradient_as_bucket_view=False": (partial(wrap, gradient_as_bucket_view=False), False),
    }
    reducings = {}
    for name, (wrap, set_to_none) in ours.items():
        model = wrap(_new_model(workload))
        reducings[name] = Reducing(model, partial(_fill, model, workload, set_to_none), model.all_reduce)
    plain = _new_model(workload)
    reducings[EACH] = Reducing(plain, partial(_fill, plain, workload, False), partial(average_each, plain))
    return reducings


def _new_model(workload: Workload) -> nn.Module:
    torch.manual_seed(SEED)
    return workload.build()


def _fill(model: nn.Module, workload: Workload, set_to_none: bool) -> None:
    """A real backward, into kept or new gradients."""
    model.zero_grad(set_to_none=set_to_none)
    (batch,) = own_batches(workload, 1)
    workload.loss(model, batch).backward()


def _calls(workload: Workload) -> list[Variant]:
    """The variants, the reference first."""
    variants = []
    for name in ("bare all_reduce", "bare all_reduce again"):
        variants.append(Variant(name, partial(dist.all_reduce, flat_like(_new_model(workload)))))
    for name, reducing in _reducings(workload).items():
        variants.append(Variant(name, reducing.call, reducing.fill))
    return variants


def _parts(workload: Workload) -> list[Variant]:
    """The parts of a call, on one model with new gradients in each round."""
    model = _new_model(workload)
    parameters, flat = list(model.parameters()), flat_like(model)
    views = _views(flat, parameters)
    fill = partial(_fill, model, workload, True)
    return [
        Variant("bare all_reduce", partial(dist.all_reduce, flat_like(model))),
        Variant("copy gradients into the flat tensor", partial(_copy, views, parameters), fill),
        Variant("exchange headers", _exchange()),
        Variant("divide the flat tensor", partial(flat.div_, dist.get_world_size())),  # new values in every round
        Variant("norm of the flat tensor", partial(torch.linalg.vector_norm, flat)),
        Variant("assign views to .grad", partial(_assign, views, parameters), fill),
    ]


def _views(flat: torch.Tensor, parameters: Sequence[nn.Parameter]) -> list[torch.Tensor]:
    pieces = flat.split([parameter.numel() for parameter in parameters])
    return [piece.view_as(parameter) for piece, parameter in zip(pieces, parameters, strict=True)]


def _copy(views: list[torch.Tensor], parameters: Sequence[nn.Parameter]) -> None:
    torch._foreach_copy_(views, [parameter.grad for parameter in parameters])


def _assign(views: Sequence[torch.Tensor], parameters: Sequence[nn.Parameter]) -> None:
    for view, parameter in zip(views, parameters, strict=True):
        parameter.grad = view


def _exchange() -> Callable[[], None]:
    """Collective, like the returned function: the agreement of a call."""
    synchronizer = Synchronizer(Settings())

    def exchange() -> None:
        with synchronizer.call(Operation.ALL_REDUCE, dist.group.WORLD) as call:
            agree(call, Header(), {})

    exchange()  # connects the private groups
    return exchange


if __name__ == "__main__":
    with quiet_interrupt():
        main()
