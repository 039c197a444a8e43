"""No text of a cross-check advises an argument that the named function, or the cross-check, does not take."""

import ast
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import legacy_ddp
from legacy_ddp import LegacyDistributedDataParallel, debug
from legacy_ddp.debug import cross_check

PACKAGE = Path(legacy_ddp.__file__).parent
# Texts about operations and about replicas are in reports of a cross-check, too.
FILES = sorted(
    path
    for pattern in (
        "debug/_cross*.py",
        "debug/_cross_check/*.py",
        "debug/_operations/*.py",
        "_replicas/*.py",
        "_explain/[acer]*.py",
    )
    for path in PACKAGE.glob(pattern)
)
# The name before an open parenthesis, and all that follows in it up to the argument.
ARGUMENT = re.compile(r"(?:\b(?P<function>\w+)\((?P<before>[^()]*))?\b(?P<name>[a-z_]+)=(?!=)")
# Beside the arguments of a cross-check: the phrase that says whose argument it is.
OF_OTHERS = dict.fromkeys(("checks", "ignore", "init_sync"), LegacyDistributedDataParallel)


def _texts(path: Path) -> Iterator[str]:
    """The texts in the code, without docstrings; a part with a value is ``{}``."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    ignored = parts | {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in ignored:
            yield node.value


def _advised(text: str) -> Iterator[tuple[Callable[..., object], str]]:
    """Each argument in a text, with the function that should take it."""
    for found in ARGUMENT.finditer(text):
        name, function = found["name"], found["function"]
        if function:
            owners = (debug, legacy_ddp, LegacyDistributedDataParallel)
            yield next(getattr(owner, function) for owner in owners if hasattr(owner, function)), name
        else:
            yield OF_OTHERS.get(name, cross_check), name


def test_every_advised_argument_exists() -> None:
    advised = [(path.name, text, *item) for path in FILES for text in _texts(path) for item in _advised(text)]

    wrong = [
        (file, text) for file, text, function, name in advised if name not in inspect.signature(function).parameters
    ]
    assert wrong == []
    assert {name for *_, name in advised} >= {"max_bytes", "operations", "local_buffers", "src"}
