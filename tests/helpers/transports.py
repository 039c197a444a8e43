"""Tests of ranks on all ways of gradients: the memory of the host, gloo, and the group of a device.

Tests of the folders and modules below that start ranks run once per way: with ``make test`` in the memory of the host
alone. A test whose behaviour depends on the transport takes ``transport`` as an argument, or is marked
``usefixtures("transport")``, and ``make test`` runs it on host and gloo. A test that holds on the CPU alone is marked
``cpu``. All other tests run on the default transport, which is the memory of the host.

With ``make test DEVICE=cuda`` tests run on that device alone (:mod:`tests.helpers.devices`).
"""

from collections.abc import Iterator
from inspect import signature
from typing import Any

import pytest

from tests.helpers import devices, tiers

HOST, GLOO, DEVICE = "host", "gloo", "device"

_FOLDERS = ("call", "ranks")
_MODULES = ("tests.watchdog.test_lost_ranks",)
_SOAK_FOLDERS = ("memory", "replicas", "reproducible", "steps", "watchdog")
_DEVICE_MODULE = "test_devices"
# What runs on the simulated device, too. It has no memory of its own, and modes of torch do not see its operations.
_SIMULATED = (_DEVICE_MODULE, "call", "replicas", "reproducible", "steps")
_DEVICE_FOLDERS = (*_SIMULATED, "memory", "debug")
_ON_AGREEMENT = ("agreement", "blame", "context", "header_faults", "many_ranks", "odd_exceptions", "precedence")
_ON_DEVICES = tuple(f"tests.ranks.test_{name}" for name in (*_ON_AGREEMENT, "user_exceptions", "wrap_order"))
_SIMULATED_MODULES = ("tests.debug.cross_check", "tests.debug.test_recorder", "tests.debug.test_check_replicas")

current = HOST


def environment() -> dict[str, str]:
    """Variables of the ranks: none for the default."""
    return {"LEGACY_DDP_TRANSPORT": GLOO} if current == GLOO else {}


def device() -> str:
    """The kind of device of the ranks."""
    return devices.CHOSEN or devices.SIMULATED if current == DEVICE else devices.CPU


def parametrize(metafunc: pytest.Metafunc) -> None:
    """Run the test once per way, if it is one of those."""
    if any("transport" in mark.args[0] for mark in metafunc.definition.iter_markers("parametrize")):
        return  # the test chooses itself
    if (ways := _ways(metafunc)) != [HOST]:
        if "transport" not in metafunc.fixturenames:
            metafunc.fixturenames.append("transport")  # for a check of pytest: see _transport_of_the_test()
        metafunc.parametrize("transport", ways, indirect=True)


def _ways(metafunc: pytest.Metafunc) -> list[Any]:
    """Of a test that does not choose."""
    module, marks = metafunc.module, {mark.name for mark in metafunc.definition.iter_markers()}
    folder = module.__name__.split(".")[1]
    ways: list[Any] = [] if folder == _DEVICE_MODULE else [HOST]
    is_alone = "alone" in metafunc.fixturenames
    starts_ranks = not is_alone and bool({"run_ranks", "run_cases", "on_ranks"} & vars(module).keys())
    if "transport" in metafunc.fixturenames:
        ways.append(GLOO)
    elif starts_ranks and (folder in (*_FOLDERS, *tiers.choose(_SOAK_FOLDERS, ())) or module.__name__ in _MODULES):
        ways.append(tiers.thorough(GLOO))
    reads_transport = "transport" in signature(metafunc.function).parameters
    if starts_ranks and not reads_transport and _runs_on_device(module.__name__, folder, marks):
        is_extra = not devices.CHOSEN and folder != _DEVICE_MODULE
        ways.append(pytest.param(DEVICE, marks=[pytest.mark.device, *([pytest.mark.thorough] if is_extra else [])]))
    return ways


def _runs_on_device(module: str, folder: str, marks: set[str]) -> bool:
    if marks & {"cpu", "gpu"}:
        return False
    if devices.is_real():
        return folder in _DEVICE_FOLDERS or module in _ON_DEVICES
    modules = (*_SIMULATED_MODULES, *_ON_DEVICES)
    can_run = folder in _SIMULATED or module in modules or module.rpartition(".")[0] in modules
    return devices.CAN_SIMULATE and can_run and not marks & {"unsimulated", "thorough"}


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
