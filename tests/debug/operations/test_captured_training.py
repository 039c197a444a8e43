"""A captured step trains as a plain step; the capture ends rightly among other modes, threads, compilers and errors."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils.flop_counter import FlopCounterMode

from legacy_ddp import LegacyDDPError, LegacyDistributedDataParallel
from legacy_ddp.debug import cross_check, digest
from legacy_ddp.debug._operations.capture import OperationCapture
from legacy_ddp.debug._operations.operation import Operation
from tests.helpers.cross_faults import ManyModules, Net, batch_of, loss_of
from tests.helpers.scripts import fork_script, run_script

Step = tuple[nn.Module, Callable[[], torch.Tensor]]


def encoder_with_autocast() -> Step:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model, x = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), torch.randn(3, 5, 16)

    def run() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(x).square().mean()

    return model, run


def convolutions() -> Step:
    layers = [
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(72, 4),
    ]
    model, x = nn.Sequential(*layers), torch.randn(4, 3, 8, 8).contiguous(memory_format=torch.channels_last)
    return model.to(memory_format=torch.channels_last), lambda: model(x).square().sum()


def many_modules() -> Step:
    model, batch = Net(ManyModules()), batch_of(0)
    return model, lambda: loss_of(model, batch)


def double_backward() -> Step:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(3, 4, requires_grad=True)

    def run() -> torch.Tensor:
        [grad] = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return grad.square().sum()

    return model, run


STEPS = [convolutions, encoder_with_autocast, many_modules, double_backward]


def _trained(build: Callable[[], Step], *, is_captured: bool) -> tuple[object, list[list[Operation]]]:
    """Everything that two steps with accumulation leave behind, and the operations of each."""
    torch.manual_seed(7)
    model, loss = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found: list[list[Operation]] = []
    losses, grads = [], []
    for _ in range(2):
        optimizer.zero_grad()
        capture = OperationCapture(model)
        if is_captured:
            capture.start()
        for _ in range(2):
            value = loss()
            value.backward()
            losses.append(value.item())
        if is_captured:
            found.append(capture.stop())
        found_grads = [p.grad for p in model.parameters() if p.grad is not None]
        grads.append([(digest(grad), grad.layout, grad.is_sparse or grad.stride()) for grad in found_grads])
        optimizer.step()
    tensors = [*model.parameters(), *model.buffers()]
    state = [(digest(tensor), tensor._version, tensor.stride()) for tensor in tensors]
    return (losses, grads, state, torch.get_rng_state().tolist()), found


@pytest.mark.parametrize("build", STEPS)
def test_a_captured_step_changes_no_bit_and_repeats_itself(build: Callable[[], Step]) -> None:
    plain, _ = _trained(build, is_captured=False)
    traced, first = _trained(build, is_captured=True)
    _dirty_memory()
    again, second = _trained(build, is_captured=True)

    assert plain == traced == again
    assert first == second
    assert all(len(step) > 10 for step in first)


def _dirty_memory() -> None:
    """Fill memory that the next steps get from the allocator with other bytes."""
    for size in range(4, 20):
        del [torch.full((2**size,), 1e30) for _ in range(8)][:]


def test_no_tensor_is_kept_alive() -> None:
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    capture = OperationCapture(model)
    capture.start()
    storages = [model(x).untyped_storage()._weak_ref()]

    assert torch.UntypedStorage._expired(storages[0])
    capture.stop()


class Other(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def test_a_block_of_another_mode_may_end_inside() -> None:
    capture, x = OperationCapture(nn.Identity()), torch.ones(2)
    with Other() as other:
        x + 1
        capture.start()
        x * 2
    x - 3

    assert [item.name for item in capture.stop()] == ["aten::mul.Tensor", "aten::sub.Tensor"]
    assert other.names == ["aten::add.Tensor", "aten::mul.Tensor"]
    assert _get_current_dispatch_mode_stack() == []


def test_a_block_of_another_mode_may_begin_inside_and_end_outside() -> None:
    capture, x = OperationCapture(nn.Identity()), torch.ones(2)
    capture.start()
    with Other() as other:
        x * 2
        assert [item.name for item in capture.stop()] == ["aten::mul.Tensor"]
        assert _get_current_dispatch_mode_stack() == [other]
        x + 1

    assert other.names == ["aten::mul.Tensor", "aten::add.Tensor"]
    assert _get_current_dispatch_mode_stack() == []


def test_a_counter_of_operations_counts_none_of_the_capture() -> None:
    model, x = nn.Linear(4, 4), torch.ones(2, 4)
    with FlopCounterMode(display=False) as plain:
        model(x).sum().backward()
    with OperationCapture(model), FlopCounterMode(display=False) as captured, Other() as other:
        model(x).sum().backward()

    assert captured.get_total_flops() == plain.get_total_flops() > 0
    assert "aten::clone" not in other.names


def test_an_operation_that_fails_is_left_out_and_the_capture_goes_on() -> None:
    with OperationCapture(nn.Identity()) as capture:
        with pytest.raises(RuntimeError, match="mat1 and mat2"):
            torch.ones(2, 3).mm(torch.ones(2, 3))
        torch.ones(2) + 1

    assert [item.name for item in capture.operations] == ["aten::ones", "aten::ones", "aten::ones", "aten::add.Tensor"]


def test_operations_of_another_thread_are_not_seen() -> None:
    model, x = nn.Linear(2, 2), torch.ones(1, 2)

    with OperationCapture(model) as capture:
        thread = threading.Thread(target=lambda: model(x).sum().backward())
        thread.start()
        thread.join()

    assert capture.operations == []
    assert model.weight.grad is not None


def test_a_stop_in_another_thread_is_an_error_and_the_capture_is_over() -> None:
    capture, errors = OperationCapture(nn.Identity()), []
    capture.start()

    def stop() -> None:
        try:
            capture.stop()
        except LegacyDDPError as error:
            errors.append(str(error))

    thread = threading.Thread(target=stop)
    thread.start()
    thread.join()

    assert "start and stop it in one thread" in errors[0]
    torch.ones(1)
    [left] = _get_current_dispatch_mode_stack()
    left.remove()  # type: ignore[attr-defined]


COMPILED = """
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode
from legacy_ddp.debug._operations.capture import OperationCapture

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.Linear(4, 2))
compiled, x = torch.compile(model, backend="aot_eager"), torch.randn(5, 3)


