"""The contents of recorded traces, and the state that a recorder leaves alone."""

import copy
import io
import math
import os
import resource
import shutil
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.parallel import DistributedDataParallel

from legacy_ddp import Checks, LegacyDistributedDataParallel, PeerError, TraceError, all_reduce_gradients
from legacy_ddp.debug import Recorder, digest
from tests.helpers import logged_warnings
from tests.helpers.processes import open_files
from tests.helpers.ranks import run_ranks
from tests.helpers.recorded import Recorded
from tests.helpers.shared_jobs import once, run_cases
from tests.helpers.small_models import add_gradients, error_of, tanh_net, wrap


def _word(values: Any) -> str:
    return f"{digest(torch.tensor(values)) % 2**64:016x}"


def _take_steps(model: LegacyDistributedDataParallel, optimizer: torch.optim.Optimizer, values: list[float]) -> None:
    for value in values:
        model.zero_grad()
        add_gradients(model, value)
        model.all_reduce()
        optimizer.step()


def _start(model: LegacyDistributedDataParallel, weights: tuple[float, float] = (1.0, 2.0)) -> torch.optim.Optimizer:
    with torch.no_grad():
        model.module.weight.copy_(torch.tensor([weights]))
    return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)


def _record_two_steps(rank: int, folder: Path) -> None:
    model = wrap()
    optimizer = _start(model)
    with Recorder(model, folder, optimizer=optimizer):
        _take_steps(model, optimizer, [1.0 + rank, 3.0 + rank])


def test_every_phase_of_a_step_holds_what_hand_arithmetic_says(tmp_path: Path) -> None:
    run_ranks(_record_two_steps, 2, tmp_path)

    for rank in range(2):
        trace = Recorded(tmp_path, rank)
        assert trace.steps == [0, 1, 2]
        assert trace.end == "closed"
        held = {
            where: tuple(map(tuple, (found.words, found.words.values(), found.norms.values())))
            for where, found in trace.sections.items()
            if where[1] != "settings"
        }
        gradient, parameter, state = (
            ("gradient of 'weight'",),
            ("parameter 'weight'",),
            ("momentum_buffer of 'weight'",),
        )
        # Means of the ranks' gradients: 1.5, then 3.5; buffers 1.5, then 0.75 + 3.5; weights minus half of that.
        assert held == {
            (0, "parameters"): (parameter, (_word([[1.0, 2.0]]),), (_rounded(math.sqrt(5)),)),
            (1, "local_gradients"): (gradient, (_word([[1.0 + rank] * 2]),), (_rounded(math.sqrt(2) * (1 + rank)),)),
            (1, "reduced_gradients"): (gradient, (_word([[1.5, 1.5]]),), (_rounded(1.5 * math.sqrt(2)),)),
            (1, "optimizer"): (state, (_word([[1.5, 1.5]]),), (_rounded(1.5 * math.sqrt(2)),)),
            (1, "parameters"): (parameter, (_word([[0.25, 1.25]]),), (_rounded(math.hypot(0.25, 1.25)),)),
            (2, "local_gradients"): (gradient, (_word([[3.0 + rank] * 2]),), (_rounded(math.sqrt(2) * (3 + rank)),)),
            (2, "reduced_gradients"): (gradient, (_word([[3.5, 3.5]]),), (_rounded(3.5 * math.sqrt(2)),)),
            (2, "optimizer"): (state, (_word([[4.25, 4.25]]),), (_rounded(4.25 * math.sqrt(2)),)),
            (2, "parameters"): (parameter, (_word([[-1.875, -0.875]]),), (_rounded(math.hypot(1.875, 0.875)),)),
        }
        assert trace.sections[1, "settings"].words["lr of parameter group 0"] == "0.5"


def _rounded(value: float) -> Any:
    """The norm of an fp32 tensor is right to about seven digits."""
    return pytest.approx(value, rel=1e-6)


@pytest.mark.cpu("norms are not read on a device")
def test_the_call_line_holds_what_the_record_says(tmp_path: Path) -> None:
    records = run_ranks(_record_one_call, 2, tmp_path)

    for rank in range(2):
        facts = Recorded(tmp_path, rank).calls[1]
        assert (facts.call, facts.micro_batches, facts.sample_size, facts.took_part) == (1, 2, 4 + rank, True)
        assert (facts.divisor, facts.payload_bytes) == (9, 8)
        assert facts.local_norm == pytest.approx(math.sqrt(2) * 2)
        assert facts.finite is True
        assert facts.seconds == pytest.approx(records[rank], abs=1e-6)
        assert facts.seconds_waited == facts.seconds["agree"]
        assert "observe" in facts.seconds
        assert facts.forwards == 2
        assert facts.inputs == (
            ("float32 (3, 2)", _word([[float(rank)] * 2] * 3)),
            ("float32 (3, 2)", _word([[float(rank + 10)] * 2] * 3)),
        )


