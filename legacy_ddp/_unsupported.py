"""Arguments and attributes without effect, of torch DDP and of the constructor, and the alternative to each. Pure."""

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
_REDUCER = "leave it out: there is no reducer with hooks in backward; the record of all_reduce() describes a call"
# Arguments of the constructor of the wrapper that are not attributes.
SETTINGS = (
    "world_size",
    "buffer_size",
    "init_sync",
    "gradient_as_bucket_view",
    "reduce_dtype",
    "reproducible",
    "ignore",
    "transport",
    "checks",
    "timeout_seconds",
)
# Assignments of scripts. Not here: ``device`` and ``logger`` of torch DDP, which are also names of scripts' own things.
ATTRIBUTES_INSTEAD = {
    **{name: advice for name, advice in INSTEAD.items() if name not in ("check_reduction", "param_to_hook_all_reduce")},
    "_ddp_sink_clone": _REDUCER,
    "_delay_all_reduce_all_params": _LATER,
    "_delay_all_reduce_params": _LATER,
    "_use_python_reducer": _REDUCER,
    "broadcast_bucket_size": "leave it out: broadcasts are cut by themselves",
    "bucket_bytes_cap": _BUCKETS,
    "bucket_bytes_cap_default": _BUCKETS,
    "bucket_bytes_cap_list": _BUCKETS,
    "buffer_hook": _BUFFERS,
    "device_type": _DEVICE,
    "is_multi_device_module": _DEVICE,
    "modules_buffers": _BUFFERS,
    "named_module_buffers": _BUFFERS,
    "parameters_to_ignore": "pass the names as ignore= to the constructor",
    "reducer": _REDUCER,
    "require_backward_grad_sync": (
        "leave out the all_reduce() of all micro-batches but the last, or put these micro-batches into no_sync()"
    ),
    "require_forward_param_sync": _BUFFERS,
    "use_side_stream_for_tensor_copies": _DEVICE,
    **{name: f"pass {name}= to the constructor of a new wrapper" for name in SETTINGS},
}


def refuse_attribute(target: type, name: str) -> None:
    """Refuse an assignment that would do nothing: to an attribute that only torch DDP has, or to a setting.

    A subclass may have an attribute of that name in its class.

    Raises:
        AttributeError: with the words of a reading, and the alternative.
    """
    if name in ATTRIBUTES_INSTEAD and not hasattr(target, name):
        missing = f"'{target.__name__}' object has no attribute '{name}'"
        raise AttributeError(f"{missing}, and an assignment would do nothing; {ATTRIBUTES_INSTEAD[name]}", name=name)


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
