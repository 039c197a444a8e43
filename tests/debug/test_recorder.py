"""The contents of recorded traces, and the state that a recorder leaves alone."""

import copy
import io
import math
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from legacy_ddp import Checks, LegacyDistributedDataParallel, PeerError, all_reduce_gradients
from legacy_ddp.debug import Recorder, digest
from tests.helpers import logged_warnings
from tests.helpers.ranks import run_ranks
from tests.helpers.recorded import PHASES, Recorded, word_of
from tests.helpers.shared_jobs import run_cases
from tests.helpers.small_models import add_gradients, error_of, tanh_net, wrap
from tests.helpers.small_models import step as take_step


def _take_steps(model: LegacyDistributedDataParallel, optimizer: torch.optim.Optimizer, values: list[float]) -> None:
    for value in values:
        take_step(model, value)
        optimizer.step()


def _start(model: LegacyDistributedDataParallel) -> torch.optim.Optimizer:
    with torch.no_grad():
        model.module.weight.copy_(torch.tensor([[1.0, 2.0]]))
    return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)


def _record_two_steps(rank: int, folder: Path) -> None:
    model = wrap()
    optimizer = _start(model)
    with Recorder(model, folder, optimizer=optimizer):
        _take_steps(model, optimizer, [1.0 + rank, 3.0 + rank])


def test_every_phase_of_a_step_holds_what_hand_arithmetic_says(tmp_path: Path) -> None:
    run_ranks(_record_two_steps, 2, tmp_path)
    names = {
        "local_gradients": "gradient of 'weight'",
        "reduced_gradients": "gradient of 'weight'",
        "optimizer": "momentum_buffer of 'weight'",
        "parameters": "parameter 'weight'",
    }

    for rank in range(2):
        trace = Recorded(tmp_path, rank)
        assert (trace.steps, trace.end) == ([0, 1, 2], "closed")
        assert [step for step, phase in trace.sections if phase == "settings"] == [1, 2]
        assert trace.sections[1, "settings"].words["lr of parameter group 0"] == "0.5"
        # Means of the ranks' gradients: 1.5, then 3.5; buffers 1.5, then 0.75 + 3.5; weights minus half of that.
        expected = {
            (0, "parameters"): [1.0, 2.0],
            (1, "local_gradients"): [1.0 + rank] * 2,
            (1, "reduced_gradients"): [1.5, 1.5],
            (1, "optimizer"): [1.5, 1.5],
            (1, "parameters"): [0.25, 1.25],
            (2, "local_gradients"): [3.0 + rank] * 2,
            (2, "reduced_gradients"): [3.5, 3.5],
            (2, "optimizer"): [4.25, 4.25],
            (2, "parameters"): [-1.875, -0.875],
        }
        held = {where: found for where, found in trace.sections.items() if where[1] != "settings"}
        assert {where: found.words for where, found in held.items()} == {
            where: {names[where[1]]: word_of([values])} for where, values in expected.items()
        }
        for where, values in expected.items():  # the norm of an fp32 tensor is right to about seven digits
            assert held[where].norms == {names[where[1]]: pytest.approx(math.hypot(*values), rel=1e-6)}


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
            ("float32 (3, 2)", word_of([[float(rank)] * 2] * 3)),
            ("float32 (3, 2)", word_of([[float(rank + 10)] * 2] * 3)),
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


