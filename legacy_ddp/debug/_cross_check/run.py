"""Runs of batches on this rank: forward, backward, and digests of all results. Restores the state afterwards."""

import dis
import functools
import random
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from itertools import islice
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import Node
from torch.utils.data import DataLoader

from legacy_ddp import _torch as internals
from legacy_ddp._call.state import private_forwards
from legacy_ddp._explain.compare import describe_items
from legacy_ddp._interrupts import undone_by
from legacy_ddp._memory.layout import distinct, fingerprint
from legacy_ddp._replicas.state import NONE, StateItem, as_bytes, comparable, digest_each, is_digestible
from legacy_ddp._torch import device as devices
from legacy_ddp.debug._cross_check.batch import Classes, check_classes, unpack
from legacy_ddp.debug._cross_check.verdict import Digests
from legacy_ddp.debug._operations.capture import OperationCapture
from legacy_ddp.debug._operations.operation import Operation

Run = Callable[[Any, Any], torch.Tensor]
_STEP = "let run(model, batch) return the loss, without backward(), all_reduce() and step()"
LOSS, GENERATORS, OTHERS = "the loss", "the random generators", "gradients outside of the model"
_DEPTH = 4  # of containers, and of functions in closures
_MOST = 1_000  # items of a container
# Values that are not searched for further values.
_LEAVES = (torch.Tensor, torch.Generator, Iterator, DataLoader, nn.Module, bool, int, float, str)
_STEP_FOR_ITERATOR = "take the item before, and pass it in the batch"
_STEP_FOR_GENERATOR = (
    "draw from torch's default generator, which travels with the batch, or draw before and pass the result in the batch"
)


@contextmanager
def state_set_aside(
    module: nn.Module, others: Sequence[nn.Module], statistics: Mapping[str, torch.Tensor]
) -> Iterator["SavedState"]:
    """Save the state for the block. In the block every ``.grad`` of the model is None, and no hook runs after backward
    adds to a gradient.

    Afterwards every ``.grad`` is the same tensor as before, with its bits. Parameters, buffers, their version counters,
    training flags and random generators are as before. State outside of torch modules, for example a counter in Python,
    is not restored. ``others``: modules beside the model, with buffers and training flags to restore. ``statistics``:
    buffers of these modules that are sent with a batch, by name.
    """
    parameters = list(module.parameters())
    saved = SavedState(module, others, statistics)
    with ExitStack() as stack:
        stack.enter_context(internals.without_accumulate_hooks(parameters))
        stack.callback(torch.clear_autocast_cache)
        stack.enter_context(undone_by(saved.restore))
        stack.enter_context(internals.preserved_versions(saved.tensors))
        yield saved


class SavedState:
    """The state of a module and of the modules beside it, and of the random generators.

    Holds a copy of all parameters and buffers of the module, and of the buffers of the other modules.
    """

    def __init__(self, module: nn.Module, others: Sequence[nn.Module], statistics: Mapping[str, torch.Tensor]) -> None:
        self.generators = generator_states(module)
        self._module, self._statistics = module, statistics
        self._is_restored = False
        self._gradients = [(parameter, parameter.grad) for parameter in module.parameters()]
        held = [*module.parameters(), *(buffer for item in (module, *others) for buffer in item.buffers())]
        self._tensors = [(item, item.detach().clone()) for item in {id(item): item for item in held}.values()]
        children = {id(child): child for item in (module, *others) for child in item.modules()}
        self._modules = [
            (child, child.training, dict(child._parameters), dict(child._buffers)) for child in children.values()
        ]

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [tensor for tensor, _ in self._tensors]

    def begin_run(self, generators: Mapping[str, Any], own: Mapping[str, torch.Tensor]) -> None:
        """Restore the saved state, but without gradients, with ``generators``, and with the tensors ``own`` by name."""
        self._restore_module()
        for parameter, _ in self._gradients:
            parameter.grad = None
        restore_generators(self._module, dict(generators))
        parameters = self._module.named_parameters(remove_duplicate=False)
        buffers = self._module.named_buffers(remove_duplicate=False)
        tensors = {**dict(parameters), **dict(buffers), **self._statistics}
        for name, value in own.items():
            tensors[name].data.copy_(value)
        torch.clear_autocast_cache()  # with a cached copy of a weight the second run would have one operation less

    def restore(self) -> None:
        """Restore everything. May be called again, also after an exception."""
        if self._is_restored:
            return
        self._restore_module()
        for parameter, grad in self._gradients:
            parameter.grad = grad
        restore_generators(self._module, self.generators)
        self._is_restored = True
        self._gradients.clear()  # an error may keep this object alive, but no gradient

    def _restore_module(self) -> None:
        for child, is_training, parameters, buffers in self._modules:
            child.training = is_training
            _put_back(child._parameters, parameters)
            _put_back(child._buffers, buffers)
        for tensor, copy in self._tensors:
            if not (is_digestible(copy) and torch.equal(as_bytes(tensor.detach()), as_bytes(copy))):
                tensor.data.copy_(copy)  # without a new version, which would count as a step elsewhere


