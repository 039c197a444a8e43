"""Does all_reduce() equal one process that holds every rank's gradients, for any module and any way of using it?

Also: what holds for any layout, any rows to compare and any header.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial
from itertools import chain, pairwise
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn

from legacy_ddp import Checks, LegacyDistributedDataParallel, SyncRecord
from legacy_ddp._memory.layout import cut_runs, distinct, plan_layout
from legacy_ddp._ranks.header import Header, Headers, encode_header
from legacy_ddp._settings import Settings
from legacy_ddp._text import MISSING, compare_rows, name_ranks
from tests.helpers.ranks import run_ranks
from tests.helpers.small_sizes import move_gradients_from
from tests.helpers.tiers import count

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128]
NONE, DENSE, STRIDED, SPARSE = "none", "dense", "strided", "sparse"
Grads = list[torch.Tensor | None]


# --- all_reduce -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Parameter:
    """A parameter to be: ``order`` permutes its strides."""

    shape: tuple[int, ...]
    order: tuple[int, ...]
    dtype: torch.dtype
    frozen: bool

    def make(self) -> nn.Parameter:
        memory = torch.zeros([self.shape[axis] for axis in self.order], dtype=self.dtype)
        axes = [self.order.index(axis) for axis in range(len(self.order))]
        return nn.Parameter(memory.permute(axes), requires_grad=not self.frozen)


@dataclass(frozen=True)
class Step:
    """One call: what is cleared before it, and per rank what it brings and says."""

    set_to_none: bool
    kinds: tuple[tuple[str, ...], ...]
    parts: tuple[dict[str, Any], ...]


@dataclass(frozen=True)
class Training:
    """A module, its wrapper's settings and its calls.

    ``ties``: of which parameters there is a second name. ``keeps``: somebody holds on to the gradients of every call.
    ``moves``: gradients move to their slots during backward, however small they are.
    """

    parameters: tuple[Parameter, ...]
    ties: tuple[int, ...]
    keeps: bool
    moves: bool
    options: dict[str, Any]
    steps: tuple[Step, ...]


@st.composite
def _parameters(draw: st.DrawFn) -> Parameter:
    shape = draw(st.lists(st.integers(0, 4), max_size=3).map(tuple))
    order = draw(st.permutations(range(len(shape))).map(tuple))
    return Parameter(shape, order, draw(st.sampled_from(DTYPES)), draw(st.integers(0, 4)) == 0)


def _parts(world_size: int) -> st.SearchStrategy[tuple[dict[str, Any], ...]]:
    skip = st.just({"skip": True})
    plain = st.just({}) | st.just({}) | skip
    weighted = st.integers(0, 5).map(lambda n: {"sample_size": n}) | skip
    return st.tuples(*[plain] * world_size) | st.tuples(*[weighted] * world_size)


@st.composite
def _trainings(draw: st.DrawFn, world_size: int) -> Training:
    parameters = draw(st.lists(_parameters(), min_size=1, max_size=5).map(tuple))
    kinds = st.tuples(
        *[
            st.sampled_from([NONE, DENSE, STRIDED, SPARSE] if len(p.shape) == 2 else [NONE, DENSE, STRIDED])
            for p in parameters
        ]
    )
    steps = st.builds(Step, st.booleans(), st.tuples(*[kinds] * world_size), _parts(world_size))
    options = {
        "buffer_size": draw(st.sampled_from([1, 3, 7, 64, 2**28])),
        "gradient_as_bucket_view": draw(st.booleans()),
    }
    ties = draw(st.lists(st.integers(0, len(parameters) - 1), max_size=2).map(tuple))
    all_steps = draw(st.lists(steps, min_size=1, max_size=3).map(tuple))
    return Training(parameters, ties, draw(st.booleans()), draw(st.booleans()), options, all_steps)


class _Modules(nn.Module):
    """The parameters under names p0, p1, ...; ranks register them in different orders."""

    def __init__(self, training: Training, *, backwards: bool) -> None:
        super().__init__()
        made = [parameter.make() for parameter in training.parameters]
        named = [(f"p{index}", parameter) for index, parameter in enumerate(made)]
        named += [(f"a{index}", made[tie]) for index, tie in enumerate(training.ties)]
        for name, parameter in reversed(named) if backwards else named:
            self.register_parameter(name, parameter)
        self.made = tuple(made)


def _new_values(parameter: Parameter, generator: torch.Generator) -> torch.Tensor:
    """Small integers: their sums are exact in every dtype."""
    values = torch.randint(-4, 5, parameter.shape, generator=generator).to(parameter.dtype)
    return values * (1 - 2j) if parameter.dtype.is_complex else values


def _bring(parameter: nn.Parameter, kind: str, values: torch.Tensor) -> None:
    """Add to the gradient as backward does, or assign one."""
    if kind == DENSE:
        (parameter * values.conj()).sum().real.backward()  # of |p| this is the gradient: values
    elif kind == STRIDED:
        parameter.grad = values.t().contiguous().t() if values.dim() == 2 else values.expand(values.shape)
    elif kind == SPARSE:
        parameter.grad = values.to_sparse(1)


def _held(parameters: Sequence[nn.Parameter]) -> Grads:
    return [None if p.grad is None else p.grad.detach().clone() for p in parameters]


@dataclass(frozen=True)
class Seen:
    """One call on one rank: what was due, held before, held after; and whether what was kept is as it was."""

    due: Grads
    before: Grads
    after: Grads
    record: SyncRecord
    kept_intact: bool


def _train_all(trainings: Sequence[Training], rank: int) -> list[list[Seen]]:
    results = []
    for training in trainings:
        try:
            results.append(_train(training, rank))
        except Exception as error:
            error.add_note(f"in {training}")
            raise
    return results


def _train(training: Training, rank: int) -> list[Seen]:
    move_gradients_from(0 if training.moves else 2**40)
    module = _Modules(training, backwards=rank % 2 == 1)
    wrapped = LegacyDistributedDataParallel(module, checks=Checks(uneven="allow"), **training.options)
    generator = torch.Generator().manual_seed(rank)
    calls: list[Seen] = []
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    after: Grads = [None] * len(module.made)
    for step in training.steps:
        if training.keeps and step.set_to_none:
            kept += [(p.grad, p.grad.clone()) for p in module.made if p.grad is not None]
        wrapped.zero_grad(set_to_none=step.set_to_none)
        due: Grads = [None if grad is None or step.set_to_none else grad.to_dense() * 0 for grad in after]
        for index, parameter in enumerate(training.parameters):
            kind, values = step.kinds[rank][index], _new_values(parameter, generator)
            if not parameter.frozen and kind != NONE:
                own = module.made[index].grad
                with warnings.catch_warnings():
                    if own is not None and (own.is_sparse or not training.options["gradient_as_bucket_view"]):
                        # Not ours: without views a gradient keeps the strides it was given; sparse ones have none.
                        warnings.filterwarnings("ignore", "grad and param do not obey the gradient layout contract")
                    _bring(module.made[index], kind, values)
                due[index] = values.clone()  # the call may write to the values in place
        before = _held(module.made)
        record = wrapped.all_reduce(**step.parts[rank])
        after = _held(module.made)
        intact = all(torch.equal(grad.to_dense(), copy.to_dense()) for grad, copy in kept)
        calls.append(Seen(due, before, after, record, intact))
    return calls


def _expected(grads: Sequence[torch.Tensor | None], divisor: int) -> tuple[torch.Tensor | None, bool]:
    """The sum over the participants' gradients divided in double precision, and whether it should be sparse."""
    present = [grad for grad in grads if grad is not None]
    if not present:
        return None, False
    wide = torch.complex128 if present[0].is_complex() else torch.float64
    total = torch.stack([grad.to_dense().to(wide) for grad in present]).sum(0) / divisor
    return total.to(present[0].dtype), all(grad.is_sparse for grad in present)


