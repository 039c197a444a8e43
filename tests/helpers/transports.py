"""Tests of ranks on both transports: the memory of the host, and gloo.

Tests of the folders and modules below that start ranks run once per transport: on gloo with ``make test-all`` alone.
A test whose behaviour depends on the transport takes ``transport`` as an argument, or is marked
``usefixtures("transport")``, and ``make test`` runs it on both. All other tests run on the default transport, which is
the memory of the host.
"""

from collections.abc import Iterator

import pytest

from legacy_ddp._settings import TRANSPORT_VARIABLE
from tests.helpers import tiers

HOST, GLOO = "host", "gloo"

_USUAL_FOLDERS = ("agreement", "collectives", "transport")
_USUAL_MODULES = ("tests.watchdog.test_lost_ranks",)
_FOLDERS = (*_USUAL_FOLDERS, "buckets", "replicas", "reproducible", "step_guard", "watchdog")

current = HOST


def environment() -> dict[str, str]:
    """Variables of the ranks: none for the default."""
    return {} if current == HOST else {TRANSPORT_VARIABLE: current}


def parametrize(metafunc: pytest.Metafunc) -> None:
    """Run the test once per transport, if it is one of those."""
    module = metafunc.module
    folders = _FOLDERS if tiers.SOAK else _USUAL_FOLDERS
    asks = "transport" in metafunc.fixturenames
    if any("transport" in mark.args[0] for mark in metafunc.definition.iter_markers("parametrize")):
        return  # the test chooses itself
    is_chosen = module.__name__.split(".")[1] in folders or module.__name__ in _USUAL_MODULES
    if asks or (is_chosen and {"run_ranks", "on_ranks"} & vars(module).keys()):
        if not asks:
            metafunc.fixturenames.append("transport")  # only for this check of pytest: see _transport_of_the_test()
        gloo = GLOO if asks else pytest.param(GLOO, marks=pytest.mark.thorough)
        metafunc.parametrize("transport", [HOST, gloo], indirect=True)


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