def _put_back(present: dict[str, Any], before: Mapping[str, Any]) -> None:
    if any(present.get(name) is not tensor for name, tensor in before.items()) or len(present) != len(before):
        present.clear()
        present.update(before)


def generator_states(module: nn.Module) -> dict[str, Any]:
    """The states of the generators of this process, of types that a parcel takes."""
    version, internal, gauss = random.getstate()
    states: dict[str, Any] = {
        "cpu": torch.get_rng_state(),
        "devices": [devices.generator_state(device) for device in devices.devices_of(module.parameters())],
        "python": (version, internal, gauss),
        "modules": {name: generator.get_state() for name, generator in _held_by_modules(module)},
    }
    if numpy := sys.modules.get("numpy"):
        name, keys, *rest = numpy.random.get_state()
        states["numpy"] = (name, keys.tolist(), *map(float, rest))
    return states


def restore_generators(module: nn.Module, states: dict[str, Any]) -> None:
    """The inverse of :func:`generator_states`, also for the states of another rank."""
    torch.set_rng_state(states["cpu"])
    for device, state in zip(devices.devices_of(module.parameters()), states["devices"], strict=False):
        devices.set_generator_state(device, state)
    random.setstate(states["python"])
    for name, generator in _held_by_modules(module):
        if name in states["modules"]:
            generator.set_state(states["modules"][name])
    if (numpy := sys.modules.get("numpy")) and "numpy" in states:
        name, keys, position, has_gauss, gauss = states["numpy"]
        numpy.random.set_state((name, keys, int(position), int(has_gauss), gauss))


def _held_by_modules(module: nn.Module) -> Iterator[tuple[str, torch.Generator]]:
    for path, child in module.named_modules():
        for name, value in vars(child).items():
            if isinstance(value, torch.Generator):
                yield f"{path}.{name}", value


