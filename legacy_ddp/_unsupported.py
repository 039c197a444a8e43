"""Unsupported arguments of torch DDP, and the alternative to each. Pure."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch.nn.parallel import DistributedDataParallel

_ANY_GRAPH = "leave it out: no hook in backward waits for a parameter, so every step may use other parameters"
_BUFFERS = "leave it out: forward never communicates; call model.broadcast_buffers() where ranks should agree on them"
_BUCKETS = "leave it out: these buckets serve the overlap with backward, and there is no overlap"
_DEVICE = "leave it out: move module and batches to the device yourself"
_LATER = "leave it out: nothing is reduced before you call all_reduce()"
INSTEAD = {
    "batched_grad_copy": _BUCKETS,
    "broadcast_buffers": _BUFFERS,
    "bucket_cap_mb": _BUCKETS,
    "bucket_cap_mb_list": _BUCKETS,
    "check_reduction": _ANY_GRAPH,
    "delay_all_reduce_named_params": _LATER,
    "device_ids": _DEVICE,
    "device_mesh": "pass the mesh, of one dimension, as process_group=",
    "dim": _DEVICE,
    "find_unused_parameters": _ANY_GRAPH,
    "forward_sync_buffers": _BUFFERS,
    "lazy_bucket_allocation": _BUCKETS,
    "mixed_precision": "use torch.autocast, and reduce_dtype= for what gradients travel in",
    "output_device": _DEVICE,
    "param_to_hook_all_reduce": _LATER,
    "skip_all_reduce_unused_params": _ANY_GRAPH,
    "static_graph": _ANY_GRAPH,
}
_OF_TORCH = frozenset(inspect.signature(DistributedDataParallel).parameters)


def refuse_unknown(
    target: type, given: Iterable[str], *signatures: Callable[..., Any], instead: Mapping[str, str] = INSTEAD
) -> None:
    """Refuse names in ``given`` without a parameter in the ``signatures`` of ``target``.

    Raises:
        TypeError: with all unknown names, and the alternative to each.
    """
    parameters = [parameter for taken in signatures for parameter in inspect.signature(taken).parameters.values()]
    known = {parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD} - {"self"}
    problems = []
    for name in given:
        if name in known:
            continue
        if name in instead:
            problems.append(f"takes no {name}; {instead[name]}")
        elif name in _OF_TORCH:
            problems.append(f"takes no {name}, unlike torch DDP; leave it out, or use torch DDP")
        else:
            problems.append(f"has no argument {name!r}; expected one of: {', '.join(sorted(known))}")
    if problems:
        raise TypeError("; ".join(f"{target.__name__} {problem}" for problem in problems))
