"""The private names of torch: all in one folder, listed, and told in one error where torch lacks them."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import legacy_ddp
from legacy_ddp._torch.private import PRIVATE_NAMES, PrivateName, check_python, check_torch
from tests.helpers.paths import ROOT
from tests.helpers.scripts import run_script

PACKAGE = Path(legacy_ddp.__file__).parent
FOLDER = PACKAGE / "_torch"


def _private_attributes(path: Path) -> Iterator[tuple[ast.Attribute, str]]:
    """Attributes with one leading underscore that are read in the file, except those of ``self``."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and node.attr[0] == "_" and node.attr[:2] != "__":
            owner = ast.unparse(node.value)
            if owner.split(".")[0] not in ("self", "cls", "sys"):
                yield node, owner


def test_the_list_has_every_private_attribute_of_the_folder() -> None:
    listed = {part for entry in PRIVATE_NAMES for part in (entry.name, *entry.owner.split("."))}
    found = {node.attr for path in FOLDER.glob("*.py") for node, _ in _private_attributes(path)}

    assert found - listed == set()
    assert len(found) > 10


def test_the_list_has_nothing_that_the_library_does_not_use() -> None:
    source = "".join(path.read_text(encoding="utf-8") for path in FOLDER.glob("*.py") if path.stem != "private")
    source += (PACKAGE / "_steps" / "backward_counter.py").read_text(encoding="utf-8")
    # Made from a kind of operation, in operation_options().
    used = [entry.name for entry in PRIVATE_NAMES if entry.name.removesuffix("Options") == entry.name]

    assert [name for name in used if name not in source] == []


def test_no_other_folder_uses_a_private_name_of_a_module_of_torch() -> None:
    assert [
        f"{path.relative_to(PACKAGE)}: {owner}.{node.attr}"
        for path in PACKAGE.rglob("*.py")
        if FOLDER not in path.parents
        for node, owner in _private_attributes(path)
        if owner.split(".")[0] in ("torch", "dist", "nn", "c10d")
    ] == []


def test_an_older_torch_is_refused_at_the_import() -> None:
    with pytest.raises(ImportError) as caught:
        check_torch("2.7.1+cu126", PRIVATE_NAMES)

    assert str(caught.value) == "legacy_ddp needs torch >= 2.8, found 2.7.1+cu126; install a newer torch"
    assert caught.value.__notes__ == ["meaning and next step: legacy-ddp explain ImportError"]
    assert str(caught.value) in (ROOT / "docs" / "errors.md").read_text()


def test_a_build_of_python_without_the_gil_is_refused_at_the_import() -> None:
    check_python(is_free_threaded=False)

    with pytest.raises(ImportError, match="needs a build of Python with the GIL"):
        check_python(is_free_threaded=True)


@pytest.mark.parametrize("version", ["2.8.0", "2.10.0+cpu", "3.0.1", "2.16.0.dev20261101+cu130", "2.9.0a0+git1"])
def test_newer_versions_pass_if_they_have_the_names(version: str) -> None:
    check_torch(version, PRIVATE_NAMES)


@pytest.mark.parametrize("owner", ["torch.Tensor", "torch.nn.Module", "torch._C._gone", "gone.module"])
def test_a_name_that_torch_lacks_is_told_with_the_versions_that_have_it(owner: str) -> None:
    names = [*PRIVATE_NAMES, PrivateName(owner, "_renamed", "2.8 to 2.15")]

    with pytest.raises(ImportError) as caught:
        check_torch("2.99.0", names)

    assert str(caught.value) == (
        f"legacy_ddp uses private names of torch, and torch 2.99.0 lacks {owner}._renamed (seen in torch 2.8 to 2.15); "
        "install one of these versions of torch, or a newer legacy_ddp"
    )


_LATE_IMPORT = """
import torch
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
group = dist.group.WORLD
torch.optim.SGD([torch.ones(1)])  # torch imports functional here
from legacy_ddp import LegacyDistributedDataParallel
from torch.distributed.nn import functional
functions = [getattr(functional, name) for name in dir(functional)]
defaults = [value for function in functions for value in getattr(function, "__defaults__", None) or ()]
assert group not in defaults, defaults
assert dist.group.WORLD is group
dist.destroy_process_group()
"""


def test_an_import_after_init_process_group_and_an_optimizer_does_not_keep_the_group_alive() -> None:
    done = run_script("-c", _LATE_IMPORT)

    assert (done.returncode, done.stderr) == (0, "")
