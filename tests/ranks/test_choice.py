"""The choice of a transport: shared memory on one host, gloo where that is not possible, and the same on all ranks."""

import errno
import os
import resource
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from legacy_ddp import LegacyDistributedDataParallel, TransportError
from tests.helpers import logged_warnings
from tests.helpers.comm_hooks import mean
from tests.helpers.hosts import on_host
from tests.helpers.processes import leave_open_files
from tests.helpers.ranks import run_ranks
from tests.helpers.shared_jobs import on_ranks
from tests.helpers.small_models import add_gradients, error_of, gradient_values, step, transport_line, wrap

Said = tuple[str, str] | None


def _no_memfd(*_: Any) -> int:
    raise OSError(errno.ENOSYS, "Function not implemented")


def _tried(rank: int, fault: str, transport: str) -> tuple[str, str, float | None]:
    """The transport, what ``print(model)`` says of it, and the mean; or the error."""
    try:
        if rank == 1 and fault == "file size":  # Python ignores SIGXFSZ
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
        model = LegacyDistributedDataParallel(nn.Linear(2000, 1, bias=False), transport=transport)
        if rank == 1 and fault == "open files":
            leave_open_files(2)  # for its own segment, and for one of two others
        mean = step(model, 1.0 + rank)
    except TransportError as error:
        return type(error).__name__, str(error), None
    return model.all_reduce().transport, transport_line(model), mean


LIMIT = "rank 1: no shared memory (the limit of open files of this process is reached; raise it with ulimit -n)"
REASONS = {"file size": "rank 1: no shared memory (OSError: [Errno 27] File too large)", "open files": LIMIT}


@pytest.mark.parametrize("transport", ["host"], indirect=True)
@pytest.mark.parametrize("fault", REASONS)
def test_where_a_rank_cannot_share_memory_all_use_gloo_or_refuse_what_was_asked_for_and_say_why(
    transport: str, fault: str
) -> None:
    chosen, refused = (run_ranks(_tried, 3, fault, asked, fresh=True) for asked in ("auto", "host"))

    assert chosen == chosen[:1] * 3
    carrier, line, mean = chosen[0]
    assert (carrier, mean) == ("gloo", 2.0)
    assert line.startswith(f"transport: gloo ({REASONS[fault]}")
    assert refused == refused[:1] * 3
    kind, text, _ = refused[0]
    assert kind == "TransportError"
    assert f'transport="host" is not possible: {REASONS[fault]}' in text
    assert 'pass transport="auto"' in text


def _fails_later(rank: int, transport: str, fault: str, options: dict[str, Any]) -> dict[str, Any]:
    """A later call needs a new segment. Rank 1 can open as many files as ``fault`` says."""
    logged_warnings.take()
    models = [wrap(transport=transport, **options) for _ in range(2)]
    for model in models:
        _outcome(model, 1.0, 1)
    count = 2 if "reproducible" in options else 1  # the sum of two micro-batches needs a segment of its own
    kept = [model.module.weight.grad for model in models]  # the next call of every rank takes a new segment
    said: dict[str, Any] = {}
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        if rank == 1:
            leave_open_files(FAULTS.index(fault))
        said["calls"] = [_outcome(model, 257.0 + rank, count) for model in models]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    del kept
    said["later"] = [_outcome(model, 257.0 + rank, count) for model in models]
    said["line"] = transport_line(models[0])
    said["warnings"] = logged_warnings.take()
    return said


def _outcome(model: LegacyDistributedDataParallel, value: float, count: int) -> tuple[str, Any]:
    """Transport and sum over the ranks after a step of ``count`` micro-batches, or type and text of the error."""
    model.zero_grad()
    for _ in range(count):
        with model.no_sync() if count > 1 else nullcontext():
            add_gradients(model, value / count)
    try:
        record = model.all_reduce(sample_size=1)
    except TransportError as error:
        return type(error).__name__, str(error)
    return record.transport, 2 * next(iter(gradient_values(model).values()))


FAULTS = ("its own segment", "the segment of rank 0")
SETTINGS: list[dict[str, Any]] = [{}, {"reduce_dtype": torch.bfloat16}, {"reproducible": True}]


@pytest.mark.parametrize("transport", ["host"], indirect=True)
@pytest.mark.parametrize("fault, options", [(FAULTS[0], {}), *((FAULTS[1], options) for options in SETTINGS)], ids=str)
def test_shared_memory_that_fails_later_is_gloo_on_all_ranks_with_one_warning(
    transport: str, fault: str, options: dict[str, Any]
) -> None:
    """The user who never asked for shared memory read that "host" was not possible any more."""
    results = run_ranks(_fails_later, 2, "auto", fault, options, fresh=True)
    # 257 + 258. In bf16 with 8 bits: 256 + 258 = 514, rounded to 512.
    expected = ("gloo", 512.0 if "reduce_dtype" in options else 515.0)
    for said in results:
        assert said["calls"] == said["later"] == [expected] * 2
        assert said["line"] == f"transport: gloo ({LIMIT})"
        (text,) = said["warnings"]  # every rank logs it, rank 0 shows it
        head = "all_reduce() call 2 of wrapper 1 (Linear): shared memory is not possible any more (warned once)"
        assert text.startswith(f"{head}:\n{LIMIT}\n")


