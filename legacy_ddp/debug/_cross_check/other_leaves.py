"""Tensors outside of the model with gradients from a run: a second model, a learnable loss, the inputs."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch.autograd.graph import Node

from legacy_ddp import _torch as internals


def other_leaves(loss: torch.Tensor, own: Collection[int]) -> list[torch.Tensor]:
    """The leaves of the graph behind ``loss``, in the order of a walk from the loss, without the ids ``own``.

    The walk is the same on ranks with the same graph. Leaves inside of a reentrant checkpoint are not in the graph.
    """
    found: dict[int, torch.Tensor] = {}
    seen: set[Node] = set()
    waiting = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = internals.leaf_of(node) if internals.node_number(node) == internals.LEAF_NUMBER else None
        if leaf is not None and id(leaf) not in own:
            found[id(leaf)] = leaf
        waiting += [inner for inner, _ in node.next_functions]
    return list(found.values())


@contextmanager
def gradients_set_aside(leaves: Sequence[torch.Tensor]) -> Iterator[None]:
    """For the block the leaves have no gradient, and backward calls none of their hooks after the accumulation."""
    before = [(leaf, leaf.grad) for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    try:
        with internals.without_accumulate_hooks(leaves):
            yield
    finally:
        for leaf, grad in before:
            leaf.grad = grad
