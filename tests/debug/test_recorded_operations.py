"""Recorder(operations=): the operations of chosen steps in the trace, and a training that stays as it was."""

import copy
import io
import shutil
from collections.abc import Collection
from contextlib import nullcontext, suppress
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from legacy_ddp import LegacyDistributedDataParallel, PeerError, all_reduce_gradients
from legacy_ddp.debug import Recorder, digest
from tests.helpers import logged_warnings
from tests.helpers.command import compare
from tests.helpers.ranks import run_ranks
from tests.helpers.recorded import Recorded
from tests.helpers.shared_jobs import run_cases
from tests.helpers.small_models import tanh_net


def batch(step: int, rank: int = 0) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + rank))


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, steps: int = 3, micro_batches: int = 1, rank: int = 0
) -> None:
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        for _ in range(micro_batches):
            model(batch(step, rank)).sum().backward()
        model.all_reduce()
        optimizer.step()


def wrapped() -> tuple[LegacyDistributedDataParallel, torch.optim.Optimizer]:
    model = LegacyDistributedDataParallel(tanh_net())
    return model, torch.optim.AdamW(model.parameters())


def _trained(rank: int, folder: Path | None, operations: Collection[int] = ()) -> list[int]:
    torch.manual_seed(rank)
    model, optimizer = wrapped()
    model.module.append(nn.Dropout(0.2))
    recorder = nullcontext() if folder is None else Recorder(model, folder, optimizer=optimizer, operations=operations)
    with recorder:
        train(model, optimizer, rank=rank)
    assert _get_current_dispatch_mode_stack() == []
    assert logged_warnings.take() == []
    return [digest(tensor) for tensor in (*model.parameters(), torch.get_rng_state())]


def test_recorded_steps_hold_their_operations_and_train_to_the_same_bits(tmp_path: Path) -> None:
    cases = {"plain": (None,), "one": (tmp_path / "one", range(2, 4)), "two": (tmp_path / "two", [3, 2])}
    trained = run_cases(_trained, 2, cases)

    assert trained["one"] == trained["two"] == trained["plain"]
    for rank in range(2):
        one, two = (Recorded(tmp_path / name, rank).operations for name in ("one", "two"))
        assert list(one) == [2, 3]
        assert one == two
        assert one[2] != one[3]
        assert [item.name for item in one[2]] == [item.name for item in one[3]]
        assert {item.micro_batch for item in one[2]} == {1}
        assert [(item.stage, item.module, item.parameters) for item in one[2] if item.name == "aten::addmm"] == [
            ("forward", "0", ("0.bias", "", "0.weight")),
            ("forward", "2", ("2.bias", "", "2.weight")),
        ]
        product, tanh = (next(item for item in one[2] if item.name == name) for name in ("aten::addmm", "aten::tanh"))
        assert product.outputs == tanh.inputs not in (product.inputs[:1], tanh.outputs)
        assert {item.stage for item in one[2]} == {"forward", "backward"}
        [draw] = [item for item in one[2] if item.generator]
        assert draw.module == "3"


@pytest.mark.usefixtures("alone")
def test_steps_with_operations_are_recorded_whatever_every_says_and_number_their_micro_batches(tmp_path: Path) -> None:
    model, optimizer = wrapped()
    with Recorder(model, tmp_path, optimizer=optimizer, every=3, operations={1, 4}):
        train(model, optimizer, steps=5, micro_batches=2)

    trace = Recorded(tmp_path)
    assert trace.steps == [0, 1, 3, 4]
    assert {(4, "local_gradients"), (4, "parameters")} <= trace.sections.keys()
    assert list(trace.operations) == [1, 4]
    for operations in trace.operations.values():
        assert [item.micro_batch for item in operations] == sorted(item.micro_batch for item in operations)
        assert {item.micro_batch for item in operations} == {1, 2}


@pytest.mark.usefixtures("alone")
def test_the_operations_lie_between_the_first_forward_pass_with_gradients_and_the_call(tmp_path: Path) -> None:
    model, optimizer = wrapped()
    with Recorder(model, tmp_path, optimizer=optimizer, operations=[1]):
        torch.ones(2) * 5
        with torch.no_grad():
            model(batch(1))
        model(batch(1)).sum().backward()
        model.module[0].weight.grad.mul_(7)
        model.all_reduce()
        torch.ones(2) * 9
        optimizer.step()

    found = Recorded(tmp_path).operations[1]

    settings = {item.settings for item in found}
    assert "other=7" in settings
    assert not {"other=5", "other=9"} & settings
    assert [item.name for item in found].count("aten::addmm") == 2
    assert {item.micro_batch for item in found} == {1}