class _Takes(nn.Module):
    """Takes anything."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1, bias=False)
        self.register_buffer("packed", torch.zeros(4, dtype=torch.uint8).view(torch.bits8))
        self.register_buffer("away", torch.empty(2, device="meta"))

    def forward(self, *_: Any, **__: Any) -> torch.Tensor:
        return self.linear(torch.ones(1, 2)).sum()


_ENDLESS: list[Any] = []
_ENDLESS.append(_ENDLESS)


@pytest.mark.usefixtures("alone")
def test_inputs_and_buffers_of_any_kind_are_recorded_or_missing_and_leave_the_training_alone(tmp_path: Path) -> None:
    model = LegacyDistributedDataParallel(_Takes(), init_sync=False)
    known: list[tuple[Any, dict[str, Any], list[str]]] = [
        (
            {"x": torch.ones(1, 2), "name": "a"},
            {"scale": torch.tensor(2.0), "power": 2},
            ["float32 (1, 2)", "str", "float32 ()", "int"],
        ),
        (torch.zeros(4, dtype=torch.uint8).view(torch.bits8), {}, ["bits8 (4,)"]),
    ]
    unknown: list[Any] = [
        object(),
        torch.empty(2, device="meta"),
        torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged),
        _ENDLESS,
        {1: {2, 3}},
    ]
    with Recorder(model, tmp_path):
        for given, named, _ in (*known, *((value, {}, []) for value in unknown)):
            model(given, **named).backward()
            model.all_reduce()

    trace = Recorded(tmp_path)
    assert trace.end == "closed"
    assert [[kind for kind, _ in trace.calls[step].inputs] for step in (1, 2)] == [kinds for *_, kinds in known]
    assert [trace.calls[step].inputs_complete for step in range(1, 8)] == [True] * 2 + [False] * 5
    assert trace.sections[0, "buffers"].norms == {"buffer 'away'": None, "buffer 'packed'": None}


@pytest.mark.usefixtures("alone")
def test_forward_passes_are_counted_in_the_step_that_follows_them_and_the_first_inputs_are_kept(tmp_path: Path) -> None:
    model = wrap()
    with Recorder(model, tmp_path):
        model(torch.ones(3, 2)).sum().backward()
        model.module(torch.ones(3, 2)).sum().backward()  # past the wrapper
        model.all_reduce()
        for _ in range(100):
            model(torch.ones(1, 2)).sum().backward()
        model.all_reduce()

    calls = Recorded(tmp_path).calls
    found = [(at.forwards, at.micro_batches, len(at.inputs), at.inputs_complete) for at in (calls[1], calls[2])]
    assert found == [(1, 2, 1, False), (100, 100, 64, False)]
    assert [{kind for kind, _ in calls[step].inputs} for step in (1, 2)] == [{"float32 (3, 2)"}, {"float32 (1, 2)"}]


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
    found = []
    with nullcontext() if folder is None else Recorder(model, folder, optimizer=optimizers, every=every):
        for _ in range(6):
            for optimizer in optimizers:
                optimizer.zero_grad()
            for _ in range(2):
                model(torch.randint(16, (4,))).backward()
            model.all_reduce(sample_size=8)
            found += [digest(parameter.grad) for parameter in model.parameters() if parameter.grad is not None]
            for optimizer in optimizers:
                optimizer.step()
    return found + [digest(value) for value in (*model.state_dict().values(), torch.get_rng_state())]


@pytest.mark.unsimulated("it has no sparse tensors")
def test_recording_changes_no_bit_of_the_training_and_writes_the_same_values_again(tmp_path: Path) -> None:
    recorded = {"off": (1, "off"), "info": (2, "info"), "detail": (1, "detail"), "again": (1, "detail")}
    cases = {"unrecorded": (None, 1, "info"), **{name: (tmp_path / name, *how) for name, how in recorded.items()}}
    left = run_cases(_train_noisy, 2, cases)

    for name, (every, level) in recorded.items():
        assert left[name] == left["unrecorded"], name
        traces = [Recorded(tmp_path / name, rank) for rank in range(2)]
        assert [trace.steps for trace in traces] == [[0, *range(every, 7, every)]] * 2
        one, other = (trace.environment for trace in traces)
        assert one.layout == other.layout != "0" * 16
        assert one.local_buffers == ("*",)
        assert one.parameters[:2] == ("body.1.bias", "body.1.weight")
        assert (one.facts["checks"], one.facts["optimizer"], one.facts["threads"]) == (level, "AdamW, SGD", "1")
        assert (one.facts["seed"], other.facts["seed"]) == ("7", "8")
    for rank in range(2):
        one, other = (Recorded(tmp_path / name, rank) for name in ("detail", "again"))
        assert one.phases == other.phases == PHASES
        assert {where: found.words for where, found in one.sections.items()} == {
            where: found.words for where, found in other.sections.items()
        }


@pytest.mark.usefixtures("alone")
def test_gradients_that_are_not_there_not_finite_or_larger_than_any_norm_are_distinguished(tmp_path: Path) -> None:
    model = LegacyDistributedDataParallel(
        nn.ParameterDict({name: torch.zeros(3, dtype=torch.float64) for name in "abc"}),
        checks=Checks(nonfinite="ignore"),
    )
    with Recorder(model, tmp_path):
        for values in ([3.0, math.nan, 4.0], [1.7e308] * 3):
            model.module["a"].grad = torch.tensor(values, dtype=torch.float64)
            model.module["b"].grad = torch.zeros(3, dtype=torch.float64)
            model.all_reduce()

    trace = Recorded(tmp_path)
    assert (trace.end, trace.calls[2].local_norm, trace.calls[2].finite) == ("closed", None, True)
    for phase in ("local_gradients", "reduced_gradients"):
        found = trace.sections[1, phase]
        assert found.norms == {"gradient of 'a'": 5.0, "gradient of 'b'": 0.0, "gradient of 'c'": None}
        assert found.nonfinite == {"gradient of 'a'": 1}
        assert found.words["gradient of 'c'"] is None


@pytest.mark.usefixtures("alone")
def test_steps_that_every_divides_are_recorded_with_the_settings_that_they_used(tmp_path: Path) -> None:
    """Steps are counted from the first one. Settings are not those that a scheduler left."""
    model = wrap()
    optimizer = _start(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    with Recorder(model, tmp_path, optimizer=optimizer, every=5, first_step=104):
        for _ in range(104, 112):
            _take_steps(model, optimizer, [1.0])
            scheduler.step()

    trace = Recorded(tmp_path)
    assert trace.steps == [103, 105, 110]
    assert (trace.environment.every, trace.environment.first_step) == (5, 104)
    rates = [trace.sections[step, "settings"].words["lr of parameter group 0"] for step in (105, 110)]
    assert rates == ["0.25", "0.0078125"]


@pytest.mark.usefixtures("alone")
def test_a_step_that_the_optimizer_skips_is_recorded_as_the_next_call_finds_it(tmp_path: Path) -> None:
    model = wrap()
    optimizer = _start(model)
    with Recorder(model, tmp_path, optimizer=optimizer):
        take_step(model, 1.0)
        _take_steps(model, optimizer, [2.0])

    trace = Recorded(tmp_path)
    assert trace.words(1, "parameters") == trace.words(0, "parameters")
    assert trace.words(2, "parameters") != trace.words(1, "parameters")


@pytest.mark.usefixtures("alone")
def test_calls_of_the_function_are_recorded_by_their_module_and_the_last_step_at_the_end(tmp_path: Path) -> None:
    module = nn.Linear(2, 1, bias=False)
    with Recorder(module, tmp_path):
        add_gradients(module, 1.0)
        assert all_reduce_gradients(module).rows[0].micro_batches == 0  # nothing is hooked to it before its first call
        all_reduce_gradients(module)
        with torch.no_grad():
            module.weight.add_(1)

    trace = Recorded(tmp_path)
    assert trace.phases == ("local_gradients", "reduced_gradients", "parameters")
    assert trace.words(2, "parameters") == {"parameter 'weight'": word_of(module.weight)}
    assert trace.words(1, "parameters") == trace.words(0, "parameters") != trace.words(2, "parameters")


@pytest.mark.usefixtures("alone")
def test_with_two_optimizers_a_step_ends_when_both_have_stepped_and_each_has_its_own_settings(tmp_path: Path) -> None:
    model = LegacyDistributedDataParallel(nn.ParameterDict({name: torch.ones(1) for name in "ab"}))
    rate = torch.tensor(0.5)
    first, second = (torch.optim.SGD([model.module[name]], lr=lr) for name, lr in (("a", rate), ("b", 0.5)))
    with Recorder(model, tmp_path, optimizer=[first, second]):
        for _ in range(2):
            take_step(model, 1.0)
            first.step()
            rate.mul_(2)  # before the other one steps
            second.step()
            with torch.no_grad():
                model.module["a"].add_(8)  # after the step

    for step, held in ((1, (0.5, 0.5)), (2, (7.5, 0.0))):
        found = Recorded(tmp_path).sections[step, "parameters"]
        assert found.words == {"parameter 'a'": word_of([held[0]]), "parameter 'b'": word_of([held[1]])}
    settings = Recorded(tmp_path).sections[1, "settings"]
    rates = [settings.words[f"optimizer {number}: lr of parameter group 0"] for number in (0, 1)]
    assert rates == [word_of(torch.tensor(0.5)), "0.5"]


def _fail_and_repeat(rank: int, folder: Path) -> None:
    model = wrap()
    with Recorder(model, folder):
        with model.no_sync():
            add_gradients(model, 1.0)
            model.all_reduce()
        with pytest.raises(PeerError):
            model.all_reduce(sample_size=-1 if rank else 4)
        model.all_reduce()


def test_a_call_inside_no_sync_or_that_failed_is_no_step(tmp_path: Path) -> None:
    run_ranks(_fail_and_repeat, 2, tmp_path)

    for rank in range(2):
        trace = Recorded(tmp_path, rank)
        assert trace.steps == [0, 1]
        assert trace.words(1, "local_gradients") == {"gradient of 'weight'": word_of([[1.0, 1.0]])}


@pytest.mark.usefixtures("alone")
def test_parameters_that_come_later_are_recorded_from_then_on(tmp_path: Path) -> None:
    model = LegacyDistributedDataParallel(nn.ParameterDict({"a": torch.ones(1)}))
    with Recorder(model, tmp_path):
        take_step(model, 1.0)
        model.module["b"] = nn.Parameter(torch.ones(2))
        take_step(model, 1.0)

    trace = Recorded(tmp_path)
    first, second = (trace.sections[step, "reduced_gradients"].words for step in (1, 2))
    assert list(first) == ["gradient of 'a'"]
    assert list(second) == ["gradient of 'a'", "gradient of 'b'"]


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
def test_a_recorder_is_used_once_and_nothing_looks_on_after_its_block(tmp_path: Path) -> None:
    model = wrap()
    optimizer = _start(model)
    recorder = Recorder(model, tmp_path, optimizer=optimizer)
    used = ("ValueError", "this recorder was used already, expected a new one; a trace is of one run")
    with recorder:
        assert error_of(recorder.__enter__) == used
        _take_steps(model, optimizer, [1.0])
    written = (tmp_path / "rank-00000.jsonl").read_bytes()

    _take_steps(model, optimizer, [1.0])

    assert error_of(recorder.__enter__) == used
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
        for _ in range(4):
            optimizer.zero_grad()
            forward(torch.ones(2, 4)).sum().backward()
            model.all_reduce()
            step()
            graphs.append(counter.frame_count)
    return graphs


def test_compiled_model_and_optimizer_are_recorded_without_compiling_again(tmp_path: Path) -> None:
    (graphs,) = run_ranks(_train_compiled, 1, tmp_path)

    trace = Recorded(tmp_path)
    assert trace.steps == list(range(5))
    assert len({str(trace.words(step, "parameters")) for step in trace.steps}) == 5
    assert graphs[2] == graphs[-1]


@pytest.mark.usefixtures("alone")
def test_an_optimizer_that_holds_no_parameter_of_the_model_is_warned_of(tmp_path: Path) -> None:
    model = LegacyDistributedDataParallel(tanh_net())
    first, *others = model.parameters()
    own, joint, other, copies = (
        torch.optim.SGD(parameters, lr=0.5)
        for parameters in (
            [first],
            [*others, *nn.Linear(2, 1).parameters()],
            nn.Linear(2, 1).parameters(),
            [item.detach().double() for item in model.parameters()],
        )
    )
    for name, given, expected in (
        ("others", other, ["optimizer (SGD) holds no parameter of the model"]),
        ("several", [own, other, copies], ["optimizer 1 (SGD) holds no", "optimizer 2 (SGD) holds no"]),
        ("the model's", [own, joint], []),
    ):
        with Recorder(model, tmp_path / name, optimizer=given):
            take_step(model, 1.0)
        said = logged_warnings.take_all()

        told = [warning for warning in said if "holds no parameter" in warning.text]
        assert all(warning.text.startswith(text) for warning, text in zip(told, expected, strict=True))
        assert {warning.filename for warning in told} <= {__file__}
        assert Recorded(tmp_path / name).end == "closed"


def _record_transports(rank: int, folder: Path) -> None:
    for transport in ("host", "gloo"):
        model = LegacyDistributedDataParallel(nn.Linear(2, 1, bias=False), transport=transport)
        for name in ("before the first call", "after it"):
            with Recorder(model, folder / transport / name):
                model.module.weight.grad = torch.ones(1, 2)
                model.all_reduce()


def test_the_environment_names_the_transport(tmp_path: Path) -> None:
    run_ranks(_record_transports, 2, tmp_path)

    expected = {"host": "host", "gloo": 'gloo (transport="gloo")'}
    for name in ("before the first call", "after it"):
        assert {at: Recorded(tmp_path / at / name).environment.facts["transport"] for at in expected} == expected