def _record_one_call(rank: int, folder: Path) -> dict[str, float]:
    model = wrap()
    with Recorder(model, folder):
        for index in range(2):
            model(torch.full((3, 2), float(rank + 10 * index)))
            add_gradients(model, 1.0)
        with torch.no_grad():
            model(torch.ones(1, 2))  # an evaluation is no part of the step
        return dict(model.all_reduce(sample_size=4 + rank).seconds)


@pytest.mark.usefixtures("alone")
def test_random_generators_are_those_that_the_call_found(tmp_path: Path) -> None:
    model = wrap()
    with Recorder(model, tmp_path):
        for draws in (0, 1, 0):
            torch.rand(draws)
            add_gradients(model, 1.0)
            model.all_reduce()
    found = [Recorded(tmp_path).calls[step].generators for step in (1, 2, 3)]

    assert len(found[0]) == 16
    assert found[0] != found[1] == found[2]


class _Judged(nn.Module):
    """Takes what a model may be given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1, bias=False)

    def forward(self, batch: dict[str, Any], *, scale: torch.Tensor, power: int) -> torch.Tensor:
        return (self.linear(batch["x"]) * scale**power).sum()


@pytest.mark.usefixtures("alone")
def test_inputs_in_dictionaries_and_keywords_are_seen(tmp_path: Path) -> None:
    model = LegacyDistributedDataParallel(_Judged())
    with Recorder(model, tmp_path):
        model({"x": torch.ones(1, 2), "name": "a"}, scale=torch.tensor(2.0), power=2).backward()
        model.all_reduce()

    facts = Recorded(tmp_path).calls[1]
    assert [kind for kind, _ in facts.inputs] == ["float32 (1, 2)", "str", "float32 ()", "int"]
    assert facts.inputs_complete


@pytest.mark.usefixtures("alone")
def test_of_very_many_forward_passes_the_first_inputs_are_kept_and_all_are_counted(tmp_path: Path) -> None:
    model = wrap()
    with Recorder(model, tmp_path):
        for _ in range(100):
            model(torch.ones(1, 2)).sum().backward()
        model.all_reduce()

    facts = Recorded(tmp_path).calls[1]
    assert (facts.forwards, len(facts.inputs), facts.inputs_complete) == (100, 64, False)


class _Noisy(nn.Module):
    """Everything that could take another way because somebody looks on: dropout, statistics, tied weights, a sparse
    gradient, one that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8, sparse=True)
        self.norm = nn.BatchNorm1d(8)
        self.body = nn.Sequential(nn.Dropout(0.3), nn.Linear(8, 8), nn.Tanh())
        self.tied = nn.Linear(8, 8)
        self.tied.weight = self.body[1].weight
        self.unused = nn.Linear(3, 3)

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        return self.tied(self.body(self.norm(self.embed(index)))).square().mean()


def _train_noisy(rank: int, folder: Path | None, every: int, level: str) -> list[int]:
    torch.manual_seed(5)
    model = LegacyDistributedDataParallel(_Noisy(), checks=Checks(level, local_buffers=("*",)))
    dense = [p for name, p in model.named_parameters() if "embed" not in name]
    optimizers = [torch.optim.AdamW(dense, lr=0.01), torch.optim.SGD(model.module.embed.parameters(), lr=0.1)]
    torch.manual_seed(7 + rank)
    recorder = None if folder is None else Recorder(model, folder, optimizer=optimizers, every=every)
    if recorder:
        recorder.__enter__()
    found = []
    for _ in range(6):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for _ in range(2):
            model(torch.randint(16, (4,))).backward()
        model.all_reduce(sample_size=8)
        found += [digest(parameter.grad) for parameter in model.parameters() if parameter.grad is not None]
        for optimizer in optimizers:
            optimizer.step()
    if recorder:
        recorder.__exit__(None, None, None)
    return found + [digest(value) for value in (*model.state_dict().values(), torch.get_rng_state())]


