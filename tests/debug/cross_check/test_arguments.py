"""Wrong arguments, failures and hangs of a cross-check are told on all ranks, and failures change nothing."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from legacy_ddp import DesyncError, LegacyDistributedDataParallel, ReplicaDivergenceError, SyncTimeoutError
from legacy_ddp.debug import CrossCheck, cross_check
from tests.helpers.cross_faults import Cached, Net, batch_of, flip, loss_of
from tests.helpers.ranks import run_ranks
from tests.helpers.shared_jobs import on_ranks, run_cases


@dataclass
class _Named:
    inputs: torch.Tensor
    targets: torch.Tensor


def _with_held_tensor(rank: int) -> dict[str, Any]:
    weights = torch.full((3,), 1.0 + (rank == 1))
    return {"run": lambda model, batch: loss_of(model, batch) * weights.sum()}


def _raising(model: nn.Module, batch: Any) -> torch.Tensor:
    loss = loss_of(model, batch)
    if dist.get_rank() == 1:
        raise KeyError("masks")
    return loss


def _raising_for_the_batch_of_rank_0(model: nn.Module, batch: Any) -> torch.Tensor:
    if len(batch["inputs"]) == 8 and dist.get_rank() == 1:
        raise IndexError("short")
    return loss_of(model, batch)


def _backward(model: nn.Module, batch: Any) -> torch.Tensor:
    loss = loss_of(model, batch)
    loss.backward()
    return loss


def _step(model: nn.Module, batch: Any) -> torch.Tensor:
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    return loss_of(model, batch)


def _all_reduce(model: nn.Module, batch: Any) -> torch.Tensor:
    loss = loss_of(model, batch)
    model.all_reduce()
    return loss


def _sum(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(batch["inputs"] if isinstance(batch, dict) else batch.inputs).sum()


# Arguments of a rank that differ from model, loss_of and batch_of(rank); the kind of the error, and parts of its text.
CASES: dict[str, tuple[Callable[[int], dict[str, Any]], str]] = {
    "iterator": (
        lambda rank: {"batch": {"lengths": [1, 2, (number for number in range(3))]} if rank == 1 else batch_of(rank)},
        "PeerError ... batch['lengths'][2] is of a type that cannot be sent to another rank",
    ),
    "too large": (
        lambda rank: {"batch": batch_of(rank, rows=100_000 if rank == 1 else 8), "max_bytes": 2**20},
        "PeerError ... batch is too large: got 3.22 MB with generators and buffers, expected at most",
    ),
    "held tensor": (
        _with_held_tensor,
        "LayoutError ... tensor in run variable 'weights': rank 1 has float32 (3,) ... equal on all ranks; pass a "
        "tensor with other values on other ranks in the batch, and not in run",
    ),
    "raising": (
        lambda _: {"run": _raising},
        "PeerError ... run failed on rank 1; model, gradients and random generators are as before",
    ),
    "backward": (
        lambda _: {"run": _backward},
        "PeerError ... run left gradients, expected none before the backward of cross_check()",
    ),
    "step": (
        lambda _: {"run": _step},
        "PeerError ... ranks 0-2: ValueError: run called step() of SGD, expected no step in run; let run",
    ),
    "all_reduce": (
        lambda _: {"run": _all_reduce},
        "PeerError ... all_reduce(): called inside of cross_check(), expected one call",
    ),
    "no loss": (lambda _: {"run": lambda model, batch: model(batch["inputs"])}, "PeerError ... a tensor of shape"),
    "no tensor": (lambda _: {"run": lambda *_: 1.0}, "PeerError ... run returned no loss: got float"),
    "no graph": (lambda _: {"run": lambda *_: torch.ones(())}, "PeerError ... a loss without a graph"),
    "no parameters": (
        lambda _: {"model": Net(nn.Tanh()).requires_grad_(False)},
        "PeerError ... the model has no parameters that require gradients",
    ),
    "all fail": (
        lambda _: {"run": lambda model, batch: model(batch["images"]).sum()},
        "PeerError ... run failed on ranks 0-2; model, gradients and random generators are as before. ranks 0-2: "
        "KeyError: 'images'",
    ),
    "another batch": (
        lambda _: {"run": _raising_for_the_batch_of_rank_0},
        "PeerError ... run with the batch of the rank before failed on rank 1; model, gradients and random generators "
        "are as before. rank 1: IndexError: short",
    ),
    "other group": (
        lambda _: {"process_group": dist.group.WORLD},
        "ValueError ... process_group is the wrapper's own, expected None",
    ),
    "swapped": (
        lambda rank: {"run": batch_of(rank), "batch": loss_of},
        "TypeError ... run is not callable: got a dict, expected run(model, batch)",
    ),
    "without the model": (
        lambda _: {"run": lambda *_: torch.ones((), requires_grad=True) * 2},
        "PeerError ... ranks 0-2: ValueError: the loss of run depends on no parameter of the model, expected gradients "
        "to compare",
    ),
    "other class": (
        lambda rank: {"run": _sum, "batch": _Named(**batch_of(rank)) if rank == 1 else batch_of(rank)},
        "PeerError ... _Named, and the batch of this rank does not",
    ),
    "other arguments": (lambda rank: {"operations": rank == 1}, "LayoutError ... argument operations"),
    "no batch": (lambda _: {"batch": None}, "ValueError ... no rank has a batch"),
    "unknown buffer": (
        lambda _: {"local_buffers": ["nothing"]},
        "ValueError ... local_buffers names what the module does not have",
    ),
}


def _all_cases(rank: int) -> dict[str, tuple[str, str, bool]]:
    seen = {}
    for name, (arguments, _) in CASES.items():
        model = LegacyDistributedDataParallel(Net(nn.BatchNorm1d(16)))
        before = [tensor.clone() for tensor in model.state_dict().values()]
        try:
            cross_check(**{"model": model, "run": loss_of, "batch": batch_of(rank), **arguments(rank)})
            kind, text = "no error", ""
        except Exception as error:  # noqa: BLE001 - the test looks at its type
            kind, text = type(error).__name__, str(error)
        after = list(model.state_dict().values())
        is_same = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        # The group is usable, and the model computes.
        works = cross_check(model, loss_of, batch_of(rank)).agrees
        seen[name] = kind, text, is_same and works and all(item.grad is None for item in model.parameters())
    loss_of(model, batch_of(rank)).backward()
    model.all_reduce()
    torch.optim.SGD(model.parameters(), lr=1.0).step()  # outside of a check steps are possible as before
    return seen


@pytest.mark.cpu("the text names the device")
def test_errors_are_equal_on_all_ranks_and_leave_everything_as_it_was() -> None:
    first, *others = run_ranks(_all_cases, 3, timeout_seconds=120)

    assert others == [first, first]
    assert {name: seen[2] for name, seen in first.items()} == dict.fromkeys(CASES, True)
    for name, (_, expected) in CASES.items():
        kind, *parts = expected.split(" ... ")
        assert first[name][0] == kind, (name, first[name])
        assert all(part in " ".join(first[name][1].split()) for part in parts), (name, first[name])


@on_ranks(3, gives=[None] * 3)
def test_a_stale_buffer_is_found_before_anything_runs(rank: int) -> None:
    net = Net(nn.Tanh())
    net.register_buffer("table", torch.ones(3) * (1 + (rank == 1)), persistent=False)
    runs = []
    model = LegacyDistributedDataParallel(net, init_sync=False)
    with pytest.raises(ReplicaDivergenceError) as caught:
        cross_check(model, lambda model, batch: runs.append(1) or loss_of(model, batch), batch_of(rank))
    text = str(caught.value)
    assert runs == []
    assert text.startswith("cross_check() call 1: replicas differ in 1 of 1 buffer\n"), text
    assert "buffer 'table'" in text, text
    assert "rank 1 against ranks 0, 2" in text, text


@on_ranks(3, gives=[(True, True)] * 3)
def test_buffers_and_parameters_of_each_rank_travel_with_its_batch(rank: int) -> tuple[bool, bool]:
    """A buffer of each rank's own decides the result, and travels; an ignored parameter likewise."""
    net = Net(Cached(0.0))
    net.middle.register_buffer("own", torch.full((16,), 1.0 + rank))
    net.middle.extra = nn.Parameter(torch.full((16,), 2.0 + rank))
    net.middle.forward = lambda inputs: inputs * net.middle.own * net.middle.extra
    model = LegacyDistributedDataParallel(net, init_sync=False, ignore=["middle.extra"])
    report = cross_check(model, loss_of, batch_of(rank), local_buffers=["middle.o*"])
    return report.agrees, bool((net.middle.own == 1.0 + rank).all() and (net.middle.extra == 2.0 + rank).all())


