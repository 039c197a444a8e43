"""Broadcast: every rank holds the bits of the source, and after an error its own bits."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from legacy_ddp import Checks, LayoutError, LegacyDDPError, LegacyDistributedDataParallel
from tests.helpers.cases import DTYPES, bits_of
from tests.helpers.ranks import run_ranks
from tests.helpers.shared_jobs import on_ranks, run_cases
from tests.helpers.small_models import add_gradients, gradient_values, wrap
from tests.helpers.small_sizes import broadcast_chunks_of

_INTEGERS = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int64]
_DTYPES = [*_INTEGERS, *DTYPES, torch.float8_e4m3fn, torch.float8_e5m2]


class _Tensors(nn.Module):
    """Frozen parameters, or buffers, numbered in the order given."""

    t0: torch.Tensor
    t2: torch.Tensor

    def __init__(self, tensors: list[torch.Tensor], *, as_buffers: bool = False, trainable: bool = False) -> None:
        super().__init__()
        for index, tensor in enumerate(tensors):
            if as_buffers:
                self.register_buffer(f"t{index}", tensor)
            else:
                self.register_parameter(f"t{index}", nn.Parameter(tensor, requires_grad=trainable))


def _wrap(module: nn.Module, **arguments: Any) -> LegacyDistributedDataParallel:
    return LegacyDistributedDataParallel(module, **{"init_sync": False, **arguments})


def _pattern(rank: int, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Random bits that differ between ranks, NaNs and all."""
    generator = torch.Generator().manual_seed(rank)
    size_bytes = torch.Size(shape).numel() * dtype.itemsize
    bits = torch.randint(0, 2 if dtype == torch.bool else 256, (size_bytes,), dtype=torch.uint8, generator=generator)
    return bits.view(dtype).view(shape)


def _broadcast_dtypes(rank: int, as_buffers: bool) -> list[list[object]]:
    """Bits after a broadcast from each rank in turn."""
    seen = []
    for src in range(dist.get_world_size()):
        tensors = [_pattern(rank, dtype, 3, 5) for dtype in _DTYPES]
        model = _wrap(_Tensors(tensors, as_buffers=as_buffers))
        (model.broadcast_buffers if as_buffers else model.broadcast_parameters)(src)
        seen.append([bits_of(tensor) for tensor in model.state_dict().values()])
    return seen


_KINDS = {"parameters": (False,), "buffers": (True,)}


def test_every_dtype_arrives_bit_by_bit_from_every_source() -> None:
    expected = [[bits_of(_pattern(src, dtype, 3, 5)) for dtype in _DTYPES] for src in range(3)]

    assert run_cases(_broadcast_dtypes, 3, _KINDS) == {kind: [expected] * 3 for kind in _KINDS}


_STRIDES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda base: base,
    "transposed": lambda base: base.transpose(0, 3),
    "channels_last": lambda base: base.contiguous(memory_format=torch.channels_last),
    "every-second": lambda base: base.repeat_interleave(2, dim=3)[..., ::2],
}


def _broadcast_strides(rank: int, strides: list[str]) -> tuple[list[int], bool]:
    parameter = _STRIDES[strides[rank]](_pattern(rank, torch.int32, 2, 2, 2, 2).float())
    module = _Tensors([parameter])
    _wrap(module).broadcast_parameters(1)
    return module.t0.flatten().tolist(), module.t0.stride() == parameter.stride()


def test_elements_arrive_at_their_index_whatever_the_strides_of_either_side() -> None:
    pairs = [*([name, name] for name in _STRIDES), ["transposed", "channels_last"]]
    for strides, seen in zip(
        pairs, run_cases(_broadcast_strides, 2, {str(pair): (pair,) for pair in pairs}).values(), strict=True
    ):
        expected = _STRIDES[strides[1]](_pattern(1, torch.int32, 2, 2, 2, 2).float()).flatten().tolist()
        assert seen == [(expected, True)] * 2, strides


def _broadcast_expanded(rank: int, as_buffers: bool) -> tuple[list[float], list[float]]:
    memory = torch.arange(8.0) + 10 * rank
    module = _Tensors([memory[2:5].unsqueeze(1).expand(3, 1000)], as_buffers=as_buffers)
    model = _wrap(module)
    (model.broadcast_buffers if as_buffers else model.broadcast_parameters)(1)
    return memory.tolist(), module.t0[:, 999].tolist()


