"""The record of the place of a difference. Pure."""

from dataclasses import dataclass

from legacy_ddp._replicas.element_compare import ElementDifference
from legacy_ddp.debug._operations.operation import OperationDifference


@dataclass(frozen=True)
class Place:
    """``difference``: of operations; None without a difference. ``elements``: of the first differing output, if known.
    ``count``: of operations of the differing run; ``last``: the number of the last of them. ``note``: the reason for a
    missing difference or for missing elements, empty without a reason. ``is_intermittent``: the output was equal in one
    more run.
    """

    difference: OperationDifference | None = None
    elements: ElementDifference | None = None
    count: int = 0
    last: int = 0
    note: str = ""
    is_intermittent: bool = False