def _check_call(of_ranks: Sequence[Seen], step: Step) -> None:
    counted = [part.get("sample_size", 1) if not part.get("skip") else 0 for part in step.parts]
    for seen in of_ranks:
        assert (seen.record.divisor, seen.record.skipped) == (sum(counted), sum(counted) == 0)
        assert seen.kept_intact
        for due, before in zip(seen.due, seen.before, strict=True):
            assert (due is None) == (before is None)
            assert due is None or before is None or torch.equal(due, before.to_dense())
    for index in range(len(of_ranks[0].due)):
        takers = [seen.before[index] for count, seen in zip(counted, of_ranks, strict=True) if count]
        expected, sparse = _expected(takers, sum(counted))
        for seen in of_ranks:
            grad, first = seen.after[index], of_ranks[0].after[index]
            assert (grad is None) == (expected is None)
            if grad is not None and expected is not None and first is not None:
                assert grad.is_sparse == sparse
                # Exact sums and one division; torch divides complex numbers by another route, with one rounding more.
                rtol = 2 * torch.finfo(grad.dtype).eps if grad.is_complex() else 0
                torch.testing.assert_close(grad.to_dense(), expected, rtol=rtol, atol=0)
                assert torch.equal(grad.to_dense(), first.to_dense())


def _check_trainings(trainings: Sequence[Training], world_size: int) -> None:
    results = run_ranks(partial(_train_all, trainings), world_size)
    for training, *of_ranks in zip(trainings, *results, strict=True):
        for number, (step, *seen) in enumerate(zip(training.steps, *of_ranks, strict=True)):
            try:
                _check_call(seen, step)
            except AssertionError as error:
                error.add_note(f"in call {number} of {training}")
                raise


# Several modules in each example, because starting the ranks takes longer than all the rest. So failures are not
# shrunk, which would take minutes; they name the module and the call instead.
_PHASES = [Phase.explicit, Phase.reuse, Phase.generate]


