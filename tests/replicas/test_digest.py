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

Edit = Callable[[torch.Tensor], torch.Tensor]


def _random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def _random_bytes(count: int) -> torch.Tensor:
    return torch.randint(256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(count))


def _contents(tensor: torch.Tensor) -> bytes:
    return _plain(tensor).view(-1).view(torch.uint8).numpy().tobytes()


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())


def _assert_seen(before: torch.Tensor, after: torch.Tensor) -> None:
    assert digest(before) != digest(after)
    assert digest_all([torch.ones(3), before]) != digest_all([torch.ones(3), after])


# A second implementation of the same


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


# Nothing else


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_dtype_is_its_bytes(dtype: torch.dtype) -> None:
    for numel in (0, 1, 3, 40_001):
        data = _random_bytes(numel * dtype.itemsize)
        data = data % 2 if dtype == torch.bool else data

        assert digest(data.view(dtype)) == digest(data)
        assert digest_all([data.view(dtype), None]) == digest_all([data.clone().view(dtype), None])


# Of bytes: how a tensor may be stored.
FORMS: dict[str, Edit] = {
    "as it is": lambda data: data,
    "strided": lambda data: torch.stack([data, data], dim=1)[:, 0],
    "not aligned": lambda data: torch.cat([data[:0].new_zeros(3), data])[3:],
    "float32": lambda data: data[: len(data) // 4 * 4].view(torch.float32),
    "float32, from the second on": lambda data: data[: len(data) // 4 * 4].view(torch.float32)[1:],
    "float64 matrix, transposed": lambda data: data[: len(data) // 16 * 16].view(torch.float64).view(-1, 2).t(),
    "channels last": lambda data: data[: len(data) // 12 * 12].view(-1, 3, 2, 2).to(memory_format=torch.channels_last),
    "expanded": lambda data: data[:1].expand(9000 if len(data) else 0),
    "expanded rows": lambda data: data.view(-1, 1).expand(-1, 7),
    "one element of a large stride": lambda data: data[:1].as_strided((len(data[:1]),), (7,)),
    "bfloat16, negative": lambda data: torch._neg_view(data[: len(data) // 2 * 2].view(torch.bfloat16)),
    "complex64, conjugated": lambda data: data[: len(data) // 8 * 8].view(torch.complex64).conj(),
    "its imaginary part": lambda data: data[: len(data) // 8 * 8].view(torch.complex64).conj().imag,
    "a parameter": lambda data: torch.nn.Parameter(data[: len(data) // 4 * 4].view(torch.float32)),
    "a result with a graph": lambda data: data[: len(data) // 4 * 4].view(torch.float32).requires_grad_() * 2,
    "one element": lambda data: data.new_full((), len(data) % 256),
    "sparse": lambda data: data.double().view(1, -1).to_sparse(),
}


@pytest.mark.parametrize("name", [name for name in FORMS if name != "sparse"])
def test_how_bits_are_stored_does_not_matter(name: str) -> None:
    for count in (0, 8, 24, 70_000, 1_200_000):
        tensor = FORMS[name](_random_bytes(count))
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
    _assert_seen(tensor, moved)


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
    tensors = [_random(size) for size in (1, 5, 0, 9000, 77, 4096, 3)] * 50
    mixed = [tensor.cuda() if index % 3 else tensor for index, tensor in enumerate(tensors)]
    assert digest_each(mixed) == digest_each(tensors)


# Many tensors


# Around the words of one row, 4096 of 8 bytes, up to which tensors are joined.
byte_counts = st.integers(0, 40) | st.integers(0, 40_000) | st.integers(8 * 4095, 8 * 4097)


@given(st.lists(st.tuples(byte_counts, st.sampled_from(sorted(FORMS))), max_size=40))
def test_digests_of_any_tensors_are_those_of_each_and_of_their_copies(drawn: list[tuple[int, str]]) -> None:
    tensors = [FORMS[name](_random_bytes(count)) for count, name in drawn]
    copies = [tensor.detach() if tensor.is_sparse else _plain(tensor) for tensor in tensors]

    assert digest_each(tensors) == [digest(tensor) for tensor in tensors]
    assert digest_all(tensors) == digest_all(copies)
    assert digests.digest_each(iter(tensors)) == [digest_all([copy]) for copy in copies]


@pytest.mark.parametrize("count", [2, 8, 9, 40])  # 8 tensors of a whole row work together on a CPU
def test_digest_each_of_many_tensors_are_what_their_definition_says(count: int) -> None:
    for size_bytes in (0, 1, 8, 13, 9216, 8 * 4096 - 1, 8 * 4096, 8 * 4096 + 1):
        tensors = [_random_bytes(size_bytes).add(index) for index in range(count)]

        assert digest_each(tensors) == [_reference(_contents(tensor)) for tensor in tensors]


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
