"""The recorder in unusual trainings: correct contents, no needless warnings."""

import copy
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist
from torch import nn

from legacy_ddp import Checks, LegacyDistributedDataParallel, all_reduce_gradients
from legacy_ddp.debug import Recorder, digest
from tests.helpers import logged_warnings
from tests.helpers.command import compare
from tests.helpers.ranks import run_ranks
from tests.helpers.recorded import Recorded
from tests.helpers.small_models import add_gradients, error_of, wrap
from tests.helpers.torch_versions import uses_torch_jit
from tests.test_message_parts import MuteError


def _net() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


class _Clamped(torch.optim.AdamW):
    """Goes on after the step of its base class, which torch looks at as another step inside."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.clamp_(-0.3, 0.3)
        return loss


def _train(
    folder: Path,
    steps: int,
    *,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    known: bool = True,
    skipped: int = 0,
    leave_at: int = 0,
    wrapped: bool = True,
    first: int = 1,
) -> nn.Module:
    """Steps from ``first`` to ``steps`` on data that follow from the step. The recorder may know the optimizer."""
    model = _net() if model is None else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01) if optimizer is None else optimizer
    called = LegacyDistributedDataParallel(model) if wrapped else model
    with Recorder(called, folder, optimizer=optimizer if known else None, first_step=first):
        for step in range(first, steps + 1):
            optimizer.zero_grad()
            data = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
            called(data).square().mean().backward()
            called.all_reduce() if wrapped else all_reduce_gradients(called)
            if step == leave_at:
                raise KeyboardInterrupt
            if step != skipped:
                optimizer.step()
    return model


def _word(tensor: torch.Tensor) -> str:
    return f"{digest(tensor) % 2**64:016x}"


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("known", [True, False])
def test_a_run_left_between_call_and_step_is_not_different(tmp_path: Path, known: bool) -> None:
    _train(tmp_path / "whole", 6, known=known)
    with pytest.raises(KeyboardInterrupt):
        _train(tmp_path / "left", 6, leave_at=4, known=known)

    comparison = compare(tmp_path / "whole", tmp_path / "left")

    assert (comparison.verdict, comparison.steps) == ("same", (0, 4))


def _leave_on_rank_1(rank: int, folder: Path) -> None:
    model = wrap()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with Recorder(model, folder, optimizer=optimizer):
        for step in (1, 2):
            model.zero_grad()
            add_gradients(model, 1.0)
            model.all_reduce()
            if rank == 1 and step == 2:
                break
            optimizer.step()


def test_a_rank_that_leaves_before_its_last_step_does_not_part_from_the_others(tmp_path: Path) -> None:
    run_ranks(_leave_on_rank_1, 2, tmp_path)

    assert compare(tmp_path).verdict == "same"


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    "how", [{"known": False}, {"skipped": 3}, {"wrapped": False, "known": False}, {"wrapped": False}, {}]
)
def test_buffers_of_a_short_run_are_those_of_a_long_one(tmp_path: Path, how: dict[str, Any]) -> None:
    _train(tmp_path / "long", 6, **how)
    _train(tmp_path / "short", 3, **how)

    assert compare(tmp_path / "long", tmp_path / "short").verdict == "same"


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("wrapped", [True, False])
def test_a_run_recorded_without_its_optimizer_has_the_same_buffers_and_parameters(
    tmp_path: Path, wrapped: bool
) -> None:
    _train(tmp_path / "known", 4, wrapped=wrapped)
    _train(tmp_path / "unknown", 4, known=False, wrapped=wrapped)

    assert compare(tmp_path / "known", tmp_path / "unknown").verdict == "same"


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("known", [True, False])
def test_a_resumed_run_starts_from_the_buffers_that_the_step_before_left(tmp_path: Path, known: bool) -> None:
    _train(tmp_path / "whole", 6, known=known)
    model, optimizer = _net(), None
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    _train(tmp_path / "first half", 3, model=model, optimizer=optimizer, known=known)
    _train(tmp_path / "second half", 6, model=model, optimizer=optimizer, known=known, first=4)

    comparison = compare(tmp_path / "whole", tmp_path / "second half")

    assert (comparison.verdict, comparison.steps) == ("same", (3, 6))


@pytest.mark.usefixtures("alone")
def test_a_step_that_calls_the_step_of_its_base_class_is_recorded_at_its_end(tmp_path: Path) -> None:
    torch.optim.AdamW([torch.zeros(1, requires_grad=True)])  # from now on torch looks at the steps of that class, too
    model = _net()

    _train(tmp_path, 1, model=model, optimizer=_Clamped(model.parameters(), lr=0.5))

    held = Recorded(tmp_path).sections[1, "parameters"]
    assert held.words["parameter '0.weight'"] == _word(model[0].weight)
    assert model[0].weight.abs().max() <= 0.3


@pytest.mark.usefixtures("alone")
def test_a_step_that_raised_does_not_hide_the_next_one(tmp_path: Path) -> None:
    model = wrap()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def fail() -> float:
        raise ValueError

    with Recorder(model, tmp_path, optimizer=optimizer):
        for fails in (True, False):
            model.zero_grad()
            add_gradients(model, 1.0)
            model.all_reduce()
            if fails:
                assert error_of(optimizer.step, fail) is not None
            optimizer.step()
            with torch.no_grad():
                model.module.weight.add_(1)  # after the step

    held = Recorded(tmp_path).sections[2, "parameters"]
    assert held.words == {"parameter 'weight'": _word(model.module.weight.detach() - 1)}


@pytest.mark.usefixtures("alone")
def test_settings_that_are_tensors_are_those_of_the_step_although_they_change_before_the_other_optimizer_steps(
    tmp_path: Path,
) -> None:
    model = LegacyDistributedDataParallel(nn.ParameterDict({name: torch.ones(1) for name in "ab"}))
    rate = torch.tensor(0.5)
    first, second = (torch.optim.SGD([model.module[name]], lr=lr) for name, lr in (("a", rate), ("b", 0.1)))
    with Recorder(model, tmp_path, optimizer=[first, second]):
        add_gradients(model, 1.0)
        model.all_reduce()
        first.step()
        rate.mul_(2)
        second.step()

    held = Recorded(tmp_path).sections[1, "settings"]
    assert held.words["optimizer 0: lr of parameter group 0"] == _word(rate / 2)


class _Takes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1, bias=False)
        self.register_buffer("packed", torch.zeros(4, dtype=torch.uint8).view(torch.bits8))
        self.register_buffer("away", torch.empty(2, device="meta"))

    def forward(self, *_: Any) -> torch.Tensor:
        return self.linear(torch.ones(1, 2)).sum()


_ENDLESS: list[Any] = []
_ENDLESS.append(_ENDLESS)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    "given",
    [
        object(),
        torch.empty(2, device="meta"),
        torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged),
        _ENDLESS,
        {1: {2, 3}},
        torch.zeros(4, dtype=torch.uint8).view(torch.bits8),
    ],
    ids=["object", "meta", "nested", "endless", "set", "bits"],
)
def test_inputs_and_buffers_of_any_kind_leave_the_training_alone(tmp_path: Path, given: Any) -> None:
    model = LegacyDistributedDataParallel(_Takes(), init_sync=False)
    with Recorder(model, tmp_path):
        model(given).backward()
        model.all_reduce()

    trace = Recorded(tmp_path)
    assert trace.end == "closed"
    assert trace.calls[1].inputs_complete == (isinstance(given, torch.Tensor) and given.dtype is torch.bits8)
    assert trace.sections[0, "buffers"].norms == {"buffer 'away'": None, "buffer 'packed'": None}


@uses_torch_jit
@pytest.mark.usefixtures("alone")
def test_functional_transforms_of_a_recorded_wrapper_work(tmp_path: Path) -> None:
    model = wrap()
    batch, weights = torch.ones(1, 2), dict(model.named_parameters())
    with Recorder(model, tmp_path):
        assert torch.func.vmap(model, randomness="same")(torch.ones(3, 1, 2)).shape == (3, 1, 1)
        assert torch.func.jvp(model, (batch,), (batch,))[0].shape == (1, 1)
        gradient = torch.func.grad(lambda given: torch.func.functional_call(model, given, (batch,)).sum())(weights)
        assert torch.equal(gradient["module.weight"], batch)
        model(torch.ones(1, 2)).sum().backward()
        model.all_reduce()

    assert Recorded(tmp_path).steps == [0, 1]


@uses_torch_jit
@pytest.mark.usefixtures("alone")
def test_a_recorded_wrapper_can_be_traced(tmp_path: Path) -> None:
    model = wrap()
    recorder = Recorder(model, tmp_path)
    with recorder:
        traced = torch.jit.trace(model, torch.ones(1, 2))
        assert torch.equal(traced(torch.ones(3, 2)), model(torch.ones(3, 2)))
        add_gradients(model, 1.0)
        model.all_reduce()


@pytest.mark.usefixtures("alone")
def test_inputs_that_bypass_the_wrapper_leave_the_inputs_incomplete(tmp_path: Path) -> None:
    model = wrap()
    with Recorder(model, tmp_path):
        model(torch.ones(1, 2)).sum().backward()
        model.module(torch.ones(1, 2)).sum().backward()
        model.all_reduce()

    facts = Recorded(tmp_path).calls[1]
    assert (facts.forwards, facts.micro_batches, facts.inputs_complete) == (1, 2, False)


@pytest.mark.usefixtures("alone")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_value_that_cannot_be_recorded_ends_the_trace_and_not_the_training(tmp_path: Path) -> None:
    model = wrap()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with Recorder(model, tmp_path, optimizer=optimizer):
        for step in (1, 2, 3):
            model.zero_grad()
            add_gradients(model, 1.0)
            model.all_reduce()
            if step == 2:
                optimizer.state[model.module.weight]["odd"] = torch.nested.nested_tensor([torch.ones(1)])
            optimizer.step()
    said = logged_warnings.take_all()

    told = [warning.text for warning in said if "the training goes on" in warning.text]
    assert len(told) == 1
    assert "rank-00000.jsonl ends before step 3" in told[0]
    trace = Recorded(tmp_path)
    assert (trace.steps, trace.end) == ([0, 1, 2], "")


class _Unreadable(dict[str, Any]):
    """State of an optimizer that fails when it is looked at, without a text."""

    def __iter__(self) -> NoReturn:
        raise MuteError


@pytest.mark.usefixtures("alone")
def test_an_exception_whose_text_cannot_be_made_ends_the_trace_and_not_the_training(tmp_path: Path) -> None:
    model = wrap()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with Recorder(model, tmp_path, optimizer=optimizer):
        add_gradients(model, 1.0)
        model.all_reduce()
        optimizer.state[model.module.weight]["odd"] = _Unreadable()
        optimizer.step()
        (told,) = logged_warnings.take()
        assert "MuteError: (no text: its __str__ raised ZeroDivisionError)" in told


def _record_on_a_part(rank: int, folder: Path) -> int:
    groups = [dist.new_group([0, 1]), dist.new_group([2])]
    module = nn.Linear(2, 1, bias=False)
    group = groups[rank == 2]
    with Recorder(module, folder / str(int(rank == 2)), process_group=group):
        add_gradients(module, 1.0)
        return all_reduce_gradients(module, process_group=group).rank


def test_ranks_are_those_of_the_group(tmp_path: Path) -> None:
    assert run_ranks(_record_on_a_part, 3, tmp_path) == [0, 1, 0]
    assert [Recorded(tmp_path / name).environment.world_size for name in "01"] == [2, 1]


@pytest.mark.usefixtures("alone")
def test_a_wrapper_has_a_group_of_its_own(tmp_path: Path) -> None:
    assert error_of(Recorder, wrap(), tmp_path, process_group=dist.group.WORLD) == (
        "ValueError",
        "process_group is the wrapper's own, expected None; assign model.process_group instead",
    )


@pytest.mark.usefixtures("alone")
def test_a_bare_module_is_not_touched_before_its_first_call(tmp_path: Path) -> None:
    module = nn.Linear(2, 1, bias=False)
    with Recorder(module, tmp_path):
        add_gradients(module, 1.0)
        assert all_reduce_gradients(module).rows[0].micro_batches == 0  # nobody counted that backward


def _sit_out(rank: int, folder: Path, garbage: float) -> None:
    model = wrap()
    with torch.no_grad():
        model.module.weight.fill_(1.0)
    with Recorder(model, folder):
        add_gradients(model, 1.0 if rank == 0 else garbage)
        model.all_reduce(skip=rank == 1)


def test_gradients_of_a_rank_that_sits_out_are_nobody_s_business(tmp_path: Path) -> None:
    for name, garbage in (("a", 5.0), ("b", 7.0)):
        run_ranks(partial(_sit_out, folder=tmp_path / name, garbage=garbage), 2)

    assert compare(tmp_path / "a", tmp_path / "b").verdict == "same"


@pytest.mark.usefixtures("alone")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("where", ["parameters", "state"])
def test_entering_that_fails_leaves_no_file(tmp_path: Path, where: str) -> None:
    model = wrap()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    if where == "parameters":
        model.module.register_parameter("sparse", nn.Parameter(torch.eye(2).to_sparse(), requires_grad=False))
    else:
        optimizer.state[model.module.weight]["odd"] = torch.nested.nested_tensor([torch.ones(1)])

    assert error_of(Recorder(model, tmp_path, optimizer=optimizer).__enter__) is not None

    assert not list(tmp_path.iterdir())
    assert not any(vars(model._synchronizer.observers).values())


def test_digests_do_not_depend_on_the_default_device() -> None:
    tensors = [torch.arange(5, device="cpu"), torch.arange(3, device="cpu")]
    expected = [*map(digest, copy.deepcopy(tensors))]
    with torch.device("meta"):
        assert [*map(digest, tensors)] == expected


def _share_a_buffer(rank: int, folder: Path) -> None:
    module = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1))
    module[1].register_buffer("mine", module[0].running_mean)
    model = LegacyDistributedDataParallel(module, checks=Checks(local_buffers=("1.*", "*.running_var")))
    with Recorder(model, folder):
        model(torch.randn(4, 2, generator=torch.Generator().manual_seed(rank))).sum().backward()
        model.all_reduce()


def test_a_buffer_that_is_a_rank_s_own_by_its_second_name_is_left_out(tmp_path: Path) -> None:
    run_ranks(_share_a_buffer, 2, tmp_path)

    assert Recorded(tmp_path).environment.local_buffers == ("1.*", "*.running_var", "0.running_mean")
    assert compare(tmp_path).verdict == "same"
