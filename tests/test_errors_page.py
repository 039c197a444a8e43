"""docs/errors.md has a section for every public exception, and shows what ranks print."""

import copy
import re
import tempfile
from collections.abc import Callable
from functools import partial
from itertools import chain, pairwise
from typing import Any

import pytest
import torch
from torch import nn

import legacy_ddp
from legacy_ddp import Checks, LegacyDDPError, LegacyDistributedDataParallel
from legacy_ddp.debug import Recorder
from tests.helpers import logged_warnings
from tests.helpers.command import command
from tests.helpers.paths import ROOT
from tests.helpers.shared_jobs import once, run_cases


def _wrap(**settings: Any) -> LegacyDistributedDataParallel:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    for parameter in module.parameters():
        nn.init.ones_(parameter)
    return LegacyDistributedDataParallel(module, **settings)


def _step(model: LegacyDistributedDataParallel, more: int = 0, **arguments: int | None) -> None:
    """``more``: added to the data."""
    model(torch.ones(3, 2) + more).sum().backward()
    model.all_reduce(**arguments)


def _layout(rank: int) -> None:
    model = _wrap()
    model.module[1].bias.requires_grad_(rank != 1)
    _step(model)


def _divergence(rank: int) -> None:
    model = _wrap(checks="detail")
    _step(model)
    if rank == 1:
        model.module[1].weight.data[0, 1] += 0.5
    _step(model)


def _nonfinite(rank: int, policy: str = "raise") -> None:
    model = _wrap(checks=Checks(nonfinite=policy))
    model.module(torch.ones(3, 2)).sum().backward()
    if rank == 1:
        model.module[1].bias.grad.fill_(float("nan"))
    model.all_reduce()


def _unscaled(checks: Checks) -> None:
    model = _wrap(checks=checks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for _ in range(2):  # a scaler is known from its first step on
        scaler.scale(model(torch.ones(3, 2)).sum()).backward()
        scaler.unscale_(optimizer)
        model.all_reduce()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def _comm_hook(rank: int) -> None:
    model = _wrap()
    model.register_comm_hook(None, lambda _, bucket: bucket.buffer()[1:])
    _step(model)


def _gradient(rank: int) -> None:
    model = _wrap()
    model.module[1].bias.grad = torch.ones(1, requires_grad=True)
    model.all_reduce()


def _unsynchronized(rank: int) -> None:
    model = _wrap()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(3, 2)).sum().backward()
    optimizer.step()


def _trace(rank: int) -> None:
    model = _wrap()
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(2):
            with Recorder(model, folder):
                _step(model)


ERRORS: dict[str, Callable[[int], object]] = {
    "LayoutError": _layout,
    "DesyncError": lambda rank: _step(_wrap(), sample_size=None if rank == 1 else 3),
    "PeerError": lambda rank: _step(_wrap(), sample_size=-1 if rank == 1 else 3),
    "ReplicaDivergenceError": _divergence,
    "NonFiniteGradientError": _nonfinite,
    "EditedGradientError": lambda _: _unscaled(Checks(edited="raise")),
    "CommHookError": _comm_hook,
    "GradientError": _gradient,
    "UnsynchronizedStepError": _unsynchronized,
    "TraceError": _trace,
    "TypeError and ValueError": lambda _: _wrap(transport="shared"),
}


def _differ(rank: int) -> None:
    model = _wrap()
    if rank == 1:
        model.module[1].weight.data[0, 1] += 0.5
    for _ in range(4):
        _step(model)


def _buffers(rank: int) -> None:
    model = _wrap()
    if rank == 1:
        model.module[1].register_buffer("routing", torch.ones(1))
    _step(model)


def _uneven(rank: int) -> None:
    model = _wrap()
    for _ in range(rank + 1):
        model(torch.ones(3, 2)).sum().backward()
    model.all_reduce()


def _same_data(rank: int) -> None:
    model = _wrap()
    for _ in range(10):
        _step(model)


def _uncleared(rank: int) -> None:
    model = _wrap()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        _step(model, rank)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()


def _cleared(rank: int) -> None:
    model = _wrap()
    for _ in range(5):
        model(torch.ones(3, 2) + rank).sum().backward()
        if rank == 1:
            model.zero_grad()
        model.all_reduce()
        model.zero_grad()


def _of_a_copy(rank: int) -> None:
    model = _wrap()
    optimizer = torch.optim.SGD(copy.deepcopy(model).parameters(), lr=0.1)
    for _ in range(17):
        _step(model, rank)
        optimizer.step()
        model.zero_grad()


def _local_steps(rank: int) -> None:
    model = _wrap()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    for _ in range(21):
        with model.no_sync():
            _step(model)
            optimizer.step()
            model.zero_grad()


