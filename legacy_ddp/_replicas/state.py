"""Items that replicas should share, as this rank holds them: parameters, buffers, gradients, optimizers.

Also which parameters the optimizers hold, and which buffers replicas share: all but statistics of each rank's own
data.

Memory of the CPU is read by zlib as a CRC-32, in one pass. A change within 32 neighbouring bits always shows; another
change goes unseen with probability 2**-32. On a device every 64-bit word is mixed with its place, and the words are
added: few operations, whatever the number of tensors, and the host does not wait. Equal tensors have equal digests only
on devices of the same kind; ranks with tensors on other devices are refused before.

Traces have digests that do not depend on the device, see ``debug/_operations/digest``.
"""

import ctypes
import json
import random
import sys
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import chain
from typing import Any, Literal, TypeAlias, TypeVar, get_args

import torch
from torch import nn

from legacy_ddp import _torch as internals
from legacy_ddp._memory.layout import Named, check_dense, distinct, fingerprint
from legacy_ddp._ranks.call import Call
from legacy_ddp._settings import Settings
from legacy_ddp._text import group_ranks, list_some
from legacy_ddp._torch import device as devices
from legacy_ddp._torch.device import read_vectors

T = TypeVar("T")
# Vectors that may be on devices, and a function from the numbers in them to a result.
Begun: TypeAlias = tuple[list[torch.Tensor], Callable[[Sequence[Sequence[int]]], T]]

MULTIPLIER = 6364136223846793005  # of Knuth's MMIX generator (The Art of Computer Programming 2, 3.3.4)
GAMMA = 0x9E3779B97F4A7C15 - 2**64  # of splitmix64
# Smaller tensors are joined before they are read, MAX_JOINED at a time: a call for each takes longer than the copy.
SMALL_BYTES = 2**12
MAX_JOINED = 2**10
SUM_BYTES = 2**25  # begin_sums() joins as many bytes in a copy, and needs the same memory once more


def digest_all(tensors: Iterable[torch.Tensor | None]) -> int:
    """One signed 64-bit number for all tensors in order: their bits, their sizes, and the positions of None."""
    vectors, finish = begin_digest(tensors)
    return finish(read_vectors(vectors))


def digest_each(tensors: Iterable[torch.Tensor]) -> list[int]:
    """The digest of each tensor. The host waits once."""
    begun = [begin_digest([tensor]) for tensor in tensors]
    read = iter(read_vectors([vector for vectors, _ in begun for vector in vectors]))
    return [finish([next(read) for _ in vectors]) for vectors, finish in begun]


@torch.no_grad()
def begin_digest(tensors: Iterable[torch.Tensor | None]) -> Begun[int]:
    """Vectors on devices, and a function from the numbers in the vectors to the result of :func:`digest_all`.

    A caller can read the vectors together with other numbers. Tensors on the CPU add no vector unless they are sparse.
    """
    sizes: list[int] = []
    groups: dict[tuple[torch.device, torch.dtype], tuple[int, list[torch.Tensor], list[torch.Tensor]]] = {}
    for tensor in tensors:
        if tensor is None:
            sizes.append(-1)
            continue
        index, small, large = groups.setdefault((tensor.device, tensor.dtype), (len(groups), [], []))
        sizes += index, tensor.numel()
        # Not by contiguity, because ranks may differ in it.
        can_join = tensor.layout is torch.strided and not tensor.is_quantized and not internals.has_own_dispatch(tensor)
        (small if can_join and tensor.nbytes <= SMALL_BYTES else large).append(tensor)
    checksum, pieces = 0, []
    for _, small, large in groups.values():
        joined = (internals.flattened(small[start : start + MAX_JOINED]) for start in range(0, len(small), MAX_JOINED))
        for tensor in chain(large, joined):
            if has_memory(tensor):
                checksum = add_memory(checksum, tensor, 0, tensor.nbytes)
            else:
                pieces.append(as_bytes(tensor))
    return begin_sums(pieces), lambda numbers: fingerprint(repr((sizes, checksum, numbers)).encode())