def _some_without_batch(rank: int, without: tuple[int, ...], guilty: int) -> tuple[str, tuple[int, ...]]:
    net = Net(nn.Tanh())
    if rank == guilty:
        net.middle.register_forward_hook(lambda *values: flip(values[-1].detach()) + 0 * values[-1])
    model = LegacyDistributedDataParallel(net)
    report = cross_check(model, loss_of, None if rank in without else batch_of(rank))
    return report.verdict, report.ranks


@pytest.mark.unsimulated("its operations run in no mode that captures them")
def test_a_rank_without_a_batch_takes_part() -> None:
    found = run_cases(
        _some_without_batch,
        3,
        {"equal": ((1,), 9), "itself": ((1,), 1), "one of two": ((0, 2), 2), "the last": ((2,), 2)},
    )

    ranks = {"equal": (), "itself": (1,), "one of two": (2,), "the last": (2,)}
    assert found == {name: [("differs" if of else "equal", of)] * 3 for name, of in ranks.items()}


_SETTINGS = (
    "module 'drop': ranks 0, 2 have training; rank 1 has eval",
    "run variable 'seed': rank 0 has 100; rank 1 has 101; rank 2 has 102",  # and not the rank's own number
)


@on_ranks(3, gives=[("differs", _SETTINGS, (1,), 2, "run", True)] * 3)
def test_a_difference_is_an_error_if_asked_for(rank: int) -> tuple[Any, ...]:
    net = Net(nn.Tanh())
    if rank == 1:
        net.drop.eval()
    model = LegacyDistributedDataParallel(net)
    seed = 100 + rank

    def with_the_rank(model: nn.Module, batch: Any) -> torch.Tensor:
        if rank < 0:
            torch.manual_seed(seed)
        return loss_of(model, batch)

    report = cross_check(model, with_the_rank, batch_of(rank))
    with pytest.raises(ReplicaDivergenceError) as caught:
        cross_check(model, with_the_rank, batch_of(rank), raises=True)
    error = caught.value
    assert str(error.report) == str(error)
    return (
        report.verdict,
        report.settings,
        error.ranks,
        error.call,
        error.phase,
        str(error).splitlines()[1:] == str(report).splitlines()[1:],
    )


