"""Time of the call after a parameter was frozen or thawed, which plans the layout again."""

import argparse
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch.distributed as dist
from _calls import Gradients
from _measure import Variant, measure, print_table, summarize

SAME, CHANGED = "nothing changed", "one parameter frozen or thawed"


def answer_replan(arguments: argparse.Namespace, *, size_bytes: int) -> dict[str, Any]:
    """Collective: both calls for each number of tensors, of ``size_bytes`` in all."""
    results: dict[str, Any] = {}
    for count in arguments.counts:
        summary = summarize(measure(partial(_variants, size_bytes, count), arguments))
        for row in summary.values():
            row["us_per_tensor"] = 1e3 * (row["median_ms"] - summary[SAME]["median_ms"]) / count
        results[f"{count} tensors"] = summary
        if dist.get_rank() == 0:
            print_table(f"call, {count:,} tensors", summary)
            print(f"planning takes {summary[CHANGED]['us_per_tensor']:.1f} us a tensor", flush=True)
    return results


def _variants(size_bytes: int, count: int) -> Sequence[Variant]:
    """The variants, the reference first."""
    same, changed = (Gradients("off", size_bytes, count, None) for _ in range(2))
    return [
        Variant(SAME, same.model.all_reduce, same.keep),
        Variant(CHANGED, changed.model.all_reduce, partial(_toggle, changed)),
    ]


def _toggle(gradients: Gradients) -> None:
    parameter = gradients.parameters[len(gradients.parameters) // 2]
    parameter.requires_grad_(not parameter.requires_grad)
    gradients.make()
    if not parameter.requires_grad:
        parameter.grad = None
