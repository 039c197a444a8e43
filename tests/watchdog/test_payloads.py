"""Payloads that still run on a device after their call: which are reported, with which ranks, and which are not.

Ranks run on the simulated device. A payload is held back there without a wait of the host, as on a real device.
"""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d

from legacy_ddp import Checks, LegacyDistributedDataParallel, LostPeerError
from legacy_ddp._explain.missing import compose_payload, recorder_text
from legacy_ddp._watchdog import watchdog
from legacy_ddp._watchdog.client import Outcome
from legacy_ddp._watchdog.process import RUNNING, STOPPED, Sample
from legacy_ddp._watchdog.status import PayloadState, PayloadWatch, Row
from tests.helpers.listening import hearing
from tests.helpers.ranks import run_ranks
from tests.helpers.simulated_device import device
from tests.helpers.simulated_group import SimulatedGroup, new_group
from tests.helpers.torch_versions import needs_simulation

pytestmark = pytest.mark.cpu("ranks use the simulated device in any case")
WARN_SECONDS = 1.0  # a rank issues its payload in less


def _wait_for(heard: list[str], part: str) -> str:
    """The first text with ``part``, without its line breaks."""
    give_up = time.monotonic() + 60.0
    while not (found := [" ".join(text.split()) for text in heard if part in " ".join(text.split())]):
        assert time.monotonic() < give_up, heard
        time.sleep(0.01)
    return found[0]


def _new(group: SimulatedGroup, folder: str = "", **checks: object) -> LegacyDistributedDataParallel:
    layer = nn.Linear(1, 1, bias=False).to("sim")
    settings = Checks(warn_after_seconds=WARN_SECONDS, report_dir=folder or None, **checks)  # type: ignore[arg-type]
    return LegacyDistributedDataParallel(layer, process_group=group, checks=settings)


def _backward(model: nn.Module) -> None:
    model.zero_grad()
    model(torch.full((1, 1), dist.get_rank() + 1.0, device="sim")).sum().backward()


def _call(model: LegacyDistributedDataParallel) -> None:
    _backward(model)
    model.all_reduce()


def _wait_until_connected() -> None:
    """Wait until the servers of the smallest group have nothing to do: each message would wake their thread."""
    server = min(watchdog._open, key=lambda one: len(one._view.peers))._server
    while [one.is_authentic and one.rank is not None for one in (*server._connections.values(),)] != [True, True]:
        time.sleep(0.01)


def _stands_before_its_payload(rank: int, folder: str) -> tuple[list[str], float]:
    """What rank 0 logs while rank 1 issues its payload late, and later; the gradient of a last call."""
    group, store = new_group([0, 1]), distributed_c10d._get_default_store()
    # The largest group looks for waits outside of calls. The group of the model sleeps until its first payload.
    largest = LegacyDistributedDataParallel(nn.Linear(1, 1))
    if rank == 2:
        store.wait(["ended"])
        return [], 0.0
    with hearing() as heard:
        model = _new(group, folder)
        _wait_until_connected()
        _call(model)
        if rank == 0:
            group.hold()
        else:
            group.before_issue = lambda: store.wait(["reported"])
        _call(model)
        if rank == 0:
            _wait_for(heard, "payload is not complete")  # outside of any call
            store.set("reported", "1")
            group.release()
            _wait_for(heard, "payload is complete now")
        _call(model)
    assert largest.world_size == 3  # the wrapper lived until here, and its watchdog
    store.set("ended", "1")
    return [" ".join(text.split()) for text in heard], model.module.weight.grad.item()


