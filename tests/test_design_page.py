"""The names of modules and classes in docs/design.md against the code."""

import ast
import re
from pathlib import Path

import pytest

import legacy_ddp
from tests.helpers.paths import ROOT
from tests.test_layers import LAYERS

PACKAGE = Path(legacy_ddp.__file__).parent
DESIGN = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
FOLDERS = [path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*") if (path / "__init__.py").exists()]
IN_FOLDER = re.compile(rf"`((?:{'|'.join(folder for folder in FOLDERS if '/' not in folder)})/[\w/*]*)`")
# A paragraph about a folder, up to an empty line or the next such paragraph.
PARAGRAPH = re.compile(r"^\*\*`([\w/]+)/`\*\* holds (.*?)(?=^$|^\*\*`)", re.MULTILINE | re.DOTALL)


def _exists(path: str) -> bool:
    return bool(list(PACKAGE.glob(f"{path.rstrip('/')}.py"))) or (PACKAGE / path).is_dir()


def test_every_module_named_with_its_folder_exists() -> None:
    names = IN_FOLDER.findall(DESIGN)

    assert len(names) >= 100
    assert [name for name in names if not _exists(name)] == []


def test_every_module_in_a_cell_of_modules_exists() -> None:
    missing = []
    for table in re.findall(r"(?:^\|.*\|\n)+", DESIGN, re.MULTILINE):
        head, _, *rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines())
        for at in (at for at, title in enumerate(head) if title in ("module", "modules")):
            for row in rows:
                folder = ""  # a name without a folder is in the folder of the name before it, or in the root
                for name in re.findall(r"`([\w/*]+)`", row[at]):
                    if IN_FOLDER.fullmatch(f"`{name}`"):
                        folder = name.rpartition("/")[0]
                    if not _exists(name) and not _exists(f"{folder}/{name}"):
                        missing.append(name)
    assert missing == []


@pytest.mark.parametrize("folder,text", PARAGRAPH.findall(DESIGN))
def test_what_the_page_says_that_a_folder_holds_is_defined_there(folder: str, text: str) -> None:
    files = sorted((PACKAGE / folder).rglob("*.py"))
    defined = {path.stem for path in files}
    for path in files:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        defined |= {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    named = set(re.findall(r"`([A-Za-z_]+)`", text))

    assert named - defined == set()


def test_every_folder_has_a_paragraph() -> None:
    told = set(re.findall(r"\*\*`([\w/]+)/`\*\*", DESIGN))

    assert told == {layer for layer in LAYERS if (PACKAGE / layer).is_dir()}
