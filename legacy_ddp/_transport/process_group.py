"""Lookup of the user's process group, again in every call."""

from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from legacy_ddp import _torch as internals
from legacy_ddp._argument_errors import argument_errors

_SINGLE_RANK = 'torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)'
_DESTROYED = "process_group was destroyed; assign a live one to .process_group"


class GroupHandle:
    """The user's process group. Copies of a wrapper share the group; a pickle loses the group."""

    def __init__(self, process_group: dist.ProcessGroup | DeviceMesh | None, *, lost: bool = False) -> None:
        self._process_group = process_group
        self._lost = lost

    def resolve(self) -> dist.ProcessGroup:
        """The group to use.

        Raises:
            ValueError, TypeError: as :func:`resolve_group`; ValueError: the handle comes from a pickle.
        """
        return resolve_group(self._process_group, is_lost=self._lost)

    def __deepcopy__(self, memo: dict[int, Any]) -> "GroupHandle":
        return GroupHandle(self._process_group, lost=self._lost)

    def __getstate__(self) -> dict[str, Any]:
        return {"_process_group": None, "_lost": self._lost or self._process_group is not None}


@argument_errors
def resolve_group(process_group: dist.ProcessGroup | DeviceMesh | None, *, is_lost: bool = False) -> dist.ProcessGroup:
    """The group to use for the argument ``process_group``. ``is_lost``: the argument did not survive a pickle.

    Raises:
        ValueError: no default group, a mesh of several dimensions, a destroyed group.
        TypeError: a different type, or the result of ``new_group`` on a process outside the group.
    """
    if is_lost:
        raise ValueError(
            "process_group was not carried by the pickle, expected a live one; assign .process_group after loading"
        )
    if isinstance(process_group, DeviceMesh):
        if process_group.ndim != 1:
            raise ValueError(
                f"process_group is a DeviceMesh of {process_group.ndim} dimensions, expected 1; pass mesh[name]"
            )
        try:
            process_group = process_group.get_group()
        except RuntimeError as error:  # torch does not know the group of the mesh any more
            raise ValueError(_DESTROYED) from error
    if process_group is None:
        process_group = dist.group.WORLD if dist.is_initialized() else None
        if process_group is None:
            raise ValueError(
                "no default process group: start with torchrun and call torch.distributed.init_process_group() first, "
                f"or pass process_group=; plain python and notebooks, for a single rank: {_SINGLE_RANK}"
            )
    if not isinstance(process_group, dist.ProcessGroup):
        raise TypeError(
            f"process_group is of the wrong type: got {process_group!r}, expected ProcessGroup, DeviceMesh or None "
            "(new_group() returns no ProcessGroup on ranks outside it; wrap on its members only)"
        )
    if not internals.is_registered(process_group):
        raise ValueError(_DESTROYED)
    return process_group
