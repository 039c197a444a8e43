"""A captured step trains as a plain step; the capture ends rightly among other modes, threads, compilers and errors."""

import threading
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from legacy_ddp import LegacyDDPError, LegacyDistributedDataParallel
from legacy_ddp.debug import cross_check, digest
from legacy_ddp.debug._operations.capture import OperationCapture
from legacy_ddp.debug._operations.operation import Operation
from tests.helpers.cross_faults import Net, loss_of
from tests.helpers.ranks import run_ranks
from tests.helpers.scripts import run_script

Step = tuple[nn.Module, Callable[[], torch.Tensor]]


def encoder() -> Step:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model, x = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), torch.randn(3, 5, 16)
    return model, lambda: model(x).square().mean()


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


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.cells = kind(6, 8, 2, dropout=0.2, batch_first=True)
        self.last = nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.cells(x)[0])


def gru() -> Step:
    model, x = Recurrent(nn.GRU), torch.randn(3, 7, 6)
    return model, lambda: model(x).square().mean()


def lstm() -> Step:
    model, x = Recurrent(nn.LSTM), torch.randn(3, 7, 6)
    return model, lambda: model(x).square().mean()


class Tied(nn.Module):
    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 6, sparse=sparse)
        self.last = nn.Linear(6, 20, bias=False)
        if not sparse:
            self.last.weight = self.words.weight

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.last(self.words(rows)).flatten(0, 1)


def tied() -> Step:
    model, rows = Tied(sparse=False), torch.randint(20, (3, 4))
    return model, lambda: cross_entropy(model(rows), rows.flatten())


def sparse() -> Step:
    model, rows = Tied(sparse=True), torch.randint(20, (3, 4))
    return model, lambda: cross_entropy(model(rows), rows.flatten())


def autocast() -> Step:
    model, loss = encoder()

    def run() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return loss()

    return model, run


def checkpointed() -> Step:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.3), nn.Tanh()), torch.randn(3, 4, requires_grad=True)
    return model, lambda: sum(checkpoint(model, x, use_reentrant=kind).sum() for kind in (True, False))  # type: ignore[return-value]


def double_backward() -> Step:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(3, 4, requires_grad=True)

    def run() -> torch.Tensor:
        [grad] = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return grad.square().sum()

    return model, run


STEPS = [encoder, convolutions, gru, lstm, tied, sparse, autocast, checkpointed, double_backward]


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
        grads.append([(digest(p.grad), p.grad.layout, p.grad.is_sparse or p.grad.stride()) for p in model.parameters()])
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


# --- modes of the user -----------------------------------------------------------------------------------------------


class Other(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Callable[..., object], types: object, args: tuple = (), kwargs: dict | None = None
    ) -> object:
        self.names.append(func.name())  # type: ignore[attr-defined]
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


def test_two_captures_run_at_once() -> None:
    x = torch.ones(2)
    with OperationCapture(nn.Identity()) as outer:
        x + 1
        with OperationCapture(nn.Identity()) as inner:
            x * 2

    assert [item.name for item in outer.operations] == ["aten::add.Tensor", "aten::mul.Tensor"]
    assert [item.name for item in inner.operations] == ["aten::mul.Tensor"]


# --- errors, threads, compilers --------------------------------------------------------------------------------------


def test_an_error_of_the_training_ends_the_capture() -> None:
    capture = OperationCapture(nn.Identity())

    with pytest.raises(RuntimeError, match="mat1 and mat2"), capture:
        torch.ones(2, 3) @ torch.ones(2, 3)

    assert _get_current_dispatch_mode_stack() == []
    assert capture.operations == []


def test_an_operation_that_fails_is_left_out_and_the_capture_goes_on() -> None:
    with OperationCapture(nn.Identity()) as capture:
        with pytest.raises(RuntimeError, match="mat1 and mat2"):
            torch.ones(2, 3).mm(torch.ones(2, 3))
        torch.ones(2) + 1

    assert [item.name for item in capture.operations] == ["aten::ones", "aten::ones", "aten::ones", "aten::add.Tensor"]