class Passes:
    """Forward and backward passes of the batches in parcels. Every pass has a new copy of its batch.

    ``model``: the first argument of ``run``. ``module``: the plain module behind it. ``classes``: of the batch of this
    rank, see :func:`pack`. ``names``: of the results, in the order of their digests, equal on all ranks.

    A pass raises a TypeError if ``run`` returns no loss, a ValueError if ``run`` called backward or step itself, and
    any failure of ``run`` or of backward.
    """

    def __init__(self, run: Run, model: nn.Module, module: nn.Module, saved: SavedState, classes: Classes) -> None:
        self._run, self._model, self._module, self._saved, self._classes = run, model, module, saved, classes
        self._device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
        self._parameters = [item.name for item in distinct(module.named_parameters(remove_duplicate=False))]
        self._buffers = [item.name for item in distinct(module.named_buffers(remove_duplicate=False))]
        self.names = (
            LOSS,
            *(f"gradient of {name!r}" for name in self._parameters),
            *(f"buffer {name!r}" for name in self._buffers),
            GENERATORS,
            OTHERS,
        )

    def check_classes(self, data: torch.Tensor) -> None:
        check_classes(data, self._classes)

    def run(self, data: torch.Tensor, *, with_operations: bool) -> tuple[Digests, list[Operation]]:
        """The digests of all results of a pass, and its operations; empty unless captured."""
        if not with_operations:
            return self._digests(data, nullcontext()), []
        capture = OperationCapture(self._module)
        return self._digests(data, capture), capture.operations

    def run_keeping(self, data: torch.Tensor, keep: Collection[int]) -> Mapping[int, tuple[torch.Tensor, ...]]:
        capture = OperationCapture(self._module, keep=keep)
        self._digests(data, capture)
        return capture.kept

    def _digests(self, data: torch.Tensor, around: AbstractContextManager[object]) -> Digests:
        """A 64-bit number for each of ``names``. ``around``: a context for forward and backward."""
        parcel = unpack(data, self._device, self._classes)
        self._saved.begin_run(parcel.generators, parcel.tensors)
        with torch.enable_grad(), private_forwards(), _without_steps(), around:
            loss = self._run(self._model, parcel.batch)
            self._check_loss(loss)
            others = _other_leaves(loss, {id(parameter) for parameter in self._module.parameters()})
            with _gradients_set_aside(others):
                loss.backward()  # type: ignore[no-untyped-call]
                text = _describe_gradients(others)
        self._check_gradients()
        with torch.no_grad():
            results = describe_items([StateItem("", name, value) for name, value in self._results(loss, text)])
        return tuple(fingerprint(results[name].encode()) for name in self.names)

    def _check_loss(self, loss: object) -> None:
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
    grads = [leaf.grad for leaf in leaves]
    with torch.no_grad():
        values = [NONE if grad is None else comparable(grad) for grad in grads]
        return repr(describe_items([StateItem("", str(index), value) for index, value in enumerate(values)]))


@contextmanager
def _without_steps() -> Iterator[None]:
    """In the block ``step()`` of any optimizer is an error on this thread, because its state is not restored."""
    thread = threading.get_ident()

    def refuse(optimizer: torch.optim.Optimizer, *_: object) -> None:
        if threading.get_ident() == thread:
            raise ValueError(f"run called step() of {type(optimizer).__name__}, expected no step in run; {_STEP}")

    with undone_by(functools.partial(internals.remove_step_pre_hook, refuse)):
        internals.add_step_pre_hook(refuse)
        yield