NOISY = [(every, level) for every in (1, 2) for level in ("off", "info", "detail")]


@once
def _noisy(base: Path) -> tuple[Path, dict[str, list[Any]]]:
    folder = Path(mkdtemp(dir=base))
    recorded = {f"{level}, every {every}": (every, level) for every, level in NOISY} | {"again": (1, "info")}
    cases = {"unrecorded": (None, 1, "info"), **{name: (folder / name, *how) for name, how in recorded.items()}}
    return folder, run_cases(_train_noisy, 2, cases)


@pytest.fixture
def noisy(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[Any]]]:
    """The folder of the traces, and what each of the trainings leaves behind."""
    return _noisy(tmp_path_factory.getbasetemp())


@pytest.mark.unsimulated("it has no sparse tensors")
@pytest.mark.parametrize("every, level", NOISY)
def test_recording_changes_no_bit_of_the_training(
    noisy: tuple[Path, dict[str, list[Any]]], level: str, every: int
) -> None:
    folder, left = noisy
    assert left[f"{level}, every {every}"] == left["unrecorded"]
    assert Recorded(folder / f"{level}, every {every}").steps == [0, *range(every, 7, every)]


@pytest.mark.unsimulated("it has no sparse tensors")
def test_two_runs_of_the_same_training_write_the_same_values(noisy: tuple[Path, dict[str, list[Any]]]) -> None:
    for rank in range(2):
        one, other = (Recorded(noisy[0] / name, rank) for name in ("info, every 1", "again"))
        assert one.phases == other.phases
        assert len(one.phases) == 6
        assert {where: found.words for where, found in one.sections.items()} == {
            where: found.words for where, found in other.sections.items()
        }


@pytest.mark.usefixtures("alone")
def test_gradients_that_are_not_there_and_elements_that_are_not_finite_are_distinguished(tmp_path: Path) -> None:
    model = LegacyDistributedDataParallel(
        nn.ParameterDict({name: torch.zeros(3) for name in "abc"}), checks=Checks(nonfinite="ignore")
    )
    with Recorder(model, tmp_path):
        model.module["a"].grad = torch.tensor([3.0, math.nan, 4.0])
        model.module["b"].grad = torch.zeros(3)
        model.all_reduce()

    for phase in ("local_gradients", "reduced_gradients"):
        found = Recorded(tmp_path).sections[1, phase]
        assert found.norms == {"gradient of 'a'": 5.0, "gradient of 'b'": 0.0, "gradient of 'c'": None}
        assert found.nonfinite == {"gradient of 'a'": 1}
        assert found.words["gradient of 'c'"] is None


@pytest.mark.usefixtures("alone")
def test_steps_are_counted_from_the_first_one_and_recorded_where_every_divides_them(tmp_path: Path) -> None:
    model = wrap()
    optimizer = _start(model)
    with Recorder(model, tmp_path, optimizer=optimizer, every=5, first_step=101):
        _take_steps(model, optimizer, [1.0] * 12)

    trace = Recorded(tmp_path)
    assert trace.steps == [100, 105, 110]
    assert (trace.environment.every, trace.environment.first_step) == (5, 101)


@pytest.mark.usefixtures("alone")
def test_what_a_resumed_run_starts_from_is_what_the_step_before_left(tmp_path: Path) -> None:
    model = wrap()
    optimizer = _start(model)
    with Recorder(model, tmp_path / "whole", optimizer=optimizer):
        _take_steps(model, optimizer, [1.0, 2.0, 3.0])
        with Recorder(model, tmp_path / "resumed", optimizer=optimizer, first_step=4):
            _take_steps(model, optimizer, [4.0])

    whole, resumed = Recorded(tmp_path / "whole"), Recorded(tmp_path / "resumed")
    for phase in ("optimizer", "parameters"):
        assert whole.words(3, phase) == resumed.words(3, phase) is not None
        assert whole.words(4, phase) == resumed.words(4, phase) != whole.words(3, phase)
    assert whole.words(4, "settings") == resumed.words(4, "settings") is not None
    assert resumed.words(3, "settings") is None  # no step used any


