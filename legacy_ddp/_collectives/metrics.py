"""Metrics of a call: figures of the training loop, read on this rank and summed over the ranks."""

import json
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from legacy_ddp._agreement.agree import Agreement
from legacy_ddp._agreement.header import Flag
from legacy_ddp._buckets.layout import fingerprint
from legacy_ddp._text import error_line
from legacy_ddp._torch import device as devices
from legacy_ddp._transport.call import Call


def read_metrics(metrics: object, reader: devices.Reader | None = None) -> dict[str, float]:
    """The value of every metric, sorted by name. ``reader``: as for :func:`read_numbers`.

    Raises:
        TypeError, ValueError: as :func:`read_numbers`; not a mapping from names.
    """
    if not isinstance(metrics, Mapping):
        raise TypeError(
            f"metrics is of the wrong type: got {type(metrics).__name__}, expected a mapping of names to numbers, such "
            "as {'loss': 1.5}"
        )
    for name in metrics:
        if not isinstance(name, str):
            raise TypeError(f"a name in metrics is of the wrong type: got {name!r}, expected a str")
        if not name:
            raise ValueError("a name in metrics is empty: got '', expected at least one character, such as 'loss'")
    return read_numbers("metrics", {name: metrics[name] for name in sorted(metrics)}, reader=reader)


def read_numbers(
    owner: str,
    values: Mapping[str, object],
    expected: str = "a real number or a tensor with one element",
    *,
    reader: devices.Reader | None = None,
) -> dict[str, float]:
    """Every value as a double. Tensors on another device than the CPU are read together, with one wait.

    ``expected``: the values that ``owner`` takes, for the text of an error. ``reader``: reads the tensors on a device
    later, together with others: until then their values are NaN.

    Raises:
        TypeError: a value is not a number, or has several elements; the text has ``owner`` and the name.
        ValueError: an int beyond the range of a double.
    """
    away = {
        name: value for name, value in values.items() if isinstance(value, torch.Tensor) and value.device.type != "cpu"
    }
    for name, value in away.items():
        _require_one_real_element(f"{owner}[{name!r}]", value)
    found = {name: _number(f"{owner}[{name!r}]", value, expected) for name, value in values.items() if name not in away}
    numbers = {name: found.get(name, math.nan) for name in values}
    if away:
        later = reader or devices.Reader()
        for name, value in away.items():
            later.add_scalar(value, partial(_take, numbers, name))
        if reader is None:
            later.read()
    return numbers


def _take(numbers: dict[str, float], name: str, number: float) -> None:
    numbers[name] = float(number)


def fingerprint_names(metrics: Mapping[str, float]) -> int:
    """The fingerprint of the names of the metrics."""
    return fingerprint(json.dumps([*metrics]).encode())


def sum_metrics(call: Call, agreement: Agreement, metrics: Mapping[str, float]) -> dict[str, float]:
    """The sum of every metric over the ranks, equal on every rank. ``metrics``: of this rank.

    Collective if a rank has metrics: 8 bytes a metric from every rank. A rank that has left a join() counts as zeros,
    and learns the names here.
    """
    if not metrics and not any(agreement.column("metric_names")):
        return {}
    with call.phase("metrics"):
        names: Sequence[str] = tuple(metrics)
        if agreement.some_flags & Flag.JOINED:
            names = next(filter(None, call.gather_objects(names)))
        own = torch.tensor([metrics.get(name, 0.0) for name in names], dtype=torch.float64, device="cpu")
        columns = call.gather(own).T.tolist()
    return dict(zip(names, map(_sum, columns), strict=True))


def _sum(values: Sequence[float]) -> float:
    """The exact sum, rounded once. With infinite values, or beyond the range of a double: the sum by ``+``."""
    try:
        return math.fsum(values)
    except (OverflowError, ValueError):
        return sum(values)


def _require_one_real_element(label: str, value: torch.Tensor) -> None:
    if value.numel() != 1:
        raise TypeError(
            f"{label} is not usable: got a tensor of shape {tuple(value.shape)}, expected one element; sum it first"
        )
    if value.is_meta:
        raise TypeError(f"{label} is not usable: got a tensor of the meta device, expected a tensor with a value")
    if value.is_complex():
        raise TypeError(f"{label} is not usable: got a tensor of {value.dtype}, expected a real number")


def _number(label: str, value: Any, expected: str) -> float:
    if isinstance(value, torch.Tensor):
        _require_one_real_element(label, value)
    try:
        held = value.item() if hasattr(value, "item") else value
        if not hasattr(type(held), "__float__"):  # float() would read the digits of a text
            raise TypeError(f"no real number: {type(held).__name__}")
        return float(held)
    except OverflowError as error:
        raise ValueError(f"{label} is out of range: got more than 1.8e308, expected a double") from error
    except Exception as error:  # noqa: BLE001 - a conversion may be the user's code
        raise TypeError(
            f"{label} is not usable: got {type(value).__name__}, expected {expected} ({error_line(error)})"
        ) from None