def test_an_expanded_tensor_is_written_inside_its_memory_only() -> None:
    for of_ranks in run_cases(_broadcast_expanded, 2, _KINDS).values():
        for rank, (memory, last_column) in enumerate(of_ranks):
            assert last_column == [12.0, 13.0, 14.0]
            assert memory == [*(torch.arange(2.0) + 10 * rank), *last_column, *(torch.arange(5.0, 8.0) + 10 * rank)]


@pytest.mark.unsimulated("it has no sparse tensors")
@on_ranks(2, [([1.0, [1.0, 1.0], 1, [1]], True, False)] * 2)
def test_frozen_tied_scalar_empty_and_unsaved_ones_arrive_and_stay_what_they_are(
    rank: int,
) -> tuple[list[Any], bool, bool]:
    module: Any = _Tensors(
        [torch.tensor(float(rank)), torch.empty(0, 3), torch.full((2,), float(rank))], trainable=True
    )
    module.register_buffer("scalar", torch.tensor(rank))
    module.register_buffer("empty", torch.empty(4, 0, dtype=torch.int8))
    module.register_buffer("not_saved", torch.tensor([rank]), persistent=False)
    module.again = module.t2  # tied
    module.t0.requires_grad_(False)
    model = _wrap(module)
    model.broadcast_parameters(1)
    model.broadcast_buffers(1)
    values = [tensor.tolist() for tensor in (module.t0, module.t2, module.scalar, module.not_saved)]
    return values, module.again is module.t2, module.t0.requires_grad


def _broadcast_large(rank: int, chunk: int, numels: list[int]) -> list[bool]:
    broadcast_chunks_of(chunk)
    model = _wrap(
        _Tensors([torch.full((numel,), rank * 100 + index, dtype=torch.uint8) for index, numel in enumerate(numels)])
    )
    model.broadcast_parameters(1)
    return [bool((tensor == 100 + index).all()) for index, tensor in enumerate(model.state_dict().values())]


def test_more_than_one_chunk_arrives_whole() -> None:
    third, chunk = 1000, 3001
    numels = [third, third, third, third + 5, chunk + 1, 1, chunk]

    assert run_ranks(_broadcast_large, 2, chunk, numels) == [[True] * len(numels)] * 2


def _build_with_init_sync(rank: int, init_sync: bool) -> list[float]:
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3).requires_grad_(False))
    with torch.no_grad():
        for tensor in module.state_dict().values():
            tensor.fill_(rank + 1)
    _wrap(module, init_sync=init_sync)
    return sorted({float(value) for tensor in module.state_dict().values() for value in tensor.flatten()})


def test_init_sync_takes_all_of_rank_0_and_without_it_nothing_is_touched() -> None:
    found = run_cases(_build_with_init_sync, 3, {"with": (True,), "without": (False,)})
    assert found == {"with": [[1.0]] * 3, "without": [[1.0], [2.0], [3.0]]}


def _broadcast_in_sub_group(rank: int) -> list[float] | None:
    group = dist.new_group([1, 2])
    if rank == 0:
        return None
    module = _Tensors([torch.full((2,), float(rank))])
    _wrap(module, process_group=group).broadcast_parameters(src=1)
    return module.t0.tolist()


def test_the_source_is_counted_inside_the_group() -> None:
    assert run_ranks(_broadcast_in_sub_group, 3) == [None, [2.0, 2.0], [2.0, 2.0]]


def _broadcast_wrongly(rank: int, srcs: list[Any], names: list[str]) -> tuple[Any, ...]:
    module = nn.Module()
    module.register_buffer(names[rank], torch.full((2,), float(rank)))
    model = _wrap(module)
    said: tuple[Any, ...] = ()
    try:
        model.broadcast_buffers(srcs[rank])
    except (LegacyDDPError, ValueError) as error:
        said = type(error).__name__, str(error), getattr(error, "ranks", None)
    value = getattr(module, names[rank]).tolist()
    if len(set(names)) == 1:  # the group is still usable
        model.broadcast_buffers(1)
        assert getattr(module, names[rank]).tolist() == [1.0, 1.0]
    return (*said, value)


