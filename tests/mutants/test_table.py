"""The table of mutants fits the package."""

from pathlib import Path

import legacy_ddp
from tests.mutants.table import MUTANTS


def test_every_snippet_stands_once_in_the_package() -> None:
    package = Path(legacy_ddp.__file__).parent
    text = "\n".join(path.read_text() for path in sorted(package.rglob("*.py")))

    counts = {mutant.name: text.count(mutant.before) for mutant in MUTANTS}

    assert {name: count for name, count in counts.items() if count != 1} == {}
