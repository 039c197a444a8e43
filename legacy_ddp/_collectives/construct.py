"""Checks of the constructor, and comparison of the plan over the ranks. Collective."""

from collections.abc import Callable

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from legacy_ddp._agreement.agree import agree, announcing_failures
from legacy_ddp._agreement.header import Header
from legacy_ddp._buckets.plan import Plan
from legacy_ddp._collectives.transport_choice import Transport
from legacy_ddp._replicas.state import check_local_buffers
from legacy_ddp._settings import Settings, check_ignored
from legacy_ddp._traceback import check_traceback_variable
from legacy_ddp._transport.call import Call


def construct(
    call: Call,
    transport: Transport,
    module: nn.Module,
    settings: Settings,
    plan: Callable[[], Plan],
    *,
    world_size: int | None,
    wrapper: type[nn.Module],
    problem: Exception | None,
) -> None:
    """Check the arguments, plan, and compare the plan over the ranks.

    ``problem``: an earlier error, raised here to announce the error to the other ranks. ``wrapper``: a class
    forbidden inside ``module``.

    Raises:
        TypeError, ValueError: an unusable argument, module or parameter.
        TransportError: ``transport="host"`` is not possible.
        LayoutError, PeerError, DesyncError, LostPeerError: as the wrapper's constructor.
    """
    with announcing_failures(call):
        if problem is not None:
            raise problem
        check_traceback_variable()
        if isinstance(world_size, bool) or not isinstance(world_size, int | None):
            raise TypeError(
                f"world_size is of the wrong type: got {type(world_size).__name__}, expected an int or None; "
                "a process group goes to process_group=, and torch DDP's device_ids are left out"
            )
        if world_size is not None and world_size != call.groups.size:
            raise ValueError(
                f"world_size does not match the process group: got {world_size}, expected {call.groups.size}; "
                "leave it out, or pass the group of that size"
            )
        wrappers = (wrapper, DistributedDataParallel)
        if inside := [type(child).__name__ for child in module.modules() if isinstance(child, wrappers)]:
            raise ValueError(f"module contains a {inside[0]}, expected no wrapper; wrap the plain module, once")
        check_ignored(module, settings.ignore)
        check_local_buffers(module, settings.checks.local_buffers)
        layout = plan().layout
    agree(call, Header(layout=layout.fingerprint), layout.inventory)
    transport.require_host(call)
    transport.before_pack()
