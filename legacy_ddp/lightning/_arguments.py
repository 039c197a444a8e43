"""Which arguments does a strategy not take, and what to do instead?"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch.nn.parallel import DistributedDataParallel

_BUFFERS = (
    "leave it out: rank 0's buffers are sent before validation and at the end of training, those in ignore= are not; "
    "with Fabric call fabric.strategy.broadcast_buffers()"
)
_HOOK = "register it after fabric.setup(): model._forward_module.register_comm_hook(state, hook)"
_INSTEAD = {
    "broadcast_buffers": _BUFFERS,
    "forward_sync_buffers": _BUFFERS,
    "bucket_cap_mb": "use buffer_size, in elements",
    "bucket_cap_mb_list": "use buffer_size, in elements",
    "ddp_comm_hook": _HOOK,
    "ddp_comm_state": _HOOK,
    "ddp_comm_wrapper": _HOOK,
    "delay_all_reduce_named_params": "leave it out: nothing is reduced before backward has ended",
    "device_ids": "leave it out: the module stays on the device that Lightning gave it",
    "device_mesh": "leave it out: the strategy trains on all ranks of the job",
    "mixed_precision": "use precision= of the Trainer or of Fabric, and reduce_dtype",
    "model_averaging_period": "with Fabric average in the loop: backward and step inside fabric.no_backward_sync()",
    "output_device": "leave it out: the module stays on the device that Lightning gave it",
    "process_group": "leave it out: the strategy trains on all ranks of the job",
    "reproducible": "it needs the number of items in every step, which Lightning's loop does not tell; "
    "wrap the model in a loop of your own, as docs/reproducible.md does",
    "skip_all_reduce_unused_params": "leave it out: a parameter that no rank used keeps grad=None",
    "static_graph": "leave it out: nothing depends on the graph, so it may change from step to step",
    "world_size": "use devices= and num_nodes= of the Trainer or of Fabric",
}
_OF_TORCH = frozenset(inspect.signature(DistributedDataParallel).parameters)


def refuse_unknown(strategy: str, given: Mapping[str, Any], lightning_strategy: Callable[..., Any]) -> None:
    """Refuse what Lightning's strategy would pass on to torch DDP, which is not there.

    Raises:
        TypeError: naming the argument and what to do instead.
    """
    parameters = inspect.signature(lightning_strategy).parameters.values()
    known = {parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD}
    for name in given.keys() - known:
        if name in _INSTEAD:
            raise TypeError(f"{strategy} takes no {name}; {_INSTEAD[name]}")
        if name in _OF_TORCH:
            raise TypeError(f"{strategy} takes no {name}, unlike torch DDP; leave it out, or use strategy='ddp'")
        raise TypeError(
            f"{strategy} has no argument {name!r}; expected those of LegacyDistributedDataParallel, or of Lightning's "
            f"DDPStrategy: {', '.join(sorted(known))}"
        )