@pytest.mark.usefixtures("alone")
def test_a_plain_module_counts_a_forward_pass_after_each_backward_pass(tmp_path: Path) -> None:
    module = tanh_net()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with Recorder(module, tmp_path, optimizer=optimizer, operations=[2]):
        for step in (1, 2, 3):
            for _ in range(3):
                (module(batch(step) + 5).sum() * 2).backward()
            all_reduce_gradients(module)
            optimizer.step()
            optimizer.zero_grad()

    found = Recorded(tmp_path).operations

    assert list(found) == [2]
    losses = [item for item in found[2] if item.settings == "other=2" and item.stage == "forward"]
    assert [item.micro_batch for item in losses] == [1, 2, 3]
    assert (found[2][0].name, found[2][0].parameters) == ("aten::t", ("0.weight",))
    assert _get_current_dispatch_mode_stack() == []


@pytest.mark.usefixtures("alone")
def test_two_forward_passes_of_a_wrapper_and_of_a_plain_module_agree(tmp_path: Path) -> None:
    for name in ("wrapper", "plain"):
        torch.manual_seed(0)
        module = tanh_net()
        model = LegacyDistributedDataParallel(module) if name == "wrapper" else module
        with Recorder(model, tmp_path / name, operations={1}):
            (model(batch(1)).sum() + model(batch(2)).sum()).backward()
            all_reduce_gradients(module) if name == "plain" else model.all_reduce()

    found = compare(tmp_path / "wrapper", tmp_path / "plain")

    # A wrapper counts two micro-batches, a plain module one.
    assert {item.micro_batch for item in Recorded(tmp_path / "wrapper").operations[1]} == {1, 2}
    assert {item.micro_batch for item in Recorded(tmp_path / "plain").operations[1]} == {1}
    assert found.verdict == "same"
    assert "operations of step 1 agree" in found.notes


@pytest.mark.usefixtures("alone")
def test_a_copy_of_a_recorded_module_is_a_plain_copy(tmp_path: Path) -> None:
    module = tanh_net()
    with Recorder(module, tmp_path, operations=[1]):
        copied = copy.deepcopy(module)
        torch.save(module, io.BytesIO())
        module(batch(1)).sum().backward()
        copied(batch(1)).sum().backward()
        all_reduce_gradients(module)

    assert {item.micro_batch for item in Recorded(tmp_path).operations[1]} == {1}
    assert not module._forward_pre_hooks


_NO_FORWARD = "saw no training forward pass of the model in the steps of operations="
_OF_WRAPPER = (
    "holds no operations: those of a compiled wrapper are not recorded; compile the module inside "
    "(wrapper.module.compile()), or record without torch.compile"
)
# What the recorder is given, the name of the first parameter in the operations, and the warning.
COMPILED = {
    "a plain module": ("_orig_mod.0.bias", ""),
    "the module inside of a plain one": ("", _NO_FORWARD),
    "a wrapper": ("", _OF_WRAPPER),
    "a wrapper that its method compiled": ("", _OF_WRAPPER),
    "the module in a wrapper": ("0.bias", ""),
}


def _compiled(what: str) -> tuple[nn.Module, nn.Module]:
    """What is called, and what the recorder is given."""
    module = tanh_net()
    if "plain" in what:  # with a recorder it compiles as a whole, too
        compiled = torch.compile(module, backend="eager", fullgraph=True)
        return compiled, module if "inside" in what else compiled
    wrapper = LegacyDistributedDataParallel(module)
    if what == "a wrapper":
        compiled = torch.compile(wrapper, backend="eager")
        return compiled, compiled
    (wrapper if "method" in what else module).compile(backend="eager")
    return wrapper, wrapper


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("what", COMPILED)
def test_what_is_compiled_is_recorded_under_its_names_or_told_to_lack_operations(tmp_path: Path, what: str) -> None:
    called, given = _compiled(what)
    with Recorder(given, tmp_path, operations=[1, 2]):
        for step in (1, 2):
            called(batch(step)).sum().backward()
            all_reduce_gradients(given) if "plain" in what else called.all_reduce()

    parameter, warning = COMPILED[what]
    told = logged_warnings.take()
    assert [warning in text for text in told] == [True] * bool(warning), told
    trace = Recorded(tmp_path)
    assert trace.steps == [0, 1, 2]
    assert trace.environment.parameters[0] == (parameter or "0.bias")
    assert list(trace.operations) == ([1, 2] if parameter else [])
    for operations in trace.operations.values():
        [first, _] = [item.parameters for item in operations if item.name == "aten::addmm"]
        assert first == (parameter, "", parameter.replace("bias", "weight"))
        assert {item.micro_batch for item in operations} == {1}