def _other_leaves(loss: torch.Tensor, own: Collection[int]) -> list[torch.Tensor]:
    """The leaves of the graph behind ``loss``, in an order that follows from the graph, without the ids ``own``.

    Leaves inside of a reentrant checkpoint are not in the graph.
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
    """In the block the leaves have no gradient at first, and none of their hooks runs after the accumulation."""
    before = [(leaf, leaf.grad) for leaf in leaves]

    def put_back() -> None:
        for leaf, grad in before:
            leaf.grad = grad

    with undone_by(put_back), internals.without_accumulate_hooks(leaves):
        for leaf in leaves:
            leaf.grad = None
        yield


def held_values(run: object, module: nn.Module) -> dict[str, Any]:
    """Tensors, numbers and texts inside of ``run``, by place. Leaves out the model's own tensors.

    Searches the first thousand items of a container, and the attributes of an object with names in the code of ``run``.
    It does not find globals of functions inside of ``run``, and attributes of objects in a closure.

    Raises:
        TypeError: ``run`` holds an iterator, a data loader or a generator.
    """
    own = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
    found: dict[str, Any] = {}
    for place, value in _walk(run, "run", _DEPTH):
        if isinstance(value, Iterator | DataLoader | torch.Generator):
            kind = type(value).__name__
            step = _STEP_FOR_GENERATOR if isinstance(value, torch.Generator) else _STEP_FOR_ITERATOR
            raise TypeError(f"{place} is a {kind}, whose state belongs to this rank only; {step}")
        items = [(place, value)]
        if isinstance(value, nn.Module):
            tensors = (*value.named_parameters(), *value.named_buffers())
            items = [(f"{place}.{key}", tensor) for key, tensor in tensors]
        for name, item in items:
            # The model is the same on all ranks already, and so is a wrapper around it.
            if not isinstance(item, torch.Tensor) or id(item) not in own:
                found[name] = item
    return found


def held_modules(run: object) -> dict[str, nn.Module]:
    return {place: value for place, value in _walk(run, "run", _DEPTH) if isinstance(value, nn.Module)}


def held_statistics(run: object, module: nn.Module) -> dict[str, torch.Tensor]:
    """The statistics of normalisation layers in modules inside of ``run``, by place; without those of the model."""
    own = {id(buffer) for buffer in module.buffers()}
    found = {}
    for place, item in held_modules(run).items():
        buffers = dict(item.named_buffers(remove_duplicate=False))
        names = internals.statistics_names(item) & buffers.keys()
        found.update({f"{place}.{name}": buffers[name] for name in sorted(names) if id(buffers[name]) not in own})
    return found


def _walk(value: object, name: str, depth: int) -> Iterator[tuple[str, Any]]:
    if isinstance(value, _LEAVES):
        yield name, value
    elif depth:
        for key, item in _parts(value, is_run=name == "run"):
            yield from _walk(item, f"{name}{key}", depth - 1)


def _parts(value: object, *, is_run: bool) -> Iterator[tuple[str, Any]]:
    """The values inside a function, a partial, a method, a callable object or a container, with their places."""
    if isinstance(value, functools.partial):
        yield "", value.func
        yield from ((f" argument {index}", item) for index, item in enumerate(value.args))
        yield from ((f" argument {key!r}", item) for key, item in value.keywords.items())
    elif isinstance(value, MethodType):
        yield "", value.__func__
        yield ".__self__", value.__self__
        if not isinstance(value.__self__, nn.Module):
            found = _attributes(value.__self__, value.__func__)
            yield from ((f".__self__.{key}", item) for key, item in found)
    elif isinstance(value, FunctionType):
        yield from _function_parts(value, with_globals=is_run)
    elif isinstance(value, Mapping):
        yield from ((f"[{key!r}]", item) for key, item in islice(value.items(), _MOST))
    elif isinstance(value, list | tuple | set | frozenset):
        yield from ((f"[{index}]", item) for index, item in enumerate(islice(value, _MOST)))
    elif is_run and callable(value):
        yield from ((f".{key}", item) for key, item in _attributes(value, type(value).__call__))


def _function_parts(function: FunctionType, *, with_globals: bool) -> Iterator[tuple[str, Any]]:
    used = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=False))
    for key, cell in used.items():
        with suppress(ValueError):  # a variable without a value
            yield f" variable {key!r}", cell.cell_contents
    for key in _global_names(function.__code__) if with_globals else ():
        item = function.__globals__.get(key)
        if not isinstance(item, ModuleType | type):
            yield f" variable {key!r}", item
    for index, item in enumerate(function.__defaults__ or ()):
        yield f" default {index}", item
    for key, item in (function.__kwdefaults__ or {}).items():
        yield f" default {key!r}", item


def _global_names(code: CodeType) -> list[str]:
    """The names of globals that a function and its inner functions read."""
    own = [instruction.argval for instruction in dis.get_instructions(code) if instruction.opname == "LOAD_GLOBAL"]
    inner = [name for constant in code.co_consts if isinstance(constant, CodeType) for name in _global_names(constant)]
    return list(dict.fromkeys([*own, *inner]))


def _attributes(value: object, method: object) -> Iterator[tuple[str, Any]]:
    """The attributes of ``value`` with a name in ``method``, or in the methods of ``value`` that ``method`` names."""
    names = _attribute_names(type(value), method, set())
    for key, item in getattr(value, "__dict__", {}).items():
        if key in names and not isinstance(item, FunctionType | MethodType):
            yield key, item


def _attribute_names(kind: type, method: object, found: set[str]) -> set[str]:
    """Add to ``found`` the names in ``method``, and those in the methods and properties of ``kind`` that it names."""
    method = method.fget if isinstance(method, property) else method
    if isinstance(method, FunctionType):
        new = _names_in(method.__code__) - found
        found |= new
        for name in new:
            _attribute_names(kind, getattr(kind, name, None), found)
    return found


def _names_in(code: CodeType) -> set[str]:
    inner = [_names_in(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    return set(code.co_names).union(*inner)
