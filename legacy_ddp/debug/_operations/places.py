"""The place of an operation: its stage and its module."""

import os
from bisect import bisect_right
from pathlib import Path
from typing import Final, NamedTuple

from torch import nn

from legacy_ddp import _torch as internals
from legacy_ddp.debug._operations.operation import Stage

_LIBRARY: Final[str] = os.path.join(str(Path(__file__).parents[2]), "")
_CAPTURES: Final[str] = os.path.join(str(Path(__file__).parent), "")  # another capture passes an operation on


class Place(NamedTuple):
    """``is_inside``: the operation runs in a forward pass of the model, or of a part of the model."""

    stage: Stage
    module: str
    is_inside: bool


class Places:
    """The places of a thread's operations, in the order of execution.

    In the backward pass an operation belongs to the module with the forward pass of its node: nodes have numbers in the
    order of their making, and the numbers at changes of the module are noted. A leaf's node belongs to the module with
    the parameter.
    """

    def __init__(self, module: nn.Module) -> None:
        self._paths = {id(child): path for path, child in module.named_modules()}
        self._owners = {id(parameter): name.rpartition(".")[0] for name, parameter in module.named_parameters()}
        self._first_numbers: list[int] = []  # of nodes of a module, ascending
        self._modules: list[str] = []
        self._next_number = 0

    def find(self) -> Place | None:
        """The place of the present operation; None for an operation of this library itself."""
        module, file = internals.caller_of_operation(self._paths, ignored=_CAPTURES)
        if file.startswith(_LIBRARY):
            return None
        stage: Stage = "backward" if internals.inside_backward() else "forward"
        is_inside = module is not None
        if not file and not is_inside and stage == "forward":
            return None  # of a thread without Python code: gloo's threads copy tensors
        if module is None:
            module = self._module_of_node() if stage == "backward" else ""
        self._note(module)
        return Place(stage, module, is_inside)

    def _note(self, module: str) -> None:
        """Assign the present node and the nodes after it to ``module``."""
        next_number = internals.next_node_number()
        if not self._modules or self._modules[-1] != module:
            self._first_numbers.append(max(next_number - 1, self._next_number))
            self._modules.append(module)
        self._next_number = next_number

    def _module_of_node(self) -> str:
        node = internals.current_node()
        if node is None:
            return ""
        number = internals.node_number(node)
        if number == internals.LEAF_NUMBER:
            return self._owners.get(id(internals.leaf_of(node)), "")
        index = bisect_right(self._first_numbers, number) - 1
        return self._modules[index] if index >= 0 else ""
