"""``legacy-ddp port``: the changes that move a script from torch DDP to this library, as a diff, and remarks.

The changes are edits of the text, so that comments and formatting stay. The remarks say what is left to the user.
"""

import ast
import difflib
import os
from dataclasses import dataclass
from pathlib import Path

from legacy_ddp._text import printable, wrap
from legacy_ddp.debug._port.findings import Finding, find
from legacy_ddp.debug._port.gradients import collectives
from legacy_ddp.debug._port.script import Edit, OtherFiles, Script, ScriptError

_BYTE_ORDER_MARK = "\ufeff"
# Of the findings.
_MIGRATION, _COMPATIBILITY = "docs/migration.md", "docs/compatibility.md"
PAGES = {
    "call": f"{_MIGRATION}#the-place-of-the-call",
    "files": f"{_MIGRATION}#a-script-in-several-files",
    "backwards": f"{_MIGRATION}#two-backward-passes-in-a-step-a-gan",
    "wrappers": f"{_MIGRATION}#several-wrappers",
    "accumulation": f"{_MIGRATION}#accumulation",
    "arguments": f"{_MIGRATION}#arguments-and-members",
    "buffers": f"{_MIGRATION}#buffers-of-each-rank",
    "evaluation": f"{_MIGRATION}#batchnorm-and-evaluation",
    "statistics": f"{_MIGRATION}#statistics-that-are-averaged-or-copied",
    "hand": f"{_MIGRATION}#average-gradients-by-hand",
    "sampler": "docs/tutorial/whole-script.md#epochs-sampler-and-seeds",
    "class": f"{_MIGRATION}#the-class-in-other-places",
    "hooks": f"{_COMPATIBILITY}#communication-hooks-uneven-inputs",
    "autograd": f"{_COMPATIBILITY}#modules-and-autograd",
    "checkpoints": f"{_COMPATIBILITY}#groups-checkpoints-data",
    "members": f"{_COMPATIBILITY}#not-here-and-why",
}
# Libraries that wrap the module themselves, by the beginning of a full name.
OTHERS = {
    "accelerate": "docs/accelerate.md",
    "apex.parallel": "docs/migration.md#apex-with-delay_allreduce",
    "fairseq": "docs/migration.md#fairseqs-legacy_ddp",
    "horovod": "docs/migration.md#horovod",
    "lightning": "docs/lightning.md",
    "pytorch_lightning": "docs/lightning.md",
    "transformers.Trainer": "docs/accelerate.md#transformers",
}
_NO_DDP = "the script does not name torch's DistributedDataParallel, and averages no gradients by hand"
_ON_SITE = "On the site of the documentation, docs/NAME.md is the page NAME.html."


@dataclass(frozen=True)
class Port:
    """The script before and after, and the findings in the order of the text. ``is_complete``: nothing to decide."""

    path: Path
    before: str
    after: str
    findings: tuple[Finding, ...]

    @property
    def is_complete(self) -> bool:
        return not any(finding.is_open for finding in self.findings)

    def diff(self) -> str:
        """A unified diff that ``patch`` and ``git apply`` read. It is empty if nothing changes."""
        name = os.path.relpath(self.path)
        if name.split(os.sep)[0] == "..":  # `patch` takes no path with ".."
            name = str(self.path.parent.resolve() / self.path.name).lstrip("/")
        end = "\t" if " " in name else ""  # as git writes it: otherwise the name ends at the space
        found = difflib.unified_diff(
            _lines(self.before), _lines(self.after), f"a/{printable(name)}{end}", f"b/{printable(name)}{end}"
        )
        return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in found)

    def write(self, path: Path) -> None:
        """Write the changed script to a new file.

        Raises:
            ScriptError: there is such a file.
            OSError: the file cannot be written.
        """
        try:
            file = path.open("xb")
        except FileExistsError as error:
            raise ScriptError(f"{path} exists, and is not overwritten; remove it, or name another file") from error
        try:
            with file:
                file.write(self.after.encode())
        except OSError:
            path.unlink()  # leave no incomplete script
            raise

    def remark_lines(self) -> list[str]:
        """The findings with a text, in lines of 80 columns. Equal findings are one, with all lines of the script."""
        lines: dict[tuple[bool, str, str], set[int]] = {}
        for finding in self.findings:
            if finding.text:
                lines.setdefault((finding.is_open, finding.text, finding.page), set()).add(finding.line)
        found = []
        for (is_open, text, page), (first, *others) in ((key, sorted(numbers)) for key, numbers in lines.items()):
            also = f" (also {', '.join(f'line {line}' for line in others)})" if others else ""
            start = f"{self.path}:{first}: {'decide' if is_open else 'note'}: {text}{also}"
            found += [*wrap(start, break_words=False), f"  {PAGES[page]}"]
        return [*found, _ON_SITE] if found else []


def _lines(text: str) -> list[str]:  # as `patch` counts: only a line feed ends a line
    return [f"{line}\n" for line in text.split("\n")[:-1]] + ([last] if (last := text.rpartition("\n")[2]) else [])


def port(path: Path) -> Port:
    """Read a script, and find the changes that make it use this library.

    Raises:
        OSError: the file cannot be read.
        ScriptError: this Python cannot read the script, or there is nothing to port.
    """
    if path.suffix == ".ipynb":
        raise ScriptError(f"{path} is a notebook; jupyter nbconvert --to script {path} makes a script of it")
    try:
        text = path.read_bytes().decode("utf-8")
        script = Script(text.removeprefix(_BYTE_ORDER_MARK))
    except UnicodeDecodeError as error:
        raise ScriptError(f"{path} is not UTF-8: {error.reason} at byte {error.start}; convert the file") from error
    except ScriptError as error:
        raise ScriptError(f"{path} is no script that this Python can read: {error}") from error
    names = [f"{name}." for name in script.imports.values()]
    if _has(names, "legacy_ddp"):
        raise ScriptError(f"{path}: nothing to port: the script uses legacy_ddp already")
    others = OtherFiles(path)
    findings = find(script, others)
    if not any(finding.edits for finding in findings):
        wrapping = [f"the script uses {other}, see {OTHERS[other]}" for other in OTHERS if _has(names, other)]
        if wrapping or not any(finding.is_open for finding in findings):
            files = ", ".join(os.path.relpath(file, path.parent) for file in others.files(script))
            without = f"{_NO_DDP}; a module that it imports may, port that file: {files}" if files else _NO_DDP
            if collectives(script):
                without += "; a function that averages the gradients that it gets goes with the file that calls it"
            raise ScriptError(f"{path}: nothing to port: {'; '.join(wrapping) or without}")
    after = _apply(script.text, [edit for finding in findings for edit in finding.edits])
    try:
        ast.parse(after)
    except SyntaxError as error:
        raise ScriptError(f"{path}: the changes would break line {error.lineno}; port this script by hand") from error
    mark = text.removesuffix(script.text)
    return Port(path, text, mark + after, tuple(findings))


def _has(names: list[str], package: str) -> bool:
    return any(name.startswith(f"{package}.") for name in names)


def _apply(text: str, edits: list[Edit]) -> str:
    """The text with all edits, except those inside of a part that another edit replaces."""
    parts, at = [], 0
    for edit in sorted(edits, key=lambda edit: (edit.start, edit.end)):
        parts += [text[at : edit.start], edit.text] if edit.start >= at else []
        at = max(at, edit.end)
    return "".join([*parts, text[at:]])