def _fail_once(rank: int, folder: Path) -> None:
    model, optimizer = wrapped()
    with Recorder(model, folder, optimizer=optimizer, operations=[1]):
        model(batch(1)).sum().backward()
        with suppress(PeerError):
            model.all_reduce(sample_size=-1 if rank == 1 else 3)
        optimizer.zero_grad()
        (model(batch(2)) * 3).sum().backward()
        model.all_reduce(sample_size=3)
        optimizer.step()


def test_after_a_call_that_failed_the_record_begins_again(tmp_path: Path) -> None:
    run_ranks(_fail_once, 2, tmp_path)

    for rank in range(2):
        found = Recorded(tmp_path, rank).operations[1]
        assert [item.settings for item in found if item.settings == "other=3"] != []
        assert [item.name for item in found].count("aten::addmm") == 2
        assert {item.micro_batch for item in found} == {1}


@pytest.mark.usefixtures("alone")
def test_an_exception_in_a_step_leaves_no_mode_behind(tmp_path: Path) -> None:
    model, optimizer = wrapped()
    with suppress(RuntimeError), Recorder(model, tmp_path, optimizer=optimizer, operations=[1]):
        model(torch.ones(2, 9))

    assert _get_current_dispatch_mode_stack() == []
    trace = Recorded(tmp_path)
    assert (trace.end, trace.operations) == ("RuntimeError", {})


class Odd(torch.Tensor):
    """A tensor that does not tell its strides."""

    def stride(self) -> tuple[int, ...]:  # type: ignore[override]
        raise OSError("no strides")


@pytest.mark.usefixtures("alone")
def test_a_failure_to_capture_ends_the_trace_and_not_the_training(tmp_path: Path) -> None:
    model, optimizer = wrapped()
    with Recorder(model, tmp_path, optimizer=optimizer, operations=[2]):
        for step in (1, 2, 3):
            optimizer.zero_grad()
            loss = model(batch(step)).sum()
            (loss * torch.ones(()).as_subclass(Odd)).backward()
            model.all_reduce()
            optimizer.step()
    said = logged_warnings.take_all()

    [told] = [item.text for item in said if "the training goes on" in item.text]
    logged_warnings.take()
    assert "rank-00000.jsonl ends before step 2" in told
    assert "no strides" in told
    assert _get_current_dispatch_mode_stack() == []
    assert Recorded(tmp_path).steps == [0, 1]


@pytest.mark.usefixtures("alone")
def test_a_trace_that_ends_within_a_step_ends_its_operations(tmp_path: Path) -> None:
    model, optimizer = wrapped()
    with Recorder(model, tmp_path / "trace", optimizer=optimizer, operations=[1]) as recorder:
        loss = model(batch(1)).sum()
        assert len(_get_current_dispatch_mode_stack()) == 1
        shutil.rmtree(tmp_path / "trace")  # the next write fails
        recorder.log(loss=1.0)
        (told,) = logged_warnings.take()
        assert "ends before step 1, and the training goes on" in told
        recorder_modes = _get_current_dispatch_mode_stack()
        loss.backward()
        model.all_reduce()

    logged_warnings.take()
    assert recorder_modes == []


@pytest.mark.usefixtures("alone")
def test_steps_that_do_not_come_are_told_and_may_be_very_many(tmp_path: Path) -> None:
    model, optimizer = wrapped()
    with Recorder(model, tmp_path, optimizer=optimizer, operations=range(10, 10**15)):
        train(model, optimizer)

    [told] = logged_warnings.take()
    assert f"the trace in {tmp_path} holds no operations: it ends with step 3" in told
