"""Digests and checksums: they change with any bit and any order of the bits, and with nothing else."""

import zlib
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from legacy_ddp._replicas import state as digests
from legacy_ddp._replicas.rotation import MAX_PARTS, SMALLEST_PART, TENSOR_COST, divide
from legacy_ddp._replicas.state import add_memory, begin_digest, begin_sums, digest_all, has_memory
from legacy_ddp.debug import digest
from legacy_ddp.debug._operations.digest import digest_each

# A digest changes with any bit and any order of the bits, and with nothing else

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
DTYPES = [*FLOATS, torch.complex64, torch.complex128, torch.int8, torch.int16, torch.int64, torch.uint8, torch.bool]
DTYPES += [torch.float8_e4m3fn, torch.float8_e5m2]
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
SIDES = [12, 288]  # squares of at most one row of lanes, and of several rows and a part of one, in every dtype

Edit = Callable[[torch.Tensor], torch.Tensor | None]


def _random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def _random_bytes(count: int) -> torch.Tensor:
    return torch.randint(256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(count))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(INTEGERS[tensor.itemsize]).view(-1)


def _contents(tensor: torch.Tensor) -> bytes:
    return _plain(tensor).view(-1).view(torch.uint8).numpy().tobytes()


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())


def _digests(tensor: torch.Tensor) -> tuple[int, int]:
    return digest(tensor), digest_all([torch.ones(3, dtype=tensor.dtype), tensor])


def _assert_seen(before: torch.Tensor, after: torch.Tensor) -> None:
    for one, other in zip(_digests(before), _digests(after), strict=True):
        assert one != other


# --- a second implementation of the same -----------------------------------------------------------------------------


