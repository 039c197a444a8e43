"""Encoding of a batch for another rank: a description as JSON values, and the bytes of the tensors. Pure.

Nothing is pickled. A received description can create only containers, numbers and texts, and instances of classes
(named tuples, dataclasses, mappings) that the receiver's own batch holds, too.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import torch

Classes = Mapping[str, type]
_EXACT = (bool, int, float, str)
_SEQUENCES: Sequence[type] = (list, tuple, torch.Size)
_NOTHING: Mapping[int, str] = {}
MAX_DEPTH = 100  # containers inside of each other; Python's recursion ends at about 300 of them
_STEP = "pass tensors in lists, tuples, dicts, named tuples or dataclasses, with numbers and texts"
_ALIGNMENT = 64  # as torch allocates: a kernel may depend on the alignment of a tensor


@dataclass(frozen=True)
class Parcel:
    """All state for a run besides the shared parameters: see :func:`pack`.

    ``generators``: states of the random generators. ``tensors``: by name, the parameters and buffers in which each rank
    has its own values.
    """

    batch: Any
    generators: Any
    tensors: Mapping[str, torch.Tensor]


@dataclass
class _Contents:
    """What a description refers to: tensors by position, classes (of named tuples, dataclasses, mappings) by name."""

    tensors: list[torch.Tensor] = field(default_factory=list)
    classes: dict[str, type] = field(default_factory=dict)

    def name_class(self, kind: type) -> str:
        name = _class_name(kind)
        self.classes[name] = kind
        return name


def pack(batch: object, generators: Any, own: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, Classes]:
    """Batch, generators and the tensors ``own`` as one dimension of uint8 on the CPU; and the classes in the batch.

    A tensor keeps dtype, shape, strides and ``requires_grad``. The memory between its elements is sent, too.
    """
    contents = _Contents()
    description = {
        "batch": _describe(batch, "batch", contents),
        "generators": _describe(generators, "generators", contents),
        "own": _describe(dict(own), "own", contents),
        "classes": [*contents.classes],
    }
    tensors = [tensor.resolve_conj().resolve_neg() for tensor in contents.tensors]
    text = json.dumps({**description, "tensors": [_layout(tensor) for tensor in tensors]}).encode("ascii")
    pieces = [
        torch.frombuffer(bytearray(len(text).to_bytes(8, "little") + text), dtype=torch.uint8),
        *map(_span, tensors),
    ]
    return torch.cat([piece for data in pieces for piece in (data, _padding(data))]), contents.classes


def unpack(data: torch.Tensor, device: torch.device, classes: Classes) -> Parcel:
    """The inverse of :func:`pack`, in new memory. Tensors that were on an accelerator are put on ``device``."""
    check_classes(data, classes)
    description, start = _description(data)
    tensors = []
    for layout in description["tensors"]:
        tensors.append(_tensor(data[start : start + layout["bytes"]], layout, device))
        start += _padded(layout["bytes"])
    return Parcel(
        _rebuild(description["batch"], tensors, classes),
        _rebuild(description["generators"], tensors, {}),
        _rebuild(description["own"], tensors, {}),
    )


def check_classes(data: torch.Tensor, classes: Classes) -> None:
    """Raises a TypeError for a parcel with a class that is not in ``classes``. The parcel may be empty."""
    if data.numel() and (unknown := sorted({*_description(data)[0]["classes"]} - {*classes})):
        raise TypeError(
            f"the batch of another rank holds {unknown[0]}, and the batch of this rank does not: expected batches "
            "of one structure on all ranks; use the same classes on all ranks"
        )


def _description(data: torch.Tensor) -> tuple[dict[str, Any], int]:
    length = int.from_bytes(bytes(data[:8].tolist()), "little")
    return json.loads(bytes(data[8 : 8 + length].tolist())), _padded(8 + length)


def _layout(tensor: torch.Tensor) -> dict[str, Any]:
    return {
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "strides": list(tensor.stride()),
        "bytes": _span_numel(tensor) * tensor.itemsize,
        "host": tensor.device.type == "cpu",
        "grad": tensor.requires_grad,
    }


def _span_numel(tensor: torch.Tensor) -> int:
    if not tensor.numel():
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _span(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes from the first to the last element of ``tensor``, for any strides: expanded, sliced, overlapping."""
    return tensor.detach().as_strided((_span_numel(tensor),), (1,)).cpu().view(torch.uint8)


def _tensor(data: torch.Tensor, layout: Mapping[str, Any], device: torch.device) -> torch.Tensor:
    span = data.clone().view(getattr(torch, layout["dtype"]))
    span = span if layout["host"] else span.to(device)
    return span.as_strided(layout["shape"], layout["strides"]).detach().requires_grad_(layout["grad"])


def _padded(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGNMENT) * _ALIGNMENT


def _padding(data: torch.Tensor) -> torch.Tensor:
    return torch.zeros(_padded(data.numel()) - data.numel(), dtype=torch.uint8, device="cpu")


