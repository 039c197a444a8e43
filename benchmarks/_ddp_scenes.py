"""The faults and situations of docs/comparison.md, each as a training of two ranks under torch DDP.

Every function is run by both ranks, and plants its fault on rank 1 unless its name says otherwise. It returns the
values at the end on this rank, and the values that would be explained: first the right ones, as one process on the data
of both ranks gets them, then wrong ones with a name. Everything is in float64, so that rounding is far below a fault.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

STEPS, RATE, FAULTY = 4, 0.1, 1
RIGHT = "right"
# A rank that plants its fault at a moment writes the time into a file of this name in its working directory.
FAULT_FILE = Path("fault")
Batches = Sequence[torch.Tensor | None]  # None: a step without a batch


@dataclass(frozen=True)
class Seen:
    """The values at the end on a rank, and those of named trainings; the first name is ``right``."""

    values: Sequence[float]
    named: Mapping[str, Sequence[float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Scene:
    """A situation: the row of the comparison that has it, and its words there.

    ``loses_rank``: rank 1 ends or stands still by plan, and the outcome is that of rank 0 alone.
    """

    row: str
    label: str
    run: Callable[[int], Seen]
    loses_rank: bool = False


class Net(nn.Module):
    """Two layers of one shape, and a head, which casts itself to the dtype of its input."""

    def __init__(self, *, order: Sequence[str] = ("a", "b"), tied: bool = False, bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = {name: nn.Linear(3, 3, dtype=torch.float64) for name in ("a", "b")}
        for name in order:
            self.add_module(name, layers[name])
        self.head = nn.Linear(3, 3, bias=bias, dtype=torch.float64)
        if tied:
            self.head.weight = self.get_submodule("a").weight
        self.extra: nn.Module = nn.Identity()

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        hidden = self.get_submodule("b")(self.get_submodule("a")(batch).tanh()).tanh()
        bias = None if self.head.bias is None else self.head.bias.to(hidden.dtype)
        return self.extra(nn.functional.linear(hidden, self.head.weight.to(hidden.dtype), bias))


def batch(rank: int, step: int, rows: int = 4) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(rows, 3, generator=generator, dtype=torch.float64)


def batches(rank: int, steps: Iterable[int] = range(STEPS)) -> Batches:
    return [batch(rank, step) for step in steps]


def loss_of(model: nn.Module, data: torch.Tensor) -> torch.Tensor:
    return model(data).square().mean()


def weights(model: nn.Module) -> list[float]:
    """By name, so that the order of registration does not matter."""
    named = sorted(model.state_dict().items())
    return torch.cat([value.double().flatten() for _, value in named]).tolist()


def wrapped(model: nn.Module, **options: bool) -> DistributedDataParallel:
    try:
        return DistributedDataParallel(model, **options)
    except Exception as error:
        error.add_note("when wrapped")
        raise


def train(model: nn.Module, data: Batches, between: Callable[[int], None] = lambda _: None, rate: float = RATE) -> None:
    """The plain loop; ``between`` runs between backward and step, with the number of the step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    for step, each in enumerate(data):
        optimizer.zero_grad()
        if each is not None:
            loss_of(model, each).backward()
        between(step)
        optimizer.step()


