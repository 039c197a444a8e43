"""Captured operations of two ranks: other data, lengths and batches are no difference, and other code is one."""

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.data import DataLoader, TensorDataset

from legacy_ddp.debug._operations.capture import OperationCapture
from legacy_ddp.debug._operations.operation import Operation
from legacy_ddp.debug._operations.structure import Structure
from tests.helpers.operations import changed, model, operation, value

Code = Callable[["Inner", Tensor], Tensor]
WIDTH = 8


class Inner(nn.Module):
    """A submodule with the code of a test."""

    def __init__(self, code: Code) -> None:
        super().__init__()
        self.code, self.linear = code, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.code(self, x)


class Outer(nn.Module):
    """A model with code in a submodule, and code of its own between submodules."""

    def __init__(self, code: Code = lambda inner, x: inner.linear(x), own: Callable[[Tensor], Tensor] = Tensor.relu):
        super().__init__()
        self.own = own
        self.first, self.inner, self.last = nn.Linear(WIDTH, WIDTH), Inner(code), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.own(self.inner(self.first(x))))
        return out


class Recurrent(nn.Module):
    def __init__(self, kind: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.first, self.body, self.last = (
            nn.Linear(WIDTH, WIDTH),
            kind(WIDTH, WIDTH, batch_first=True),
            nn.Linear(8, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.body(self.first(x))[0][:, -1])
        return out


class Both(nn.Module):
    """Two directions, in two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.last = nn.GRU(WIDTH, WIDTH, 2, bidirectional=True, batch_first=True), nn.Linear(2 * WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.body(x)[0])
        return out


class Chunks(nn.Module):
    """A loop over equal parts of a sequence, as long as the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(torch.cat([self.body(part) for part in x.split(2, 1)], 1))
        return out


class Cells(nn.Module):
    """A loop over time in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.last = nn.LSTMCell(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = c = torch.zeros(len(x), WIDTH)
        for time in range(x.shape[1]):
            h, c = self.cell(x[:, time], (h, c))
        out: Tensor = self.last(h)
        return out


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.last = nn.LSTM(WIDTH, WIDTH, batch_first=True), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        lengths = x[:, :, 0].gt(0).sum(1).clamp(min=1)
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        out: Tensor = self.last(self.body(packed)[1][0][-1])
        return out


class Words(nn.Module):
    """Positions and a causal mask of the length of the sequence, as in a language model."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Embedding(16, WIDTH)
        self.body = nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        out: Tensor = self.body(x + self.places(torch.arange(length)), src_mask=mask, is_causal=True)
        return out


def captured(make: Callable[[], nn.Module], x: Tensor, rank: int = 0, *, loss: Any = None) -> list[Operation]:
    """The operations of a step on a rank; ``loss``: of the model and the batch."""
    torch.manual_seed(0)
    model = make()
    torch.manual_seed(rank + 1)
    with OperationCapture(model, counts_forwards=True) as capture:
        (loss(model, x) if loss else model(x).square().sum()).backward()
    return capture.operations


def batch(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def compare(a: list[Operation], b: list[Operation]) -> Structure:
    return Structure(a, b, lambda _: True)


def compare_code(a: Code, b: Code | None = None) -> Structure:
    """Two ranks with code of a submodule and data of their own."""
    codes = (a, b or a)
    return compare(
        *(captured(partial(Outer, code), batch(4, WIDTH, seed=rank), rank) for rank, code in enumerate(codes))
    )


BATCHES = (3, 5, WIDTH), (4, 5, WIDTH)
LENGTHS = (3, 5, WIDTH), (3, 7, WIDTH)


@pytest.mark.parametrize("shapes", [BATCHES, LENGTHS], ids=["batches", "lengths"])
@pytest.mark.parametrize(
    "make",
    [
        *(partial(Recurrent, kind) for kind in (nn.LSTM, nn.GRU, nn.RNN)),
        *(partial(Recurrent, partial(kind, num_layers=2, dropout=0.1)) for kind in (nn.LSTM, nn.GRU)),
        Both,
        *(Cells, Chunks, Packed, Words),
    ],
    ids=[
        *("LSTM", "GRU", "RNN", "LSTM of two layers", "GRU of two layers", "GRU in two directions"),
        *("loop over cells", "loop over parts", "packed sequences", "positions and causal mask"),
    ],
)
def test_sequences_and_batches_of_other_sizes_are_no_difference(
    make: Callable[[], nn.Module], shapes: tuple[tuple[int, ...], ...]
) -> None:
    a, b = (captured(make, batch(*shape, seed=rank), rank) for rank, shape in enumerate(shapes))

    assert compare(a, b).difference is None
    assert compare(b, a).difference is None


def test_packed_sequences_of_many_lengths_are_no_difference() -> None:
    steps = [captured(Packed, batch(4, 6, WIDTH, seed=seed), seed) for seed in range(6)]

    assert [compare(steps[0], step).difference for step in steps[1:]] == [None] * 5


@pytest.mark.parametrize("size", [1, 3])
def test_positions_of_the_batch_and_a_squeezed_batch_of_one_are_no_difference(size: int) -> None:
    def code(inner: Inner, x: Tensor) -> Tensor:
        return inner.linear(x + torch.arange(len(x))[:, None]).squeeze().reshape(-1, WIDTH)

    a, b = (captured(partial(Outer, code), batch(rows, WIDTH), rank) for rank, rows in enumerate((4, size)))

    assert compare(a, b).difference is None


@pytest.mark.parametrize(
    "code",
    [
        lambda inner, x: inner.linear(x) * (1 / len(x)),
        lambda inner, x: inner.linear(x) + torch.full((WIDTH,), 1 / len(x)),
    ],
    ids=["factor", "filling"],
)
def test_a_fraction_that_follows_from_the_size_of_the_batch_is_no_difference(code: Code) -> None:
    a, b = (captured(partial(Outer, code), batch(rows, WIDTH), rank) for rank, rows in enumerate((4, 3)))

    assert compare(a, b).difference is None


def test_a_mask_that_chooses_one_row_is_no_difference() -> None:
    def code(inner: Inner, x: Tensor) -> Tensor:
        chosen, out = torch.arange(4) < chosen_rows.pop(0), x.clone()
        out[chosen] = inner.linear(x[chosen])
        return out

    for rows in ([3, 1], [1, 3]):
        chosen_rows = rows
        assert compare_code(code).difference is None


def scaled_by_maximum(inner: Inner, x: Tensor) -> Tensor:
    return inner.linear(x / x.detach().abs().max().item())


def scaled_by_whole_number(inner: Inner, x: Tensor) -> Tensor:
    return inner.linear(x) * (1 + int(x.detach().abs().sum() * 10) % 7)


class Drawn:
    """Numbers of Python's generator, others on each rank."""

    def __init__(self) -> None:
        self.generator = random.Random(3)

    def crop(self, inner: Inner, x: Tensor) -> Tensor:
        start = self.generator.randrange(4)
        return inner.linear(torch.cat([x[:, start : start + 4]] * 2, 1))

    def roll(self, inner: Inner, x: Tensor) -> Tensor:
        return inner.linear(x.roll(self.generator.randrange(1, 8), 1))

    def split(self, inner: Inner, x: Tensor) -> Tensor:
        size = self.generator.randrange(1, 8)
        return inner.linear(torch.cat(x.split([size, 8 - size], 1)[::-1], 1))


@pytest.mark.parametrize("code", [scaled_by_maximum, scaled_by_whole_number, Drawn().crop, Drawn().roll, Drawn().split])
def test_numbers_that_come_from_data_are_no_difference(code: Code) -> None:
    assert [compare_code(code).difference for _ in range(3)] == [None] * 3


def test_a_number_that_is_infinite_on_one_rank_is_no_difference() -> None:
    a, b = (captured(partial(Outer, scaled_by_maximum), x) for x in (batch(4, 8), torch.full((4, 8), float("inf"))))

    assert compare(a, b).difference is None


def test_a_loop_as_long_as_a_number_from_data_is_no_difference() -> None:
    def code(inner: Inner, x: Tensor) -> Tensor:
        for _ in range(int(x.new_tensor(turns.pop(0)))):
            x = torch.tanh(inner.linear(x))
        return x

    for numbers in ([1, 4], [3, 2]):
        turns = numbers
        assert compare_code(code).difference is None


def test_a_block_called_once_more_is_a_difference_for_equal_sizes() -> None:
    found = compare_code(
        lambda inner, x: inner.linear(x).tanh(), lambda inner, x: inner.linear(inner.linear(x).tanh()).tanh()
    ).difference

    assert found is not None
    assert found.kind == "sequence"


def test_a_data_loader_between_micro_batches_is_no_difference() -> None:
    def step(model: nn.Module, x: Tensor) -> Tensor:
        number = numbers.pop(0)
        batches = iter(DataLoader(TensorDataset(x), batch_size=4))
        for _ in range(number - 1):
            model(next(batches)[0]).square().sum().backward()
        last: Tensor = model(next(batches)[0]).square().sum()
        return last

    # The last batch of the second rank has three rows in the last case.
    for given, rows in (([2, 3], 12), ([3, 2], 12), ([2, 2], 7)):
        numbers = given
        a, b = captured(Outer, batch(12, WIDTH), loss=step), captured(Outer, batch(rows, WIDTH), 1, loss=step)
        assert "aten::stack" in {item.name for item in a}
        assert compare(a, b).difference is None


def number(value: float) -> Code:
    return lambda inner, x: inner.linear(x) * value


@pytest.mark.parametrize(
    "a, b",
    [
        (number(0.25), number(0.5)),
        (lambda inner, x: inner.linear(x).softmax(0), lambda inner, x: inner.linear(x).softmax(1)),
        (
            lambda inner, x: functional.layer_norm(inner.linear(x), (WIDTH,), eps=1e-5),
            lambda inner, x: functional.layer_norm(inner.linear(x), (WIDTH,), eps=1e-6),
        ),
        (
            lambda inner, x: functional.dropout(inner.linear(x), 0.1),
            lambda inner, x: functional.dropout(inner.linear(x), 0.2),
        ),
        (
            lambda inner, x: functional.leaky_relu(inner.linear(x)),
            lambda inner, x: functional.leaky_relu(inner.linear(x), 0.2),
        ),
        (
            lambda inner, x: functional.gelu(inner.linear(x)),
            lambda inner, x: functional.gelu(inner.linear(x), approximate="tanh"),
        ),
    ],
    ids=["factor", "dimension", "eps", "p of dropout", "slope", "word"],
)
def test_another_constant_on_one_rank_is_a_difference(a: Code, b: Code) -> None:
    found = compare_code(a, b).difference

    assert found is not None
    assert (found.kind, found.operation.stage) == ("form", "forward")


@pytest.mark.parametrize(
    "a, b", [(lambda x: x * 0.25, lambda x: x * 0.5), (lambda x: x.softmax(0), lambda x: x.softmax(1))]
)
def test_another_constant_of_the_model_s_own_forward_is_a_difference(
    a: Callable[[Tensor], Tensor], b: Callable[[Tensor], Tensor]
) -> None:
    steps = [captured(partial(Outer, own=own), batch(4, WIDTH, seed=rank), rank) for rank, own in enumerate((a, b))]

    found = compare(*steps).difference

    assert found is not None
    assert (found.kind, found.operation.module) == ("form", "")


def test_a_constant_in_the_loss_is_no_difference() -> None:
    steps = [
        captured(Outer, batch(4, WIDTH), rank, loss=lambda model, x, rank=rank: model(x).sum() / (3.5 + rank))
        for rank in range(2)
    ]

    assert compare(*steps).difference is None


def test_a_number_between_two_forward_passes_of_one_loss_is_no_difference() -> None:
    def contrast(rank: int, model: nn.Module, x: Tensor) -> Tensor:
        return model(x).sum() / (3.5 + rank) + model(x).sum()

    steps = [captured(Outer, batch(4, WIDTH), rank, loss=partial(contrast, rank)) for rank in range(2)]

    assert compare(*steps).difference is None


def turns(x: Tensor, number: int, *names: str) -> Tensor:
    """Operations in a loop."""
    for _ in range(number):
        for name in names:
            x = getattr(x, name)()
    return x


@pytest.mark.parametrize(
    "a, b",
    [
        (lambda inner, x: inner.linear(x).sin().cos(), lambda inner, x: inner.linear(x).sin().cos().sin()),
        (lambda inner, x: inner.linear(x).sin(), lambda inner, x: inner.linear(x * 2).sin()),
        (
            lambda inner, x: turns(inner.linear(x), len(x), "sin", "cos", "tanh"),
            lambda inner, x: turns(inner.linear(x), len(x), "sin", "cos", "tanh").exp(),
        ),
    ],
    ids=["the same once more elsewhere", "another operation", "beside a loop"],
)
def test_an_extra_operation_is_a_difference_beside_batches_of_other_sizes(a: Code, b: Code) -> None:
    steps = [captured(partial(Outer, code), batch(4 - rank, WIDTH), rank) for rank, code in enumerate((a, b))]

    found = compare(*steps).difference

    assert found is not None
    assert (found.kind, found.operation.stage) == ("sequence", "forward")


def test_loops_of_other_lengths_are_a_difference_for_equal_sizes() -> None:
    def code(*numbers: int) -> Code:
        first, second = ("sin", "cos", "tanh"), ("neg", "exp", "atan")
        return lambda inner, x: turns(turns(inner.linear(x), numbers[0], *first), numbers[1], *second)

    found = compare_code(code(2, 3), code(3, 2)).difference

    assert found is not None
    assert (found.kind, found.operation.stage) == ("sequence", "forward")


STEP = model()


def difference(a: list[Operation], b: list[Operation]) -> Any:
    return Structure(a, b, lambda name: name.endswith("weight")).difference


def dropout(path: str = "drop", **changes: Any) -> Operation:
    given = {"settings": "p=0.1, train=True", "generator": "0" * 16, "module": path}
    return operation("native_dropout", ["x"], ["y", "mask"], **{**given, **changes})


def test_other_data_are_no_difference() -> None:
    assert difference(STEP, model("y")) is None


def test_dropout_seeded_by_rank_is_no_difference() -> None:
    assert difference([dropout()], [dropout(generator="1" * 16)]) is None


def test_an_uneven_batch_is_no_difference() -> None:
    full = [
        operation("mm", ["x"], ["y"], module="fc", settings="[32, 10]"),
        operation("div.Scalar", ["y"], ["z"], settings="37.5"),
        operation("expand", ["z"], ["g"], stage="backward", module="fc", settings="[32, 1]"),
    ]
    rest = [
        operation(
            item.name.removeprefix("aten::"),
            inputs=(value("p", "float32 (6, 8)"),),
            parameters=("",),
            outputs=(value("q", "float32 (6, 8)"),),
            settings=item.settings.replace("32", "6").replace("37.5", "6"),
            stage=item.stage,
            module=item.module,
        )
        for item in full
    ]

    assert difference(full, rest) is None


def test_a_device_of_each_rank_s_own_is_no_difference() -> None:
    a, b = ([operation("zeros", [], ["z"], module="fc", settings=f"device=cuda:{index}")] for index in (0, 1))

    assert difference(a, b) is None


def test_a_buffer_of_each_rank_s_own_is_no_difference() -> None:
    a, b = ([operation("norm", ["x", mean], ["y"], parameters=("", "running_mean"))] for mean in ("m", "n"))

    assert difference(a, b) is None


def test_another_weight_is_named() -> None:
    found = difference(STEP, changed(model("y"), 3, inputs=(value("other"),)))

    assert (found.kind, found.start_a, found.origin.parameter, found.origin.reader) == ("input", 3, "1.weight", None)


def test_a_weight_that_changed_during_the_step_names_its_last_reader() -> None:
    again = operation("mm", ["w1"], ["z"], parameters=("1.weight",))
    found = difference([*STEP, again], [*model("y"), operation("mm", ["poked"], ["z"], parameters=("1.weight",))])

    assert (found.origin.parameter, found.origin.reader) == ("1.weight", 4)


@pytest.mark.parametrize(
    "changes",
    [
        {"settings": "p=0.1, train=False"},
        {"settings": "p=0.5, train=True"},
        {"parameters": ("fc.weight",)},
        {"inputs": (value("x", "bfloat16 (4, 8)"),)},
        {"inputs": (value("x", "float32 (1, 4, 8)"),)},
    ],
)
def test_another_form_is_a_difference(changes: dict[str, Any]) -> None:
    found = difference([dropout()], [dropout(**changes)])

    assert (found.kind, found.start_a, found.has_effect) == ("form", 0, None)


def test_a_missing_operation_is_a_difference() -> None:
    found = difference([*STEP[:2], dropout(), *STEP[2:]], model("y"))

    assert (found.kind, found.start_a, found.a, found.b) == ("sequence", 2, (dropout(),), ())


def micro_batch(number: int, *stages: str, **changes: Any) -> list[Operation]:
    return [operation("mul", ["x"], ["y"], micro_batch=number, stage=stage, **changes) for stage in stages]


def test_a_third_micro_batch_of_one_rank_is_no_difference() -> None:
    two = [*micro_batch(1, "forward", "backward"), *micro_batch(2, "forward", "backward")]

    assert difference(two, [*two, dropout(micro_batch=3)]) is None
    assert difference(two, []) is None


def test_one_backward_pass_of_uneven_micro_batches_is_no_difference() -> None:
    two = [*micro_batch(1, "forward"), *micro_batch(2, "forward", "backward")]
    three = [*micro_batch(1, "forward"), *micro_batch(2, "forward"), *micro_batch(3, "forward", "backward")]

    assert difference(two, three) is None
    assert difference(three, two) is None


def test_a_difference_in_a_common_micro_batch_is_found_beside_uneven_ones() -> None:
    a = [*micro_batch(1, "forward", module="fc"), *micro_batch(2, "forward", module="fc")]
    b = [*micro_batch(1, "forward", module="fc", settings="p=0.5")]

    found = difference(a, b)

    assert found is not None
    assert (found.kind, found.start_a, found.start_b) == ("form", 0, 0)
