"""Runs of batches on this rank: forward and backward from the saved state, and the digests of all results."""

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import Node
from torch.optim.optimizer import register_optimizer_step_pre_hook

from legacy_ddp import _torch as internals
from legacy_ddp._buckets.layout import distinct, fingerprint
from legacy_ddp._collectives.state import private_forwards
from legacy_ddp._replicas.digest import digest_each
from legacy_ddp._replicas.state import NONE, StateItem, comparable, describe_items
from legacy_ddp.debug._cross_check.batch import Classes, Parcel, unknown_classes, unpack
from legacy_ddp.debug._cross_check.saved_state import SavedState, generator_states
from legacy_ddp.debug._cross_check.verdict import Digests
from legacy_ddp.debug._operations.capture import OperationCapture
from legacy_ddp.debug._operations.operation import Operation

Run = Callable[[Any, Any], torch.Tensor]
_STEP = "let run(model, batch) return the loss, without backward(), all_reduce() and step()"
LOSS, GENERATORS, OTHERS = "the loss", "the random generators", "gradients outside of the model"


class Runner:
    """Runs batches. ``model``: the first argument of ``run``; ``module``: the plain module behind it.

    ``names``: of the results, in the order of their digests, on all ranks of replicas the same.
    """

    def __init__(self, run: Run, model: nn.Module, module: nn.Module, saved: SavedState) -> None:
        self._run, self._model, self._module, self._saved = run, model, module, saved
        self._parameters = [item.name for item in distinct(module.named_parameters(remove_duplicate=False))]
        self._buffers = [item.name for item in distinct(module.named_buffers(remove_duplicate=False))]
        self.names = (
            LOSS,
            *(f"gradient of {name!r}" for name in self._parameters),
            *(f"buffer {name!r}" for name in self._buffers),
            GENERATORS,
            OTHERS,
        )

    def digests(self, parcel: Parcel, around: AbstractContextManager[object] | None = None) -> tuple[int, ...]:
        """Forward and backward of the batch; a 64-bit number for each of ``names``.

        ``around``: entered for forward and backward.

        Raises:
            TypeError: ``run`` returns no loss. ValueError: ``run`` called backward or step itself.
            Exception: any failure of ``run`` or of backward.
        """
        self._saved.begin_run(parcel.generators, parcel.tensors)
        with _as_in_training(), _without_steps(), around or nullcontext():
            loss = self._run(self._model, parcel.batch)
            self._check(loss)
            others = _other_leaves(loss, {id(parameter) for parameter in self._module.parameters()})
            with _gradients_set_aside(others):
                loss.backward()  # type: ignore[no-untyped-call]
                text = _describe_gradients(others)
        self._check_gradients()
        with torch.no_grad():
            results = describe_items([StateItem("", name, value) for name, value in self._results(loss, text)])
        return tuple(fingerprint(results[name].encode()) for name in self.names)

    def _check(self, loss: object) -> None:
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            kind = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise TypeError(f"run returned no loss: got {kind}, expected a tensor with one element; {_STEP}")
        if any(parameter.grad is not None for parameter in self._module.parameters()):
            raise ValueError(f"run left gradients, expected none before the backward of cross_check(); {_STEP}")
        if not loss.requires_grad and not any(parameter.requires_grad for parameter in self._module.parameters()):
            raise ValueError(
                "the model has no parameters that require gradients, and run returned a loss without a graph: expected "
                "gradients to compare; pass the model that is trained"
            )
        if not loss.requires_grad:
            raise ValueError(f"run returned a loss without a graph, expected a loss that requires grad; {_STEP}")

    def _check_gradients(self) -> None:
        trained = [parameter for parameter in self._module.parameters() if parameter.requires_grad]
        if trained and all(parameter.grad is None for parameter in trained):
            raise ValueError(
                "the loss of run depends on no parameter of the model, expected gradients to compare; compute the loss "
                "with the first argument of run(model, batch)"
            )

    def _results(self, loss: torch.Tensor, others: str) -> Iterator[tuple[str, torch.Tensor | str]]:
        """The results in the order of ``names``. ``others``: as text, the gradients outside of the model."""
        parameters = dict(self._module.named_parameters(remove_duplicate=False))
        buffers = dict(self._module.named_buffers(remove_duplicate=False))
        states = generator_states(self._module)
        digests = digest_each([states.pop("cpu"), *states.pop("devices"), *states.pop("modules").values()])
        values = [
            loss.detach(),
            *(parameters[name].grad for name in self._parameters),
            *(buffers.get(name) for name in self._buffers),
            repr((digests, states)),
            others,
        ]
        for name, value in zip(self.names, values, strict=True):
            yield name, comparable(value) if isinstance(value, torch.Tensor) else value or NONE


def _describe_gradients(leaves: Sequence[torch.Tensor]) -> str:
    """The gradients of ``leaves`` as text: dtypes, shapes and digests."""
    grads = [leaf.grad for leaf in leaves]
    with torch.no_grad():
        values = [NONE if grad is None else comparable(grad) for grad in grads]
        return repr(describe_items([StateItem("", str(index), value) for index, value in enumerate(values)]))


@contextmanager
def _as_in_training() -> Iterator[None]:
    """The modes of a training loop, whatever the modes of the caller."""
    with torch.enable_grad(), private_forwards():
        yield


@contextmanager
def _without_steps() -> Iterator[None]:
    """In the block ``step()`` of any optimizer is an error on this thread: its state is not put back."""
    thread = threading.get_ident()

    def refuse(optimizer: torch.optim.Optimizer, *_: object) -> None:
        if threading.get_ident() == thread:
            raise ValueError(f"run called step() of {type(optimizer).__name__}, expected no step in run; {_STEP}")

    handle = register_optimizer_step_pre_hook(refuse)
    try:
        yield
    finally:
        handle.remove()


def _other_leaves(loss: torch.Tensor, own: Collection[int]) -> list[torch.Tensor]:
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
def _gradients_set_aside(leaves: Sequence[torch.Tensor]) -> Iterator[None]:
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


class Passes:
    """Forward and backward passes of the batches in parcels. Every pass has a new copy of its batch.

    ``names``: of the results. ``classes``: of the batch of this rank, see
    :func:`~legacy_ddp.debug._cross_check.batch.classes_in`.
    """

    def __init__(self, runner: Runner, module: nn.Module, classes: Classes) -> None:
        self.names = runner.names
        self._runner, self._module, self._classes = runner, module, classes
        self._device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))

    def check_classes(self, data: torch.Tensor) -> None:
        """Refuse a batch with an unknown class.

        Raises:
            TypeError: names the class.
        """
        if data.numel() and (unknown := unknown_classes(data, self._classes)):
            raise TypeError(
                f"the batch of another rank holds {unknown[0]}, and the batch of this rank does not: expected batches "
                "of one structure on all ranks; use the same classes on all ranks"
            )

    def run(self, data: torch.Tensor, *, with_operations: bool) -> tuple[Digests, list[Operation]]:
        """The digests of all results of a pass; the operations, empty unless captured."""
        parcel = unpack(data, self._device, self._classes)
        if not with_operations:
            return self._runner.digests(parcel, nullcontext()), []
        capture = OperationCapture(self._module)
        digests = self._runner.digests(parcel, capture)
        return digests, capture.operations

    def run_keeping(self, data: torch.Tensor, keep: Collection[int]) -> Mapping[int, tuple[torch.Tensor, ...]]:
        """The output tensors of the operations at the positions ``keep``."""
        parcel = unpack(data, self._device, self._classes)
        capture = OperationCapture(self._module, keep=keep)
        self._runner.digests(parcel, capture)
        return capture.kept