def alone(*of_ranks: Batches, net: Callable[[], nn.Module] = Net) -> list[float]:
    """The weights of one process that takes the mean over the batches of all ranks in every step."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for joined in zip(*of_ranks, strict=True):
        optimizer.zero_grad()
        torch.stack([loss_of(model, each) for each in joined if each is not None]).mean().backward()
        optimizer.step()
    return weights(model)


def both() -> list[float]:
    return alone(batches(0), batches(1))


def fault() -> None:
    """Note the moment of the fault."""
    FAULT_FILE.write_text(str(time.monotonic()))


# The modules of the ranks differ.


def differs(rank: int, change: Callable[[Net], object], *, later: bool = False) -> Seen:
    net = Net()
    if rank == FAULTY and not later:
        change(net)
    model = wrapped(net)
    if rank == FAULTY and later:
        change(net)
    train(model, batches(rank))
    return Seen(weights(net), {RIGHT: both()})


def freeze(net: Net) -> None:
    net.head.requires_grad_(False)


def cast(net: Net) -> None:
    net.head.float()


def built_otherwise(rank: int, *, of_faulty: Mapping[str, object], of_others: Mapping[str, object]) -> Seen:
    net = Net(**(of_faulty if rank == FAULTY else of_others))
    train(wrapped(net), batches(rank))
    return Seen(weights(net), {RIGHT: alone(batches(0), batches(1), net=lambda: Net(**of_others))})


def other_shapes_in_other_order(rank: int) -> Seen:
    torch.manual_seed(0)
    wide, narrow = nn.Linear(3, 5), nn.Linear(3, 2)
    layers = {"narrow": narrow, "wide": wide} if rank == FAULTY else {"wide": wide, "narrow": narrow}
    model = wrapped(nn.ModuleDict(layers))
    return Seen(weights(model))


# Ranks meet in other places.


def other_wrapper(rank: int) -> Seen:
    """Two models, whose backward passes rank 1 makes in the reverse order."""
    nets = [Net(), Net()]
    models = [wrapped(net) for net in nets]
    for index in (1, 0) if rank == FAULTY else (0, 1):
        (loss_of(models[index], batch(rank, 0)) * (1 + 9 * index)).backward()
    expected = []
    for index, net in enumerate((Net(), Net())):
        torch.stack([loss_of(net, batch(each, 0)) * (1 + 9 * index) for each in (0, 1)]).mean().backward()
        expected += _gradients(net)
    return Seen([value for net in nets for value in _gradients(net)], {RIGHT: expected})


def _gradients(net: nn.Module) -> list[float]:
    return [value for each in net.parameters() if each.grad is not None for value in each.grad.flatten().tolist()]


def one_step_more(rank: int) -> Seen:
    """Rank 1 makes a backward pass more in step 1, so that all its later passes meet an earlier step of rank 0."""
    net = Net()
    order = (0, 1, 1, 2) if rank == FAULTY else range(STEPS)
    train(wrapped(net), batches(rank, order))
    mixed = alone(batches(0), batches(1, (0, 1, 1, 2)))
    return Seen(weights(net), {RIGHT: both(), "two steps are mixed": mixed})


def through_module(rank: int) -> Seen:
    net = Net()
    wrapped(net)
    train(net, batches(rank))
    return Seen(weights(net), {RIGHT: both()})


def one_backward_alone(rank: int) -> Seen:
    """Rank 1 steps on its own gradients once, inside no_sync()."""
    net = Net()
    model = wrapped(net)
    if rank == FAULTY:
        with model.no_sync():
            train(model, batches(rank, [0]))
        train(model, [*batches(rank, range(1, STEPS)), batch(rank, STEPS)])
    else:
        train(model, batches(rank))
    return Seen(weights(net), {RIGHT: both()})


def fewer_micro_batches(rank: int) -> Seen:
    """Two micro-batches on rank 0, one on rank 1; each rank adds its gradients."""
    net = Net()
    model = wrapped(net)
    if rank != FAULTY:
        with model.no_sync():
            loss_of(model, batch(rank, 1)).backward()
    loss_of(model, batch(rank, 0)).backward()
    of_both = Net()
    for each in ((0, 0), (0, 1), (1, 0)):
        (loss_of(of_both, batch(*each)) / 3).backward()
    summed = Net()
    for each in ((0, 0), (0, 1), (1, 0)):
        (loss_of(summed, batch(*each)) / 2).backward()
    wrong = "the sums of unequal numbers are averaged"
    return Seen(_gradients(net), {RIGHT: _gradients(of_both), wrong: _gradients(summed)})


# A rank is lost.


def lost(rank: int, how: Callable[[], object]) -> Seen:
    model = wrapped(Net())
    train(model, batches(rank, range(2)))
    if rank == FAULTY:
        fault()
        how()
    train(model, batches(rank, range(2, STEPS)))
    return Seen([])


def kill_itself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop_itself() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def raise_error() -> None:
    raise RuntimeError("planted")


def leave() -> None:
    raise SystemExit(3)


def loop() -> None:
    while True:
        pass


def wait() -> None:
    threading.Event().wait()


# Replicas and gradients part.


def between_steps(rank: int, change: Callable[[nn.Module], object]) -> Seen:
    """``change`` is made on rank 1 in step 1, after backward."""
    net = Net()
    train(wrapped(net), batches(rank), lambda step: change(net) if rank == FAULTY and step == 1 else None)
    return Seen(weights(net), {RIGHT: both()})


def flip_bit(net: nn.Module) -> None:
    with torch.no_grad():
        next(net.parameters()).view(torch.int64)[0, 0] ^= 1 << 40


def clip(net: nn.Module) -> None:
    nn.utils.clip_grad_norm_(net.parameters(), 1e-3)


def drop_gradients(net: nn.Module) -> None:
    net.zero_grad()


def other_rate(rank: int) -> Seen:
    net = Net()
    train(wrapped(net), batches(rank), rate=2 * RATE if rank == FAULTY else RATE)
    return Seen(weights(net), {RIGHT: both()})


def statistics(rank: int) -> Seen:
    """Running means after a training with other data on each rank, and a forward in evaluation."""
    layer = nn.BatchNorm1d(3, dtype=torch.float64)
    model = wrapped(layer)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for each in batches(rank):
        optimizer.zero_grad()
        loss_of(model, each).backward()
        optimizer.step()
    own = nn.BatchNorm1d(3, dtype=torch.float64)
    joined, of_rank_0 = nn.BatchNorm1d(3, dtype=torch.float64), own
    for step in range(STEPS):
        joined(torch.cat([batch(0, step), batch(1, step)]))
        of_rank_0(batch(0, step))
    model.eval()
    model(batch(0, 0))
    means = {RIGHT: joined, "rank 0's on all ranks": of_rank_0}
    return Seen(layer.running_mean.tolist(), {name: each.running_mean.tolist() for name, each in means.items()})


def bad_input(rank: int) -> Seen:
    net = Net()
    data = batches(rank)
    if rank == FAULTY:
        data[1][0, 0] = torch.nan
    train(wrapped(net), data)
    return Seen(weights(net), {RIGHT: both()})


def same_data(_: int) -> Seen:
    net = Net()
    train(wrapped(net), batches(0))
    one = alone(batches(0), batches(0))
    return Seen(weights(net), {RIGHT: both(), "as with the data of one rank": one})


def wrong_kernel(rank: int) -> Seen:
    """One gradient of rank 1 is wrong before the exchange."""
    net = Net()
    model = wrapped(net)
    if rank == FAULTY:
        net.head.weight.register_hook(lambda grad: grad * 1.01)
    train(model, batches(rank))
    return Seen(weights(net), {RIGHT: both()})


def caught_error(rank: int) -> Seen:
    """Rank 1 catches an error in its backward and goes on with its next batch."""
    net = Net()
    model = wrapped(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for step in range(STEPS + (rank == FAULTY)):
        optimizer.zero_grad()
        loss = loss_of(model, batch(rank, step))
        if rank == FAULTY and step == 1:
            loss.register_hook(lambda _: raise_error())
        try:
            loss.backward()
        except RuntimeError as error:
            if "planted" not in str(error):
                raise
            continue
        optimizer.step()
    mixed = alone(batches(0), batches(1, (0, 2, 3, 4)))
    return Seen(weights(net), {RIGHT: both(), "two steps are mixed": mixed})


def graph_of_gradients(rank: int) -> Seen:
    net = Net()
    model = wrapped(net)
    loss_of(model, batch(rank, 0)).backward(create_graph=rank == FAULTY)
    of_both = Net()
    torch.stack([loss_of(of_both, batch(each, 0)) for each in (0, 1)]).mean().backward()
    return Seen(_gradients(net), {RIGHT: _gradients(of_both)})


# Uneven work.


def uneven_rows(rank: int) -> Seen:
    """One row on rank 0, three on rank 1; every rank takes the mean over its rows."""
    rows = (1, 3)
    net = Net()
    model = wrapped(net)  # lives until the end: its hooks die with it
    loss_of(model, batch(rank, 0, rows[rank])).backward()
    data = [batch(each, 0, rows[each]) for each in (0, 1)]
    by_rows, by_ranks = Net(), Net()
    loss_of(by_rows, torch.cat(data)).backward()
    torch.stack([loss_of(by_ranks, each) for each in data]).mean().backward()
    wrong = "every rank has equal weight"
    return Seen(_gradients(net), {RIGHT: _gradients(by_rows), wrong: _gradients(by_ranks)})


def out_of_data(rank: int, how: str) -> Seen:
    """Rank 1 has a batch less."""
    net = Net()
    model = wrapped(net)
    own = batches(rank)[: STEPS - (rank == FAULTY)]
    if how == "join":
        with model.join(divide_by_initial_world_size=False):
            train(model, own)
        return Seen(weights(net), {RIGHT: alone(batches(0), [*batches(1, range(STEPS - 1)), None])})
    train(model, own)
    if rank == FAULTY:
        fault()
    if how == "barrier":
        dist.barrier()
    return Seen(weights(net), {RIGHT: both()})


# Loops and models of other kinds, on all ranks alike.


def forwards(rank: int, *, backwards: int) -> Seen:
    net = Net()
    model = wrapped(net)
    losses = [loss_of(model, batch(rank, step)) for step in (0, 1)]
    for loss in losses if backwards == 2 else [sum(losses)]:
        loss.backward()
    of_both = Net()
    (sum(loss_of(of_both, batch(each, step)) for each in (0, 1) for step in (0, 1)) / 2).backward()
    return Seen(_gradients(net), {RIGHT: _gradients(of_both)})


class Checkpointed(Net):
    """Runs its layers in re-entrant checkpoints, the first layer ``times`` times."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        hidden = data.clone().requires_grad_()
        for name in ("a",) * self.times + ("b",):
            hidden = checkpoint(self.get_submodule(name), hidden, use_reentrant=True)
        return self.head(hidden)


