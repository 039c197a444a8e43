"""Equal operations of two sequences in different orders. Pure."""

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence

from legacy_ddp.debug._operations.blocks import Block
from legacy_ddp.debug._operations.operation import Operation


def reordered(a: Sequence[Operation], b: Sequence[Operation], blocks: Iterable[Block]) -> int:
    """The number of operations at the beginning of A and of B that differ in their order alone; or 0.

    ``blocks``: the alignment of A and B. Up to there the operations of A alone are the operations of B alone: equal
    stages, modules, names, parameters and settings, as often.
    """
    surplus: Counter[Hashable] = Counter()  # of A over B
    for block in blocks:
        if not block.is_common:
            surplus.update(map(_identity, a[block.start_a : block.end_a]))
            surplus.subtract(map(_identity, b[block.start_b : block.end_b]))
        if not any(surplus.values()):
            return 0 if block.is_common else block.end_a
    return 0


def _identity(operation: Operation) -> Hashable:
    return operation.stage, operation.module, operation.name, operation.parameters, operation.settings
