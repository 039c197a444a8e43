"""Captured operations of one rank alone: results that the step does not use, and others."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from legacy_ddp.debug._operations.capture import OperationCapture
from legacy_ddp.debug._operations.operation import Operation
from legacy_ddp.debug._operations.structure import Structure
from tests.helpers.operations import operation, value

WIDTH = 8
KEPT: list[Tensor] = []
Code = Callable[[nn.Module, Tensor], Tensor]
After = Callable[[nn.Module, Tensor], object]


class Net(nn.Module):
    """``code`` runs between two layers."""

    def __init__(self, code: Code) -> None:
        super().__init__()
        self.first, self.last, self.code = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1), code
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("average", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.code(self, self.first(x)))
        return out


def plain(_: nn.Module, x: Tensor) -> Tensor:
    return x


def captured(code: Code = plain, rank: int = 0, after: After | None = None) -> list[Operation]:
    torch.manual_seed(0)
    model = Net(code)
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(rank))
    with OperationCapture(model, counts_forwards=True) as capture:
        loss = model(x).square().sum()
        loss.backward()
        if after:
            after(model, loss)
    return capture.operations


def compare(a: list[Operation], b: list[Operation]) -> Structure:
    return Structure(a, b, lambda _: True)


def logged_mean(_: nn.Module, x: Tensor) -> Tensor:
    KEPT.append(torch.tensor(x.mean().item()))
    return x


def logged_column(_: nn.Module, x: Tensor) -> Tensor:
    KEPT.append(torch.tensor(x[:, 0].abs().max().item()))
    return x


def kept_copy(_: nn.Module, x: Tensor) -> Tensor:
    KEPT.append(x.detach().clone())
    return x


def kept_scalar(_: nn.Module, x: Tensor) -> Tensor:
    KEPT.append(x.detach().mean())
    return x


def kept_sizes(_: nn.Module, x: Tensor) -> Tensor:
    KEPT.append(x.detach().abs().mean(1))
    return x


def scaled(_: nn.Module, x: Tensor) -> Tensor:
    return x * 2


def scaled_and_logged(_: nn.Module, x: Tensor) -> Tensor:
    KEPT.append(torch.tensor((x * 2).sum().item()))
    return x * 2


def written(_: nn.Module, x: Tensor) -> Tensor:
    return x.clamp_(-0.1, 0.1)


def drawn(_: nn.Module, x: Tensor) -> Tensor:
    torch.rand(1)
    return x


UNUSED = [logged_mean, logged_column, kept_copy, kept_scalar, kept_sizes]


@pytest.mark.parametrize("code", UNUSED)
def test_a_log_on_one_rank_is_no_difference(code: Code) -> None:
    a, b = captured(code), captured(rank=1)

    for found, own in ((compare(a, b), "a"), (compare(b, a), "b")):
        assert found.difference is None
        assert [bool(getattr(gap, own)) for gap in found.unused] == [True]


def log_loss(_: nn.Module, loss: Tensor) -> None:
    KEPT.append(torch.tensor(loss.item()))


def log_norms(model: nn.Module, _: Tensor) -> None:
    norms = [parameter.grad.norm() for parameter in model.parameters() if parameter.grad is not None]
    KEPT.append(torch.tensor(torch.stack(norms).norm().item()))


@pytest.mark.parametrize("after", [log_loss, log_norms])
def test_a_log_after_the_backward_pass_of_one_rank_is_no_difference(after: After) -> None:
    assert compare(captured(after=after), captured(rank=1)).difference is None


@pytest.mark.parametrize("log", UNUSED)
@pytest.mark.parametrize("code", [scaled, scaled_and_logged, written, drawn])
def test_a_log_on_one_rank_hides_no_fault_of_the_other(log: Code, code: Code) -> None:
    def logging(model: nn.Module, x: Tensor) -> Tensor:
        return torch.sin(torch.cos(log(model, x)))

    found = compare(captured(logging), captured(lambda model, x: code(model, torch.sin(torch.cos(x))), rank=1))

    assert found.difference is not None
    assert (found.difference.kind, found.difference.a, len(found.unused)) == ("sequence", (), 1)
    assert found.difference.operation.stage == "forward"


def scale_in_place(model: nn.Module, _: Tensor) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(0.5)


def scale_to_new(model: nn.Module, _: Tensor) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad = parameter.grad * 0.5


@pytest.mark.parametrize("after", [scale_in_place, scale_to_new])
def test_gradients_scaled_after_the_backward_pass_of_one_rank_are_a_difference(after: After) -> None:
    found = compare(captured(after=after), captured(rank=1)).difference

    assert found is not None
    assert found.operation.name.startswith("aten::mul")


def test_an_addition_of_nothing_is_named_in_the_forward_pass() -> None:
    found = compare(captured(lambda _, x: x + 0 * x.mean()), captured(rank=1))

    assert found.difference is not None
    assert (found.difference.operation.stage, found.difference.operation.name) == ("forward", "aten::mean")
    assert found.unused == []


def test_a_log_is_no_part_of_a_hook_on_a_gradient_of_the_same_rank() -> None:
    def hooked(model: nn.Module, x: Tensor) -> Tensor:
        x = torch.sin(x)
        x.register_hook(lambda gradient: gradient * 2)
        return logged_mean(model, x)

    found = compare(captured(hooked), captured(lambda _, x: torch.sin(x), rank=1))

    assert found.difference is not None
    assert (found.difference.operation.stage, found.difference.operation.name) == ("backward", "aten::mul.Tensor")
    assert len(found.unused) == 1


def test_running_statistics_of_one_rank_are_a_difference_although_the_result_is_only_logged() -> None:
    def normalised(model: nn.Module, x: Tensor) -> Tensor:
        out = functional.batch_norm(x.detach(), model.norm.running_mean, model.norm.running_var, training=True)
        KEPT.append(torch.tensor(out.mean().item()))
        return x

    found = compare(captured(normalised), captured(rank=1)).difference

    assert found is not None
    assert "aten::native_batch_norm" in [item.name for item in found.a]


def test_a_copy_for_a_log_does_not_hide_a_hook_on_a_gradient() -> None:
    def hooked(_: nn.Module, x: Tensor) -> Tensor:
        x.register_hook(lambda gradient: gradient * 2)
        return x

    found = compare(captured(kept_copy), captured(hooked, rank=1))

    assert found.difference is not None
    assert (found.difference.operation.stage, found.difference.operation.name) == ("backward", "aten::mul.Tensor")


def test_a_buffer_written_on_one_rank_is_a_difference_although_the_step_reads_it_no_more() -> None:
    def averaged(model: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():
            model.average.mul_(0.9)
        return x

    found = compare(captured(averaged), captured(rank=1)).difference

    assert found is not None
    assert found.operation.name == "aten::mul_.Tensor"


def test_batch_norm_in_eval_mode_on_one_rank_is_another_setting() -> None:
    def normalised(model: nn.Module, x: Tensor) -> Tensor:
        return model.norm(x)

    def evaluated(model: nn.Module, x: Tensor) -> Tensor:
        return model.norm.eval()(x)

    for a, b in ((normalised, evaluated), (evaluated, normalised)):
        found = compare(captured(a), captured(b, rank=1)).difference

        assert found is not None
        assert (found.kind, found.operation.module, found.operation.name) == ("form", "norm", "aten::native_batch_norm")
        assert {"training=True", "training=False"} == {item.settings.partition(",")[0] for item in (*found.a, *found.b)}


def test_a_result_that_only_a_transposed_view_reads_is_used() -> None:
    extra = operation("mul", ["x"], ["y"])
    view = operation("t", inputs=(value(None),), outputs=(value(None),), parameters=("",))
    rest = [view, operation("mm", ["turned"], ["out"]), operation("mm", ["out"], ["g"], stage="backward")]

    found = compare([operation("mm", ["d"], ["x"]), extra, *rest], [operation("mm", ["e"], ["x2"]), *rest])

    assert found.difference is not None
    assert found.difference.a == (extra,)


def test_the_result_of_another_operation_with_the_same_bits_is_not_of_the_log() -> None:
    step = [operation("mm", ["x"], ["h"]), operation("ones_like", ["h"], ["one"]), operation("mm", ["one"], ["g"])]
    log = operation("eq", ["h"], outputs=(value("one", "bool ()"),))

    assert compare([step[0], log, *step[1:]], step).difference is None


def test_a_copy_of_data_before_their_first_reader_is_unused() -> None:
    step = [operation("mm", ["x"], ["h"]), operation("mm", ["h"], ["g"], stage="backward")]

    assert compare([operation("clone", ["x"], ["x"]), *step], step).difference is None