class Odd(torch.Tensor):
    """A tensor that does not tell its strides."""

    def stride(self) -> tuple[int, ...]:  # type: ignore[override]
        raise OSError("no strides")


def test_a_failure_to_record_does_not_reach_the_training() -> None:
    capture = OperationCapture(nn.Identity())
    capture.start()

    total = torch.ones(2) + torch.ones(2).as_subclass(Odd)
    product = total * 2

    assert product.tolist() == [4.0, 4.0]
    with pytest.raises(OSError, match="no strides"):
        capture.stop()
    assert _get_current_dispatch_mode_stack() == []


def test_a_capture_may_start_again() -> None:
    capture = OperationCapture(nn.Identity())
    capture.start()

    assert capture.stop() == []
    with capture:
        torch.ones(1)
    assert len(capture.operations) == 1


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


def _errors(code: str) -> str:
    """The last line of standard error of a script in a process of its own; empty if it ends well."""
    ended = run_script("-c", code)
    return "" if ended.returncode == 0 else ended.stderr.splitlines()[-1]


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
    assert _errors(COMPILED) == ""


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
    assert _errors(NO_COMPILER) == ""


def _captured(rank: int) -> list[list[str]]:
    """The names of the operations of a captured step, without and with a cross-check inside."""
    seen = []
    for checks in (False, True):
        model = LegacyDistributedDataParallel(Net(nn.BatchNorm1d(16)))
        batch = {"inputs": torch.randn(6 + rank, 6), "targets": torch.randint(3, (6 + rank,))}
        with OperationCapture(model.module) as capture:
            loss = loss_of(model, batch)
            if checks:
                assert cross_check(model, loss_of, batch, operations=True).agrees
            loss.backward()
        seen.append([f"{item.stage} {item.module} {item.name}" for item in capture.operations])
    return seen


@pytest.mark.unsimulated("its operations run in no mode that captures them")
def test_a_capture_of_the_users_step_does_not_see_a_cross_check() -> None:
    for without, with_check in run_ranks(_captured, 2):
        assert with_check == without
        assert len(without) > 20


STRESS = """
import gc
import threading

import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from legacy_ddp.debug._operations.capture import OperationCapture

torch.manual_seed(0)
layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
model = nn.Sequential(nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), nn.LSTM(8, 8, batch_first=True))
x, other = torch.randn(3, 4, 8), nn.Linear(8, 8)
stop = threading.Event()


def beside():
    # Allocates, frees and trains in a thread of its own: dirty memory for the next operations.
    while not stop.is_set():
        other(torch.full((64, 8), 1e30)).sum().backward()


def step(round_number):
    model.zero_grad()
    torch.manual_seed(1)
    capture = OperationCapture(model)
    with FlopCounterMode(display=False) if round_number % 3 == 0 else torch.enable_grad():
        capture.start()
        hidden = checkpoint(model[0], x, use_reentrant=False)
    model[1](hidden)[0].square().sum().backward()
    return capture.stop(), [parameter.grad.clone() for parameter in model.parameters()]


thread = threading.Thread(target=beside)
thread.start()
try:
    step(0)  # in torch 2.8 the first of all checkpoints imports modules that run operations
    first, grads = step(1)
    for round_number in range(60):
        again, others = step(round_number)
        assert again == first, next((a, b) for a, b in zip(first, again) if a != b)
        assert all(map(torch.equal, grads, others))
        assert _get_current_dispatch_mode_stack() == []
finally:
    stop.set()
    thread.join()
gc.collect()
torch.ones(1).add_(1)
"""


@pytest.mark.thorough
def test_sixty_captured_steps_are_equal_and_end_cleanly() -> None:
    ended = run_script("-c", STRESS)

    assert (ended.returncode, ended.stderr) == (0, "")
