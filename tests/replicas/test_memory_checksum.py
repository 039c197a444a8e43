"""CRC-32 of the memory of tensors, against zlib on the bytes of numpy."""

import zlib
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from legacy_ddp._replicas.digest import add_memory, has_memory

pytestmark = pytest.mark.fast

DTYPES = {torch.float64: np.float64, torch.float16: np.float16, torch.int64: np.int64, torch.bool: np.bool_}


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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_is_read_as_its_bytes(dtype: torch.dtype) -> None:
    tensor = (torch.arange(24) % 7).to(dtype)

    assert _whole(tensor) == zlib.crc32((np.arange(24) % 7).astype(DTYPES[dtype]).tobytes())


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


@pytest.mark.parametrize("bit", [0, 31, 32, 63])
def test_a_pair_of_flipped_bits_shows(bit: int) -> None:
    """Two flips of bit 63 cancel in sums of 64-bit words."""
    words = torch.zeros(8, dtype=torch.int64)
    flipped = words.clone()
    flipped[[2, 5]] = 1 << bit if bit < 63 else -(2**63)

    assert _whole(flipped) != _whole(words)


def test_swapped_and_negated_elements_show() -> None:
    values = torch.arange(1.0, 9.0, dtype=torch.float64)

    assert len({_whole(values), _whole(-values), _whole(values.flip(0)), _whole(values[[1, 0, *range(2, 8)]])}) == 4


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