class HalfUsed(Net):
    """Leaves its second layer out."""

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        return self.head(self.get_submodule("a")(data).tanh())


def other_net(rank: int, build: Callable[[], Net], **options: bool) -> Seen:
    net = build()
    train(wrapped(net, **options), batches(rank))
    return Seen(weights(net), {RIGHT: alone(batches(0), batches(1), net=build)})


def changed_later(rank: int, change: Callable[[Net], object]) -> Seen:
    """``change`` is made on all ranks after wrapping."""

    def build() -> Net:
        net = Net()
        change(net)
        return net

    net = Net()
    model = wrapped(net)
    change(net)
    train(model, batches(rank))
    return Seen(weights(net), {RIGHT: alone(batches(0), batches(1), net=build)})


def add_layer(net: Net) -> None:
    net.extra = nn.Linear(3, 3, dtype=torch.float64)
    nn.init.eye_(net.extra.weight)
    nn.init.zeros_(net.extra.bias)


# Arithmetic and transport.


def half(_: int, value: float) -> Seen:
    layer = nn.Linear(1, 1, bias=False, dtype=torch.float16)
    model = wrapped(layer)
    model(torch.full((1, 1), value, dtype=torch.float16)).sum().backward()
    exact = torch.tensor([value], dtype=torch.float16).item()
    return Seen(_gradients(layer), {RIGHT: [exact], "the mean of two equal gradients is 0": [0.0]})