def _forgotten(rank: int) -> None:
    model = _wrap()
    for _ in range(20):
        model(torch.ones(3, 2) + rank).sum().backward()
        for parameter in model.parameters():
            parameter.data.sub_(parameter.grad, alpha=0.001)


def _statistics(rank: int) -> None:
    model = LegacyDistributedDataParallel(nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.BatchNorm1d(2)))
    _step(model, rank)
    model.eval()(torch.ones(3, 2))


def _merged(rank: int) -> None:
    model = _wrap(reproducible=True)
    with model.no_sync():
        for _ in range(2):
            model(torch.ones(3, 2)).sum().backward()
    model(torch.ones(3, 2)).sum().backward()
    model.all_reduce(sample_size=9)


WARNINGS: dict[str, Callable[[int], object]] = {
    "Replicas differ": _differ,
    "Buffers of some ranks": _buffers,
    "Gradients are not finite": partial(_nonfinite, policy="warn"),
    "Gradients were changed before the call": lambda _: _unscaled(Checks()),
    "Uneven work": _uneven,
    "The same data": _same_data,
    "Gradients that were not cleared": _uncleared,
    "Gradients that were cleared before the call": _cleared,
    "Parameters that no step changes": _of_a_copy,
    "Every step inside no_sync()": _local_steps,
    "A forgotten call": _forgotten,
    "Statistics of each rank": _statistics,
    "Merged micro-batches": _merged,
}


PAGE = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^### (.*)\n((?:(?!#).*\n)*)", PAGE, re.MULTILINE))
PATH = re.compile(r"\S*/rank-\d+")


def _shown(section: str) -> list[str]:
    """The parts of the example in a section, without line ends, cut where the page leaves words out."""
    lines = [line for line in SECTIONS[section].splitlines() if line.startswith("    ")]
    return [part for part in _one_line("\n".join(lines)).split(" ...") if part]


def _one_line(text: str) -> str:
    return PATH.sub("FILE", " ".join(text.split()))


def test_every_public_exception_has_a_section_and_every_section_a_next_step() -> None:
    errors = {name for name in legacy_ddp.__all__ if name.endswith("Error")}

    assert errors == {name for name in SECTIONS if name in vars(legacy_ddp)}
    assert ERRORS.keys() | WARNINGS.keys() <= SECTIONS.keys()
    for name, text in SECTIONS.items():
        assert "\nNext: " in text or name in ("AgreedError", "LegacyDDPError"), name


def _error(rank: int, section: str) -> tuple[str, str]:
    try:
        ERRORS[section](rank)
    except (LegacyDDPError, ValueError) as error:
        return type(error).__name__, str(error)
    return "no error", ""


def _warnings(rank: int, section: str) -> list[tuple[str, str]]:
    WARNINGS[section](rank)
    return [(told.text, told.section) for told in logged_warnings.take_all()]


@once
def _printed(kind: str) -> dict[str, list[Any]]:
    scene, table = (_error, ERRORS) if kind == "errors" else (_warnings, WARNINGS)
    return run_cases(scene, 3, {section: (section,) for section in table})


def _assert_shown(section: str, printed: str) -> None:
    rest = _one_line(printed)
    assert _shown(section)
    for part in _shown(section):
        assert part in rest
        rest = rest.split(part, 1)[1]


def _explained(line: str) -> set[str]:
    """The sections that the command prints for a line of a text."""
    lines = command("explain", "--", line).stdout.splitlines()
    return {title for title, rule in pairwise(lines) if rule and set(rule) == {"="}}


def _assert_explained(section: str, printed: str) -> None:
    """Every line with enough words to be of one text leads to the section, pasted behind ``legacy-ddp explain``."""
    lines = [line for line in printed.splitlines() if len(re.findall("[a-z]+", re.sub("'[^']*'", "", line))) >= 5]
    assert lines
    assert [line for line in lines if section not in _explained(line)] == []


@pytest.mark.parametrize("section", ERRORS)
def test_an_error_has_the_text_that_its_section_shows(section: str) -> None:
    for rank, (name, text) in enumerate(_printed("errors")[section]):
        if section == "PeerError" and rank == 1:  # has its own exception
            continue
        assert name in section
        _assert_shown(section, text)
        _assert_explained(section, text)


@pytest.mark.parametrize("section", WARNINGS)
def test_a_warning_has_the_text_that_its_section_shows(section: str) -> None:
    ((text, command),) = {*chain.from_iterable(_printed("warnings")[section])}

    assert command == section  # the last line of the warning prints its section
    _assert_shown(section, text)
    _assert_explained(section, text)


def test_every_check_has_a_section() -> None:
    sources = "".join(path.read_text() for path in (ROOT / "legacy_ddp" / "_call").glob("*.py"))
    named = re.findall(r'^    section = "(.+)"$', sources, re.MULTILINE)

    assert len(named) > 5
    assert {*named} <= SECTIONS.keys()