def _reference(data: bytes) -> int:
    words = np.frombuffer(data + bytes(-len(data) % 8), dtype=np.uint64)
    lanes = 4096
    while 64 * lanes < len(words):
        lanes *= 2
    with np.errstate(over="ignore"):  # mod 2**64
        state = np.arange(min(lanes, len(words)), dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        rows = [words[start : start + len(state)] for start in range(0, len(words), len(state) or 1)]
        for row in [*rows, np.zeros_like(state), np.zeros_like(state)]:
            mixed = row + np.uint64(6364136223846793005) * state[: len(row)]
            state[: len(row)] = mixed ^ (mixed >> np.uint64(32))
        total = int(state.sum())
    unsigned = total ^ len(data)
    return unsigned - 2**64 if unsigned >= 2**63 else unsigned


_COUNTS = [0, 1, 7, 8, 9, 1000, 8 * 4096, 8 * 4096 + 1, 70_001, 64 * 8 * 4096, 2_100_003]
_COUNTS += [64 * 8 * 2**15 + 8 * 2**15 + 5]  # 65536 lanes, of which not all work together; half a last row


@pytest.mark.parametrize("count", _COUNTS)
def test_digest_is_what_its_definition_says(count: int) -> None:
    data = _random_bytes(count)

    assert digest(data) == _reference(data.numpy().tobytes())


# --- every fault that other sums miss --------------------------------------------------------------------------------


def _flip(*positions: int, bit: int) -> Edit:
    def edit(square: torch.Tensor) -> None:
        mask = torch.tensor(1 << bit % (8 * square.itemsize - 1), dtype=INTEGERS[square.itemsize])
        _bits(square)[list(positions)] ^= mask

    return edit


def _swap(width_bytes: int, first: int, second: int) -> Edit:
    def edit(square: torch.Tensor) -> None:
        units = square.view(-1, width_bytes // square.itemsize) if width_bytes else square.view(-1, 1)
        units[[first, second]] = units[[second, first]]

    return edit


def _next_number(square: torch.Tensor) -> None:
    _bits(square)[::97] += 1


EDITS: dict[str, Edit] = {
    "two flips of the same bit": _flip(5, 143, bit=7),
    "two elements swapped": _swap(0, 3, 140),
    "two adjacent words swapped": _swap(8, 6, 7),
    "negated": torch.neg,
    "transposed": torch.t,
    "rows permuted": lambda square: square.roll(1, dims=0),
    "columns permuted": lambda square: square.roll(1, dims=1),
    "all ones": torch.ones_like,
    "all zeros": torch.zeros_like,
    "the next number now and then": _next_number,
}


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", EDITS)
def test_an_edit_is_seen(name: str, side: int, dtype: torch.dtype) -> None:
    square = _random(side, side, dtype=dtype)
    edited = square.clone()
    edited = result if (result := EDITS[name](edited)) is not None else edited

    assert _contents(square) != _contents(edited)
    _assert_seen(square, edited)


# --- bits that a polynomial mod 2**64 loses: those at the top of a word -----------------------------------------------


@pytest.mark.parametrize("rows_apart", [1, 2, 4, 8, 16, 32])
@pytest.mark.parametrize("half", [0, 1])
def test_swapped_powers_of_two_in_one_column_are_seen(half: int, rows_apart: int) -> None:
    tensor = torch.zeros(33 * 4096, 2)
    tensor[7, half], tensor[7 + 4096 * rows_apart, half] = 1, 2
    swapped = tensor.clone()
    swapped[7, half], swapped[7 + 4096 * rows_apart, half] = 2, 1

    _assert_seen(tensor, swapped)


# --- any place -------------------------------------------------------------------------------------------------------

NUMEL = 20_003  # of float32: three rows of lanes, the last one not whole and ending with half a word
places = st.integers(0, NUMEL - 1)


@given(places, st.integers(0, 31))
def test_any_changed_bit_is_seen(place: int, bit: int) -> None:
    tensor = _random(NUMEL)
    changed = tensor.clone()
    changed.view(torch.uint8)[4 * place + bit // 8] ^= 1 << bit % 8

    _assert_seen(tensor, changed)


# --- nothing else ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", [0, 1, 3, 40_001])
def test_any_dtype_is_its_bytes(numel: int, dtype: torch.dtype) -> None:
    data = _random_bytes(numel * dtype.itemsize)
    data = data % 2 if dtype == torch.bool else data

    assert digest(data.view(dtype)) == digest(data)
    assert digest_all([data.view(dtype), None]) == digest_all([data.clone().view(dtype), None])


@pytest.mark.parametrize(
    "made",
    [
        lambda: _random(30, 20).t(),
        lambda: _random(4, 8, 30, 30).to(memory_format=torch.channels_last),
        lambda: _random(5, 1).expand(5, 7),
        lambda: _random(1).expand(9000),
        lambda: _random(100)[::3],
        lambda: _random(100)[3:4].as_strided((1,), (7,)),
        lambda: _random(20_000)[1:],
        lambda: _random_bytes(70_000)[3:],
        lambda: _random(300_000)[3:],
        lambda: _random(1).squeeze(),
        lambda: _random(0, 5),
        lambda: _random(6, dtype=torch.complex64).conj(),
        lambda: _random(6, dtype=torch.complex64).conj().imag,
        lambda: _random(1, dtype=torch.complex64).conj().imag,
        lambda: _random(40, 40).requires_grad_() * 2,
        lambda: torch.nn.Parameter(_random(5)),
    ],
)
def test_how_bits_are_stored_does_not_matter(made: Callable[[], torch.Tensor]) -> None:
    tensor = made()
    plain = _plain(tensor)

    assert digest(tensor) == digest(plain) == _reference(_contents(tensor.detach()))
    assert digest_all([tensor, tensor]) == digest_all([plain, plain])


def test_a_sparse_tensor_is_its_coalesced_indices_and_values() -> None:
    indices, values = [[4, 1, 4], [0, 2, 0]], [1.0, 2.0, 3.0]
    tensor = torch.sparse_coo_tensor(torch.tensor(indices), torch.tensor(values), (5, 3), check_invariants=True)
    coalesced = torch.tensor([[1, 4], [2, 0]]), torch.tensor([2.0, 4.0])
    moved = torch.sparse_coo_tensor(torch.tensor([[1, 4], [2, 1]]), coalesced[1], (5, 3), check_invariants=True)

    assert digest(tensor) == digest(tensor.coalesce()) == _reference(b"".join(map(_contents, coalesced)))
    assert digest_all([tensor, None]) == digest_all([tensor.coalesce(), None])
    _assert_seen_alone(tensor, moved)


def _assert_seen_alone(before: torch.Tensor, after: torch.Tensor) -> None:
    assert digest(before) != digest(after)
    assert digest_all([before]) != digest_all([after])


def test_a_digest_leaves_no_trace() -> None:
    tensor = _random(40_000).requires_grad_()
    before, version = tensor.detach().clone(), tensor._version
    digest(tensor)
    digest_all([tensor, tensor])

    assert torch.equal(tensor, before)
    assert tensor._version == version
    assert torch.is_grad_enabled()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("numel", [0, 3, 5000, 2**20 + 1, 2**27 + 3])
def test_a_gpu_says_the_same(numel: int) -> None:
    tensor = _random(numel)
    both = [tensor, tensor.cuda(), tensor.cuda()[1:], tensor[1:]]

    assert digest_each(both)[0::3] == digest_each(both)[1:3]
    of_gpu = tensor.cuda()
    strided = torch.stack([of_gpu, of_gpu], dim=1)[:, 0]
    assert digest_all([of_gpu, None, of_gpu]) == digest_all([strided, None, strided])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_and_a_cpu_are_digested_in_one_go() -> None:
    tensors = [_random(size) for size in (1, 5, 0, 9000, 77, 4096, 3)] * 50
    mixed = [tensor.cuda() if index % 3 else tensor for index, tensor in enumerate(tensors)]

    assert digest_each(mixed) == digest_each(tensors)


# --- many tensors ----------------------------------------------------------------------------------------------------


def _sliced(data: torch.Tensor) -> torch.Tensor:
    return torch.stack([data, data], dim=1)[:, 0]


# Around the words of one row, 4096 of 8 bytes, up to which tensors are joined.
byte_counts = st.integers(0, 40) | st.integers(0, 40_000) | st.integers(8 * 4095, 8 * 4097)
FORMS: dict[str, Edit] = {
    "as it is": lambda data: data,
    "strided": _sliced,
    "not aligned": lambda data: torch.cat([data[:0].new_zeros(3), data])[3:],
    "float32": lambda data: data[: len(data) // 4 * 4].view(torch.float32),
    "float64 matrix, transposed": lambda data: data[: len(data) // 16 * 16].view(torch.float64).view(-1, 2).t(),
    "bfloat16, negative": lambda data: torch._neg_view(data[: len(data) // 2 * 2].view(torch.bfloat16)),
    "complex64, conjugated": lambda data: data[: len(data) // 8 * 8].view(torch.complex64).conj(),
    "a parameter": lambda data: torch.nn.Parameter(data[: len(data) // 4 * 4].view(torch.float32)),
    "one element": lambda data: data.new_full((), len(data) % 256),
    "sparse": lambda data: data.double().view(1, -1).to_sparse(),
}


@given(st.lists(st.tuples(byte_counts, st.sampled_from(sorted(FORMS))), max_size=40))
def test_digests_of_any_tensors_are_those_of_each_and_of_their_copies(drawn: list[tuple[int, str]]) -> None:
    tensors = [form for count, name in drawn if (form := FORMS[name](_random_bytes(count))) is not None]
    copies = [tensor.detach() if tensor.is_sparse else _plain(tensor) for tensor in tensors]

    assert digest_each(tensors) == [digest(tensor) for tensor in tensors]
    assert digest_all(tensors) == digest_all(copies)
    assert digests.digest_each(iter(tensors)) == [digest_all([copy]) for copy in copies]


@pytest.mark.parametrize("count", [2, 3, 8, 9, 17, 40])  # 8 tensors of a whole row work together on a CPU
@pytest.mark.parametrize("size_bytes", [0, 1, 8, 13, 9216, 8 * 4096 - 1, 8 * 4096, 8 * 4096 + 1])
def test_digest_each_of_many_tensors_are_what_their_definition_says(size_bytes: int, count: int) -> None:
    tensors = [_random_bytes(size_bytes).add(index) for index in range(count)]
    known = {0: tensors[0], count // 2: tensors[count // 2], count - 1: tensors[-1]}
    words = digest_each(tensors)

    assert words == [digest(tensor) for tensor in tensors]
    for index, tensor in known.items():
        assert words[index] == _reference(_contents(tensor))


def test_sums_of_states_that_wrap_around_are_kept_apart() -> None:
    tensors = [torch.full((size,), -1, dtype=torch.int64) for size in [1, 4096, 2, 4095, 1, 1] * 5]

    assert digest_each(tensors) == [_reference(_contents(tensor)) for tensor in tensors]


class _Operations(TorchDispatchMode):
    """Counts the operations that launch a kernel on a device: all but views."""

    count = 0

    def __torch_dispatch__(self, operation: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not operation.is_view
        return operation(*args, **kwargs or {})


@pytest.mark.parametrize("size_bytes", [4, 9216])
def test_one_more_small_tensor_takes_few_more_operations(size_bytes: int) -> None:
    counts = []
    for many in (500, 1000):
        with _Operations() as operations:
            digest_each([_random_bytes(size_bytes)] * many)
        counts.append(operations.count)

    assert counts[1] - counts[0] < 6 * 500  # alone it takes some thirty


@given(st.lists(st.lists(st.integers(0, 1), max_size=3) | st.none(), max_size=4), st.data())
def test_digest_all_is_equal_if_all_tensors_are(lists: list[list[int] | None], data: st.DataObject) -> None:
    others = data.draw(st.permutations(lists) | st.lists(st.lists(st.integers(0, 1), max_size=3) | st.none()))
    one, other = ([None if row is None else torch.tensor(row).float() for row in rows] for rows in (lists, others))

    assert (digest_all(one) == digest_all(other)) == (lists == others)


def test_a_change_in_any_of_many_tensors_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "MAX_JOINED", 3)
    sizes = [3, 0, 70_000, 1024, 5, 1025, *[7] * 10, 1, 1024, 2]  # of at most 1024 elements they are joined
    tensors = [torch.zeros(size) for size in sizes]
    seen = {digest_all(tensors)}
    for tensor in filter(len, tensors):
        tensor[-1] = 1
        seen.add(digest_all(tensors))
        tensor[-1] = 0

    assert len(seen) == 1 + sum(size > 0 for size in sizes)


def test_tensors_of_two_dtypes_and_large_tensors_swapped_are_seen() -> None:
    single, double = torch.zeros(2), torch.zeros(2, dtype=torch.float64)
    first, second = _random(2, 2**18)

    assert digest_all([single, double, single]) != digest_all([single, single, double])
    assert digest_all([first, second]) != digest_all([second, first])


def test_tensors_of_the_cpu_need_no_vector_and_sparse_ones_do() -> None:
    tensors = [torch.ones(5), torch.ones(5000), torch.ones(3, 2).t(), torch.ones(3, dtype=torch.complex64).conj()]

    assert begin_digest(tensors)[0] == []
    assert len(begin_digest([*tensors, torch.ones(3).to_sparse()])[0]) == 1


# CRC-32 of the memory of tensors, against zlib on the bytes of numpy


def _whole(tensor: torch.Tensor) -> int:
    return add_memory(0, tensor, 0, tensor.nbytes)


@given(st.lists(st.integers(0, 255), min_size=1, max_size=200), st.data())
def test_pieces_end_to_end_are_the_checksum_of_the_bytes(values: list[int], data: st.DataObject) -> None:
    tensor = torch.tensor(values, dtype=torch.uint8)
    cuts = [0, *sorted(data.draw(st.lists(st.integers(0, len(values)), max_size=4))), len(values)]

    checksum = 0
    for start, stop in pairwise(cuts):
        checksum = add_memory(checksum, tensor, start, stop)

    assert checksum == zlib.crc32(bytes(values))


def test_strides_conjugates_and_negations_are_read_in_row_major_order() -> None:
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    numbers = values.astype(np.complex64) * (1 + 2j)
    matrix, complex_matrix = torch.tensor(values), torch.tensor(numbers)

    assert _whole(matrix.t()) == zlib.crc32(np.ascontiguousarray(values.T).tobytes())
    assert _whole(matrix[:, 1:3]) == zlib.crc32(np.ascontiguousarray(values[:, 1:3]).tobytes())
    assert complex_matrix.conj().is_conj()
    assert _whole(complex_matrix.conj()) == zlib.crc32(numbers.conj().tobytes())
    assert complex_matrix.conj().imag.is_neg()
    assert _whole(complex_matrix.conj().imag) == zlib.crc32(np.ascontiguousarray(numbers.conj().imag).tobytes())
    alone = complex_matrix[1, 1].conj().imag  # contiguous
    assert _whole(alone) == zlib.crc32(np.float32(-10).tobytes())


def test_reading_runs_no_operation_of_torch_and_leaves_the_version() -> None:
    class Refuse(TorchDispatchMode):
        def __torch_dispatch__(self, function: object, *_: object) -> object:
            raise AssertionError(function)

    tensor = torch.nn.Parameter(torch.ones(5))
    with Refuse():
        checksum = _whole(tensor)

    assert checksum == zlib.crc32(np.ones(5, dtype=np.float32).tobytes())
    assert tensor._version == 0


def test_only_tensors_with_memory_of_the_cpu_are_read() -> None:
    with FakeTensorMode():
        fake = torch.ones(3)

    assert has_memory(torch.ones(3))
    assert has_memory(torch.nn.Parameter(torch.ones(0)))
    assert not any(map(has_memory, [fake, torch.ones(3).to_sparse(), torch.ones(3, device="meta")]))
    with pytest.raises(TypeError, match="no memory: got FakeTensor"):
        _whole(fake)


# The sums of a device


def _sum(*pieces: torch.Tensor) -> list[int]:
    return [number for vector in begin_sums(pieces) for number in vector.tolist()]


def test_a_sum_of_bytes_changes_with_every_byte_and_with_their_order() -> None:
    data = torch.arange(100, dtype=torch.uint8)
    others = [data.clone() for _ in range(100)]
    for index, other in enumerate(others):
        other[index] ^= 128

    assert len({_sum(data)[0], _sum(data.flip(0))[0], *(_sum(other)[0] for other in others)}) == 102


def test_a_sum_is_the_digest_of_the_joined_bytes() -> None:
    data = torch.arange(1001, dtype=torch.int64).view(torch.uint8)[:8003]

    assert _sum(data[:5], data[5:4000], data[4000:]) == [digest(data) ^ 8003]


def test_every_32_mib_have_a_sum_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "SUM_BYTES", 64)
    data = torch.arange(200, dtype=torch.uint8)

    assert _sum(data[:50], data[50:]) == [
        *_sum(data[:50]),
        *_sum(data[50:114]),
        *_sum(data[114:178]),
        *_sum(data[178:]),
    ]


def test_a_sum_of_a_hundred_tensors_takes_no_more_operations_than_of_one() -> None:
    data = torch.arange(100, dtype=torch.uint8)
    counts = []
    for pieces in ([data], data.split(1)):
        with _Operations() as operations:
            begin_sums(pieces)
        counts.append(operations.count)

    assert counts == [11, 11]


# Parts of a rotation: every byte once, in at most 16 parts of about equal cost

_SIZES = st.lists(st.one_of(st.integers(0, 200), st.integers(0, 2**22)), max_size=200)


@given(_SIZES)
def test_every_byte_is_in_one_part(sizes: list[int]) -> None:
    pieces = sorted(piece for part in divide(sizes) for piece in part)

    for index, size in enumerate(sizes):
        own = [piece for piece in pieces if piece.tensor == index]
        assert [piece.start for piece in own][:1] == [0][: len(own)]
        assert all(before.stop == after.start for before, after in pairwise(own))
        assert (own[-1].stop if own else 0) == size
        assert all(piece.start % 64 == 0 and piece.start < piece.stop for piece in own)


@given(_SIZES)
def test_parts_are_few_and_of_about_equal_cost(sizes: list[int]) -> None:
    parts = divide(sizes)
    costs = [sum(TENSOR_COST + piece.stop - piece.start for piece in part) for part in parts]

    assert 1 <= len(parts) <= MAX_PARTS
    total = sum(size + TENSOR_COST for size in sizes)
    assert max(costs) <= max(2 * SMALLEST_PART, total / MAX_PARTS) + 3 * TENSOR_COST


def test_a_small_model_is_one_part_and_nothing_is_an_empty_part() -> None:
    assert divide([100, 200, 300]) == [[(0, 0, 100), (1, 0, 200), (2, 0, 300)]]
    assert divide([]) == divide([0, 0]) == [[]]


@pytest.mark.parametrize("start, stop", [(0, 41), (-8, 8), (24, 16), (48, 56)])
def test_bytes_beyond_a_tensor_are_refused_and_not_read(start: int, stop: int) -> None:
    with pytest.raises(ValueError, match=f"got {start} to {stop}, expected 0 to 40"):
        add_memory(0, torch.zeros(10), start, stop)
