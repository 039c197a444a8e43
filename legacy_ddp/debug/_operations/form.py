"""The form of an operation: its settings and tensors, as far as data of each rank's own leave them equal. Pure."""

import re
from collections.abc import Iterable, Iterator
from itertools import groupby

from legacy_ddp.debug._operations.describe import sizes
from legacy_ddp.debug._operations.operation import Operation, Value

_ARGUMENT = re.compile(r", (?=\w+=)")
_NUMBER = re.compile(r"(?<![\w.])-?(?:\d[\w.+-]*|inf\b|nan\b)")
_INTEGER = re.compile(r"(?<![\w.])(?<!e[-+])-?\d+(?![\w.])")
_DEVICE_INDEX = re.compile(r"\b([a-z]+):\d+")
# An argument without any word: a number, or a list of numbers.
_NUMBERS_ALONE = re.compile(r"(?:\w+=)?[\[\]#, ]*")
_DIMENSION = re.compile(r"dims?\d?=")


def form(operation: Operation, other: Operation, *, has_dimensions: bool, has_fractions: bool) -> tuple[object, ...]:
    """The parts of an operation without influence of data; ``other``: the operation of the other rank.

    - The parameters, and dtype and number of dimensions (``has_dimensions``) of the tensors. Like neighbours count as
      a single tensor: the length of a list (``unbind``, ``cat``) is a length of the data.
    - Words among the settings, as ``training=True``.
    - Two kinds of numbers among the settings, only for tensors of equal shapes in both operations: the
      arguments named ``dim``, which code chooses, and fractions (``has_fractions``), which are no sizes, positions or
      numbers of items. An operation without an input has no fractions here: ``arange`` may end with a fraction.
    """
    has_equal_shapes = _kinds(operation) == _kinds(other)
    has_fractions = has_fractions and has_equal_shapes and bool(operation.inputs)
    settings = _DEVICE_INDEX.sub(r"\1", operation.settings)
    arguments = _arguments(settings, has_equal_shapes=has_equal_shapes, has_fractions=has_fractions)
    inputs = [*zip(operation.parameters, _tensors(operation.inputs, has_dimensions=has_dimensions), strict=True)]
    outputs = _tensors(operation.outputs, has_dimensions=has_dimensions)
    return [*arguments], _merged(inputs), _merged(outputs)


def has_other_sizes(a: Operation, b: Operation) -> bool:
    """Whether tensors or lists of tensors have other sizes, and tensors as many dimensions."""
    sides = ((a.inputs, b.inputs), (a.outputs, b.outputs))
    return _kinds(a) != _kinds(b) and all(_merged(_tensors(left)) == _merged(_tensors(right)) for left, right in sides)


def _kinds(operation: Operation) -> list[list[str]]:
    return [[value.kind for value in side] for side in (operation.inputs, operation.outputs)]


def _arguments(settings: str, *, has_equal_shapes: bool, has_fractions: bool) -> Iterator[str]:
    """The arguments that are compared, without the others."""
    numbers = _INTEGER if has_fractions else _NUMBER
    for argument in _ARGUMENT.split(settings):
        is_dimension = has_equal_shapes and _DIMENSION.match(argument)
        text = argument if is_dimension else numbers.sub("#", argument)
        if not _NUMBERS_ALONE.fullmatch(text):
            yield text


def _merged(items: Iterable[object]) -> list[object]:
    """The items, like neighbours as one."""
    return [item for item, _ in groupby(items)]


def _tensors(values: Iterable[Value], *, has_dimensions: bool = True) -> list[tuple[str, int]]:
    """Dtype and number of dimensions; without ``has_dimensions`` the dtype, and 0."""
    parts = (value.kind.partition(" ") for value in values)
    return [(dtype, len(sizes(shape)) if has_dimensions else 0) for dtype, _, shape in parts]
