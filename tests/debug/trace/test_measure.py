"""Digests, norms and non-finite counts of values."""

import math
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch._C._distributed_c10d import HashStore

from legacy_ddp.debug import Recorder, digest
from tests.helpers import logged_warnings
from tests.helpers.recorded import Recorded

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
NARROW = [torch.float8_e4m3fn, torch.float8_e5m2]
PARTS = 2**14  # elements whose norm is taken at once


@pytest.fixture(scope="module", autouse=True)
def _group() -> Iterator[None]:
    """One process group for all examples. Without git a recorder begins sooner."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", "")
        yield
    dist.destroy_process_group()


def measure(tensors: Sequence[torch.Tensor]) -> list[tuple[str | None, float | None, int]]:
    """Digest, norm, and number of elements that are not finite, as a recorder writes them for buffers."""
    with torch.inference_mode(mode=False):
        module = nn.Linear(1, 1)
    for index, tensor in enumerate(tensors):
        module.register_buffer(f"{index:03}", tensor)
    with TemporaryDirectory() as folder:
        with Recorder(module, folder):
            pass
        logged_warnings.take()  # it holds no step
        found = Recorded(Path(folder)).sections[0, "buffers"]
    return [(found.words[name], found.norms[name], found.nonfinite.get(name, 0)) for name in found.words]


def _norm(tensor: torch.Tensor) -> float | None:
    [(_, norm, nonfinite)] = measure([tensor])
    assert nonfinite == 0
    return norm


def _random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)


def _by_hand(numbers: list[float]) -> float:
    return math.sqrt(math.fsum(number * number for number in numbers if math.isfinite(number)))


# --- words -----------------------------------------------------------------------------------------------------------


@given(st.binary(max_size=20))
def test_the_word_of_a_tensor_is_its_digest_in_16_hex_digits(data: bytes) -> None:
    tensor = torch.tensor(list(data), dtype=torch.uint8)
    [(word, _, _)] = measure([tensor])

    assert word is not None
    assert len(word) == 16
    assert struct.unpack(">q", bytes.fromhex(word)) == (digest(tensor),)


# --- norms -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [*FLOATS, *NARROW, torch.int8, torch.int64, torch.uint8])
@pytest.mark.parametrize("count", [1, 3, 16])
def test_the_norm_of_any_dtype_is_that_by_hand(dtype: torch.dtype, count: int) -> None:
    threes_and_fours = torch.tensor([3.0, 4.0] * count**2).to(dtype)

    assert _norm(threes_and_fours) == 5 * count


def test_the_norm_of_bools_and_complex_numbers_and_one_element() -> None:
    assert _norm(torch.tensor([True, False, True, True, True])) == 2
    assert _norm(torch.tensor([3 + 4j, 12j])) == 13
    assert _norm(torch.tensor([3 + 4j, 12j]).conj()) == 13
    assert _norm(torch.tensor([3 + 4j, 12j]).conj().imag) == pytest.approx(math.sqrt(160), rel=2**-23)
    assert _norm(torch.tensor(-7.5)) == 7.5
    assert _norm(torch.nn.Parameter(torch.tensor([[3.0], [4.0]]))) == 5


def test_integers_that_no_fp32_holds_keep_their_norm() -> None:
    assert _norm(torch.tensor([2**24 + 1])) == 2**24 + 1
    assert _norm(torch.tensor([-(2**63)])) == float(f"{2.0**63:.8e}")


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_tensor_without_elements_or_of_zeros_has_norm_zero(dtype: torch.dtype) -> None:
    assert _norm(torch.empty(0, 3, dtype=dtype)) == 0
    assert _norm(torch.zeros(5, dtype=dtype)) == 0
    assert _norm(-torch.zeros(PARTS + 5, dtype=dtype)) == 0


@given(st.lists(st.floats(-1e6, 1e6, width=32), max_size=20))
def test_the_norm_of_fp32_is_right_to_fp32(numbers: list[float]) -> None:
    # Each square, each of up to 20 additions and the root round once.
    assert _norm(torch.tensor(numbers)) == pytest.approx(_by_hand(numbers), rel=24 * 2**-24, abs=0)


@given(st.lists(st.floats(-1e6, 1e6), max_size=20))
def test_the_norm_of_fp64_has_9_digits(numbers: list[float]) -> None:
    norm = _norm(torch.tensor(numbers, dtype=torch.float64))

    assert norm == float(f"{norm:.8e}")
    if (exact := math.hypot(*numbers)) > 1e-140:
        assert norm == pytest.approx(exact, rel=0.51e-8, abs=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("transposed", [False, True])
def test_the_norm_of_many_elements_is_as_exact_as_that_of_few(dtype: torch.dtype, transposed: bool) -> None:
    tensor = _random(4096, 1031, dtype=dtype)
    tensor = tensor.t() if transposed else tensor

    # One sum over all of them is wrong by 1e-4.
    assert _norm(tensor) == pytest.approx(tensor.double().norm().item(), rel=2e-6)


@pytest.mark.parametrize("numel", [PARTS - 1, PARTS, PARTS + 1, 3 * PARTS])
def test_every_element_of_a_large_tensor_counts(numel: int) -> None:
    for place in (0, PARTS - 1, numel // 2, numel - 1):
        tensor = torch.zeros(numel)
        tensor[min(place, numel - 1)] = 3

        assert _norm(tensor) == 3


def test_many_tensors_of_many_sizes_have_the_norms_that_each_has_alone() -> None:
    tensors = [_random(size, dtype=dtype) for size in (1, 0, 2304, PARTS + 7, 5 * PARTS) for dtype in FLOATS]

    assert (
        measure([tensor.clone() for tensor in tensors * 8])
        == [entry for tensor in tensors for entry in measure([tensor])] * 8
    )


@pytest.mark.parametrize(
    "dtype, large",
    [(torch.float16, 60_000.0), (torch.bfloat16, 2.0**127), (torch.float32, 2.0**127), (torch.float64, 2.0**1000)],
)
def test_large_finite_numbers_have_a_norm(dtype: torch.dtype, large: float) -> None:
    tensor = torch.full((4,), large, dtype=torch.float64).to(dtype)

    assert _norm(tensor) == float(f"{2 * tensor[0].double().item():.8e}")


def test_a_norm_that_no_number_is_large_enough_for_is_none() -> None:
    tensor = torch.full((4,), torch.finfo(torch.float64).max, dtype=torch.float64)

    assert _norm(tensor) is None
    assert _norm(tensor[:1]) == float(f"{torch.finfo(torch.float64).max:.8e}") < math.inf


@pytest.mark.parametrize("small", [2.0**-40, 2.0**-75, 2.0**-100, 2.0**-149])
@pytest.mark.parametrize("numel", [4, 4 * PARTS])
def test_numbers_too_small_to_square_have_a_norm(small: float, numel: int) -> None:
    tensor = torch.full((numel,), small)

    assert _norm(tensor) == float(f"{math.sqrt(numel) * small:.8e}")


def test_a_sparse_tensor_has_the_norm_of_its_coalesced_values() -> None:
    indices = torch.tensor([[4, 1, 4], [0, 2, 0]])
    tensor = torch.sparse_coo_tensor(indices, torch.tensor([1.0, 4.0, 2.0]), (5, 3), check_invariants=True)
    [(word, norm, nonfinite)] = measure([tensor])

    assert (norm, nonfinite) == (5.0, 0)
    assert word == f"{digest(tensor) % 2**64:016x}"


# --- not finite ------------------------------------------------------------------------------------------------------


@given(st.lists(st.floats(-100, 100, width=16) | st.sampled_from([math.inf, -math.inf, math.nan]), max_size=12))
@pytest.mark.parametrize("dtype", FLOATS)
def test_the_norm_is_of_the_finite_elements_and_the_others_are_counted(
    dtype: torch.dtype, numbers: list[float]
) -> None:
    tensor = torch.tensor(numbers, dtype=torch.float64).to(dtype)
    [(_, norm, nonfinite)] = measure([tensor])

    assert nonfinite == sum(not math.isfinite(number) for number in numbers)
    assert norm == pytest.approx(_by_hand(tensor.tolist()), rel=1e-6, abs=0)


def test_nan_of_every_kind_of_tensor_is_counted() -> None:
    assert measure([torch.tensor([3.0, math.nan]).to(torch.float8_e5m2)])[0][1:] == (3, 1)
    assert measure([torch.tensor([complex(3, math.inf), complex(0, 4)])])[0][1:] == (5, 1)
    assert measure([torch.tensor([0.0, 3.0, math.nan]).to_sparse()])[0][1:] == (3, 1)
    assert measure([torch.full((3,), math.nan)])[0][1:] == (0, 3)


def test_nan_anywhere_in_a_large_tensor_is_counted() -> None:
    tensor = torch.zeros(3 * PARTS + 5)
    tensor[7], tensor[2 * PARTS] = 3, 4
    tensor[[5, PARTS, 3 * PARTS + 4]] = math.nan

    assert measure([torch.ones(1), tensor, torch.ones(4)])[1][1:] == (5, 3)


def test_large_finite_numbers_beside_an_infinite_one_have_a_norm() -> None:
    tensor = torch.tensor([math.inf, 2.0**127, 2.0**127, 2.0**127, 2.0**127])

    assert measure([tensor])[0][1:] == (float(f"{2.0**128:.8e}"), 1)


# --- no traces of its own --------------------------------------------------------------------------------------------


def test_measuring_changes_nothing() -> None:
    tensor = torch.tensor([1.0, math.nan]).requires_grad_()
    version = tensor._version
    measure([tensor])

    assert (tensor._version, tensor.grad, torch.is_grad_enabled()) == (version, None, True)
    assert torch.equal(tensor.isnan(), torch.tensor([False, True]))


def test_measuring_in_inference_mode_says_the_same() -> None:
    tensors = [_random(5), _random(5, dtype=torch.complex64), torch.tensor([1.0, math.inf])]
    before = measure(tensors)
    with torch.inference_mode():
        assert measure([tensor.clone() for tensor in tensors]) == before


@pytest.mark.gpu
def test_a_gpu_says_nearly_the_same() -> None:
    tensors = [_random(size, dtype=dtype) for size in (1, 0, 5, PARTS + 7) for dtype in FLOATS]
    tensors += [torch.tensor([3.0, math.nan, 4.0]), torch.full((4,), 2.0**127), torch.zeros(3)]
    there, here = measure([tensor.cuda() for tensor in tensors]), measure(tensors)

    assert [(word, count) for word, _, count in there] == [(word, count) for word, _, count in here]
    for (_, one, _), (_, other, _) in zip(there, here, strict=True):
        assert one == pytest.approx(other, rel=1e-6, abs=0)
