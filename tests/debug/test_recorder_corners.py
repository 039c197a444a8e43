"""The recorder in unusual trainings, with wrong arguments, and on a disk that fails."""

import copy
import os
import resource
import shutil
import traceback
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from legacy_ddp import Checks, LegacyDistributedDataParallel, TraceError, all_reduce_gradients
from legacy_ddp.debug import Recorder, digest
from tests.helpers import logged_warnings
from tests.helpers.command import compare
from tests.helpers.processes import open_files
from tests.helpers.ranks import run_ranks
from tests.helpers.recorded import Recorded, word_of
from tests.helpers.small_models import add_gradients, error_of, wrap
from tests.helpers.small_models import step as take_step
from tests.helpers.torch_versions import uses_torch_jit
from tests.test_message_parts import MuteError


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
    *,
    first: int = 1,
    steps: int = 6,
    known: bool = True,
    skipped: int = 0,
    leave_at: int = 0,
    wrapped: bool = True,
) -> None:
    """Train on data that follow from the step, and record from step ``first`` on, perhaps without the optimizer."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    called = LegacyDistributedDataParallel(model) if wrapped else model
    recorder = Recorder(called, folder, optimizer=optimizer if known else None, first_step=first)
    with ExitStack() as stack:
        for step in range(1, steps + 1):
            if step == first:
                stack.enter_context(recorder)
            optimizer.zero_grad()
            data = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
            called(data).square().mean().backward()
            called.all_reduce() if wrapped else all_reduce_gradients(called)
            if step == leave_at:
                raise KeyboardInterrupt
            if step != skipped:
                optimizer.step()


# Two trainings, and the last step that they have in common.
PAIRS: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    **{f"left, {given}": (given, {**given, "leave_at": 4}, 4) for given in ({}, {"known": False})},
    "closed before the last step of the optimizer": ({}, {"steps": 4, "skipped": 4}, 4),
    **{
        f"short, {given}": (given, {**given, "steps": 3}, 3)
        for given in ({"known": False}, {"skipped": 3}, {"wrapped": False, "known": False}, {"wrapped": False}, {})
    },
    **{
        f"recorded without the optimizer, {given}": (given, {**given, "known": False}, 6)
        for given in ({}, {"wrapped": False})
    },
    **{f"resumed, {given}": (given, {**given, "first": 4}, 6) for given in ({}, {"known": False})},
}


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", PAIRS)
def test_trainings_are_the_same_as_far_as_both_go(tmp_path: Path, name: str) -> None:
    *pair, last = PAIRS[name]
    for label, given in zip("ab", pair, strict=True):
        with suppress(KeyboardInterrupt):
            _train(tmp_path / label, **given)

    comparison = compare(tmp_path / "a", tmp_path / "b")

    assert (comparison.verdict, comparison.steps) == ("same", (pair[1].get("first", 1) - 1, last))
    trace = Recorded(tmp_path / "b")
    assert trace.end == ("KeyboardInterrupt" if "leave_at" in pair[1] else "closed")
    if pair[1] == {"wrapped": False, "known": False, "steps": 3}:  # no forward pass is seen that follows the last step
        assert (3, "buffers") not in trace.sections


@pytest.mark.usefixtures("alone")
def test_a_step_that_calls_the_step_of_its_base_class_is_recorded_at_its_end(tmp_path: Path) -> None:
    torch.optim.AdamW([torch.zeros(1, requires_grad=True)])  # from now on torch looks at the steps of that class, too
    model = wrap()
    optimizer = _Clamped(model.parameters(), lr=0.5)
    with Recorder(model, tmp_path, optimizer=optimizer):
        take_step(model, 1.0)
        optimizer.step()

    assert Recorded(tmp_path).words(1, "parameters") == {"parameter 'weight'": word_of(model.module.weight)}
    assert model.module.weight.abs().max() <= 0.3


@pytest.mark.usefixtures("alone")
def test_a_step_that_raised_does_not_hide_the_next_one(tmp_path: Path) -> None:
    model = wrap()
    nn.init.ones_(model.module.weight)  # sums below are exact
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def fail() -> float:
        raise ValueError

    with Recorder(model, tmp_path, optimizer=optimizer):
        for fails in (True, False):
            take_step(model, 1.0)
            if fails:
                assert error_of(optimizer.step, fail) is not None
            optimizer.step()
            with torch.no_grad():
                model.module.weight.add_(1)  # after the step

    held = Recorded(tmp_path).words(2, "parameters")
    assert held == {"parameter 'weight'": word_of(model.module.weight.detach() - 1)}


@uses_torch_jit
@pytest.mark.usefixtures("alone")
def test_a_recorded_wrapper_can_be_transformed_and_traced(tmp_path: Path) -> None:
    model = wrap()
    batch, weights = torch.ones(1, 2), dict(model.named_parameters())
    with Recorder(model, tmp_path):
        assert torch.func.vmap(model, randomness="same")(torch.ones(3, 1, 2)).shape == (3, 1, 1)
        assert torch.func.jvp(model, (batch,), (batch,))[0].shape == (1, 1)
        gradient = torch.func.grad(lambda given: torch.func.functional_call(model, given, (batch,)).sum())(weights)
        assert torch.equal(gradient["module.weight"], batch)
        traced = torch.jit.trace(model, batch)
        assert torch.equal(traced(torch.ones(3, 2)), model(torch.ones(3, 2)))
        model(torch.ones(1, 2)).sum().backward()
        model.all_reduce()

    assert Recorded(tmp_path).steps == [0, 1]


class _Unreadable(dict[str, Any]):
    """State of an optimizer that fails when it is looked at, without a text."""

    def __iter__(self) -> NoReturn:
        raise MuteError


@pytest.mark.usefixtures("alone")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    "odd, reason",
    [
        (lambda: torch.nested.nested_tensor([torch.ones(1)]), "NestedTensor"),
        (_Unreadable, "MuteError: (no text: its __str__ raised ZeroDivisionError)"),
    ],
    ids=["nested", "mute"],
)
def test_a_value_that_cannot_be_recorded_ends_the_trace_and_not_the_training(
    tmp_path: Path, odd: Callable[[], Any], reason: str
) -> None:
    model = wrap()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with Recorder(model, tmp_path, optimizer=optimizer) as recorder:
        for step in (1, 2, 3):
            take_step(model, 1.0)
            if step == 2:
                optimizer.state[model.module.weight]["odd"] = odd()
            optimizer.step()
            recorder.log(step=step)
    said = logged_warnings.take_all()

    [told] = [warning.text for warning in said if "the training goes on" in warning.text]
    assert "rank-00000.jsonl ends before step 3" in told
    assert reason in told
    trace = Recorded(tmp_path)
    assert (trace.steps, trace.end, trace.logged) == ([0, 1, 2], "", {1: {"step": 1.0}})


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


def _sit_out(rank: int, folder: Path) -> None:
    for name, garbage in (("a", 5.0), ("b", 7.0)):
        model = wrap()
        with torch.no_grad():
            model.module.weight.fill_(1.0)
        with Recorder(model, folder / name):
            add_gradients(model, garbage if rank == 1 else 1.0)
            model.all_reduce(skip=rank == 1)


def test_gradients_of_a_rank_that_sits_out_are_nobody_s_business(tmp_path: Path) -> None:
    run_ranks(_sit_out, 2, tmp_path)

    assert compare(tmp_path / "a", tmp_path / "b").verdict == "same"
    assert [(1, "local_gradients") in Recorded(tmp_path / "a", rank).sections for rank in (0, 1)] == [True, False]


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


_COUNT = "expected a whole number from 1 to 1,000,000,000,000,000"
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"every": 0}, f"ValueError: every is not usable: got 0, {_COUNT}"),
    ({"every": True}, f"ValueError: every is not usable: got True, {_COUNT}"),
    ({"first_step": 0}, f"ValueError: first_step is not usable: got 0, {_COUNT}"),
    ({"argv": "no"}, "TypeError: argv is not usable: got 'no', expected True or False"),
    ({"folder": 3}, "TypeError: folder is not usable: got 3, expected a path"),
    ({"folder": ""}, "TypeError: folder is not usable: got '', expected a path"),
    ({"folder": Path("\0")}, "ValueError: folder is not usable: got '\\x00', expected a path without a null character"),
    (
        {"folder": "~nobody-of-that-name/x"},
        "ValueError: folder is not usable: got '~nobody-of-that-name/x', expected ~ with a known home directory; name "
        "the whole path",
    ),
    (
        {"optimizer": [3]},
        "TypeError: optimizer is of the wrong type: got int, expected torch.optim.Optimizer or several",
    ),
    (
        {"model": 3},
        "TypeError: model is of the wrong type: got int, expected a LegacyDistributedDataParallel, or the module that "
        "all_reduce_gradients() is called with",
    ),
    *(
        (
            {"operations": value},
            f"TypeError: operations is of the wrong type: got {value!r}, expected numbers of steps, as range(40, 42)",
        )
        for value in (40, "40")
    ),
    ({"operations": [1, 2.0]}, "TypeError: operations holds a float: got 2.0, expected numbers of steps"),
    ({"operations": [True]}, "TypeError: operations holds a bool: got True, expected numbers of steps"),
    *(
        (
            {"operations": value},
            f"ValueError: operations holds more than numbers of steps: got {least}, expected whole numbers from 1",
        )
        for value, least in (({0, 3}, 0), (range(-1, 3), -1))
    ),
    *(
        (
            {"operations": value},
            f"ValueError: operations holds no step: got {value!r}, expected a first step before the end, as "
            "range(40, 42); pass () for no operations",
        )
        for value in (range(5, 1), range(0))
    ),
    (
        {"process_group": True},
        "ValueError: process_group is the wrapper's own, expected None; assign model.process_group instead",
    ),
]


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("arguments, expected", WRONG)
def test_wrong_arguments_are_named(tmp_path: Path, arguments: dict[str, Any], expected: str) -> None:
    said = error_of(Recorder, **{"model": wrap(), "folder": tmp_path, **arguments})

    assert ": ".join(said or ()) == expected
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("alone")
def test_torch_ddp_is_refused_because_nothing_would_be_seen(tmp_path: Path) -> None:
    said = error_of(Recorder, torch.compile(DistributedDataParallel(nn.Linear(2, 1)), backend="eager"), tmp_path)

    assert said is not None
    assert "got DistributedDataParallel, expected a LegacyDistributedDataParallel" in said[1]


@pytest.mark.usefixtures("alone")
def test_an_error_on_entering_comes_without_the_errors_of_the_system_and_overwrites_nothing(tmp_path: Path) -> None:
    model = wrap()
    name = "rank-00000.jsonl"
    (tmp_path / "file").touch()
    (tmp_path / name).write_text("precious")
    for folder, text in (
        (tmp_path, f"/{name} exists, expected no trace of this rank there; name another folder, or remove that one"),
        (tmp_path / "file", " is no folder; name another folder, or a path that does not exist yet"),
        (tmp_path / "file" / "below", f"/{name} cannot be written: Not a directory; name another folder"),
        (Path("/proc/none"), f"/{name} cannot be written: No such file or directory; name another folder"),
    ):
        with pytest.raises(TraceError) as caught, Recorder(model, folder):
            pass

        assert str(caught.value) == f"{folder}{text}"
        assert "Error" not in "".join(traceback.format_exception(caught.value)).replace("TraceError", "")
        assert not any(vars(model._synchronizer.observers).values())
    assert (tmp_path / name).read_text() == "precious"


@pytest.mark.usefixtures("alone")
def test_a_folder_may_lie_in_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    model = wrap()
    with Recorder(model, "~/runs/x"):
        take_step(model, 1.0)

    assert Recorded(tmp_path / "home" / "runs" / "x").steps == [0, 1]
    assert [path.name for path in tmp_path.iterdir()] == ["home"]


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("is_at_the_end", [False, True])
def test_a_folder_that_was_deleted_during_the_run_is_warned_of(tmp_path: Path, is_at_the_end: bool) -> None:
    model = wrap()
    with Recorder(model, tmp_path / "trace"):
        take_step(model, 1.0)
        shutil.rmtree(tmp_path / "trace")
        if not is_at_the_end:
            model.all_reduce()
    said = logged_warnings.take_all()

    [told] = [warning.text for warning in said if "the training goes on" in warning.text]
    assert "rank-00000.jsonl ends before step 2, and the training goes on" in told
    assert told.endswith("(the file was deleted)")


def _fill_the_disk(rank: int, folder: Path) -> tuple[list[str], int]:
    model = wrap()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    with Recorder(model, folder, optimizer=optimizer):
        if rank == 1:  # no file of this process may grow beyond that
            room = os.path.getsize(folder / "rank-00001.jsonl") + 2000
            resource.setrlimit(resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))
        for _ in range(8):
            take_step(model, 1.0)
            optimizer.step()
    said = logged_warnings.take_all()
    assert not any(str(folder) in name for name in open_files())
    assert {warning.filename for warning in said} <= {__file__}  # and not a file of the library or of torch
    return [warning.text for warning in said], digest(model.module.weight)


def test_a_full_disk_ends_the_trace_and_not_the_training(tmp_path: Path) -> None:
    (none, weights), (said, others_weights) = run_ranks(_fill_the_disk, 2, tmp_path)

    assert none == []
    assert len(said) == 1
    assert "rank-00001.jsonl ends before step" in said[0]
    assert "cannot be recorded or written any more (File too large)" in said[0]
    assert weights == others_weights
    whole, cut = Recorded(tmp_path, 0), Recorded(tmp_path, 1)
    assert (whole.end, whole.steps) == ("closed", list(range(9)))
    assert cut.end == ""
    assert 1 < len(cut.steps) < 9
    for step in cut.steps:
        assert cut.words(step, "reduced_gradients") in (whole.words(step, "reduced_gradients"), None)