@pytest.mark.usefixtures("alone")
def test_settings_are_those_that_the_step_used_not_those_that_a_scheduler_left(tmp_path: Path) -> None:
    model = wrap()
    optimizer = _start(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    with Recorder(model, tmp_path, optimizer=optimizer):
        for _ in range(2):
            _take_steps(model, optimizer, [1.0])
            scheduler.step()

    for step, rate in ((1, "0.5"), (2, "0.25")):
        settings = Recorded(tmp_path).sections[step, "settings"]
        assert settings.words["lr of parameter group 0"] == rate


@pytest.mark.usefixtures("alone")
def test_a_step_that_the_optimizer_skips_is_recorded_as_the_next_call_finds_it(tmp_path: Path) -> None:
    model = wrap()
    optimizer = _start(model)
    with Recorder(model, tmp_path, optimizer=optimizer):
        add_gradients(model, 1.0)
        model.all_reduce()
        model.zero_grad()
        _take_steps(model, optimizer, [2.0])

    trace = Recorded(tmp_path)
    assert trace.words(1, "parameters") == trace.words(0, "parameters")
    assert trace.words(2, "parameters") != trace.words(1, "parameters")


@pytest.mark.usefixtures("alone")
def test_without_an_optimizer_the_last_step_is_taken_at_the_end(tmp_path: Path) -> None:
    model = wrap()
    optimizer = _start(model)
    with Recorder(model, tmp_path):
        _take_steps(model, optimizer, [1.0, 1.0])

    trace = Recorded(tmp_path)
    assert trace.phases == ("local_gradients", "reduced_gradients", "parameters")
    held = trace.sections[2, "parameters"]
    assert held.words == {"parameter 'weight'": _word(model.module.weight.tolist())}


@pytest.mark.usefixtures("alone")
def test_with_two_optimizers_a_step_is_over_when_both_have_stepped(tmp_path: Path) -> None:
    model = LegacyDistributedDataParallel(nn.ParameterDict({name: torch.ones(1) for name in "ab"}))
    optimizers = [torch.optim.SGD([model.module[name]], lr=0.5) for name in "ab"]
    with Recorder(model, tmp_path, optimizer=optimizers):
        for _ in range(2):
            model.zero_grad()
            add_gradients(model, 1.0)
            model.all_reduce()
            for optimizer in optimizers:
                optimizer.step()
            with torch.no_grad():
                model.module["a"].add_(8)  # after the step

    for step, held in ((1, (0.5, 0.5)), (2, (8.0, 0.0))):
        found = Recorded(tmp_path).sections[step, "parameters"]
        assert found.words == {"parameter 'a'": _word([held[0]]), "parameter 'b'": _word([held[1]])}
    settings = Recorded(tmp_path).sections[1, "settings"]
    assert settings.words["optimizer 1: lr of parameter group 0"] == "0.5"


@pytest.mark.usefixtures("alone")
def test_inputs_belong_to_the_step_that_follows_them(tmp_path: Path) -> None:
    model = wrap()
    with Recorder(model, tmp_path):
        for size in (1, 2):
            model(torch.ones(size, 2)).sum().backward()
            model.all_reduce()

    for step in (1, 2):
        facts = Recorded(tmp_path).calls[step]
        assert (facts.forwards, [kind for kind, _ in facts.inputs]) == (1, [f"float32 ({step}, 2)"])


def test_a_call_that_failed_is_no_step(tmp_path: Path) -> None:
    run_ranks(_fail_and_repeat, 2, tmp_path)

    for rank in range(2):
        trace = Recorded(tmp_path, rank)
        assert trace.steps == [0, 1]
        local = trace.sections[1, "local_gradients"]
        assert local.words == {"gradient of 'weight'": _word([[1.0, 1.0]])}


def _fail_and_repeat(rank: int, folder: Path) -> None:
    model = wrap()
    with Recorder(model, folder):
        add_gradients(model, 1.0)
        with pytest.raises(PeerError):
            model.all_reduce(sample_size=-1 if rank else 4)
        model.all_reduce()


@pytest.mark.usefixtures("alone")
def test_a_call_inside_no_sync_is_no_step(tmp_path: Path) -> None:
    model = wrap()
    with Recorder(model, tmp_path):
        with model.no_sync():
            add_gradients(model, 1.0)
            model.all_reduce()
        add_gradients(model, 1.0)
        model.all_reduce()

    assert Recorded(tmp_path).steps == [0, 1]


@pytest.mark.usefixtures("alone")
def test_calls_of_the_function_are_recorded_by_its_module(tmp_path: Path) -> None:
    module = nn.Linear(2, 1, bias=False)
    with Recorder(module, tmp_path):
        add_gradients(module, 1.0)
        all_reduce_gradients(module)

    assert Recorded(tmp_path).phases == ("local_gradients", "reduced_gradients", "parameters")


@pytest.mark.usefixtures("alone")
def test_parameters_that_come_later_are_recorded_from_then_on(tmp_path: Path) -> None:
    model = LegacyDistributedDataParallel(nn.ParameterDict({"a": torch.ones(1)}))
    with Recorder(model, tmp_path):
        add_gradients(model, 1.0)
        model.all_reduce()
        model.module["b"] = nn.Parameter(torch.ones(2))
        model.zero_grad()
        add_gradients(model, 1.0)
        model.all_reduce()

    trace = Recorded(tmp_path)
    first, second = (trace.sections[step, "reduced_gradients"].words for step in (1, 2))
    assert list(first) == ["gradient of 'a'"]
    assert list(second) == ["gradient of 'a'", "gradient of 'b'"]


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_the_last_line_says_how_the_block_was_left(tmp_path: Path, error: type[BaseException]) -> None:
    model = wrap()
    with suppress(error), Recorder(model, tmp_path):
        add_gradients(model, 1.0)
        model.all_reduce()
        raise error

    assert Recorded(tmp_path).end == error.__name__


@pytest.mark.usefixtures("alone")
def test_a_copy_or_a_checkpoint_made_meanwhile_knows_nothing_of_the_recorder(tmp_path: Path) -> None:
    model = wrap()
    optimizer = _start(model)
    with Recorder(model, tmp_path, optimizer=optimizer):
        twin = copy.deepcopy(model)
        torch.save([model, optimizer], io.BytesIO())
        twin_optimizer = copy.deepcopy(optimizer)
        twin(torch.ones(1, 2)).sum().backward()
        twin.all_reduce()
        twin_optimizer.step()
        _take_steps(model, optimizer, [1.0])

    assert Recorded(tmp_path).steps == [0, 1]


@pytest.mark.usefixtures("alone")
def test_nothing_looks_on_after_the_block(tmp_path: Path) -> None:
    model = wrap()
    optimizer = _start(model)
    with Recorder(model, tmp_path, optimizer=optimizer):
        _take_steps(model, optimizer, [1.0])
    written = (tmp_path / "rank-00000.jsonl").read_bytes()

    _take_steps(model, optimizer, [1.0])

    assert (tmp_path / "rank-00000.jsonl").read_bytes() == written
    assert not any(vars(model._synchronizer.observers).values())
    assert not optimizer._optimizer_step_post_hooks


def _train_compiled(rank: int, folder: Path) -> list[int]:
    warnings.filterwarnings("ignore", category=DeprecationWarning)  # torch's compiler uses torch.jit
    counter = CompileCounterWithBackend("eager")
    compiled: Callable[[Any], Any] = torch.compile(backend=counter)
    model = LegacyDistributedDataParallel(tanh_net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    forward, step = compiled(model), compiled(optimizer.step)
    graphs = []
    with Recorder(model, folder, optimizer=optimizer):
        for _ in range(8):
            optimizer.zero_grad()
            forward(torch.ones(2, 4)).sum().backward()
            model.all_reduce()
            step()
            graphs.append(counter.frame_count)
    return graphs


def test_compiled_model_and_optimizer_are_recorded_without_compiling_again(tmp_path: Path) -> None:
    (graphs,) = run_ranks(_train_compiled, 1, tmp_path)

    trace = Recorded(tmp_path)
    assert trace.steps == list(range(9))
    assert len({str(trace.words(step, "parameters")) for step in trace.steps}) == 9
    assert graphs[2] == graphs[-1]


@pytest.mark.usefixtures("alone")
def test_a_block_without_any_call_is_warned_of(tmp_path: Path) -> None:
    model = wrap()
    recorder = Recorder(model, tmp_path).__enter__()
    add_gradients(model, 1.0)
    all_reduce_gradients(model.module)  # not what it looks at

    recorder.__exit__(None, None, None)
    (told,) = logged_warnings.take()
    assert "holds no step: the recorder saw no all_reduce" in told


@pytest.mark.usefixtures("alone")
def test_a_trace_that_is_there_is_not_overwritten(tmp_path: Path) -> None:
    model = wrap()
    (tmp_path / "rank-00000.jsonl").write_text("precious")

    said = error_of(Recorder(model, tmp_path).__enter__)

    assert said is not None
    assert said[0] == "TraceError"
    assert "rank-00000.jsonl exists" in said[1]
    assert (tmp_path / "rank-00000.jsonl").read_text() == "precious"
    assert not any(vars(model._synchronizer.observers).values())


@pytest.mark.usefixtures("alone")
def test_a_recorder_is_used_once(tmp_path: Path) -> None:
    model = wrap()
    recorder = Recorder(model, tmp_path)
    with recorder:
        assert error_of(recorder.__enter__) == (
            "ValueError",
            "this recorder was used already, expected a new one; a trace is of one run",
        )
        add_gradients(model, 1.0)
        model.all_reduce()
    assert error_of(recorder.__enter__) is not None


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    "arguments, expected",
    [
        (
            {"every": 0},
            ("ValueError", "every is not usable: got 0, expected a whole number from 1 to 1,000,000,000,000,000"),
        ),
        (
            {"every": True},
            ("ValueError", "every is not usable: got True, expected a whole number from 1 to 1,000,000,000,000,000"),
        ),
        (
            {"first_step": 0},
            ("ValueError", "first_step is not usable: got 0, expected a whole number from 1 to 1,000,000,000,000,000"),
        ),
        ({"argv": "no"}, ("TypeError", "argv is not usable: got 'no', expected True or False")),
        ({"folder": 3}, ("TypeError", "folder is not usable: got 3, expected a path")),
        ({"folder": ""}, ("TypeError", "folder is not usable: got '', expected a path")),
        (
            {"folder": Path("a\0b")},
            ("ValueError", "folder is not usable: got 'a\\x00b', expected a path without a null character"),
        ),
        (
            {"folder": "~nobody-of-that-name/x"},
            (
                "ValueError",
                "folder is not usable: got '~nobody-of-that-name/x', expected ~ with a known home directory; name the "
                "whole path",
            ),
        ),
        (
            {"optimizer": [3]},
            ("TypeError", "optimizer is of the wrong type: got int, expected torch.optim.Optimizer or several"),
        ),
        (
            {"model": 3},
            (
                "TypeError",
                "model is of the wrong type: got int, expected a LegacyDistributedDataParallel, or the module that "
                "all_reduce_gradients() is called with",
            ),
        ),
    ],
)
def test_wrong_arguments_are_named(tmp_path: Path, arguments: dict[str, Any], expected: tuple[str, str]) -> None:
    given = {"model": wrap(), "folder": tmp_path, **arguments}

    assert error_of(Recorder, given.pop("model"), given.pop("folder"), **given) == expected
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("alone")
def test_an_error_on_entering_comes_without_the_errors_of_the_system(tmp_path: Path) -> None:
    model = wrap()
    (tmp_path / "file").touch()
    (tmp_path / "rank-00000.jsonl").touch()
    name = "rank-00000.jsonl"
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


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("folder", ["~/runs/x", Path("~/runs/x")])
def test_a_folder_may_lie_in_the_home_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str | Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    model = wrap()
    with Recorder(model, folder):
        add_gradients(model, 1.0)
        model.all_reduce()

    assert Recorded(tmp_path / "home" / "runs" / "x").steps == [0, 1]
    assert [path.name for path in tmp_path.iterdir()] == ["home"]


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("value", [1e200, 1.7e308])
def test_gradients_whose_norm_no_float64_holds_are_recorded_without_one(tmp_path: Path, value: float) -> None:
    model = LegacyDistributedDataParallel(nn.Linear(2, 1, bias=False, dtype=torch.float64))
    with Recorder(model, tmp_path):
        for _ in range(2):
            model.module.weight.grad = torch.full((1, 2), value, dtype=torch.float64)
            model.all_reduce()

    trace = Recorded(tmp_path)
    assert (trace.steps, trace.end) == ([0, 1, 2], "closed")
    facts = trace.calls[2]
    assert (facts.local_norm, facts.finite) == (None, True)


@pytest.mark.usefixtures("alone")
def test_an_optimizer_that_holds_no_parameter_of_the_model_is_warned_of(tmp_path: Path) -> None:
    model = wrap()
    own, other, copies = (
        torch.optim.SGD(parameters, lr=0.5)
        for parameters in (
            model.parameters(),
            nn.Linear(2, 1).parameters(),
            [item.detach().double() for item in model.parameters()],
        )
    )
    for name, given, expected in (
        ("other", other, ["optimizer (SGD) holds no parameter of the model"]),
        ("several", [own, other, copies], ["optimizer 1 (SGD) holds no", "optimizer 2 (SGD) holds no"]),
    ):
        with Recorder(model, tmp_path / name, optimizer=given):
            add_gradients(model, 1.0)
            model.all_reduce()
        said = logged_warnings.take_all()

        told = [warning for warning in said if "holds no parameter" in warning.text]
        assert all(warning.text.startswith(text) for warning, text in zip(told, expected, strict=True))
        assert {warning.filename for warning in told} == {__file__}
        assert Recorded(tmp_path / name).end == "closed"


@pytest.mark.usefixtures("alone")
def test_optimizers_of_some_of_the_parameters_or_of_more_than_the_model_has_are_the_model_s(tmp_path: Path) -> None:
    model = LegacyDistributedDataParallel(tanh_net())
    first, *others = model.parameters()
    late = torch.optim.SGD([first], lr=0.5)
    joint = torch.optim.SGD([*others, *nn.Linear(2, 1).parameters()], lr=0.5)
    with Recorder(model, tmp_path, optimizer=[late, joint]):  # a warning is an error here
        add_gradients(model, 1.0)
        model.all_reduce()
        late.step()
        joint.step()

    assert Recorded(tmp_path).end == "closed"


@pytest.mark.usefixtures("alone")
def test_torch_ddp_is_refused_because_nothing_would_be_seen(tmp_path: Path) -> None:
    model = DistributedDataParallel(nn.Linear(2, 1))
    for given in (model, torch.compile(model, backend="eager")):
        said = error_of(Recorder, given, tmp_path)

        assert said is not None
        assert "got DistributedDataParallel, expected a LegacyDistributedDataParallel" in said[1]


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("is_at_the_end", [False, True])
def test_a_folder_that_was_deleted_during_the_run_is_warned_of(tmp_path: Path, is_at_the_end: bool) -> None:
    model = wrap()
    with Recorder(model, tmp_path / "trace"):
        add_gradients(model, 1.0)
        model.all_reduce()
        shutil.rmtree(tmp_path / "trace")
        if not is_at_the_end:
            model.all_reduce()
    said = logged_warnings.take_all()

    [told] = [warning.text for warning in said if "the training goes on" in warning.text]
    assert "rank-00000.jsonl ends before step 2, and the training goes on" in told
    assert told.endswith("(the file was deleted)")


def _fill_the_disk(rank: int, folder: Path) -> tuple[list[str], int]:
    model = wrap()
    optimizer = _start(model)
    with Recorder(model, folder, optimizer=optimizer):
        if rank == 1:  # no file of this process may grow beyond that
            room = os.path.getsize(folder / "rank-00001.jsonl") + 2000
            resource.setrlimit(resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))
        _take_steps(model, optimizer, [1.0] * 8)
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


