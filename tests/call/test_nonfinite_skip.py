"""Steps that all ranks skip because of NaN or infinity: ``Checks(nonfinite="skip")``, and GradScalers."""

import copy
import os
import pickle
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from legacy_ddp import Checks, LegacyDistributedDataParallel, SyncRecord
from tests.call.test_nonfinite import HEADLINE
from tests.helpers import logged_warnings
from tests.helpers.cases import all_bits
from tests.helpers.outcomes import attempt
from tests.helpers.ranks import run_ranks
from tests.helpers.shared_jobs import on_ranks, run_cases
from tests.helpers.small_models import Said, add_gradients, error_of, step, wrap

NAN, INF = float("nan"), float("inf")
SKIP = Checks(nonfinite="skip")


class _Model(nn.Module):
    """A dense and a sparse gradient: the input, and ones in two rows."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.rows = nn.Embedding(4, 1, sparse=True)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return (self.weight * values).sum() + self.rows(torch.tensor([0, 2])).sum()


def _values(rank: int, value: float) -> torch.Tensor:
    return torch.tensor([1.0, value if rank == 1 else 1.0])


def _call(model: Any, rank: int, value: float, **arguments: Any) -> SyncRecord:
    """A step in which rank 1 has ``value`` in its gradient."""
    model.zero_grad()
    with model.no_sync():
        model(_values(rank, 1.0)).backward()
    if model._synchronizer.settings.reproducible:
        with model.no_sync():
            model(_values(rank, value)).backward()
    else:
        model(_values(rank, value)).backward()
    record: SyncRecord = model.all_reduce(**arguments)
    return record


def _grads(model: nn.Module) -> list[Any]:
    return [None if p.grad is None else p.grad.to_dense().flatten().tolist() for p in model.parameters()]


WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # settings of the wrapper, arguments of the call
    "plain": ({}, {}),
    "weighted": ({}, {"sample_size": 2}),
    "in tree order": ({"reproducible": True}, {"sample_size": 2}),
    "detail": ({}, {}),
    "copies": ({"gradient_as_bucket_view": False}, {}),
}


def _skips(rank: int) -> dict[str, list[Any]]:
    """Records, gradients and warnings of a good, two bad and a good call, for every way."""
    found: dict[str, list[Any]] = {}
    for name, (settings, arguments) in WAYS.items():
        level = "detail" if name == "detail" else "info"
        module = _Model() if not settings.get("reproducible") else nn.Linear(2, 1, bias=False)
        model = LegacyDistributedDataParallel(module, checks=Checks(level, nonfinite="skip"), **settings)
        steps = []
        for value in (1.0, NAN, float("inf"), 1.0):
            record = _call(model, rank, value, metrics={"loss": rank + 1.0}, **arguments)
            steps.append((record.skipped, record.skipped_ranks, record.metrics["loss"], _grads(model)))
        found[name] = [steps, logged_warnings.take()]
    return found


@pytest.mark.unsimulated("it has no sparse tensors")
def test_all_ranks_skip_the_step_of_a_rank_with_a_nan_whatever_the_way() -> None:
    for found in run_ranks(_skips, 2):
        for name, (steps, warned) in found.items():
            (good, *bad, last) = steps
            assert [step[0] for step in steps] == [False, True, True, False], name
            assert good == last
            assert all(gradient is not None for gradient in good[3])
            for _, ranks, loss, grads in bad:
                assert (ranks, loss) == ((0, 1), 3.0)
                assert set(map(str, grads)) == {"None"}
            # Told once for the two calls in a row.
            (text,) = warned
            assert "all_reduce() call 2: non-finite gradients, found before they were exchanged:\n  rank 1: " in text
            assert "all ranks skip this step (1 until now): every .grad is None" in text


@pytest.mark.unsimulated("it has no sparse tensors")
@on_ranks(2, [[True, True]] * 2)
def test_a_training_that_skips_for_ever_says_so_again(rank: int) -> list[bool]:
    model = LegacyDistributedDataParallel(_Model(), checks=SKIP)
    for _ in range(12):
        _call(model, rank, NAN)
    return [f"({steps} until now)" in text for steps, text in zip((1, 10), logged_warnings.take(), strict=True)]


@on_ranks(2, [(1, True)] * 2)
def test_a_hook_does_not_see_the_nan_of_a_skipped_step(rank: int) -> tuple[int, bool]:
    """How often a hook ran in two calls, of which the first is bad, and whether the second was reduced."""
    model = LegacyDistributedDataParallel(nn.Linear(2, 1, bias=False), checks=SKIP)
    ran = []

    def hook(_: object, bucket: Any) -> torch.Tensor:
        ran.append(bucket)
        return torch.full((2,), 5.0)

    model.register_comm_hook(None, hook)
    _call(model, rank, NAN)
    _call(model, rank, 1.0)
    assert len(logged_warnings.take()) == 1
    return len(ran), _grads(model) == [[5.0, 5.0]]


def _has_scaler(rank: int, with_scaler: Sequence[int]) -> tuple[str, bool, float, list[Any]]:
    """The error, whether the call skipped, the scale and the weights after a step of a GradScaler."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0) if rank in with_scaler else None
    model = LegacyDistributedDataParallel(
        nn.Linear(2, 1, bias=False), checks=Checks(nonfinite="skip", grad_scaler=scaler)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    loss = model(_values(rank, float("inf"))).sum()
    (loss if scaler is None else scaler.scale(loss)).backward()
    records: list[SyncRecord] = []
    error = attempt(lambda: records.append(model.all_reduce()))
    before = model.module.weight.detach().clone()
    if scaler is not None and not error:
        scaler.step(optimizer)
        scaler.update()
    is_same = torch.equal(before, model.module.weight)
    skipped = bool(records) and records[0].skipped
    return str(error or ""), skipped, scaler.get_scale() if scaler else 0.0, [is_same, logged_warnings.take()]


def test_with_a_grad_scaler_on_all_ranks_the_scalers_skip_the_step_and_on_some_ranks_it_is_an_error() -> None:
    found = run_cases(_has_scaler, 2, {"all": ((0, 1),), "some": ((0,),)})

    assert found["all"] == [("", False, 2.0, [True, []])] * 2
    for error, *_ in found["some"]:
        assert error.startswith("all_reduce() call 1: rank 1: non-finite gradients, and rank 1 without an enabled Grad")


def _skips_with_checks_off(rank: int) -> tuple[bool, list[Any], str, list[str]]:
    """A step with a NaN on rank 1, where the environment of rank 0 says off: the record, and what is told."""
    if rank == 0:
        os.environ["LEGACY_DDP_CHECKS"] = "off"
    model = LegacyDistributedDataParallel(nn.Linear(2, 1, bias=False), checks=SKIP)
    model(_values(rank, NAN)).backward()
    record = model.all_reduce()
    return record.skipped, _grads(model), str(record), logged_warnings.take()


def test_checks_that_the_environment_switches_off_still_skip_a_step_and_the_record_says_why() -> None:
    """The variable dropped the setting without a word, and a record said that no rank took part."""
    for skipped, grads, text, told in run_ranks(_skips_with_checks_off, 2):
        assert (skipped, grads) == (True, [None])
        assert text.startswith(
            "call 1: all ranks skipped this step, because of NaN or infinity on rank 1, every .grad is None"
        )
        assert "took no part" not in text
        assert len(told) == 1


# GradScaler


class Training:
    """Mixed-precision training on the CPU, as torch's recipe has it."""

    def __init__(self, rank: int, *, policy: str = "raise", init_scale: float = 65536.0, enabled: bool = True) -> None:
        self.rank = rank
        self.scaler = torch.amp.GradScaler("cpu", init_scale=init_scale, enabled=enabled)
        self.model = LegacyDistributedDataParallel(
            nn.Linear(4, 2), checks=Checks(nonfinite=policy, grad_scaler=self.scaler)
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.generator = torch.Generator().manual_seed(rank)

    def step(self, factor: float = 1.0) -> list[object]:
        x = torch.randn(8, 4, generator=self.generator)
        self.optimizer.zero_grad()
        self.scaler.scale(self.model(x).square().mean() * factor).backward()
        self.model.all_reduce()
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return all_bits([p.detach() for p in self.model.parameters()])


def _overflows_once(rank: int, policy: str) -> tuple[list[list[object]], list[float]]:
    training = Training(rank, policy=policy)
    weights, scales = [], []
    for call in range(8):
        weights.append(training.step(factor=1e36 if (call, rank) == (3, 1) else 1.0))
        scales.append(training.scaler.get_scale())
    return weights, scales


def test_an_overflow_of_the_scaler_is_a_step_that_all_ranks_skip_silently() -> None:
    for (weights, scales), *others in run_cases(_overflows_once, 3, {"raise": ("raise",), "warn": ("warn",)}).values():
        assert others == [(weights, scales)] * 2
        assert scales == [65536.0] * 3 + [32768.0] * 5
        moved = [weights[call] != weights[call - 1] for call in range(1, 8)]
        assert moved == [True, True, False, True, True, True, True]


def _nan_at_every_step(rank: int, init_scale: float, enabled: bool) -> tuple[list[float], Said]:
    training = Training(rank, init_scale=init_scale, enabled=enabled)
    scales = []
    for _ in range(10):
        if said := error_of(training.step, factor=NAN if rank == 1 else 1.0):
            return scales, said
        scales.append(training.scaler.get_scale())
    return scales, None


_AT_1 = "the GradScaler's scale is {}: to skip this step would not help\n"
# The initial scale, whether the scaler is enabled, the scales until the error, and its words.
_SCALES: list[tuple[float, bool, list[float], str]] = [
    (8.0, True, [4.0, 2.0, 1.0], _AT_1.format(1)),
    (1.0, True, [], _AT_1.format(1)),
    (0.5, True, [], _AT_1.format(0.5)),
    (65536.0, False, [], ""),
]


def test_a_nan_that_the_scaler_did_not_make_is_reported_once_the_scale_is_down() -> None:
    seen = run_cases(_nan_at_every_step, 2, {str(case): case[:2] for case in _SCALES})
    for case in _SCALES:
        first, second = seen[str(case)]
        _, _, scales, words = case
        assert first == second
        assert first[0] == scales
        kind, text = first[1]
        assert kind == "NonFiniteGradientError"
        assert text == (
            f"all_reduce() call {len(scales) + 1}: {HEADLINE}"
            "  rank 1: every gradient (2 of 2 parameters): look at its loss and its input\n"
            f"{words}nothing changed: mend the cause, or zero_grad() on all ranks drops this step"
        )


class _OwnScaler:
    """Not of torch: only what the checks ask for."""

    def __init__(self, scale: float) -> None:
        self._scale = scale

    def is_enabled(self) -> bool:
        return True

    def get_scale(self) -> float:
        return self._scale


class _Broken(_OwnScaler):
    def get_scale(self) -> float:
        raise LookupError("no scale here")


def _other_scaler_on(rank: int, odd: int, which: str) -> Said:
    scalers: dict[str, Any] = {
        "none": None,
        "disabled": torch.amp.GradScaler("cpu", enabled=False),
        "at 1": torch.amp.GradScaler("cpu", init_scale=1.0),
        "at infinity": torch.amp.GradScaler("cpu", init_scale=INF),
        "broken": _Broken(1.0),
    }
    scaler = scalers[which] if rank == odd else torch.amp.GradScaler("cpu")
    model = wrap(checks=Checks(nonfinite="raise", grad_scaler=scaler))
    add_gradients(model, INF if rank == 1 else 1.0)
    said = error_of(model.all_reduce)
    assert step(model, rank) == 1.0
    return said


_OTHER_SCALERS = {
    (0, "none"): "no GradScaler is enabled on rank 0: not all ranks would skip this step",
    (1, "none"): "no GradScaler is enabled on rank 1: not all ranks would skip this step",
    (2, "disabled"): "no GradScaler is enabled on rank 2: not all ranks would skip this step",
    (2, "at 1"): "the GradScaler's scale is 1: to skip this step would not help",
    (0, "at infinity"): "the GradScaler's scale is inf: to skip this step would not help",
    (1, "broken"): "rank 1: inspection failed: LookupError: no scale here\nnothing changed",
    (2, "broken"): "rank 1: 'weight': 2 inf of 2\n  rank 2: inspection failed: LookupError: no scale here\nnothing",
}


def test_one_rank_without_a_scaler_overflow_makes_it_an_error_on_all() -> None:
    seen = run_cases(_other_scaler_on, 3, {str(case): case for case in _OTHER_SCALERS})
    for case, words in _OTHER_SCALERS.items():
        first, *others = seen[str(case)]
        assert others == [first] * 2
        assert first[0] == "NonFiniteGradientError"
        assert words in first[1], case


@pytest.mark.cpu("a device tells later")
@on_ranks(2, [[0, 1]] * 2)
def test_overflows_in_a_row_of_a_scaler_that_is_not_of_torch_are_told_at_its_least_scale_alone(rank: int) -> list[int]:
    """Three calls in a row without finite gradients: the number of warnings in the log, for two scales."""
    found = []
    for scale in (128.0, 1.0):
        model = wrap(checks=Checks(grad_scaler=_OwnScaler(scale)))
        for _ in range(3):
            model.zero_grad()
            add_gradients(model, INF if rank == 1 else 1.0)
            model.all_reduce()
        found.append(len(logged_warnings.take()))
    return found


@pytest.mark.usefixtures("alone")
def test_a_deep_copy_shares_the_scaler_and_a_pickle_leaves_it_out_even_in_the_middle_of_a_step() -> None:
    training = Training(0)
    training.step()
    training.scaler.scale(training.model(torch.ones(1, 4)).sum()).backward()
    training.model.all_reduce()
    training.scaler.unscale_(training.optimizer)

    with pytest.raises(AssertionError):  # torch's own word: not here
        pickle.dumps(training.scaler)
    shared, loaded = copy.deepcopy(training.model), pickle.loads(pickle.dumps(training.model))

    assert shared._settings.checks.grad_scaler is training.scaler
    assert loaded._settings.checks == Checks(nonfinite="raise")
    for model, raises in [(shared, False), (loaded, True)]:
        add_gradients(model, INF)
        assert (error_of(model.all_reduce) is not None) == raises


@pytest.mark.parametrize("scaler", [65536.0, torch.amp.GradScaler, object()])
def test_an_object_that_is_no_scaler_is_refused(scaler: Any) -> None:
    with pytest.raises(
        TypeError, match=r"^checks: grad_scaler is not usable: got .*, expected a torch\.amp\.G"
    ) as caught:
        Checks(grad_scaler=scaler)

    assert "an object with the methods is_enabled() and get_scale()" in str(caught.value)
