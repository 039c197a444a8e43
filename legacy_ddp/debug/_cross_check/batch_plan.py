"""The description of a batch: its containers, numbers and texts as JSON values, and its tensors in a list. Pure.

Nothing is pickled: a received description makes containers, numbers and texts. A class (a named tuple, a dataclass, a
mapping) is made again only if the receiver's own batch holds an instance of the same class.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeGuard

import torch

Classes = Mapping[str, type]
_EXACT = (bool, int, float, str)
_SEQUENCES: Sequence[type] = (list, tuple, torch.Size)
_NOTHING: Mapping[int, str] = {}
MAX_DEPTH = 100  # containers inside of each other; Python's recursion ends at about 300 of them
_STEP = "pass tensors in lists, tuples, dicts, named tuples or dataclasses, with numbers and texts"


def describe(batch: object, where: str, tensors: list[torch.Tensor], outer: Mapping[int, str] = _NOTHING) -> Any:
    """The JSON value for ``batch``; its tensors are appended to ``tensors``. ``where``: name of the batch in errors.

    ``outer``: the containers around ``batch``, the name of each by its id.

    Raises:
        TypeError: a value that cannot be sent to another rank; the text names its place in the batch.
        ValueError: a container inside of itself, or more than ``MAX_DEPTH`` containers inside of each other.
    """
    if batch is None or type(batch) in _EXACT:
        return batch
    if isinstance(batch, torch.Tensor):
        _check_tensor(batch, where)
        tensors.append(batch)
        return {"tensor": len(tensors) - 1}
    if isinstance(batch, bytes):
        return {"bytes": batch.hex()}
    if type(batch) is complex:
        return {"complex": [batch.real, batch.imag]}
    _check_nesting(batch, where, outer)
    inner = {**outer, id(batch): where}
    if type(batch) in _SEQUENCES:
        items = [describe(item, f"{where}[{index}]", tensors, inner) for index, item in enumerate(batch)]  # type: ignore[arg-type, var-annotated]
        return {type(batch).__name__: items}
    if _is_record(batch):
        fields = {name: describe(value, f"{where}.{name}", tensors, inner) for name, value in _fields(batch)}
        return {"class": _class_name(type(batch)), "fields": fields}
    if isinstance(batch, Mapping):
        _check_constructor(batch, where)
        keys = [_describe_key(key, where) for key in batch]
        values = [describe(value, f"{where}[{key!r}]", tensors, inner) for key, value in batch.items()]
        pairs = list(map(list, zip(keys, values, strict=True)))
        return {"dict": pairs} if type(batch) is dict else {"class": _class_name(type(batch)), "items": pairs}
    why = ", whose constructor does not take all fields" if dataclasses.is_dataclass(batch) else ""
    raise TypeError(f"{where} is of a type that cannot be sent to another rank: got {_kind(batch)}{why}; {_STEP}")


def rebuild(value: Any, tensors: Sequence[torch.Tensor], classes: Classes) -> Any:
    """The batch for a JSON value of :func:`describe`.

    Raises:
        TypeError: a class is not in ``classes``.
    """
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
            return kind(rebuild(item, tensors, classes) for item in value[kind.__name__])
    if "fields" in value:
        fields = {name: rebuild(item, tensors, classes) for name, item in value["fields"].items()}
        return _find_class(value["class"], classes)(**fields)
    pairs = value["dict"] if "dict" in value else value["items"]
    built = {_rebuild_key(key): rebuild(item, tensors, classes) for key, item in pairs}
    return built if "dict" in value else _find_class(value["class"], classes)(built)


def classes_in(batch: object) -> dict[str, type]:
    """The classes of named tuples, dataclasses and mappings in ``batch``, by the names in descriptions."""
    return {_class_name(kind): kind for kind in _walk_classes(batch)}


def names_in(value: Any) -> set[str]:
    """The names of the classes that a JSON value of :func:`describe` needs."""
    if isinstance(value, dict):
        own = {value["class"]} if "class" in value else set()
        return own.union(*map(names_in, value.values()))
    return set().union(*map(names_in, value)) if isinstance(value, list) else set()


def _walk_classes(batch: object) -> Iterator[type]:
    if _is_record(batch):
        yield type(batch)
        for _, value in _fields(batch):
            yield from _walk_classes(value)
    elif isinstance(batch, Mapping):
        if type(batch) is not dict:
            yield type(batch)
        for value in batch.values():
            yield from _walk_classes(value)
    elif type(batch) in _SEQUENCES:
        for value in batch:  # type: ignore[attr-defined]
            yield from _walk_classes(value)


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


def _describe_key(key: object, where: str) -> Any:
    if key is None or type(key) in _EXACT:
        return key
    if type(key) is tuple:
        return {"tuple": [_describe_key(item, where) for item in key]}
    raise TypeError(f"{where} has a key that cannot be sent to another rank: got {_kind(key)}; {_STEP}")


def _rebuild_key(key: Any) -> Any:
    return tuple(map(_rebuild_key, key["tuple"])) if isinstance(key, dict) else key


def _check_nesting(batch: object, where: str, outer: Mapping[int, str]) -> None:
    """Raises a ValueError for a container inside of itself, or too deep."""
    if id(batch) in outer:
        raise ValueError(f"{outer[id(batch)]} contains itself, at {where}: expected a batch without cycles")
    if len(outer) >= MAX_DEPTH:
        first = next(iter(outer.values()))
        raise ValueError(
            f"{first} is nested too deeply: expected at most {MAX_DEPTH} containers inside of each other; pass a "
            "flatter batch"
        )


def _check_constructor(mapping: Mapping[Any, Any], where: str) -> None:
    """Raises a TypeError for a mapping that its class cannot make from a dict, as a defaultdict."""
    try:
        type(mapping)(dict(mapping))  # type: ignore[call-arg]
    except Exception as error:
        raise TypeError(
            f"{where} is of a type that cannot be sent to another rank: got {_kind(mapping)}, whose constructor takes "
            "no dict; pass a dict"
        ) from error


def _check_tensor(tensor: torch.Tensor, where: str) -> None:
    """Raises a TypeError for a tensor without plain bytes of its own."""
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


def _class_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _find_class(name: str, classes: Classes) -> Any:
    if name not in classes:
        raise TypeError(
            f"the batch of another rank holds a {name}, and the batch of this rank holds none: expected batches of one "
            "structure on all ranks; use the same classes on all ranks"
        )
    return classes[name]


def _kind(value: object) -> str:
    kind = type(value)
    return f"a {kind.__name__}" if kind.__module__ == "builtins" else f"a {_class_name(kind)}"