@pytest.mark.unsimulated("it has no sparse tensors")
@pytest.mark.parametrize("level", ["off", "detail"])
def test_layout_and_local_buffers_are_in_the_first_line(noisy: tuple[Path, dict[str, list[Any]]], level: str) -> None:
    one, other = (Recorded(noisy[0] / f"{level}, every 1", rank).environment for rank in range(2))
    assert one.layout == other.layout != "0" * 16
    assert one.local_buffers == ("*",)
    assert one.parameters[:2] == ("body.1.bias", "body.1.weight")
    assert one.facts["checks"] == level
    assert one.facts["optimizer"] == "AdamW, SGD"
    assert (one.facts["seed"], other.facts["seed"]) == ("7", "8")
    assert one.facts["threads"] == "1"


def _record_transports(rank: int, folder: Path) -> None:
    for transport in ("host", "gloo"):
        model = LegacyDistributedDataParallel(nn.Linear(2, 1, bias=False), transport=transport)
        for name in ("before the first call", "after it"):
            with Recorder(model, folder / transport / name):
                model.module.weight.grad = torch.ones(1, 2)
                model.all_reduce()


def test_the_environment_names_the_transport(tmp_path: Path) -> None:
    run_ranks(_record_transports, 2, tmp_path)

    for name in ("before the first call", "after it"):
        traces = [Recorded(tmp_path / transport / name) for transport in ("host", "gloo")]
        assert [trace.environment.facts["transport"] for trace in traces] == ["host", 'gloo (transport="gloo")']