@on_ranks(3, gives=[[False, False, True, False, False, True, False]] * 3)
def test_the_object_checks_in_every_nth_call(rank: int) -> list[bool]:
    model = LegacyDistributedDataParallel(Net(nn.Tanh()))
    check = CrossCheck(model, loss_of, every=3)
    return [check(batch_of(rank)) is not None for _ in range(7)]


@on_ranks(3, gives=[None] * 3)
def test_ranks_with_other_counts_are_told_that_they_meet_in_different_calls(rank: int) -> None:
    model = LegacyDistributedDataParallel(Net(nn.Tanh()))
    check = CrossCheck(model, loss_of, every=2)
    check(batch_of(rank))
    with pytest.raises(DesyncError) as caught:  # noqa: PT012 - a rank with fewer calls goes on
        if rank != 1:
            check(batch_of(rank))
        model.all_reduce()
    text = " ".join(str(caught.value).split())
    assert "rank 1 has all_reduce() call 1; ranks 0, 2 have cross_check() call 1" in text, text


_BYTES = "expected a whole number of bytes, 1 or more"


@pytest.mark.parametrize(
    "wrong, kind, text",
    [
        ({"model": None}, TypeError, "model is of the wrong type: got NoneType, expected torch.nn.Module"),
        ({"run": 3}, TypeError, "run is not callable: got 3"),
        ({"raises": 1}, TypeError, "raises is not usable: got 1"),
        ({"operations": "yes"}, TypeError, "operations is not usable: got 'yes'"),
        ({"local_buffers": "own"}, TypeError, "local_buffers is of the wrong type: got the string 'own'"),
        *[({"every": every}, ValueError, "every is not usable") for every in (0, 1.5, True)],
        *[({"max_bytes": size}, TypeError, f"got {size!r}, {_BYTES}") for size in ("1GB", True, 1e9)],
        ({"max_bytes": 0}, ValueError, f"max_bytes is not usable: got 0, {_BYTES}"),
        ({"max_byte": 1}, TypeError, "unexpected keyword argument 'max_byte'"),
    ],
)
def test_a_wrong_argument_is_told_when_the_object_is_made_and_not_in_the_nth_step(
    wrong: dict[str, Any], kind: type[Exception], text: str
) -> None:
    arguments = {"model": nn.Linear(1, 1), "run": loss_of, "every": 100, **wrong}

    with pytest.raises(kind, match=text):
        CrossCheck(**arguments)


