"""Digests, norms and non-finite counts of values."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch._C._distributed_c10d import HashStore

from legacy_ddp.debug import Recorder
from tests.helpers import logged_warnings
from tests.helpers.recorded import Recorded, word_of

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
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


def _random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)


def _full(*shape: int, value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full(shape, value, dtype=torch.float64).to(dtype)


def _with(numel: int, values: dict[int, float]) -> torch.Tensor:
    """Zeros, but for ``values`` at some places."""
    tensor = torch.zeros(numel)
    tensor[list(values)] = torch.tensor([*values.values()])
    return tensor


def _sparse(values: list[float]) -> torch.Tensor:
    indices = [[4, 1, 4], [0, 2, 0]]
    return torch.sparse_coo_tensor(indices, values, (5, 3), check_invariants=True)  # type: ignore[arg-type]


def cases() -> dict[str, tuple[torch.Tensor, Any, int]]:
    """Tensor, its norm by hand, and its number of elements that are not finite."""
    most = torch.finfo(torch.float64).max
    return {
        **{
            f"{2 * count**2} of {dtype}": (torch.tensor([3.0, 4.0] * count**2).to(dtype), 5 * count, 0)
            for dtype in (*FLOATS, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.int64, torch.uint8)
            for count in (1, 3, 16)
        },
        "bools": (torch.tensor([True, False, True, True, True]), 2, 0),
        "complex numbers": (torch.tensor([3 + 4j, 12j]), 13, 0),
        "conjugates": (torch.tensor([3 + 4j, 12j]).conj(), 13, 0),
        "their imaginary parts": (torch.tensor([3 + 4j, 12j]).conj().imag, pytest.approx(160**0.5, rel=2**-23), 0),
        "one element": (torch.tensor(-7.5), 7.5, 0),
        "an integer that no fp32 holds": (torch.tensor([2**24 + 1]), 2**24 + 1, 0),
        "the least integer": (torch.tensor([-(2**63)]), _digits(2.0**63), 0),
        "sparse": (_sparse([1.0, 4.0, 2.0]), 5, 0),
        **{f"no element of {dtype}": (torch.empty(0, 3, dtype=dtype), 0, 0) for dtype in FLOATS},
        **{f"zeros of {dtype}": (-torch.zeros(PARTS + 5, dtype=dtype), 0, 0) for dtype in FLOATS},
        **{
            f"large of {dtype}": (_full(4, value=large, dtype=dtype), _digits(2 * large), 0)
            for dtype, large in zip(FLOATS, (60_000.0, 2.0**127, 2.0**127, 2.0**1000), strict=True)
        },
        "the largest": (_full(1, value=most, dtype=torch.float64), _digits(most), 0),
        "a norm that no number is large enough for": (_full(4, value=most, dtype=torch.float64), None, 0),
        **{
            f"{numel} too small to square, {small}": (_full(numel, value=small), _digits(numel**0.5 * small), 0)
            for small in (2.0**-40, 2.0**-75, 2.0**-100, 2.0**-149)
            for numel in (4, 4 * PARTS)
        },
        **{
            f"element {place} of {numel}": (_with(numel, {place: 3.0}), 3, 0)
            for numel in (PARTS - 1, PARTS, PARTS + 1, 3 * PARTS)
            for place in {0, min(PARTS, numel) - 1, numel // 2, numel - 1}
        },
        "NaN of float8": (torch.tensor([3.0, math.nan]).to(torch.float8_e5m2), 3, 1),
        "NaN of complex": (torch.tensor([complex(3, math.inf), complex(0, 4)]), 5, 1),
        "NaN of sparse": (_sparse([1.0, math.nan, 2.0]), 3, 1),
        "NaN alone": (_full(3, value=math.nan), 0, 3),
        "NaN in a large one": (
            _with(3 * PARTS + 5, {7: 3, 2 * PARTS: 4, **dict.fromkeys((5, PARTS, 3 * PARTS + 4), math.nan)}),
            5,
            3,
        ),
        "large beside infinity": (torch.tensor([math.inf, *[2.0**127] * 4]), _digits(2.0**128), 1),
    }


def _digits(norm: float) -> float:
    return float(f"{norm:.8e}")


def test_digests_norms_and_counts_of_tensors_of_any_kind_are_those_by_hand() -> None:
    expected = {name: (word_of(tensor), norm, count) for name, (tensor, norm, count) in cases().items()}

    assert dict(zip(expected, measure([tensor for tensor, *_ in cases().values()]), strict=True)) == expected


@given(st.lists(st.floats(-1e6, 1e6), max_size=20))
def test_the_norm_of_fp64_has_9_digits(numbers: list[float]) -> None:
    [(_, norm, _)] = measure([torch.tensor(numbers, dtype=torch.float64)])

    assert norm == _digits(norm)
    if (exact := math.hypot(*numbers)) > 1e-140:
        assert norm == pytest.approx(exact, rel=0.51e-8, abs=0)


@given(
    st.sampled_from(FLOATS),
    st.lists(st.floats(-100, 100, width=16) | st.sampled_from([math.inf, -math.inf, math.nan]), max_size=12),
)
def test_the_norm_is_of_finite_elements_and_the_others_are_counted(dtype: torch.dtype, numbers: list[float]) -> None:
    tensor = torch.tensor(numbers, dtype=torch.float64).to(dtype)
    [(_, norm, nonfinite)] = measure([tensor])

    assert nonfinite == sum(not math.isfinite(number) for number in numbers)
    exact = math.hypot(*(number for number in tensor.tolist() if math.isfinite(number)))
    assert norm == pytest.approx(exact, rel=1e-6, abs=0)


def test_the_norm_of_many_elements_is_as_exact_as_that_of_few() -> None:
    tensors = [_random(4096, 1031, dtype=dtype) for dtype in FLOATS]
    tensors += [tensor.t() for tensor in tensors]

    # One sum over all of them is wrong by 1e-4.
    for tensor, (_, norm, _) in zip(tensors, measure(tensors), strict=True):
        assert norm == pytest.approx(tensor.double().norm().item(), rel=2e-6)


def test_measuring_changes_nothing_and_says_the_same_in_inference_mode() -> None:
    tensors = [_random(5), _random(5, dtype=torch.complex64), torch.tensor([1.0, math.nan]).requires_grad_()]
    last, version = tensors[-1], tensors[-1]._version
    before = measure(tensors)

    assert (last._version, last.grad, torch.is_grad_enabled()) == (version, None, True)
    assert torch.equal(last.isnan(), torch.tensor([False, True]))
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