@pytest.mark.parametrize("transport", ["host"], indirect=True)
@pytest.mark.parametrize("fault", FAULTS)
def test_shared_memory_that_was_asked_for_and_fails_later_is_one_text_for_one_cause(transport: str, fault: str) -> None:
    """And the next call is right."""
    for said in run_ranks(_fails_later, 2, "host", fault, {}, fresh=True):
        for name, text in said["calls"]:
            assert name == "TransportError"
            assert text == (
                f'all_reduce() call 2: transport="host" is not possible any more: {LIMIT}; mend the cause, or pass '
                'transport="auto"'
            )
        assert said["later"] == [("host", 515.0)] * 2
        assert said["warnings"] == []


def _asked(rank: int) -> list[str]:
    differs = error_of(wrap, transport=("gloo", "auto")[rank])
    os.environ["LEGACY_DDP_TRANSPORT"] = "gloo"
    chosen = [_transport_of(transport="host")]
    os.environ["LEGACY_DDP_TRANSPORT"] = ""
    chosen += [_transport_of(), _transport_of(reduce_dtype=torch.float64), _transport_of(reproducible=True)]
    os.environ["LEGACY_DDP_TRANSPORT"] = "shm"
    said = error_of(wrap)
    del os.environ["LEGACY_DDP_TRANSPORT"]
    model = wrap(transport="host")
    step(model, 1.0)
    model.process_group = dist.new_group([0, 1])
    with on_host("another one") if rank == 1 else nullcontext():
        moved = error_of(step, model, 1.0)
    return [*chosen, *map(str, (differs, said, moved))]


def _transport_of(**options: Any) -> str:
    model = wrap(**options)
    model.module.weight.grad = torch.ones(1, 2)
    return model.all_reduce(sample_size=1).transport


@pytest.mark.parametrize("transport", ["host"], indirect=True)
def test_what_is_asked_for_is_compared_checked_and_kept_on_a_later_group_and_the_environment_variable_wins(
    transport: str,
) -> None:
    for *chosen, differs, said, moved in run_ranks(_asked, 2):
        assert chosen == ["gloo", "host", "host", "host"]
        assert differs.startswith("('LayoutError', ")
        assert "setting 'transport'" in differs
        assert "environment variable LEGACY_DDP_TRANSPORT: got 'shm', expected one of" in said
        assert moved.startswith("('TransportError', ")
        assert "they run on different hosts" in moved


@pytest.mark.usefixtures("transport")
@pytest.mark.parametrize("transport", ["host"], indirect=True)
@on_ranks(2, [["host 1.5", "gloo 1.5"]] * 2)
def test_a_hook_that_comes_later_carries_the_gradients_itself(rank: int) -> list[str]:
    model = wrap()
    seen = []
    for _ in range(2):
        model.module.weight.grad = torch.full((1, 2), 1.0 + rank)
        seen.append(f"{model.all_reduce().transport} {model.module.weight.grad.unique().item()}")
        if len(seen) == 1:
            model.register_comm_hook(None, mean)
    return seen


@pytest.mark.usefixtures("transport")
@pytest.mark.parametrize("transport", ["host"], indirect=True)
@on_ranks(2, [["host 1.5"] * 2 + ["gloo 1.5"] * 2 + ["host 1.5"] * 2] * 2)
def test_a_failure_on_another_group_does_not_follow_the_model(rank: int) -> list[str]:
    """Rank 1 has no memory to share while the model is on a second group. Every later call on the first group was a
    TransportError."""
    model, other = wrap(), dist.new_group([0, 1])
    memfd_create = os.memfd_create
    seen, kept = [], []
    for group, fails in ((None, False), (other, True), (None, False)):
        model.process_group = dist.group.WORLD if group is None else group
        if rank == 1 and fails:
            os.memfd_create = _no_memfd
        for _ in range(2):
            model.module.weight.grad = torch.full((1, 2), 1.0 + rank)
            seen.append(f"{model.all_reduce().transport} {model.module.weight.grad.unique().item()}")
            kept.append(model.module.weight.grad)  # so that every call needs other memory
        os.memfd_create = memfd_create
    return seen


def _transport_of_a_call(_: int) -> str:
    model = LegacyDistributedDataParallel(nn.Linear(1, 1))
    add_gradients(model, 1.0)
    return model.all_reduce().transport


def test_a_test_that_does_not_ask_for_its_transport_runs_on_it_all_the_same(request: pytest.FixtureRequest) -> None:
    # tests/helpers/transports.py gives this test both transports, and its name ends with one of them.
    assert run_ranks(_transport_of_a_call, 2) == [request.node.callspec.id] * 2