def step():
    model.zero_grad()
    compiled(x).sum().backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


plain = step()
before = dict(counters["frames"])
with OperationCapture(model) as capture:
    traced = step()
after = step()
if hasattr(TorchDispatchMode, "ignore_compile_internals"):  # in older versions of torch a mode compiles it once more
    assert dict(counters["frames"]) == before, (before, dict(counters["frames"]))
assert all(map(torch.equal, plain, traced)) and all(map(torch.equal, plain, after))
names = [item.name for item in capture.operations]
assert names.count("aten::gelu_backward") == 1, names
"""


@pytest.mark.thorough
def test_compiled_code_stays_compiled_and_its_operations_are_seen() -> None:
    ended = fork_script("-c", COMPILED)

    assert ended.returncode == 0, ended.stderr


NO_COMPILER = """
import sys
import torch
from torch import nn
from legacy_ddp.debug._operations.capture import OperationCapture

model = nn.Linear(2, 2)
with OperationCapture(model) as capture:
    model(torch.ones(1, 2)).sum().backward()
assert "torch._dynamo" not in sys.modules
"""


def test_the_compiler_is_not_imported() -> None:
    ended = run_script("-c", NO_COMPILER)

    assert ended.returncode == 0, ended.stderr


@pytest.mark.usefixtures("alone")
def test_a_capture_of_the_users_step_does_not_see_a_cross_check() -> None:
    seen = []
    for checks in (False, True):
        model, batch = LegacyDistributedDataParallel(Net(nn.BatchNorm1d(16))), batch_of(0)
        with OperationCapture(model.module) as capture:
            loss = loss_of(model, batch)
            if checks:
                assert cross_check(model, loss_of, batch, operations=True).agrees
            loss.backward()
        seen.append([f"{item.stage} {item.module} {item.name}" for item in capture.operations])

    without, with_check = seen
    assert with_check == without
    assert len(without) > 20