def two_dtypes(_: int) -> Seen:
    def build() -> Net:
        net = Net()
        net.head.bfloat16()
        return net

    net = build()
    model = wrapped(net)
    loss_of(model, torch.ones(1, 3, dtype=torch.float64)).backward()
    other = build()
    loss_of(other, torch.ones(1, 3, dtype=torch.float64)).backward()
    return Seen(_gradients(net), {RIGHT: _gradients(other)})


def collective_in_flight(rank: int, *, numel: int) -> Seen:
    """The script's own all_reduce on the same group begins before backward, on rank 1 after it."""
    net = Net()
    model = wrapped(net)
    own = torch.full((numel,), 100.0, dtype=torch.float64)
    loss = loss_of(model, batch(rank, 0))
    if rank != FAULTY:
        work = dist.all_reduce(own, async_op=True)
    loss.backward()
    if rank == FAULTY:
        work = dist.all_reduce(own, async_op=True)
    assert work is not None
    work.wait()
    of_both = Net()
    torch.stack([loss_of(of_both, batch(each, 0)) for each in (0, 1)]).mean().backward()
    return Seen(_gradients(net), {RIGHT: _gradients(of_both)})


def bits_of_one_process(rank: int) -> Seen:
    """In float32, against one process on the joined batches: compared to the last bit."""
    torch.manual_seed(0)
    net, one = nn.Linear(64, 64), nn.Linear(64, 64)
    one.load_state_dict(net.state_dict())
    data = [torch.randn(8, 64, generator=torch.Generator().manual_seed(each)) for each in (0, 1)]
    model = wrapped(net)
    loss_of(model, data[rank]).backward()
    loss_of(one, torch.cat(data)).backward()
    values, expected = _gradients(net), _gradients(one)
    return Seen([float(values == expected)], {RIGHT: [1.0], "bits differ": [0.0]})