def test_a_source_outside_the_group_is_a_value_error_on_every_rank() -> None:
    sources = [3, -1, True, 1.0, "0", None]
    results = run_cases(_broadcast_wrongly, 3, {repr(src): ([src] * 3, ["a"] * 3) for src in sources})

    for src, seen in results.items():
        text = f"src is no rank of the group: got {src}, expected 0 to 2"
        assert seen == [("ValueError", text, None, [float(rank)] * 2) for rank in range(3)]


_DISAGREEMENTS: list[tuple[list[int], list[str], str, tuple[int, ...], list[str]]] = [
    ([0, 0, 9], ["a"] * 3, "PeerError", (2,), ["rank 2: ValueError: src is no rank of the group: got 9"]),
    ([0, 1, 0], ["a"] * 3, "DesyncError", (1,), ["src: rank 1 has 1; ranks 0, 2 have 0"]),
    ([0, 1, 2], ["a"] * 3, "DesyncError", (), ["src: rank 2 has 2; rank 1 has 1; rank 0 has 0"]),
    ([0, 0, 0], ["a", "a", "b"], "LayoutError", (2,), ["buffer 'a'", "buffer 'b'", "rank 2"]),
]


def test_ranks_that_disagree_get_the_same_error_and_nothing_is_written() -> None:
    results = run_cases(_broadcast_wrongly, 3, {str(case): case[:2] for case in _DISAGREEMENTS})
    for case in _DISAGREEMENTS:
        _, _, error, ranks, words = case
        seen = results[str(case)]
        for rank, (kind, text, suspects, value) in enumerate(seen):
            assert (kind, suspects, text) == (error, ranks, seen[0][1])
            assert all(word in text for word in words)
            assert value == [float(rank)] * 2


_BUFFERS: dict[str, tuple[Callable[[], torch.Tensor], str]] = {
    "shape": (lambda: torch.zeros(3), "float32 (3,)"),
    "dtype": (lambda: torch.zeros(2, dtype=torch.int32), "int32 (2,)"),
    "expanded": (lambda: torch.full((1,), 5.0).expand(2), "float32 (2,) on cpu#0, expanded in dimensions [0]"),
}


def _other_buffer(rank: int, how: str) -> tuple[str, bool]:
    """The error of a broadcast, and whether this one and one of the constructor leave the buffer as it is."""
    module = nn.BatchNorm1d(2)
    model = _wrap(module)
    if rank == 1:
        module.running_var = _BUFFERS[how][0]()
    before = module.running_var.clone()
    with pytest.raises(LayoutError) as caught:
        model.broadcast_buffers()
    with pytest.raises(LayoutError):
        LegacyDistributedDataParallel(module)
    return str(caught.value), bool((module.running_var == before).all())


@pytest.mark.cpu("the text names the device")
def test_a_buffer_that_differs_is_named_and_not_broadcast() -> None:
    for how, of_ranks in run_cases(_other_buffer, 3, {how: (how,) for how in _BUFFERS}).items():
        assert of_ranks == [(of_ranks[0][0], True)] * 3
        assert f"buffer 'running_var': rank 1 has {_BUFFERS[how][1]}" in of_ranks[0][0]


@pytest.mark.unsimulated("a call from inside backward ends its process")
@on_ranks(2, [True] * 2)
def test_a_broadcast_from_inside_backward_is_refused(rank: int) -> bool:
    model = LegacyDistributedDataParallel(nn.Linear(2, 1))
    model.module.weight.register_hook(lambda _: model.broadcast_buffers())
    with pytest.raises(LegacyDDPError) as caught:
        model(torch.ones(1, 2)).sum().backward()
    return "broadcast_buffers() was called from inside backward" in str(caught.value)


@pytest.mark.unsimulated("a call from inside backward ends its process")
@on_ranks(2, [[1.5]] * 2)
def test_a_broadcast_between_backward_and_call_is_not_taken_for_a_step(rank: int) -> list[float | None]:
    model = wrap(checks=Checks(uneven="allow"))
    for _ in range(1 + rank):
        add_gradients(model, 1.0)
    model.broadcast_parameters()
    model.all_reduce()
    return list(gradient_values(model).values())
