"""The plan: the slot, the buffer and the parameter of every gradient. Made again only when the parameters change.

Every call compares the present parameters with those of the plan, in few steps per parameter.

The plan also places the hooks that copy large gradients to their slots while backward still runs. A gradient just
computed by backward is in the caches, and after the copy its memory is free for the next gradient. A step then needs
one copy of the gradients in memory and not two, touches fewer fresh pages, and the call has less to copy.
"""

import threading
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise, repeat
from operator import attrgetter, is_
from typing import NamedTuple, cast

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter, is_lazy
from torch.utils.hooks import RemovableHandle, unserializable_hook

from legacy_ddp import _torch as internals
from legacy_ddp._memory.flat_buffer import FlatBuffer, SlotResult
from legacy_ddp._memory.layout import (
    Bucket,
    Layout,
    describe_module,
    distinct,
    plan_layout,
)
from legacy_ddp._memory.segment import SegmentPolicy
from legacy_ddp._settings import Settings
from legacy_ddp._steps.backward_counter import (
    BackwardCounter,
    PassiveHook,
    only_backward_hook,
    remove_hooks,
)
from legacy_ddp._steps.guard import FrozenGradients

_WALKS = frozenset({"named_parameters", "named_modules", "_named_members"})
# Smaller gradients are cheaper to copy all together. Other devices copy all together at any size: not measured there.
SMALLEST_BYTES = 64 * 1024


