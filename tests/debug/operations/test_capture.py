"""Capture of operations: names, places, digests, settings and generators."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import dropout
from torch.utils.checkpoint import checkpoint

from legacy_ddp.debug import digest
from legacy_ddp.debug._operations.capture import OperationCapture
from legacy_ddp.debug._operations.operation import Operation
from tests.helpers.recorded import word_of
from tests.helpers.torch_versions import leaves_compiler_alone


def captured(module: nn.Module, run: Callable[[], object], *, keep: range = range(0)) -> list[Operation]:
    with OperationCapture(module, keep=keep) as capture:
        run()
    return capture.operations


def the(operations: list[Operation], name: str) -> Operation:
    [found] = [item for item in operations if item.name == name]
    return found


class Block(nn.Module):
    """Two layers by name, the second shared with a list."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(3, 4)
        self.inner = nn.Sequential(nn.Tanh(), nn.Linear(4, 2, bias=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(self.first(x))


def test_an_operation_has_the_digests_of_its_inputs_and_outputs() -> None:
    model, x = Block(), torch.randn(5, 3)

    operation = the(captured(model, lambda: model(x)), "aten::addmm")

    weight, bias = model.first.weight.detach(), model.first.bias.detach()
    assert [value.digest for value in operation.inputs] == [word_of(item) for item in (bias, x, weight.t())]
    assert [value.kind for value in operation.inputs] == ["float32 (4,)", "float32 (5, 3)", "float32 (3, 4)"]
    assert [value.layout for value in operation.inputs] == ["", "", "strides (1, 3)"]
    assert [value.digest for value in operation.outputs] == [word_of(x @ weight.t() + bias)]
    assert operation.parameters == ("first.bias", "", "first.weight")
    assert (operation.stage, operation.module, operation.settings, operation.generator) == ("forward", "first", "", "")


def test_operations_of_the_backward_pass_and_its_hooks_belong_to_the_module_of_the_forward_pass() -> None:
    model, x = Block(), torch.randn(5, 3)

    def run() -> None:
        out = model(x)
        out.register_hook(lambda grad: grad * 7)
        (out * 2).sum().backward()

    found = captured(model, run)

    places = [(item.stage, item.module) for item in found]
    assert list(dict.fromkeys(places)) == [
        ("forward", "first"),
        ("forward", "inner.0"),
        ("forward", "inner.1"),
        ("forward", ""),
        ("backward", ""),
        ("backward", "inner.1"),
        ("backward", "inner.0"),
        ("backward", "first"),
    ]
    products = [item for item in found if item.name == "aten::mm" and item.stage == "backward"]
    assert [item.module for item in products] == ["inner.1", "inner.1", "first"]
    assert products[1].parameters == ("", "inner.1.weight")
    [hook] = [item for item in found if item.settings == "other=7"]
    assert (hook.stage, hook.module) == ("backward", "inner.1")
    assert products[2].outputs[0].digest == word_of(model.first.weight.grad.t().contiguous().t())


class Borrower(nn.Module):
    """A product with the weight of another module."""

    def __init__(self, lender: nn.Linear) -> None:
        super().__init__()
        self._lenders = [lender]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self._lenders[0].weight


def test_a_gradient_belongs_to_the_holder_of_the_parameter_and_not_to_its_user() -> None:
    lender = nn.Linear(3, 3, bias=False)
    model, x = nn.ModuleDict({"lender": lender, "borrower": Borrower(lender)}), torch.randn(5, 3)
    lender.weight.grad = torch.zeros(3, 3)

    found = captured(model, lambda: model["borrower"](x).sum().backward())

    accumulation = the(found, "aten::add_.Tensor")
    assert (accumulation.module, accumulation.outputs[0].digest) == ("lender", word_of(lender.weight.grad))
    assert {item.module for item in found if item.name == "aten::mm"} == {"borrower"}


class Slope(nn.Module):
    """The derivative of a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(3, 3), nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        return torch.autograd.grad(self.inner(x).sum(), x)[0]


def test_a_backward_pass_inside_of_a_module_belongs_to_the_modules_of_its_nodes() -> None:
    model, x = nn.Sequential(Slope()), torch.randn(5, 3)

    found = captured(model, lambda: model(x))

    assert the(found, "aten::tanh_backward").module == "0.inner.1"
    assert the(found, "aten::mm").module == "0.inner.0"
    assert {item.stage for item in found} == {"forward", "backward"}


def test_operations_of_the_library_itself_are_left_out() -> None:
    x = torch.ones(2)

    found = captured(nn.Identity(), lambda: (x + 1, digest(x), x * 2))

    assert [item.name for item in found] == ["aten::add.Tensor", "aten::mul.Tensor"]


EYE = [[1.0, 0.0], [0.0, 1.0]]


@pytest.mark.parametrize(
    "name, run, inputs, outputs",
    [
        ("aten::mul_.Tensor", lambda: torch.tensor([1.0, -2.0]).mul_(3), [[1.0, -2.0]], [[3.0, -6.0]]),
        (
            "aten::_foreach_add_.Scalar",
            lambda: torch._foreach_add_([torch.ones(2), torch.zeros(3)], 1.0),
            [[1.0] * 2, [0.0] * 3],
            [[2.0] * 2, [1.0] * 3],
        ),
        # A destination is not read.
        (
            "aten::mm.out",
            lambda: torch.mm(torch.eye(2), torch.eye(2), out=torch.full((2, 2), float("nan"))),
            [EYE, EYE, None],
            [EYE],
        ),
    ],
)
def test_what_an_operation_changes_is_an_output_and_digested_before_as_an_input(
    name: str, run: Callable[[], object], inputs: list[Any], outputs: list[Any]
) -> None:
    operation = the(captured(nn.Identity(), run), name)

    for found, expected in ((operation.inputs, inputs), (operation.outputs, outputs)):
        digests = [None if values is None else word_of(values) for values in expected]
        assert [value.digest for value in found] == digests


def test_the_statistics_of_a_batch_norm_are_outputs() -> None:
    norm, x = nn.BatchNorm1d(3), torch.randn(4, 3)

    operation = the(captured(norm, lambda: norm(x)), "aten::native_batch_norm")

    assert operation.parameters == ("", "weight", "bias", "running_mean", "running_var")
    assert {word_of(norm.running_mean), word_of(norm.running_var)} <= {item.digest for item in operation.outputs}


def test_a_large_tensor_is_digested_before_it_changes() -> None:
    x = torch.arange(2.0**17)

    def run() -> None:
        y = x + 1
        y.zero_()

    total, zero = captured(nn.Identity(), run)

    assert total.outputs[0].digest == word_of(x + 1)
    assert zero.outputs[0].digest == word_of(torch.zeros(2**17))


def test_views_have_shapes_and_no_digests() -> None:
    x = torch.arange(6.0).view(2, 3)

    view, select = captured(nn.Identity(), lambda: x.t()[1])

    assert (view.name, select.name, select.settings) == ("aten::t", "aten::select.int", "dim=0, index=1")
    assert (view.outputs[0].kind, view.outputs[0].layout) == ("float32 (3, 2)", "strides (1, 3)")
    assert {value.digest for item in (view, select) for value in (*item.inputs, *item.outputs)} == {None}


def test_a_random_operation_has_the_state_of_its_generator() -> None:
    x, own = torch.ones(4), torch.Generator().manual_seed(9)
    default, given = torch.get_rng_state(), own.get_state()

    found = captured(nn.Identity(), lambda: (dropout(x, 0.5), torch.bernoulli(x / 2, generator=own), x + 1))

    assert the(found, "aten::bernoulli_.float").generator == word_of(default)
    assert the(found, "aten::bernoulli").generator == word_of(given)
    assert the(found, "aten::bernoulli").settings == "generator=Generator"
    assert the(found, "aten::add.Tensor").generator == ""


def test_kept_outputs_are_copies() -> None:
    x = torch.ones(2)

    with OperationCapture(nn.Identity(), keep=(1,)) as capture:
        ((x + 1) * 2).zero_()

    assert list(capture.kept) == [1]
    assert capture.kept[1][0].tolist() == [4.0, 4.0]


@pytest.mark.parametrize(
    "writes",
    [
        [(lambda x: x.copy_(torch.ones(2, 2)), [[1.0, 1], [1, 1]])],
        [(lambda x: x[:, 1:].fill_(1), None), (lambda x: x[:, :1].fill_(2), [[2.0, 1], [2, 1]])],
        [(lambda x: x.index_put_((torch.tensor([0, 1]),), torch.ones(2)), None), (torch.Tensor.zero_, [[0.0, 0]] * 2)],
    ],
    ids=["whole", "in parts", "at some indices"],
)
def test_memory_has_a_digest_once_all_of_it_is_written(writes: list[tuple[Callable[[Any], Any], Any]]) -> None:
    def run() -> None:
        x = torch.empty(2, 2)
        for write, _ in writes:
            write(x)
            x + 1

    found = captured(nn.Identity(), run)

    assert found[0].outputs[0].digest is None
    sums = [item.inputs[0].digest for item in found if item.name == "aten::add.Tensor"]
    assert sums == [None if held is None else word_of(held) for _, held in writes]
    if len(writes) == 1:
        copy = the(found, "aten::copy_")
        assert [copy.inputs[0].digest, copy.outputs[0].digest] == [None, *sums]


def test_freed_memory_does_not_make_new_memory_undefined() -> None:
    def run() -> None:
        for _ in range(50):
            torch.empty(64)  # freed at once
            torch.tensor([1.0] * 64) + 1

    sums = [item for item in captured(nn.Identity(), run) if item.name == "aten::add.Tensor"]

    assert {item.inputs[0].digest for item in sums} == {word_of(torch.ones(64))}


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_the_second_forward_of_a_checkpoint_is_in_the_backward_pass(use_reentrant: bool) -> None:
    model, x = Block(), torch.randn(5, 3)
    model.inner = nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 2))

    def run() -> None:
        checkpoint(model.inner, model.first(x), use_reentrant=use_reentrant).sum().backward()

    found = captured(model, run)

    draws = [item for item in found if item.name == "aten::bernoulli_.float"]
    assert [(item.stage, item.module) for item in draws] == [("forward", "inner.0"), ("backward", "inner.0")]
    assert draws[0].generator == draws[1].generator != ""
    assert [item.module for item in found if item.stage == "backward" and item.name == "aten::mm"] == [
        "inner.1",
        "inner.1",
        "first",
    ]


def test_functional_call_names_parameters_by_their_memory() -> None:
    model, x = Block(), torch.randn(5, 3)
    same = {name: parameter.detach() for name, parameter in model.named_parameters()}
    other = {name: parameter.clone() for name, parameter in same.items()}

    found = captured(model, lambda: [torch.func.functional_call(model, given, (x,)) for given in (same, other)])

    first, second = [item for item in found if item.name == "aten::addmm"]
    assert (first.parameters, second.parameters) == (("first.bias", "", "first.weight"), ("", "", ""))
    assert first.module == second.module == "first"
    assert first.outputs == second.outputs


def test_transforms_of_functions_are_seen_as_the_operations_that_they_run() -> None:
    model, x = Block(), torch.randn(5, 3)
    given = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def loss(parameters: dict[str, torch.Tensor], row: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, parameters, (row,)).sum()

    found = captured(model, lambda: torch.vmap(torch.func.grad(loss), (None, 0))(given, x))

    assert {"aten::mm", "aten::tanh_backward", "aten::bmm"} <= {item.name for item in found}
    assert {item.stage for item in found} == {"forward", "backward"}


def test_a_second_backward_pass_belongs_to_the_modules_of_the_first() -> None:
    model, x = Block(), torch.randn(5, 3, requires_grad=True)

    def run() -> None:
        [grad] = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        grad.square().sum().backward()

    found = captured(model, run)

    assert {item.module for item in found if item.name == "aten::tanh_backward"} == {"inner.0"}
    assert {item.module for item in found if item.name == "aten::mm"} == {"inner.1", "first"}


def test_sparse_gradients_are_digested_as_coalesced() -> None:
    words, rows = nn.Embedding(10, 2, sparse=True), torch.tensor([3, 1, 3])

    found = captured(words, lambda: words(rows).sum().backward())

    sparse = [item for item in found for value in item.outputs if value.kind.endswith("sparse") and value.digest]
    assert sparse[-1].outputs[0].digest == word_of(words.weight.grad)
    assert sparse[-1].outputs[0].layout == "sparse_coo"


def test_complex_tensors_have_their_conjugation_in_the_layout() -> None:
    x = torch.tensor([1 + 2j, 3 - 1j])

    found = captured(nn.Identity(), lambda: x.conj() * 2)

    assert the(found, "aten::_conj").outputs[0].layout == "conjugated"
    assert the(found, "aten::mul.Tensor").inputs[0].digest == word_of(torch.tensor([1 - 2j, 3 + 1j]))


def test_tied_weights_have_their_first_name() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight

    found = captured(model, lambda: model(torch.ones(1, 2)))

    assert [(item.module, item.parameters) for item in found if item.name == "aten::mm"] == [
        ("0", ("", "0.weight")),
        ("1", ("", "0.weight")),
    ]


def test_parameters_in_one_memory_are_told_apart() -> None:
    flat, model = torch.randn(5), nn.ParameterList()
    model.extend([nn.Parameter(flat[:2]), nn.Parameter(flat[2:])])

    found = captured(model, lambda: (model[1] * 2, flat + 1))

    assert [item.parameters for item in found] == [("1",), ("0, 1",)]


@leaves_compiler_alone
def test_a_control_flow_operation_runs_and_has_a_row() -> None:
    x = torch.ones(2)

    found = captured(nn.Identity(), lambda: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)))

    assert found[-1].name == "higher_order::cond"
    assert found[-1].outputs[0].digest == word_of(torch.sin(x))


def test_operations_before_the_first_forward_pass_have_no_number() -> None:
    model = nn.Sequential(nn.Tanh(), nn.Tanh())
    inputs = torch.ones(2)

    with OperationCapture(model) as capture:
        model((inputs + 1).exp()).sum()
    with OperationCapture(model) as without:
        inputs.exp().sum()

    assert [item.number for item in capture.operations] == [0, 0, 1, 2, 3]
    assert [item.number for item in without.operations] == [1, 2]
