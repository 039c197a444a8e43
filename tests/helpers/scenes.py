"""Texts of the library for a set of scenes, kept in a file: ``=== name``, then the text."""

from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.helpers.paths import ROOT

Scene = Callable[[Path], str]
"""Writes its files below a folder and returns its text."""


def texts_in(file: Path) -> dict[str, str]:
    parts = file.read_text(encoding="utf-8").split("=== ")[1:]
    return {name: text for name, _, text in (part.partition("\n") for part in parts)}


def rewrite(file: Path, scenes: Mapping[str, Scene]) -> None:
    """Write the file again, after a change of a text by intention.

    `python -m` runs it with the name of a test module. Read the diff.
    """
    texts = []
    for name, scene in scenes.items():
        with TemporaryDirectory() as folder:
            texts.append(f"=== {name}\n{scene(Path(folder))}")
    file.write_text("".join(texts), encoding="utf-8")
    print(f"wrote {file.relative_to(ROOT)}")
