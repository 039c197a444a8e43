"""Text for ``print(model)``: layout, group and settings of a wrapper. Pure, except for the rank in the group."""

from collections.abc import Callable, Iterator
from contextlib import suppress

import torch.distributed as dist

from legacy_ddp._buckets.layout import Layout
from legacy_ddp._settings import Settings
from legacy_ddp._text import format_bytes
from legacy_ddp._transport.groups import GroupHandle


def describe_wrapper(
    layout: Layout | None,
    group: GroupHandle,
    transport_text: Callable[[dist.ProcessGroup], str],
    settings: Settings,
) -> str:
    """A few lines. Never raises.

    ``layout``: the last layout, None before the first plan. ``transport_text``: the transport on a group, may be empty.
    """
    return "\n".join([*_layout_lines(layout), *_group_lines(group, transport_text), _settings_line(settings)])


def _layout_lines(layout: Layout | None) -> Iterator[str]:
    if layout is None:
        yield "no layout planned yet"
        return
    for index, bucket in enumerate(layout.buckets):
        size = format_bytes(bucket.numel * bucket.dtype.itemsize)
        yield f"bucket {index}: {bucket.label}, {len(bucket.slots):,} tensors, {bucket.numel:,} elements, {size}"
    if not layout.buckets:
        yield "no trainable parameters"


def _group_lines(group: GroupHandle, transport_text: Callable[[dist.ProcessGroup], str]) -> list[str]:
    with suppress(ValueError, TypeError, RuntimeError):  # no group, or a destroyed group
        found = group.resolve()
        lines = [f"group: rank {dist.get_rank(found)} of {dist.get_world_size(found)}, {dist.get_backend(found)}"]
        return lines + [f"transport: {text}" for text in [transport_text(found)] if text]
    return ["group: none available"]


def _settings_line(settings: Settings) -> str:
    defaults = Settings()
    changed = {name: value for name, value in vars(settings).items() if value != getattr(defaults, name)}
    changed.pop("transport", None)  # shown with the group
    checks = changed.pop("checks", None) or repr(settings.checks.level)
    return ", ".join([*(f"{name}={value!r}" for name, value in changed.items()), f"checks={checks}"])
