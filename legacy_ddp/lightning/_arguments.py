"""Arguments that a strategy does not take, each with the alternative."""

from legacy_ddp import _unsupported

_BUFFERS = (
    "leave it out: rank 0's buffers are sent before validation and at the end of training, those in ignore= are not; "
    "with Fabric call fabric.strategy.broadcast_buffers()"
)
_DEVICE = "leave it out: the module stays on the device that Lightning gave it"
_GROUP = "leave it out: the strategy trains on all ranks of the job"
_HOOK = "register it after fabric.setup(): model._forward_module.register_comm_hook(state, hook)"
INSTEAD = {
    **_unsupported.INSTEAD,
    "broadcast_buffers": _BUFFERS,
    "forward_sync_buffers": _BUFFERS,
    "ddp_comm_hook": _HOOK,
    "ddp_comm_state": _HOOK,
    "ddp_comm_wrapper": _HOOK,
    "device_ids": _DEVICE,
    "device_mesh": _GROUP,
    "dim": _DEVICE,
    "mixed_precision": "use precision= of the Trainer or of Fabric, and reduce_dtype",
    "model_averaging_period": "with Fabric average in the loop: backward and step inside fabric.no_backward_sync()",
    "output_device": _DEVICE,
    "process_group": _GROUP,
    "reproducible": "it needs the number of items in every step, which Lightning's loop does not pass on; "
    "wrap the model in a loop of your own, as docs/reproducible.md does",
    "world_size": "use devices= and num_nodes= of the Trainer or of Fabric",
}
