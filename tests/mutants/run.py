"""Plant every fault of the table in a copy of the tree, one at a time, and run the tests that have to find it.

    python tests/mutants/run.py                           # every mutant, with the tests of its row
    python tests/mutants/run.py --only "layout|streak"    # names that match a pattern
    python tests/mutants/run.py --tests "tests/ranks"     # these tests for all mutants
    python tests/mutants/run.py --marks "not thorough"    # of the tests of each row, those of make test

A mutant is killed by a failed test, and survives if all tests pass. A run at the time limit proves nothing: a machine
may be slow. The exit status is 0 if every mutant was killed.
"""

import argparse
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.mutants.table import MUTANTS, Mutant  # noqa: E402

_LEFT_OUT = shutil.ignore_patterns(
    ".git", ".venv*", "build", "dist", "__pycache__", ".*_cache", ".hypothesis", "shared"
)
_PASSED, _FAILED, _NO_TESTS = 0, 1, 5  # exit codes of pytest


def main() -> int:
    """Run the chosen mutants."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="a regular expression for the names of mutants")
    parser.add_argument("--tests", default="", help="arguments of pytest, in place of the tests of each row")
    parser.add_argument("--marks", default="", help="run the tests with these marks alone, for instance 'not thorough'")
    parser.add_argument("--seconds", type=float, default=300.0, help="the time limit of a mutant")
    parser.add_argument("--list", action="store_true", help="find every snippet, and run nothing")
    arguments = parser.parse_args()
    chosen = [mutant for mutant in MUTANTS if re.search(arguments.only, mutant.name)]
    places = {mutant.name: find(mutant, ROOT) for mutant in chosen}
    if arguments.list:
        print(*(f"{place.relative_to(ROOT)}: {name}" for name, place in places.items()), sep="\n")
        return 0
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = Path(folder) / "tree"
        shutil.copytree(ROOT, copy, symlinks=True, ignore=_LEFT_OUT)
        marks = ["-m", arguments.marks] if arguments.marks else []
        verdicts = [
            _run(mutant, copy, [*_split(arguments.tests or mutant.killers), *marks], arguments.seconds)
            for mutant in chosen
        ]
    counts = {verdict: verdicts.count(verdict) for verdict in dict.fromkeys(verdicts)}
    print(f"{len(chosen)} mutants:", ", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
    return 0 if set(counts) <= {"killed"} else 1


def find(mutant: Mutant, root: Path) -> Path:
    """The only file of the package with the snippet.

    Raises:
        SystemExit: the snippet stands nowhere, or more than once.
    """
    counts = {path: path.read_text().count(mutant.before) for path in sorted((root / "legacy_ddp").rglob("*.py"))}
    found = [path for path, count in counts.items() if count]
    if sum(counts.values()) != 1:
        where = ", ".join(str(path.relative_to(root)) for path in found) or "no file"
        sys.exit(f"mutant {mutant.name!r}: got its snippet {sum(counts.values())} times ({where}), expected it once")
    return found[0]


def _run(mutant: Mutant, copy: Path, tests: list[str], seconds: float) -> str:
    start = time.monotonic()
    with _planted(mutant, copy):
        code, output = _pytest(copy, tests, seconds)
    verdict = {_PASSED: "survived", _FAILED: "killed", None: "at the time limit", _NO_TESTS: "without a test"}.get(
        code, f"pytest exit code {code}"
    )
    by = re.findall(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
    print(
        f"{verdict:9} {time.monotonic() - start:4.0f} s  {mutant.name}  {by[0] if by else shlex.join(tests)}",
        flush=True,
    )
    return verdict


def _split(tests: str) -> list[str]:
    """The arguments. ``-k`` and ``-m`` take the rest of the text, up to the next option: ``-k a or b``."""
    arguments = shlex.split(tests)
    for option in ("-k", "-m"):
        if option in arguments:
            at = arguments.index(option) + 1
            arguments[at:] = [" ".join(arguments[at:])]
    return arguments


@contextmanager
def _planted(mutant: Mutant, copy: Path) -> Iterator[None]:
    path = find(mutant, copy)
    text = path.read_text()
    path.write_text(text.replace(mutant.before, mutant.after))
    try:
        yield
    finally:
        path.write_text(text)


def _pytest(copy: Path, tests: list[str], seconds: float) -> tuple[int | None, str]:
    """The exit code, None at the time limit, and the output. Ranks end with pytest: they share its process group."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, cwd=copy, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    ) as process:
        try:
            output, _ = process.communicate(timeout=seconds)
            return process.returncode, output.decode(errors="replace")
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            return None, output.decode(errors="replace")


if __name__ == "__main__":
    sys.exit(main())
