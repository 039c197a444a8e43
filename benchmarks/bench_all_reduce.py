"""What does the explicit call cost? Ours, a bare all_reduce and one collective per parameter; and the call in parts.

    torchrun --standalone --nproc-per-node 2 benchmarks/bench_all_reduce.py [--models transformer] [--json FILE]

Every variant has its own copy of one model; all are run once per round, in an order that rotates from round to round,
so that whatever else the machine does hits all of them alike, and everything is built several times, because where
memory happens to lie is worth some per cent. A ratio is the median of the rounds' ratios. Whole steps are
bench_step.py's question. Two tables:

call    the ranks aligned by a barrier first, so that waiting for a late rank is not counted; gradients come from a real
        backward before it, on other data on each rank. Before anything is timed, the calls of ours and one collective
        per parameter have to leave the mean over the ranks

        bare all_reduce              one all_reduce of a tensor of the gradients' bytes: a sum, of nothing that was
                                     packed, and no division. The others are compared with it
        bare all_reduce again        the control: what it differs from 1 by is noise
        ours, ..., views             .grad is where the last call left it, backward adds to it
        ours, ..., to pack           after zero_grad(set_to_none=True). If gradients are packed during backward, that is
                                     not in this time: it is in bench_step.py's
        ours, off, gradient_as_bucket_view=False
                                     .grad is a tensor of its own: copied in and out
        one collective per parameter all_reduce and a division for each gradient, where it lies

parts   what such a call may consist of, each alone, compared with a bare all_reduce as well. Caches are colder or
        warmer than inside a call, so that they add up only roughly. Assigning views frees the gradients that were there

Aims, for the transformer, by the bare all_reduce: off with views <= 1.12, info with views <= 1.22, off with gradients
to pack <= 1.30. "phases" are the medians of record.seconds over the timed calls. Seconds are those of rank 0.
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
from legacy_ddp._agreement.agree import agree
from legacy_ddp._agreement.header import Header
from legacy_ddp._collectives.state import Synchronizer
from legacy_ddp._settings import Settings
from legacy_ddp._transport.operation import Operation

MODELS = ("transformer", "resnet", "tiny")
TRANSFORMER_AIMS = {"ours, off, views": 1.12, "ours, info, views": 1.22, "ours, off, to pack": 1.30}


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
    """What the ratios of a table of calls should not exceed."""
    return TRANSFORMER_AIMS if model == "transformer" else {}


@dataclass(frozen=True)
class Reducing:
    """A model, what gives it gradients, and the call that averages them."""

    model: nn.Module
    fill: Callable[[], object]
    call: Callable[[], object]


def _reducings(workload: Workload) -> dict[str, Reducing]:
    """Collective: a new model for each way to average; all have equal weights."""
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
    """A real backward, into gradients that are kept or made anew."""
    model.zero_grad(set_to_none=set_to_none)
    (batch,) = own_batches(workload, 1)
    workload.loss(model, batch).backward()


def _calls(workload: Workload) -> list[Variant]:
    """The first variant is what the others are compared with."""
    variants = []
    for name in ("bare all_reduce", "bare all_reduce again"):
        variants.append(Variant(name, partial(dist.all_reduce, flat_like(_new_model(workload)))))
    for name, reducing in _reducings(workload).items():
        variants.append(Variant(name, reducing.call, reducing.fill))
    return variants


def _parts(workload: Workload) -> list[Variant]:
    """Of one model whose gradients are made anew each time."""
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
    """Collective, and so is what is returned: what agreeing takes in every call."""
    synchronizer = Synchronizer(Settings())

    def exchange() -> None:
        with synchronizer.call(Operation.ALL_REDUCE, dist.group.WORLD) as call:
            agree(call, Header(), {})

    exchange()  # connects the private groups
    return exchange


if __name__ == "__main__":
    with quiet_interrupt():
        main()