@needs_simulation
def test_a_payload_that_a_rank_does_not_issue_is_reported_between_calls_with_this_rank(tmp_path: Path) -> None:
    (first, gradient), (second, _), _ = run_ranks(_stands_before_its_payload, 3, str(tmp_path), fresh=True)

    call, (report, completed) = "all_reduce() call 2 of wrapper 1 (Linear)", first
    assert report.startswith(f"{call}: the payload is not complete after ")
    assert f" s on rank 0 (sim:0); missing rank 1 ({call}: payload" in report
    assert "the payload is running on rank 0, being issued on rank 1" in report
    assert f"0 user code after {call}" in report
    assert "in _stands_before_its_payload" in report  # the stack of rank 0
    assert f"(reports of this rank: {tmp_path}" in report
    assert completed == f"{call}: the payload is complete now on rank 0"
    assert second == []  # one rank of a host logs
    assert gradient == 1.5


def _dies_after_its_call(rank: int, folder: str) -> tuple[str, str, tuple[int, ...]]:
    """The report on the payload, and report and ranks of the error of the next call."""
    group = new_group()
    with hearing() as heard:
        model = _new(group, folder)
        _call(model)
        group.hold()
        _call(model)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        report = _wait_for(heard, "payload is not complete")
        with pytest.raises(LostPeerError) as caught:
            _call(model)
    return report, " ".join(caught.value.report.split()), caught.value.ranks


@needs_simulation
def test_a_payload_of_a_rank_that_died_is_reported_and_comes_first_in_the_error_of_the_next_call(
    tmp_path: Path,
) -> None:
    report, next_report, ranks = run_ranks(_dies_after_its_call, 2, str(tmp_path), lost=(1,))[0]

    assert report.startswith("all_reduce() call 2: the payload is not complete after ")
    assert " s on rank 0 (sim:0); missing rank 1 (its process has ended, on host" in report
    assert next_report.startswith("all_reduce() call 2: the payload is not complete after ")
    assert " s on rank 0 (sim:0); all_reduce() call 3" in next_report
    assert ranks == (1,)


def _counts_copies(_: int) -> list[tuple[int, int]]:
    """By level of the checks: the copies of one number to the host that it did not wait for, and its waits."""
    found = []
    for settings in ({"level": "off"}, {"level": "info"}):
        model = _new(new_group(), **settings)
        _backward(model)
        device.holds_copies = True
        device.host_waits.clear()
        model.all_reduce()
        found.append((sum(target.dim() == 0 for target, _ in device.copies), device.waits_of_the_library()))
        device.holds_copies = False
        device.run_copies()
    return found


@needs_simulation
def test_a_call_copies_one_number_for_the_watch_without_a_wait_and_none_without_checks() -> None:
    assert run_ranks(_counts_copies, 2, fresh=True) == [[(0, 0), (1, 0)]] * 2


def _issue(watch: PayloadWatch, serial: int) -> Any:
    """A payload that is complete."""
    watch.begin(serial, f"call {serial}", [torch.device("cpu")])
    watch.issue()
    return watch._payloads[-1]


def test_a_payload_that_has_finished_is_never_late_however_long_ago_it_began() -> None:
    watch = PayloadWatch(warn_after_seconds=0.0)
    _issue(watch, 1)

    assert watch.take_late() is None
    assert watch.state() == PayloadState(begun=1, issued=1, complete=1)


def test_the_oldest_payload_is_late_once_and_later_ones_after_it() -> None:
    watch = PayloadWatch(warn_after_seconds=0.0)
    first = _issue(watch, 1)
    first.words[0].zero_()  # as if the device had not written yet
    second = _issue(watch, 2)
    second.words[0].zero_()

    assert [watch.take_late(), watch.take_late()] == [first, None]
    assert (watch.state().serial, watch.state().complete, watch.state().is_late) == (1, 0, True)
    first.words[0].fill_(1)
    assert watch.take_late() is second
    assert watch.take_completed() == [first]
    second.words[0].fill_(2)
    assert watch.take_completed() == [second]
    assert watch.state() == PayloadState(begun=2, issued=2, complete=2)