@pytest.mark.slow
@settings(max_examples=count(50, 6), phases=_PHASES)
@given(st.lists(_trainings(2), min_size=1, max_size=6))
def test_two_ranks_equal_the_single_process(trainings: list[Training]) -> None:
    _check_trainings(trainings, 2)


@pytest.mark.thorough
@settings(max_examples=20, phases=_PHASES)
@given(
    st.sampled_from([1, 3]).flatmap(
        lambda ranks: st.tuples(st.lists(_trainings(ranks), min_size=1, max_size=6), st.just(ranks))
    )
)
def test_one_rank_and_three_equal_the_single_process(case: tuple[list[Training], int]) -> None:
    _check_trainings(*case)


# --- layouts ----------------------------------------------------------------------------------------------------------


@given(_trainings(1), st.data(), st.integers(0, 40), st.integers(1, 50))
def test_runs_cover_the_present_slots_and_only_small_gaps(
    training: Training, data: st.DataObject, max_gap: int, max_numel: int
) -> None:
    named = _Modules(training, backwards=False).named_parameters(remove_duplicate=False)
    for bucket in plan_layout(distinct(named), Settings()).buckets:
        present = data.draw(st.lists(st.booleans(), min_size=len(bucket.slots), max_size=len(bucket.slots)))
        spans = [range(slot.offset, slot.offset + slot.numel) for slot in bucket.slots]
        wanted = set(chain(*(span for span, here in zip(spans, present, strict=True) if here)))

        exact, joined = bucket.runs(present), bucket.runs(present, max_gap=max_gap)

        assert _elements(exact) == sorted(wanted)
        assert set(_elements(joined)) >= wanted
        ends = list(chain(*joined))
        assert set(ends[::2]) | {stop - 1 for stop in ends[1::2]} <= wanted  # nothing absent on the outside
        assert all(start - stop > max_gap for (_, stop), (start, _) in pairwise(joined))
        cut = cut_runs(joined, max_numel=max_numel)
        assert _elements(cut) == _elements(joined)
        assert all(0 < stop - start <= max_numel for start, stop in cut)


def _elements(runs: Sequence[tuple[int, int]]) -> list[int]:
    return list(chain(*(range(start, stop) for start, stop in runs)))


# --- blame ------------------------------------------------------------------------------------------------------------

ROWS = st.lists(st.dictionaries(st.sampled_from("abc"), st.sampled_from("xyz"), max_size=3), min_size=1, max_size=9)


@given(ROWS)
def test_a_finding_names_what_differs_who_holds_what_and_everybody_outside_a_strict_majority(
    rows: list[dict[str, str]],
) -> None:
    finding = compare_rows(rows)

    things = {thing for row in rows for thing in row}
    differing = {thing for thing in things if len({row.get(thing, MISSING) for row in rows}) > 1}
    assert {difference.name for difference in finding.differences} == differing
    assert bool(finding) == bool(differing)
    blamed = set()
    for difference in finding.differences:
        holders = {rank: value for value, ranks in difference.holders for rank in ranks}
        assert holders == {rank: row.get(difference.name, MISSING) for rank, row in enumerate(rows)}
        for value, ranks in difference.holders:
            assert value in str(difference)
            assert name_ranks(ranks) in str(difference)
        majority = [value for value, ranks in difference.holders if 2 * len(ranks) > len(rows)]
        expected = {rank for rank, value in holders.items() if majority and value != majority[0]}
        assert set(difference.suspects) == expected
        blamed |= expected
    assert finding.ranks == tuple(sorted(blamed))


@given(st.sets(st.integers(0, 40), min_size=1))
def test_named_ranks_can_be_read_back(ranks: set[int]) -> None:
    word, _, text = name_ranks(ranks).partition(" ")
    spans = [part.split("-") for part in text.split(", ")]

    assert {rank for span in spans for rank in range(int(span[0]), int(span[-1]) + 1)} == ranks
    assert word == ("rank" if len(ranks) == 1 else "ranks")


# --- headers ----------------------------------------------------------------------------------------------------------

BYTES, COUNTS, WORDS = st.integers(0, 255), st.integers(0, 2**32 - 1), st.integers(-(2**63), 2**63 - 1)
SECONDS = st.floats(0.0, 2.0**60, width=32)
# The fields of Header, in their order.
FACTS = st.tuples(*[BYTES] * 3, *[COUNTS] * 3, *[WORDS] * 3, *[COUNTS] * 2, *[WORDS] * 5, *[SECONDS] * 4, *[WORDS] * 3)


@given(st.lists(FACTS, min_size=1, max_size=5))
def test_headers_survive_the_wire_in_128_bytes(rows: list[tuple[Any, ...]]) -> None:
    headers = [Header(*row) for row in rows]

    encoded = [encode_header(header) for header in headers]

    assert {len(alike + others) for alike, others in encoded} == {128}
    found = Headers(*(b"".join(parts) for parts in zip(*encoded, strict=True)))
    assert (found.size, found.rows) == (len(rows), headers)
    for field in fields(Header)[3:]:
        assert found.column(field.name) == [getattr(header, field.name) for header in headers]