@pytest.mark.usefixtures("alone")
def test_names_of_local_buffers_from_a_generator_serve_every_check() -> None:
    check = CrossCheck(nn.Linear(1, 1), loss_of, every=1, local_buffers=(name for name in ["nosuch"]))

    for _ in range(2):
        with pytest.raises(
            ValueError, match=r"got \['nosuch'\], and the module has no buffers; leave local_buffers out"
        ):
            check(batch_of(0))


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    "module, text",
    [
        (nn.LazyLinear(2), r"parameter '0.weight' is not initialised yet \(lazy module\).*cross_check"),
        (nn.LazyBatchNorm1d(affine=False), "buffer '0.running_mean' is not initialised yet"),
    ],
)
def test_what_is_not_initialised_is_named(module: nn.Module, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        cross_check(nn.Sequential(module), loss_of, batch_of(0))


def _in_a_group(rank: int) -> tuple[str, tuple[int, ...]] | None:
    group = dist.new_group([0, 2])
    if rank == 1:
        return None
    net = Net(nn.Tanh())
    if rank == 2:
        net.drop.eval()
    report = cross_check(net, loss_of, batch_of(rank), process_group=group)
    return report.verdict, report.ranks


def test_ranks_are_counted_in_the_group() -> None:
    assert run_ranks(_in_a_group, 3) == [("differs", (0, 1)), None, ("differs", (0, 1))]


_HANGING = 2


def _wait_for(paths: list[Path]) -> None:
    while not all(path.exists() for path in paths):
        time.sleep(0.05)


def _hang(rank: int, folder: Path) -> str:
    model = LegacyDistributedDataParallel(Net(nn.Tanh()), timeout_seconds=3.0)
    told = [folder / str(other) for other in range(3) if other != _HANGING]

    def run(model: nn.Module, batch: Any) -> torch.Tensor:
        if rank == _HANGING:
            _wait_for(told)
        return loss_of(model, batch)

    with pytest.raises(Exception) as caught:  # noqa: PT011 - its type is checked below
        cross_check(model, run, batch_of(rank))
    if rank == _HANGING:
        return ""
    assert isinstance(caught.value, SyncTimeoutError)
    assert caught.value.ranks == (_HANGING,)
    (folder / str(rank)).touch()
    return str(caught.value)


def test_a_rank_that_hangs_inside_run_is_named_with_its_line(tmp_path: Path) -> None:
    texts = run_ranks(_hang, 3, tmp_path, fresh=True)

    for text in texts[:_HANGING]:
        words = " ".join(text.split())
        assert f"missing rank {_HANGING} (cross_check() call 1: run, at cross_check/test_arguments.py:" in words
        assert "in _wait_for" in words
        assert f"stack of rank {_HANGING}, innermost last:" in words
        assert "look at the network" not in words