@torch.no_grad()
def begin_sums(pieces: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """A number for each 32 MiB of all ``pieces``: vectors of int64, one for each device. The host does not wait.

    ``pieces``: of one dimension of uint8. They are joined: eleven operations for each 32 MiB. All operations are on
    integers, so the numbers do not depend on the order in which a device adds.
    """
    sums: dict[torch.device, list[torch.Tensor]] = {}
    for joined in _fill(pieces):
        device = joined[0].device
        padding = torch.zeros(8, dtype=torch.uint8, device=device)
        zero = padding.view(torch.int64)
        words = torch.cat([*joined, padding[: -sum(piece.numel() for piece in joined) % 8]]).view(torch.int64)
        state = torch.arange(words.numel(), device=device).mul_(GAMMA)
        advance(state, [words, zero, zero])
        sums.setdefault(device, []).append(state.sum().view(1))
    return [found[0] if len(found) == 1 else torch.cat(found) for found in sums.values()]


def advance(state: torch.Tensor, rows: Iterable[torch.Tensor]) -> None:
    """Mix each row of words into the states: ``x = word + MULTIPLIER * state``, then ``state = x ^ (x >> 32)``.

    Each step is invertible, so a single changed word always changes the state. Without the shift, two flips of bit 63
    would cancel.
    """
    low, high = state.view(torch.int32).view(-1, 2).unbind(1)
    for row in rows:
        torch.add(row, state, alpha=MULTIPLIER, out=state)
        low.bitwise_xor_(high)


def is_digestible(tensor: torch.Tensor) -> bool:
    """Whether the tensor is strided or sparse COO, and neither packed, nor meta, nor around other tensors."""
    is_plain = tensor.layout in (torch.strided, torch.sparse_coo) and not tensor.is_meta
    return is_plain and not internals.is_packed(tensor) and not internals.wraps_others(tensor)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bits in row-major order, one dimension of uint8: a view of a contiguous tensor, otherwise a copy."""
    if not is_digestible(tensor):
        kind = tensor.dtype if tensor.is_quantized else "meta" if tensor.is_meta else tensor.layout
        raise TypeError(f"tensor cannot be digested: got a {kind} one, expected a strided or sparse COO tensor")
    if tensor.layout is torch.sparse_coo:
        tensor = tensor.coalesce()
        return torch.cat([as_bytes(tensor.indices()), as_bytes(tensor.values())])
    if tensor.is_quantized:
        quantizer = torch.tensor(list(internals.quantizer_of(tensor).encode()), dtype=torch.uint8, device=tensor.device)
        return torch.cat([as_bytes(internals.integers_of(tensor)), quantizer])
    tensor = tensor.resolve_conj().resolve_neg().contiguous()
    # Not view(-1), which keeps any stride of a tensor with a single element.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether the elements lie in memory of the CPU: not of a sparse or fake tensor, for example."""
    is_plain = tensor.device.type == "cpu" and tensor.layout is torch.strided and not internals.is_packed(tensor)
    return is_plain and not internals.has_own_dispatch(tensor)


def add_memory(checksum: int, tensor: torch.Tensor, start: int, stop: int) -> int:
    """``checksum`` (at first 0) continued with the bytes ``start`` to ``stop`` of the tensor in row-major order.

    Also with scale and zero point of a quantized tensor. TypeError for a tensor without memory: of a compiler, or
    around other tensors.
    """
    if not 0 <= start <= stop <= tensor.nbytes:
        raise ValueError(f"bytes are not of the tensor: got {start} to {stop}, expected 0 to {tensor.nbytes} at most")
    if tensor.is_quantized:
        checksum = zlib.crc32(internals.quantizer_of(tensor).encode(), checksum)
        tensor = internals.integers_of(tensor)
    if start == stop:  # an empty tensor has no memory
        return checksum
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg().contiguous()
    address = 0 if internals.has_own_dispatch(tensor) else tensor.data_ptr()
    if not address:
        raise TypeError(f"the tensor has no memory: got {type(tensor).__name__}, expected a tensor with a storage")
    # `tensor` keeps the memory alive until the checksum is there.
    return zlib.crc32((ctypes.c_char * (stop - start)).from_address(address + start), checksum)


def _fill(pieces: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Lists of pieces on one device, each of at most ``SUM_BYTES``. A larger piece is cut."""
    waiting: dict[torch.device, list[torch.Tensor]] = {}
    sizes: dict[torch.device, int] = {}
    for piece in chain.from_iterable(torch.split(piece, SUM_BYTES) for piece in pieces):
        device = piece.device
        if sizes.get(device, 0) + piece.numel() > SUM_BYTES:
            yield waiting.pop(device)
            sizes[device] = 0
        sizes[device] = sizes.get(device, 0) + piece.numel()
        waiting.setdefault(device, []).append(piece)
    yield from waiting.values()


Fact = tuple[str, torch.Tensor | str]
NOT_COMPARED = ", not compared"  # the end of the text of a tensor whose bits cannot be read
NONE = "none"  # in place of a gradient, or of the group of a parameter that no optimizer holds
# Optimizer entries that are neither state nor hyperparameters.
MEMBERSHIP = "parameter group"
WEIGHTS = "weights"
EARLIER_STATE = "state before the last step"
Kind = Literal["parameters", "buffers", "gradients", "optimizer"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True)
class StateItem:
    """A tensor, or a setting as text."""

    kind: str  # in KINDS
    name: str  # for the user
    value: torch.Tensor | str


def parameters(module: nn.Module, ignore: Iterable[str]) -> list[StateItem]:
    """Every parameter except the names in ``ignore``, including frozen parameters, sorted by name."""
    found = distinct(module.named_parameters(remove_duplicate=False), frozenset(ignore))
    for item in found:
        check_dense(item, kind="parameter")
    return [StateItem("parameters", f"parameter {item.name!r}", comparable(item.tensor)) for item in found]


def buffers(module: nn.Module, ignore: Iterable[str], local: Sequence[str]) -> list[StateItem]:
    """Every buffer except the names in ``ignore`` and the names that a name or pattern in ``local`` matches."""
    return buffer_items(named_buffers(module, ignore, local))


def named_buffers(module: nn.Module, ignore: Iterable[str], local: Sequence[str]) -> list[Named]:
    """The buffers of :func:`buffers` with all their names, sorted."""
    found = distinct(module.named_buffers(remove_duplicate=False), frozenset(ignore))
    return [item for item in found if not any(fnmatchcase(name, pattern) for name in item.names for pattern in local)]


def buffer_items(named: Iterable[Named]) -> list[StateItem]:
    return [StateItem("buffers", f"buffer {item.name!r}", comparable(item.tensor)) for item in named]


def gradients(named: Mapping[str, torch.Tensor | None]) -> list[StateItem]:
    """The given gradients by parameter name, sorted; the value is ``NONE`` for a parameter without a gradient."""
    return [
        StateItem("gradients", f"gradient of {name!r}", NONE if grad is None else comparable(grad))
        for name, grad in sorted(named.items())
    ]


def gradients_in(module: nn.Module, ignore: Iterable[str]) -> list[StateItem]:
    """The gradient of every trainable parameter."""
    found = distinct(module.named_parameters(remove_duplicate=False), frozenset(ignore))
    return gradients({item.name: item.tensor.grad for item in found if item.tensor.requires_grad})


def optimizer_items(
    optimizers: Sequence[torch.optim.Optimizer],
    module: nn.Module,
    settings_of: Callable[[torch.optim.Optimizer], Iterable[Fact]] | None = None,
) -> list[StateItem]:
    """:func:`optimizer_settings` and :func:`optimizer_states`, sorted by name."""
    found = [*optimizer_settings(optimizers, settings_of), *optimizer_states(optimizers, module)]
    return sorted(found, key=lambda item: item.name)


def optimizer_settings(
    optimizers: Sequence[torch.optim.Optimizer],
    settings_of: Callable[[torch.optim.Optimizer], Iterable[Fact]] | None = None,
) -> list[StateItem]:
    """Hyperparameters of every group, sorted by name. ``settings_of``: default: the present hyperparameters."""
    return _items_of(optimizers, settings_of or (lambda optimizer: settings_in(optimizer.param_groups)))


def optimizer_states(optimizers: Sequence[torch.optim.Optimizer], module: nn.Module) -> list[StateItem]:
    """The state of every parameter, and the parameters in optimizers that the module does not have; sorted by name."""
    names = {id(item.tensor): item.name for item in distinct(module.named_parameters(remove_duplicate=False))}
    return _items_of(optimizers, lambda optimizer: _states(optimizer, names))


def settings_in(parameter_groups: Iterable[Mapping[str, Any]]) -> Iterator[Fact]:
    for index, group in enumerate(parameter_groups):
        for key in sorted(set(group) - {"params", "param_names"}):  # these two depend on the order of registration
            yield from flatten(f"{key} of parameter group {index}", group[key])


def check_local_buffers(module: nn.Module, local: Sequence[str]) -> None:
    """Refuse a name that is not a buffer of ``module``."""
    names = [name for name, _ in module.named_buffers(remove_duplicate=False)]
    # A pattern may match no buffer, so that models can share patterns.
    if unknown := [name for name in local if name not in names and not set(name) & set("*?[")]:
        expected = f"expected some of {names}" if names else "and the module has no buffers; leave local_buffers out"
        raise ValueError(f"local_buffers names what the module does not have: got {unknown}, {expected}")


def digest_items(items: Sequence[StateItem]) -> int:
    """A 64-bit digest of all items, as cheap as possible: equal on two ranks that hold equal items."""
    bits = digest_all([item.value for item in items if isinstance(item.value, torch.Tensor)])
    return fingerprint(json.dumps([bits, [(item.name, describe_value(item.value)) for item in items]]).encode())


def digest_generators(module: nn.Module) -> int:
    """A digest of the random generators of torch, Python and NumPy (the global one) in this process."""
    states: list[object] = [digest_all(torch_generators(module)), random.getstate()]
    if numpy := sys.modules.get("numpy"):
        _, key, *rest = numpy.random.get_state()
        states.append((key.tobytes(), rest))
    return fingerprint(repr(states).encode())


def torch_generators(module: nn.Module) -> list[torch.Tensor]:
    """The states of torch's generators for the CPU and for the devices of ``module``."""
    return [torch.get_rng_state(), *map(devices.generator_state, devices.devices_of(module.parameters()))]


def _items_of(
    optimizers: Sequence[torch.optim.Optimizer], facts_of: Callable[[torch.optim.Optimizer], Iterable[Fact]]
) -> list[StateItem]:
    found = []
    for index, optimizer in enumerate(optimizers):
        prefix = f"optimizer {index}: " if len(optimizers) > 1 else ""
        found += [StateItem("optimizer", prefix + name, value) for name, value in facts_of(optimizer)]
    return sorted(found, key=lambda item: item.name)


def _states(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> Iterator[Fact]:
    for index, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            name = repr(names.get(id(parameter), f"parameter {position} of group {index}"))
            if id(parameter) not in names:  # a copy in another precision, for instance
                yield f"{WEIGHTS} of {name}", parameter
            state = optimizer.state.get(parameter, {})
            for key in sorted(state, key=str) if isinstance(state, Mapping) else ():
                yield from flatten(f"{key} of {name}", state[key])


def flatten(name: str, value: object) -> Iterator[Fact]:
    """The comparable values inside ``value``. Functions and other objects are left out."""
    if isinstance(value, torch.Tensor):
        yield name, comparable(value)
    elif isinstance(value, Mapping):
        for key in sorted(value, key=str):
            yield from flatten(f"{key} in {name}", value[key])
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from flatten(f"{index} in {name}", item)
    elif value is None or isinstance(value, bool | int | float | str):
        yield name, repr(value)


def comparable(tensor: torch.Tensor) -> torch.Tensor | str:
    """The tensor, or its type as text if its bits cannot be read; a meta tensor has no bits."""
    if is_digestible(tensor):
        return tensor
    return f"{tensor.dtype} {tuple(tensor.shape)} {tensor.layout}{' on meta' if tensor.is_meta else NOT_COMPARED}"


def unread(items: Iterable[StateItem]) -> list[str]:
    return [item.name for item in items if isinstance(item.value, str) and item.value.endswith(NOT_COMPARED)]


def describe_value(value: torch.Tensor | str) -> str:
    """The text of a setting, or the type of a tensor, with its device unless that is the CPU."""
    if isinstance(value, str):
        return value
    return format_type(value, "" if value.device.type == "cpu" else f" on {value.device.type}")


def format_type(tensor: torch.Tensor, device: str = "") -> str:
    layout = " sparse" if tensor.is_sparse else ""
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}{device}{layout}"


def parameter_groups(
    optimizers: Sequence[torch.optim.Optimizer], module: nn.Module, ignore: Collection[str]
) -> list[StateItem]:
    """The parameter group of each parameter, ``NONE`` for a parameter in no optimizer. Empty without optimizers."""
    groups: dict[int, list[str]] = {}
    for number, optimizer in enumerate(optimizers):
        of = f" of optimizer {number}" if len(optimizers) > 1 else ""
        for index, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                groups.setdefault(id(parameter), []).append(f"{index}{of}")
    named = distinct(module.named_parameters(remove_duplicate=False), ignore) if optimizers else []
    return [
        StateItem("optimizer", f"{MEMBERSHIP} of {item.name!r}", ", ".join(groups.get(id(item.tensor), [NONE])))
        for item in named
    ]


def describe_membership(optimizers: Iterable[torch.optim.Optimizer], named: Sequence[Named]) -> tuple[str, bool]:
    """What ``optimizers`` hold of ``named`` and of other tensors, as text; and whether a parameter is stale.

    A stale parameter was replaced in the model after the optimizer was made: no optimizer holds the new parameter, but
    an optimizer holds a tensor of the same type that is not in the model.
    """
    held = {
        id(parameter): parameter
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    known = {id(item.tensor) for item in named}
    foreign = [format_type(tensor) for key, tensor in held.items() if key not in known]
    missing = [item for item in named if item.tensor.requires_grad and id(item.tensor) not in held]
    parts = [f"{len(known & held.keys())} of the model's {len(named)} parameters"]
    if missing:
        parts.append(f"without {list_some([repr(item.name) for item in missing])}")
    if foreign:
        what = "a tensor that is" if len(foreign) == 1 else f"{len(foreign)} tensors that are"
        parts.append(f"with {what} not in the model: {list_some(foreign)}")
    return ", ".join(parts), any(format_type(item.tensor) in foreign for item in missing)


class SharedBuffers:
    """Chooses the buffers to compare.

    Left out are ``ignore``, ``Checks(local_buffers=)``, buffers that are not saved, and statistics of each rank's own
    data. Running statistics of a frozen normalisation layer are compared, because no rank updates them.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._marks: dict[str, int] | None = None  # digests by name, see mark()
        self.statistics: set[str] = set()  # names, found by learn()
        self.has_run = False  # a forward or a backward of this rank has begun since the mark

    def named(self, module: nn.Module) -> list[Named]:
        return [item for item in self.saved(module) if item.name not in self.statistics]

    def saved(self, module: nn.Module) -> list[Named]:
        """The buffers to compare, and those that :meth:`learn` has found to be statistics."""
        left_out = {*self._settings.ignore, *internals.unsaved_buffer_names(module)}
        return named_buffers(module, left_out, self._settings.checks.local_buffers)

    def items(self, module: nn.Module) -> list[StateItem]:
        return buffer_items(self.named(module))

    def mark(self, module: nn.Module) -> None:
        """Remember the present bits: the buffers are equal on all ranks now, or are meant to be."""
        self._marks = _digest(self.named(module))
        self.has_run = False

    def begin_forward(self, module: nn.Module) -> None:
        # The first forward after a mark marks again: a checkpoint may have been loaded between.
        if not self.has_run and self._marks is not None:
            with torch.no_grad():
                self._marks = _digest(self.named(module))
        self.has_run = True

    def learn(self, call: Call, module: nn.Module, left_out: Collection[int]) -> bool:
        """Collective: find the buffers that are statistics of each rank's own data.

        Such a buffer differs now, and its bits have changed since the mark on every rank. For a buffer of a
        normalisation layer, a change on one rank where the layer is in training is enough. A buffer that the script has
        written on some ranks alone does not count: it still has the bits of the mark on the other ranks. A buffer that
        a rank does not have, or left out before, is left out, too; ``_call/replicas`` warns of it.
        Returns whether there are new statistics; equal on all ranks that compare the same buffers.
        """
        # A copy of a wrapper has no marks. Every buffer then counts as changed: the earlier training may have done it.
        present, marks = _digest(self.named(module)), self._marks or {}
        updated = internals.updated_statistics_names(module)
        changed = {name for name, bits in present.items() if marks.get(name) != bits}
        # Whether the buffer may have changed (a rank without data until now cannot tell), whether it has changed in a
        # layer in training, and its bits.
        own = {
            name: [not self.has_run or name in changed, name in changed & updated, bits]
            for name, bits in present.items()
        }
        rows: list[dict[str, Any]] = call.gather_objects(own)
        compared = [row for rank, row in enumerate(rows) if rank not in left_out]
        found = set()
        for name in set[str]().union(*compared):  # not of this rank alone: every rank finds the same names
            if not all(name in row for row in compared):
                found.add(name)
                continue
            may_have_changed, is_updated, bits = zip(*(row[name] for row in compared), strict=True)
            if len(set(bits)) > 1 and (all(may_have_changed) or any(is_updated)):
                found.add(name)
        self.statistics |= found
        return bool(found)


def equal_groups(digests: Mapping[int, int]) -> tuple[tuple[int, ...], ...]:
    """The groups of ranks with equal digests, by their lowest ranks. ``digests``: by rank."""
    return tuple(sorted(ranks for _, ranks in group_ranks(list(digests.values()), list(digests))))


def gather_digests(call: Call, digest: int, left_out: Collection[int]) -> dict[int, int]:
    """Collective: the digest of each rank, without ``left_out``."""
    digests = call.gather(torch.tensor([digest], device="cpu")).flatten().tolist()
    return {rank: value for rank, value in enumerate(digests) if rank not in left_out}


def _digest(named: Collection[Named]) -> dict[str, int]:
    tensors = {item.name: item.tensor for item in named if is_digestible(item.tensor)}
    return dict(zip(tensors, digest_each(tensors.values()), strict=True))
