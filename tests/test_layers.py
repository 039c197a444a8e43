"""The order of the layers: every import of the library goes to the same layer or to one above it in the list."""

import ast
from collections.abc import Iterator
from pathlib import Path

import legacy_ddp

PACKAGE = Path(legacy_ddp.__file__).parent
# A folder is one layer; a module outside of folders is another. docs/design.md says what each holds.
LAYERS = (
    "_statistics",
    "_text",
    "_errors",
    "_explainer",
    "_interrupts",
    "_torch",
    "_log",
    "_steps",
    "_check_settings",
    "_settings",
    "_memory",
    "_watchdog",
    "_ranks",
    "_reproducible",
    "_record",
    "_replicas",
    "_call",
    "_explain",
    "_wrapper",
    "__init__",
    "debug/_operations",
    "debug/_trace",
    "debug/_cross_check",
    "debug/_diff",
    "debug/_page",
    "debug/_port",
    "debug",
    "__main__",
    "data",
    "lightning",
)


def _layer(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return "/".join(parts[:-1]) or parts[0]


def _file(name: str) -> Path:
    """The file that an import of the dotted ``name`` reads last: a module, or the ``__init__`` of a package."""
    parts = name.split(".")[1:]
    while parts:
        path = PACKAGE.joinpath(*parts)
        if path.with_suffix(".py").exists():
            return path.with_suffix(".py")
        if path.is_dir():
            return path / "__init__.py"
        parts.pop()
    return PACKAGE / "__init__.py"


def _imported(path: Path) -> Iterator[Path]:
    """The files of the package that ``path`` imports, also only for type checkers but in ``FOR_TYPES``."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    if path in FOR_TYPES:
        tree.body = [node for node in tree.body if not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node))]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "legacy_ddp":
            yield from (_file(f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (_file(alias.name) for alias in node.names if alias.name.split(".")[0] == "legacy_ddp")


# The signatures of the interface between the core and `_explain` name classes of the layers that use it.
FOR_TYPES = [PACKAGE / "_explainer.py"]
# Attributes of the package, for type checkers; at run time they are imported at their first use.
LAZY = [(PACKAGE / "__init__.py", PACKAGE / "data.py"), (PACKAGE / "__init__.py", PACKAGE / "debug" / "__init__.py")]
FILES = sorted(PACKAGE.rglob("*.py"))


def test_every_file_is_in_a_known_layer() -> None:
    assert {_layer(path) for path in FILES} == set(LAYERS)


def test_no_import_goes_to_a_later_layer() -> None:
    place = {layer: index for index, layer in enumerate(LAYERS)}

    assert [
        f"{path.relative_to(PACKAGE)} imports {imported.relative_to(PACKAGE)}"
        for path in FILES
        for imported in _imported(path)
        if place[_layer(imported)] > place[_layer(path)] and (path, imported) not in LAZY
    ] == []


def test_every_layer_that_is_a_folder_says_what_it_holds() -> None:
    for layer in LAYERS:
        if (PACKAGE / layer).is_dir():
            text = ast.get_docstring(ast.parse((PACKAGE / layer / "__init__.py").read_text(encoding="utf-8")))
            assert text, layer
            assert not text.splitlines()[0].endswith("?"), layer