class Signature:
    """All properties of parameters on which a plan depends. Keeps no parameter alive.

    Identities show which tensors have several names. A new tensor may get the identity of a deleted tensor; the counter
    notices, because the new tensor lacks the hooks of the old tensor.
    """

    def __init__(self, names: Sequence[str], tensors: Sequence[torch.Tensor]) -> None:
        self._identities = (names, list(map(id, tensors)), list(map(type, tensors)))
        first = {id(tensor): index for index, tensor in reversed(list(enumerate(tensors)))}
        self._first = sorted(first.values())  # index of the first name of each tensor
        kinds = set(self._identities[2])
        self._has_lazy = any(issubclass(kind, (UninitializedParameter, UninitializedBuffer)) for kind in kinds)
        shaped = self._shaped(tensors)
        self._facts = _facts(shaped)
        self._guards = internals.TensorGuards(shaped)

    def matches(self, names: Sequence[str], tensors: Sequence[torch.Tensor]) -> bool:
        """Whether a plan for these parameters would be the same plan."""
        if (names, list(map(id, tensors)), list(map(type, tensors))) != self._identities:
            return False
        shaped = self._shaped(tensors) if self._has_lazy or len(self._first) < len(tensors) else tensors
        if self._guards.match(*shaped) and internals.grad_dtypes(shaped) == self._facts[0]:
            return True
        if _facts(shaped) != self._facts:
            return False
        self._guards = internals.TensorGuards(shaped)  # autocast or inference settings differ from the last call
        return True

    def _shaped(self, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Each tensor once, without lazy tensors, which have no shape yet."""
        once = tensors if len(self._first) == len(tensors) else [tensors[index] for index in self._first]
        return [tensor for tensor in once if not is_lazy(tensor)] if self._has_lazy else once


def _facts(tensors: Sequence[torch.Tensor]) -> tuple[list[torch.dtype | None], Sequence[tuple[object, ...]]]:
    facts = [(each.requires_grad, each.dtype, each.device, each.shape, each.stride()) for each in tensors]
    return internals.grad_dtypes(tensors), facts


class Columns(NamedTuple):
    """All names of every tensor, and the tensor of each name."""

    names: Sequence[str]
    tensors: Sequence[torch.Tensor]


def columns(named: Iterable[tuple[str, torch.Tensor]]) -> Columns:
    """The columns of named tensors. A lasting tuple per tensor would start Python's garbage collector often."""
    names: list[str] = []
    tensors: list[torch.Tensor] = []
    for name, tensor in named:
        names.append(name)
        tensors.append(tensor)
    return Columns(names, tensors)


def parameter_columns(module: nn.Module) -> Columns:
    """The same as ``module.named_parameters(remove_duplicate=False)``."""
    return ParameterWalk().columns(module)


class ParameterWalk:
    """Walks over the parameters of a module. Names are made again only if they changed since the walk before.

    Keeps nothing but names alive. ``walked``: an object that the walk replaces if a name of a parameter, buffer or
    module changes, None if it cannot tell; and the names of the parameters.
    """

    def __init__(self) -> None:
        self.walked: tuple[list[object] | None, list[str]] = None, []

    def columns(self, module: nn.Module) -> Columns:
        """The same as ``module.named_parameters(remove_duplicate=False)``, in a tenth of the time.

        Modules with a walk of their own are asked for it.
        """
        tree: list[object] = []  # for every module its own names, and the places without a module or a buffer
        tensors: list[torch.Tensor | None] = []
        stack: list[nn.Module | None] = [module]
        while stack:
            current = stack.pop()
            if current is None:
                tree.append(None)
                continue
            own, buffers, children = current._parameters, current._buffers, current._modules
            is_plain = isinstance(own, dict) and isinstance(children, dict)
            is_plain = is_plain and (not buffers or isinstance(buffers, dict))
            is_usual = is_plain and current.__dict__.keys().isdisjoint(_WALKS)
            if not (is_usual and _has_usual_walk(type(current))):  # type: ignore[arg-type]  # a class has a hash
                self.walked = None, self.walked[1]
                return columns(module.named_parameters(remove_duplicate=False))
            tree.append((*own, None, *children))
            if buffers:
                tree.append([name for name, buffer in buffers.items() if buffer is not None])
            tensors += own.values()
            stack += reversed(children.values())
        if tree != self.walked[0]:
            self.walked = tree, list(_names_in(module, ""))
        all_names = self.walked[1]
        if not any(map(is_, tensors, repeat(None))):
            return Columns(all_names, cast(Sequence[torch.Tensor], tensors))
        named = [(name, tensor) for name, tensor in zip(all_names, tensors, strict=True) if tensor is not None]
        return columns(named)


def _names_in(module: nn.Module, prefix: str) -> Iterator[str]:
    """The names of all parameters, also of places without a parameter."""
    for name in module._parameters:
        yield prefix + name
    for name, child in module._modules.items():
        if child is not None:
            yield from _names_in(child, f"{prefix}{name}.")


@lru_cache(maxsize=256)
def _has_usual_walk(kind: type[nn.Module]) -> bool:
    return all(getattr(kind, walk) is getattr(nn.Module, walk) for walk in _WALKS)


class BackwardCopy:
    """The hooks on the parameters of a plan. Keeps no parameter alive."""

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []
        self._thread = _BackwardThread()
        weakref.finalize(self, remove_hooks, self._handles)

    def attach(self, parameters_of: Iterable[tuple[FlatBuffer, Sequence[torch.Tensor]]]) -> None:
        """Move the gradients of these parameters to their buffers from now on; replaces all earlier hooks."""
        remove_hooks(self._handles)
        for buffer, parameters in parameters_of:
            for index, parameter in enumerate(parameters):
                if buffer.as_views and buffer.bucket.device.type == "cpu" and parameter.nbytes >= SMALLEST_BYTES:
                    self._handles.append(parameter.register_hook(self._thread.before_accumulation))  # type: ignore[no-untyped-call]
                    hook = _MoveHook(buffer, index, self._thread)
                    internals.add_accumulate_hook(parameter, hook, self._handles)


class _BackwardThread:
    """The thread of all backward passes over the parameters of a plan, as long as there is a single thread.

    torch adds to a ``.grad`` under a lock, but runs post-accumulate hooks outside of the lock. If a hook replaces
    ``.grad`` while a second thread adds to the old gradient, the sum is lost and the heap is corrupted. Therefore a
    second thread ends the moves for good, before its first addition: tensor hooks run before torch adds, and wait for a
    move in progress.
    """

    def __init__(self) -> None:
        self.is_single = True
        self.moving = threading.Lock()
        self._ident: int | None = None

    @internals.skip_tracing  # traced, the hook would return at once and notice no thread
    @unserializable_hook  # type: ignore[untyped-decorator]  # torch.save() warns of the hooks of a tensor otherwise
    def before_accumulation(self, _: torch.Tensor) -> None:
        """A tensor hook: the calling thread is about to add to a gradient."""
        if torch.compiler.is_compiling() or self._ident == threading.get_ident():
            return
        with self.moving:
            self.is_single = self.is_single and self._ident is None
            self._ident = threading.get_ident()


class _MoveHook(PassiveHook):
    def __init__(self, buffer: FlatBuffer, index: int, thread: _BackwardThread) -> None:
        self.buffer = buffer
        self.index = index
        self.thread = thread

    def __call__(self, parameter: torch.Tensor) -> None:
        # Compiled autograd traces hooks. Several wrappers on one parameter have several slots for the gradient: counter
        # hooks that run after the move would not notice that the gradient is new.
        if torch.compiler.is_compiling() or (counting := only_backward_hook(parameter)) is None:
            return
        with self.thread.moving:
            if self.thread.is_single and (moved := self.buffer.move_to_slot(self.index, parameter)) is not None:
                counting.left_version, counting.grad_identity = moved._version, internals.identity(moved)


@dataclass(slots=True)  # a frozen dataclass takes three times as long to make, in every call
class Plan:
    """The input of a call: the layout's slots, the parameter of each slot, and the buffers with the slots.

    Nothing changes it. A sequence with an item per slot is always flat, over all buckets. ``slot_ranges``: each buffer,
    with the range of its slots among all slots.
    """

    layout: Layout
    parameters: Sequence[torch.Tensor]
    buffers: Sequence[FlatBuffer]
    slot_ranges: Sequence[tuple[FlatBuffer, slice]]
    may_need_wire: bool

    @property
    def grads(self) -> list[torch.Tensor | None]:
        return list(map(attrgetter("grad"), self.parameters))

    def bucket_of(self, index: int) -> Bucket:
        return next(buffer.bucket for buffer, slots in self.slot_ranges if slots.start <= index < slots.stop)

    def collect(self, grads: Sequence[torch.Tensor | None], *, are_used: bool = True) -> None:
        """Copy the dense gradients among ``grads``, one per slot, to their slots. No ``.grad`` sees the writes.

        With ``are_used=False`` gradients are neither checked nor copied.
        """
        for buffer, slots in self.slot_ranges:  # all of them, before anything is copied
            buffer.look_at(grads[slots], are_used=are_used)
        for buffer, slots in self.slot_ranges:
            buffer.pack(grads[slots], copy=are_used)

    def alias(self, kinds: Sequence[int], sparse: Mapping[int, torch.Tensor], given: Collection[int] | None) -> None:
        """Give every parameter its reduced gradient; ``sparse`` has the sparse gradients, by slot.

        ``given``: slots with gradients of the script, as :meth:`BackwardCounter.given_gradients`.
        """
        for index, grad in sparse.items():
            self.parameters[index].grad = grad
        for buffer, slots in self.slot_ranges:
            own = None if given is None else [index - slots.start for index in given]
            buffer.alias(self.parameters[slots], kinds[slots], own)

    def discard_gradients(self) -> None:
        """Clear every ``.grad``, and drop the buffers' memory: a broken-off collective may still write there."""
        for parameter in self.parameters:
            parameter.grad = None
        for buffer in self.buffers:
            buffer.release_memory()


class _Known(NamedTuple):
    """A plan without its parameters. Replaced as a whole, so that an exception leaves no half of a change.

    ``order``: for each slot, the position of its parameter among the named parameters. ``may_need_wire``: of any
    buffer.
    """

    signature: Signature
    layout: Layout
    order: Sequence[int]
    buffers: Sequence[FlatBuffer]
    slot_ranges: Sequence[tuple[FlatBuffer, slice]]
    may_need_wire: bool


class Planner:
    """Keeps the plan of a set of parameters from call to call. Keeps no parameter alive.

    ``module``: of the parameters, as the inventory describes it; nothing for parameters without a module.
    """

    def __init__(self, settings: Settings, module: nn.Module | None = None) -> None:
        self.settings = settings
        self.module = {} if module is None else describe_module(module)
        self.counter = BackwardCounter(guarded=settings.checks.guards_steps)
        self._frozen = FrozenGradients(self.counter.policy)
        self._backward_copy = BackwardCopy()
        self.layout: Layout | None = None  # of the last plan
        self.walk = ParameterWalk()
        self.segments = SegmentPolicy()
        self._known: _Known | None = None  # None: the next call makes a new plan
        self.first_parameters: dict[str, object] = {}  # identities of the parameters of the first plan, by name

    def change_settings(self, settings: Settings) -> None:
        """Use these settings from the next plan on; the next call makes a new plan."""
        self._known = None
        self.settings = settings

    @contextmanager
    def released_on_failure(self) -> Iterator[None]:
        """Remove all hooks from the parameters if the block fails.

        The wrapper under construction is then of no use, but stays alive as long as the user keeps the error.
        """
        try:
            yield
        except BaseException:
            self._known = None
            self.counter.attach((), (), ())
            self._frozen.attach(())
            self._backward_copy.attach(())
            raise

    def plan(self, columns: Columns) -> Plan:
        """The plan for all names of every parameter: the last plan, if nothing changed since."""
        names, tensors = columns
        known = self._known
        if known is not None and known.signature.matches(names, tensors):
            parameters = list(map(tensors.__getitem__, known.order))
            if self.counter.is_attached_to(parameters):
                return Plan(known.layout, parameters, known.buffers, known.slot_ranges, known.may_need_wire)
        return self._replan(names, tensors)

    def _replan(self, names: Sequence[str], tensors: Sequence[torch.Tensor]) -> Plan:
        self._known = None  # from here on the hooks may be of the new plan
        items = distinct(zip(names, tensors, strict=True), self.settings.ignore)
        layout = plan_layout(items, self.settings, self.module)
        position = {name: index for index, name in enumerate(names)}
        order = [position[slot.name] for slot in layout.slots]
        buffers = [FlatBuffer(bucket, self.settings, self.segments) for bucket in layout.buckets]
        may_need_wire = any(buffer.may_need_wire for buffer in buffers)
        known = _Known(Signature(names, tensors), layout, order, buffers, _slot_ranges(buffers), may_need_wire)
        parameters = list(map(tensors.__getitem__, order))
        plan = Plan(layout, parameters, buffers, known.slot_ranges, may_need_wire)
        last_results = [SlotResult(buffer, index) for buffer in buffers for index in range(len(buffer.bucket.slots))]
        self._frozen.attach([(item.name, item.tensor) for item in items if _may_thaw(item.tensor)])
        # Before the new hooks that count: after a move they would not notice that the gradient is new.
        self._backward_copy.attach(())
        self.counter.attach([slot.name for slot in layout.slots], plan.parameters, last_results)
        self._backward_copy.attach((buffer, plan.parameters[slots]) for buffer, slots in plan.slot_ranges)
        if self.layout is None:
            names_of_slots = [slot.name for slot in layout.slots]
            self.first_parameters = dict(zip(names_of_slots, map(internals.identity, plan.parameters), strict=True))
        self.layout = layout
        self._known = known
        return plan


def _may_thaw(tensor: torch.Tensor) -> bool:
    """Whether a frozen parameter may get a gradient later."""
    is_differentiable = tensor.is_floating_point() or tensor.is_complex()
    return is_differentiable and not (tensor.requires_grad or tensor.is_inference() or is_lazy(tensor))


def _slot_ranges(buffers: Sequence[FlatBuffer]) -> list[tuple[FlatBuffer, slice]]:
    bounds = accumulate((len(buffer.bucket.slots) for buffer in buffers), initial=0)
    return [(buffer, slice(*bound)) for buffer, bound in zip(buffers, pairwise(bounds), strict=True)]