def _describe(batch: object, where: str, contents: _Contents, outer: Mapping[int, str] = _NOTHING) -> Any:
    """The JSON value for ``batch``. Adds its tensors and classes to ``contents``.

    ``where``: name of ``batch`` in errors. ``outer``: the containers around it, the name of each by its id.
    """
    if batch is None or type(batch) in _EXACT:
        return batch
    if isinstance(batch, torch.Tensor):
        _check_tensor(batch, where)
        contents.tensors.append(batch)
        return {"tensor": len(contents.tensors) - 1}
    if isinstance(batch, bytes):
        return {"bytes": batch.hex()}
    if type(batch) is complex:
        return {"complex": [batch.real, batch.imag]}
    _check_nesting(batch, where, outer)
    inner = {**outer, id(batch): where}
    if type(batch) in _SEQUENCES:
        items = [_describe(item, f"{where}[{index}]", contents, inner) for index, item in enumerate(batch)]  # type: ignore[arg-type, var-annotated]
        return {type(batch).__name__: items}
    if _is_record(batch):
        fields = {name: _describe(value, f"{where}.{name}", contents, inner) for name, value in _fields(batch)}
        return {"class": contents.name_class(type(batch)), "fields": fields}
    if isinstance(batch, Mapping):
        _check_constructor(batch, where)
        keys = [_describe_key(key, where) for key in batch]
        values = [_describe(value, f"{where}[{key!r}]", contents, inner) for key, value in batch.items()]
        pairs = list(map(list, zip(keys, values, strict=True)))
        return {"dict": pairs} if type(batch) is dict else {"class": contents.name_class(type(batch)), "items": pairs}
    why = ", whose constructor does not take all fields" if dataclasses.is_dataclass(batch) else ""
    raise TypeError(f"{where} is of a type that cannot be sent to another rank: got {_kind(batch)}{why}; {_STEP}")


def _describe_key(key: object, where: str) -> Any:
    if key is None or type(key) in _EXACT:
        return key
    if type(key) is tuple:
        return {"tuple": [_describe_key(item, where) for item in key]}
    raise TypeError(f"{where} has a key that cannot be sent to another rank: got {_kind(key)}; {_STEP}")


def _check_nesting(batch: object, where: str, outer: Mapping[int, str]) -> None:
    if id(batch) in outer:
        raise ValueError(f"{outer[id(batch)]} contains itself, at {where}: expected a batch without cycles")
    if len(outer) >= MAX_DEPTH:
        first = next(iter(outer.values()))
        raise ValueError(
            f"{first} is nested too deeply: expected at most {MAX_DEPTH} containers inside of each other; pass a "
            "flatter batch"
        )


def _check_constructor(mapping: Mapping[Any, Any], where: str) -> None:
    """Raises a TypeError for a mapping whose class cannot be called with a dict, such as a defaultdict."""
    try:
        type(mapping)(dict(mapping))  # type: ignore[call-arg]
    except Exception as error:
        raise TypeError(
            f"{where} is of a type that cannot be sent to another rank: got {_kind(mapping)}, whose constructor takes "
            "no dict; pass a dict"
        ) from error


def _check_tensor(tensor: torch.Tensor, where: str) -> None:
    if type(tensor) is not torch.Tensor:
        problem, step = f"a {type(tensor).__name__}", "pass a plain tensor"
    elif tensor.layout is not torch.strided or tensor.is_nested:
        problem, step = "a sparse or nested tensor", "pass a dense tensor, and make the sparse one inside run()"
    elif tensor.is_quantized or tensor.is_meta:
        problem, step = "a tensor that is quantized or on the meta device", "pass a tensor with plain values"
    elif tensor.grad_fn is not None:
        problem, step = "a tensor with a grad_fn, the result of other tensors of this rank", "detach() it"
    else:
        return
    raise TypeError(f"{where} cannot be sent to another rank: got {problem}; {step}")


def _kind(value: object) -> str:
    kind = type(value)
    return f"a {kind.__name__}" if kind.__module__ == "builtins" else f"a {_class_name(kind)}"


def _rebuild(value: Any, tensors: Sequence[torch.Tensor], classes: Classes) -> Any:
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        return tensors[value["tensor"]]
    if "bytes" in value:
        return bytes.fromhex(value["bytes"])
    if "complex" in value:
        return complex(*value["complex"])
    for kind in _SEQUENCES:
        if kind.__name__ in value:
            return kind(_rebuild(item, tensors, classes) for item in value[kind.__name__])
    if "fields" in value:
        fields = {name: _rebuild(item, tensors, classes) for name, item in value["fields"].items()}
        return classes[value["class"]](**fields)
    pairs = value["dict"] if "dict" in value else value["items"]
    built = {_rebuild_key(key): _rebuild(item, tensors, classes) for key, item in pairs}
    return built if "dict" in value else classes[value["class"]](built)


def _rebuild_key(key: Any) -> Any:
    return tuple(map(_rebuild_key, key["tuple"])) if isinstance(key, dict) else key


def _class_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _is_record(batch: object) -> bool:
    """Whether ``batch`` is a named tuple, or an instance of a dataclass whose constructor takes its fields."""
    return _is_named_tuple(batch) or (
        dataclasses.is_dataclass(batch)
        and not isinstance(batch, type)
        and all(field.init for field in dataclasses.fields(batch))
    )


def _is_named_tuple(batch: object) -> TypeGuard[tuple[Any, ...]]:
    return isinstance(batch, tuple) and hasattr(batch, "_fields")


def _fields(batch: object) -> list[tuple[str, Any]]:
    if _is_named_tuple(batch):
        return list(zip(batch._fields, batch, strict=True))  # type: ignore[attr-defined]
    return [(field.name, getattr(batch, field.name)) for field in dataclasses.fields(batch)]  # type: ignore[arg-type]
