"""Tests of ranks on all ways of gradients: the memory of the host, gloo, and the group of a device.

Tests of the folders and modules below that start ranks run once per way: with ``make test`` in the memory of the host
alone. A test whose behaviour depends on the transport takes ``transport`` as an argument, or is marked
``usefixtures("transport")``, and ``make test`` runs it on host and gloo. A test that holds on the CPU alone is marked
``cpu``. All other tests run on the default transport, which is the memory of the host.

With ``make test DEVICE=cuda`` tests run on that device alone (:mod:`tests.helpers.devices`).
"""

from collections.abc import Iterator
from typing import Any

import pytest

from legacy_ddp._settings import TRANSPORT_VARIABLE
from tests.helpers import devices, tiers

HOST, GLOO, DEVICE = "host", "gloo", "device"

_USUAL_FOLDERS = ("agreement", "collectives", "transport")
_USUAL_MODULES = ("tests.watchdog.test_lost_ranks",)
_FOLDERS = (*_USUAL_FOLDERS, "buckets", "replicas", "reproducible", "step_guard", "watchdog")
_DEVICE_FOLDERS = ("agreement", "buckets", "collectives", "debug", "replicas", "reproducible", "step_guard")
_DEVICE_MODULE = "test_devices"

current = HOST


def environment() -> dict[str, str]:
    """Variables of the ranks: none for the default."""
    if current == DEVICE:
        return {devices.VARIABLE: devices.CHOSEN or devices.SIMULATED}
    return {} if current == HOST else {TRANSPORT_VARIABLE: current}


def parametrize(metafunc: pytest.Metafunc) -> None:
    """Run the test once per way, if it is one of those."""
    if any("transport" in mark.args[0] for mark in metafunc.definition.iter_markers("parametrize")):
        return  # the test chooses itself
    if "transport" in metafunc.fixturenames:
        metafunc.parametrize("transport", [HOST, GLOO], indirect=True)
    elif (ways := _ways(metafunc)) != [HOST]:
        metafunc.fixturenames.append("transport")  # only for this check of pytest: see _transport_of_the_test()
        metafunc.parametrize("transport", ways, indirect=True)


def _ways(metafunc: pytest.Metafunc) -> list[Any]:
    """Of a test that does not choose."""
    module, marks = metafunc.module, {mark.name for mark in metafunc.definition.iter_markers()}
    folder = module.__name__.split(".")[1]
    if folder == _DEVICE_MODULE:
        return [pytest.param(DEVICE, marks=pytest.mark.device)]
    ways: list[Any] = [HOST]
    if not {"run_ranks", "on_ranks"} & vars(module).keys():
        return ways
    if folder in (_FOLDERS if tiers.SOAK else _USUAL_FOLDERS) or module.__name__ in _USUAL_MODULES:
        ways.append(tiers.thorough(GLOO))
    if folder in _DEVICE_FOLDERS and not marks & {"cpu", "gpu"}:
        simulated = [] if devices.CHOSEN else [pytest.mark.thorough]
        ways.append(pytest.param(DEVICE, marks=[pytest.mark.device, *simulated]))
    return ways


@pytest.fixture(autouse=True)
def _transport_of_the_test(request: pytest.FixtureRequest) -> None:
    """Set the transport of a test without the argument: pytest sets up no fixture that nothing asks for."""
    if "transport" in getattr(getattr(request.node, "callspec", None), "params", {}):
        request.getfixturevalue("transport")


@pytest.fixture
def transport(request: pytest.FixtureRequest) -> Iterator[str]:
    """The transport of all ranks that the test starts."""
    global current
    before, current = current, request.param
    yield request.param
    current = before