def test_a_payload_far_behind_the_host_counts_from_the_end_of_the_one_before() -> None:
    watch = PayloadWatch(warn_after_seconds=500.0)
    for serial in (1, 2):
        payload = _issue(watch, serial)
        payload.begun_at -= 1000.0
    payload.words[0].zero_()

    watch.take_completed()

    assert watch.take_late() is None
    assert watch.state().seconds < 500.0
    assert 0.0 < (watch.seconds_to_look() or 0.0) <= 500.0


def test_a_payload_that_was_not_issued_is_late_too_and_is_dropped_with_its_call() -> None:
    watch = PayloadWatch(warn_after_seconds=0.0)
    assert watch.seconds_to_look() is None
    watch.begin(3, "call 3", [torch.device("cpu")])

    assert watch.take_late() is watch._payloads[0]
    watch.drop_failed()
    assert watch.state() == PayloadState()


def _row(rank: int, *state: int) -> Row:
    sample = Sample("", "user code", 1.0, 1, ())
    payloads = PayloadState(*state, serial=5, devices=f"cuda:{rank}", seconds=30.0)
    return Row(rank, "node-a", 100 + rank, Outcome.ANSWERED, sample, 5, last_call="call 5", payloads=payloads)


_GONE = Row(2, "node-b", 102, Outcome.SILENT, process=STOPPED)
_SILENT = Row(2, "node-b", 102, Outcome.SILENT, process=RUNNING)


@pytest.mark.parametrize(
    "rows, missing, said",
    [
        ([_row(0, 5, 5, 4), _row(1, 5, 5, 5), _row(2, 4, 4, 4)], (2,), "complete on rank 1, running on rank 0, not"),
        ([_row(0, 5, 5, 4), _row(1, 4, 4, 4), _GONE], (2,), "missing rank 2 (its process is stopped"),
        ([_row(0, 5, 5, 4), _row(1, 5, 4, 4), _SILENT], (1,), "no answer from rank 2"),
        ([_row(0, 5, 5, 4), _row(1, 5, 5, 4), _SILENT], (2,), "missing rank 2 (its process is running but does not"),
        ([_row(0, 5, 5, 4), _row(1, 6, 6, 5)], (), "every rank has issued it; look at the network"),
        ([_row(0, 5, 4, 4), _row(1, 5, 4, 4)], (), "the backend may still be connecting the devices"),
    ],
    ids=["not begun", "gone", "being issued", "silent", "nobody", "connecting"],
)
def test_ranks_that_are_gone_or_have_not_issued_the_payload_are_missing(
    rows: list[Row], missing: tuple[int, ...], said: str
) -> None:
    report = compose_payload(rows, "call 5", 5)

    text = " ".join(report.text.split())
    assert text.startswith("call 5: the payload is not complete after 30.0 s on rank 0 (cuda:0)")
    assert report.missing == missing
    assert said in text
    assert set(report.reporters) - {2} == {0}  # rank 2 may be on a host of its own


@pytest.mark.parametrize(
    "environment, said",
    [
        ({}, ""),
        ({"TORCH_NCCL_TRACE_BUFFER_SIZE": "0", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/x/r"}, ""),
        ({"TORCH_NCCL_TRACE_BUFFER_SIZE": "2000", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/x/r"}, "goes to /x/rRANK"),
        ({"TORCH_FR_BUFFER_SIZE": "2000", "TORCH_FR_DUMP_TEMP_FILE": "/y/r"}, "goes to /y/rRANK"),
        ({"TORCH_FR_BUFFER_SIZE": "2000"}, "goes to the file that torch chooses"),
    ],
    ids=["off", "zero", "older names", "newer names", "no file"],
)
def test_the_report_says_where_the_flight_recorder_leaves_its_dump(
    environment: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("TORCH_")]:
        monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    assert said in recorder_text()
    assert bool(recorder_text()) is bool(said)
    assert ("flight recorder" in compose_payload([_row(0, 5, 5, 4)], "call 5", 5).text) is bool(said)