SCENES = (
    Scene("layers", "frozen when wrapped", partial(differs, change=freeze)),
    Scene("layers", "missing", partial(built_otherwise, of_faulty={"bias": False}, of_others={})),
    Scene("layers", "untied", partial(built_otherwise, of_faulty={}, of_others={"tied": True})),
    Scene("layers", "cast when wrapped", partial(differs, change=cast)),
    Scene("layers", "frozen later", partial(differs, change=freeze, later=True)),
    Scene("layers", "cast later", partial(differs, change=cast, later=True)),
    Scene("order", "equal shapes", partial(built_otherwise, of_faulty={"order": ("b", "a")}, of_others={})),
    Scene("order", "other shapes", other_shapes_in_other_order),
    Scene("calls", "two models in another order", other_wrapper),
    Scene("calls", "a backward pass more", one_step_more),
    Scene("forgotten", "a forward through `model.module`", through_module),
    Scene("lost", "raises", partial(lost, how=raise_error), loses_rank=True),
    Scene("lost", "exits", partial(lost, how=leave), loses_rank=True),
    Scene("lost", "SIGKILL", partial(lost, how=kill_itself), loses_rank=True),
    Scene("lost", "stops (SIGSTOP)", partial(lost, how=stop_itself), loses_rank=True),
    Scene("lost", "loops", partial(lost, how=loop), loses_rank=True),
    Scene("lost", "hangs", partial(lost, how=wait), loses_rank=True),
    Scene("own step", "a step inside `no_sync()`", one_backward_alone),
    Scene("backward passes", "one micro-batch against two", fewer_micro_batches),
    Scene("step left out", "a step left out", partial(between_steps, change=drop_gradients)),
    Scene("weights", "one bit", partial(between_steps, change=flip_bit)),
    Scene("weights", "another learning rate", other_rate),
    Scene("weights", "a local clip", partial(between_steps, change=clip)),
    Scene("statistics", "other data on each rank", statistics),
    Scene("nan", "a NaN in one batch", bad_input),
    Scene("same data", "the same batches", same_data),
    Scene("bad gradient", "an exception in backward, caught", caught_error),
    Scene("bad gradient", "`create_graph=True`", graph_of_gradients),
    Scene("token weights", "1 and 3 rows", uneven_rows),
    Scene("no data", "a rank that ends", partial(out_of_data, how="end"), loses_rank=True),
    Scene("no data", "a rank that goes on to a `barrier()`", partial(out_of_data, how="barrier")),
    Scene("no data", "`join()`", partial(out_of_data, how="join")),
    Scene("other loops", "two forwards, one backward", partial(forwards, backwards=1)),
    Scene("other loops", "two forwards, two backwards", partial(forwards, backwards=2)),
    Scene("other loops", "a re-entrant checkpoint", partial(other_net, build=partial(Checkpointed, 1))),
    Scene("other loops", "one layer in two of them", partial(other_net, build=partial(Checkpointed, 2))),
    Scene("other loops", "unused parameters", partial(other_net, build=HalfUsed)),
    Scene(
        "other loops",
        "unused parameters with `find_unused_parameters=True`",
        partial(other_net, build=HalfUsed, find_unused_parameters=True),
    ),
    Scene("other loops", "a layer added later", partial(changed_later, change=add_layer)),
    Scene("other loops", "a layer frozen later", partial(changed_later, change=freeze)),
    Scene("edited", "on one rank, after backward", partial(between_steps, change=clip)),
    Scene("fp16", "6e-8 on both ranks", partial(half, value=6e-8)),
    Scene("fp16", "40,000 on both ranks", partial(half, value=40_000.0)),
    Scene("two dtypes", "bf16 and float64", two_dtypes),
    Scene("in flight", "another order on one rank, equal sizes", partial(collective_in_flight, numel=36)),
    Scene("in flight", "another order on one rank, other sizes", partial(collective_in_flight, numel=5)),
    Scene("split", "2 ranks and 1 process", bits_of_one_process),
    Scene("kernel", "a wrong gradient on one rank", wrong_kernel),
)
