"""Public names: listed, documented, and picklable."""

import ast
import inspect
import pickle
import re
import traceback
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

import legacy_ddp
from legacy_ddp import LegacyDDPError, LegacyDistributedDataParallel, RankRow, SyncRecord, debug
from tests.helpers.scripts import run_script

_NOT_PUBLIC = ("typing", "legacy_ddp")
_FOR_THE_IMPORT = ("check_system", "lazy_names")
_BESIDE = ("__version__", "data", "debug")  # in dir(), and not in __all__

_ERRORS = [getattr(legacy_ddp, name) for name in legacy_ddp.__all__ if name.endswith("Error")]


@pytest.mark.parametrize("door", [legacy_ddp, debug])
def test_all_is_sorted_and_names_exactly_what_is_public(door: ModuleType) -> None:
    imported = _imported_names(door)

    assert list(door.__all__) == sorted(imported)
    assert dir(door) == sorted([*imported, *(_BESIDE if door is legacy_ddp else ())])
    assert all(getattr(door, name) is getattr(import_module(module), name) for name, module in imported.items())
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        door.nothing  # noqa: B018


_IMPORT = """
import logging, os, sys, threading, warnings
sys.modules["torch"] = None  # a second import fails
import legacy_ddp
assert not {"legacy_ddp.debug", "legacy_ddp.data"} & sys.modules.keys()
print(legacy_ddp.__version__, legacy_ddp.debug.__name__, "torch" in dir(legacy_ddp.debug))
del sys.modules["torch"]
import torch, torch.distributed.device_mesh
before, environment = set(sys.modules), dict(os.environ)
filters, threads = list(warnings.filters), threading.active_count()
print(legacy_ddp.debug.check_replicas.__name__, legacy_ddp.data.GlobalBatchSampler.__name__)
legacy_ddp.LegacyDistributedDataParallel
heavy = [name for name in set(sys.modules) - before if name.startswith(("numpy", "sympy", "torch._dynamo"))]
assert not heavy, sorted(heavy)
assert logging.getLogger().handlers == [] and not logging.getLogger("legacy_ddp").handlers
assert not torch.cuda.is_initialized() and not torch.distributed.is_initialized()
assert dict(os.environ) == environment and warnings.filters == filters and threading.active_count() == threads
"""


def test_importing_the_package_does_nothing_and_debug_and_data_are_its_attributes() -> None:
    done = run_script("-c", _IMPORT, environment={"LEGACY_DDP_CHECKS": "read at construction only"})

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        f"{legacy_ddp.__version__} legacy_ddp.debug False",
        "check_replicas GlobalBatchSampler",
    ]


def _imported_names(door: ModuleType) -> dict[str, str]:
    """What the source imports from the library for its users, and the module of each."""
    source = ast.parse(Path(str(door.__file__)).read_text(encoding="utf-8"))
    imports = [node for node in ast.walk(source) if isinstance(node, ast.ImportFrom) and node.module]
    found = {alias.name: str(node.module) for node in imports if node.module not in _NOT_PUBLIC for alias in node.names}
    return {name: module for name, module in found.items() if name not in _FOR_THE_IMPORT}


@pytest.mark.parametrize("kind", _ERRORS)
def test_errors_keep_text_attributes_and_command_through_pickle(kind: type[LegacyDDPError]) -> None:
    error = kind("what happened", ranks=[2, 0], call=7, phase="payload", parameter="layer.weight")

    for shown in (error, pickle.loads(pickle.dumps(error))):
        assert type(shown) is kind
        assert (str(shown), shown.ranks, shown.call) == ("what happened", (2, 0), 7)
        assert (shown.phase, shown.parameter) == ("payload", "layer.weight")
        assert traceback.format_exception_only(shown) == [
            f"legacy_ddp.{kind.__name__}: what happened\n",
            f"meaning and next step: legacy-ddp explain {kind.__name__}\n",
        ]
    assert kind.anchor == kind.__name__.lower()


def test_the_errors_form_one_tree() -> None:
    agreed = "CommHook Desync EditedGradient Layout NonFiniteGradient Peer ReplicaDivergence Transport"
    tree = {
        RuntimeError: "LegacyDDP",
        LegacyDDPError: "Agreed Gradient LostPeer Trace UnsynchronizedStep",
        legacy_ddp.AgreedError: agreed,
        FloatingPointError: "NonFiniteGradient",
        legacy_ddp.LostPeerError: "PeerLost SyncTimeout",
    }
    bases = {(kind.__name__, base) for kind in _ERRORS for base in kind.__bases__}
    assert bases == {(f"{name}Error", base) for base, names in tree.items() for name in names.split()}


def test_records_cannot_be_changed_and_travel_through_pickle() -> None:
    record = SyncRecord(call=3, synchronized=True, seconds={"plan": 0.5})
    row = RankRow(0, 1.5, True, 1, None, True, 0.25)

    assert pickle.loads(pickle.dumps([record, row])) == [record, row]
    for frozen, name in [(record, "call"), (row, "rank")]:
        with pytest.raises(AttributeError):
            setattr(frozen, name, 9)


def test_the_version_is_a_literal_that_can_be_read_without_importing_torch() -> None:
    source = Path(legacy_ddp.__file__).read_text(encoding="utf-8")

    assert re.findall(r'^__version__ = "(\d+\.\d+\.\w+)"$', source, re.MULTILINE) == [legacy_ddp.__version__]


def test_the_displayed_signatures_leave_out_what_is_taken_for_a_better_error_alone() -> None:
    """help() showed ``**unknown: Never``, and ``*unnamed: Never``."""
    for shown in (LegacyDistributedDataParallel, LegacyDistributedDataParallel.__init__, legacy_ddp.debug.Recorder.log):
        assert "Never" not in str(inspect.signature(shown))
