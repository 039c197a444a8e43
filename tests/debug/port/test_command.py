"""The command ``legacy-ddp port``: its output, the diff in other programs, and ported scripts beside torch DDP."""

import ast
import inspect
import re
import shutil
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.parallel import DistributedDataParallel

from tests.helpers.command import RefusedError, command
from tests.helpers.paths import ROOT
from tests.helpers.ported import ADDRESSES, end_states, ported
from tests.helpers.ranks import run_ranks
from tests.helpers.scripts import assert_same_bits, run_script

OURS = "from legacy_ddp import LegacyDistributedDataParallel"
THEIRS = "from torch.nn.parallel import DistributedDataParallel"
HEAD = f"{THEIRS} as DDP\nmodel = DDP(net)\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
SCRIPT = f"{HEAD}loss.backward()\noptimizer.step()\n"


def test_arguments_are_those_of_torch_ddp(tmp_path: Path) -> None:
    names = [*inspect.signature(DistributedDataParallel).parameters][1:]
    given = ", ".join(f"{name}=x" for name in names)
    found = ported(f"{THEIRS} as DDP\nmodel = DDP(net, {given})\n", tmp_path)

    assert not [text for text in found.texts if "is no argument of torch DDP" in text]


def _anchors(page: str) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_finding_names_a_section_that_exists() -> None:
    for address in ADDRESSES:
        page, _, anchor = address.partition("#")
        assert not anchor or anchor in _anchors(page), address


def test_a_remark_about_several_lines_is_told_once(tmp_path: Path) -> None:
    (text,) = ported(f"{HEAD}model.eval()\nloss.backward()\noptimizer.step()\nmodel.eval()\n", tmp_path).texts

    assert text.endswith("an evaluation on one rank needs nothing (also line 7)")


def test_an_output_file_has_the_ported_script_and_no_file_is_overwritten(tmp_path: Path) -> None:
    found = ported(f"{HEAD}x = 'é'\r\nloss.backward()\noptimizer.step()\n", tmp_path)
    script = tmp_path / "train.py"

    refused = command("port", script, "-o", script)

    assert "x = 'é'\r\n" in found.after
    assert "all_reduce" in found.after
    assert refused.returncode == 2
    assert f"error: {script} exists, and is not overwritten" in " ".join(refused.stderr.split())
    assert "all_reduce" not in script.read_text()


def test_an_output_file_that_cannot_be_written_leaves_no_half_of_a_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, output, open_file = tmp_path / "train.py", tmp_path / "ported.py", Path.open
    script.write_text(SCRIPT)

    def open_on_a_full_disk(path: Path, mode: str = "r", **options: Any) -> Any:
        if path != output:
            return open_file(path, mode, **options)
        path.touch()
        return open_file(Path("/dev/full"), "wb", 0)

    monkeypatch.setattr(Path, "open", open_on_a_full_disk)
    refused = command("port", script, "-o", output)

    assert refused.returncode == 2
    assert "No space left on device" in refused.stderr
    assert not output.exists()


@pytest.mark.parametrize(
    "text, words",
    [
        (b"import torch\n", "nothing to port: the script does not name torch's DistributedDataParallel"),
        (b"with model.no_sync():\n    pass\n", "nothing to port: the script does not name torch's"),
        (f"{HEAD}{OURS}".encode(), "nothing to port: the script uses legacy_ddp already"),
        (b"import accelerate\nx.backward()", "nothing to port: the script uses accelerate, see docs/accelerate.md"),
        (b"def", "is no script that this Python can read: invalid syntax in line 1"),
        (b"x = '\xff'", "is not UTF-8: invalid start byte at byte 5; convert the file"),
        (b"# coding: latin-1\nx = '\xe4'", "is not UTF-8: invalid continuation byte at byte 23; convert the file"),
        (b"x = 1\0", "is no script that this Python can read: "),
        (b"(" * 50_000, "is no script that this Python can read: "),
        (HEAD.replace("DDP(net)", "DDP(net,\ndim=0\n, init_sync=True)").encode(), "the changes would break line 3"),
        (None, "No such file or directory"),
    ],
)
def test_what_cannot_be_ported_is_an_error_in_lines_of_80_columns(
    text: bytes | None, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if text is not None:
        Path("train.py").write_bytes(text)

    done = command("port", "train.py")

    assert (done.returncode, done.stdout) == (2, "")
    assert max(map(len, done.stderr.splitlines())) <= 80
    told = " ".join(done.stderr.split())
    assert told.startswith("legacy-ddp: error: train.py")
    assert words in told


def test_a_script_without_ddp_names_the_files_that_it_imports(tmp_path: Path) -> None:
    for name in ("trainer.py", "data/__init__.py", "data/text.py", "other.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()

    with pytest.raises(RefusedError, match=r"port that file: data/text\.py, data/__init__\.py, trainer\.py$"):
        ported("import torch, data.text as text\nfrom trainer import Trainer\nfrom .data import load\n", tmp_path)


def test_a_notebook_is_refused_with_the_command_that_makes_a_script_of_it(tmp_path: Path) -> None:
    notebook = tmp_path / "train.ipynb"
    notebook.write_text('{"cells": [], "nbformat": 4}')  # Python, too

    done = command("port", notebook)

    assert done.returncode == 2
    told = " ".join(done.stderr.split())
    assert f"is a notebook; jupyter nbconvert --to script {notebook} makes a script of it" in told


@pytest.mark.parametrize("program", [["patch", "--binary", "-p1"], ["git", "apply"]], ids=["patch", "git"])
@pytest.mark.parametrize("end", ["\n", "", "\r\n"])
def test_the_diff_applies(program: list[str], end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which(program[0]) is None:
        pytest.skip(f"needs the program {program[0]}")
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "my scripts" / "train.py"
    script.parent.mkdir()
    text = (f"\ufeff{HEAD}größe = 1\n\f\nloss.backward()\n" * 2).replace("\n\ufeff", "\n") + "optimizer.step()"
    found = ported(text.replace("\n", end or "\n") + end, script.parent)
    before = script.read_bytes()

    subprocess.run(program, cwd=tmp_path, input=found.diff.encode(), check=True)

    assert script.read_bytes() == found.after.encode() != before


@pytest.mark.parametrize("given", ["{}/train.py", "../out/train.py"])
def test_the_diff_of_a_script_in_another_folder_applies_as_the_help_says(
    given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shutil.which("patch") is None:
        pytest.skip("needs the program patch")
    here, there = tmp_path / "here", tmp_path / "out"
    here.mkdir()
    there.mkdir()
    monkeypatch.chdir(here)
    (there / "train.py").write_text(SCRIPT)
    done = command("port", given.format(there))

    subprocess.run(["patch", "-p1", "-d", "/"], input=done.stdout.encode(), check=True)

    assert "model.all_reduce()\n" in (there / "train.py").read_text()


def test_the_diff_has_the_bytes_of_the_script_in_every_terminal(tmp_path: Path) -> None:
    found = ported(f"{HEAD}größe = 1  # 日本\nloss.backward()\noptimizer.step()\n", tmp_path)

    done = run_script("-m", "legacy_ddp", "port", str(tmp_path / "train.py"), environment={"PYTHONIOENCODING": "ascii"})

    assert (done.returncode, done.stdout, done.stderr) == (0, found.diff, "")


def test_the_example_of_the_page_prints_what_the_page_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs" / "migration.md").read_text(encoding="utf-8")
    shown = dict(re.findall(r"^<!-- port: (\S+) -->\n```\w+\n(.*?)^```$", page, re.MULTILINE | re.DOTALL))
    (tmp_path / "train.py").write_text(shown["train.py"])
    monkeypatch.chdir(tmp_path)

    done = command("port", "train.py")

    assert (done.returncode, done.stdout, done.stderr) == (2, shown["stdout"], shown["stderr"])


PROGRAM = """
import torch
from torch.nn.parallel import DistributedDataParallel as DDP
model = DDP(module)
optimizer = torch.optim.AdamW(model.parameters())
"""
PROGRAMS = {
    "micro-batches": """
for first, last in zip(batches[::2], batches[1::2]):
    optimizer.zero_grad()
    with model.no_sync():
        model(first).sum().backward()
    model(last).sum().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
""",
    "a setting of torch DDP": """
for pair in zip(batches[::2], batches[1::2]):
    for x in pair:
        model.require_backward_grad_sync = x is pair[-1]
        model(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
""",
    "several backward passes": """
for first, second in zip(batches[::2], batches[1::2]):
    optimizer.zero_grad()
    model(first).sum().backward()
    model(second).sum().backward()
    optimizer.step()
""",
}


def test_a_ported_script_ends_in_the_bits_of_torch_ddp(tmp_path: Path) -> None:
    theirs = [PROGRAM + program for program in PROGRAMS.values()]
    ours = [ported(program, tmp_path).after for program in theirs]
    assert [program.count("all_reduce()") for program in ours] == [1, 1, 2]

    for states in run_ranks(partial(end_states, programs=[*theirs, *ours]), 2):
        for name, before, after in zip(PROGRAMS, states, states[len(ours) :], strict=False):
            assert set(after) == set(before), name
            assert_same_bits(after, before)


_OF_DDP = [
    "model = DDP(net, [0], find_unused_parameters=True)",
    "model = torch.nn.parallel.DistributedDataParallel(\n{0}    net, # net\n{0}    device_ids=[1])",
    "self.model = (DDP)(net, (1), **{{'a': 1}}) if ddp else net",
    "model.require_backward_grad_sync = x % 2",
    "from torch.nn.parallel import DistributedDataParallel as DDP, DataParallel",
    "from torch.nn.parallel import DataParallel, \\\n{0}  DistributedDataParallel",
    "return DDP(net), 1",
    "y = f'{{DDP}} {{loss.backward()}} é'",
    "a, b = DDP(x), DDP(y)",
    "x = 'DistributedDataParallel'; isinstance(x, DDP)",
]
_PLAIN = [
    "loss.backward()",
    "scaler.scale(loss).backward()  # ü",
    "optimizer.step()",
    "scaler.step(optimizer); scaler.update()",
    "import torch.nn, os",
    "x = '''\n  loss.backward()'''; loss.backward()",
    "net(x).backward() \\\n{0}  ;optimizer.step()",
    "closure(lambda: loss.backward())",
    "clip_grad_norm_(model.parameters(), 1.0)",
    "model.eval()",
    "\f",
    "# optimizer.step()",
]
_HEADERS = [
    "if i % 2:",
    "if amp: optimizer.step()\n{0}else:",
    "for x in y:",
    "with model.no_sync():",
    "def train(model, x):",
    "@wrap\n{0}async def test(x):",
    "class A(B):",
    "try: loss.backward()\n{0}finally:",
]


def _blocks(lines: list[str]) -> st.SearchStrategy[Any]:
    line = st.sampled_from(lines)
    return st.recursive(
        st.lists(line, min_size=1, max_size=4),
        lambda inner: st.lists(st.tuples(st.sampled_from(_HEADERS), inner) | line, min_size=1, max_size=5),
        max_leaves=12,
    )


def _script(block: list[Any], indent: str) -> str:
    lines = []
    for item in block:
        if isinstance(item, tuple):
            header, inner = item
            lines += [indent + header.format(indent), _script(inner, f"{indent}  "), f"{indent}  pass"]
        else:
            lines.append(indent + item.format(indent))
    return "\n".join(lines)


@given(
    _blocks(_PLAIN) | _blocks([*_PLAIN, *_OF_DDP]),
    st.sampled_from(["\n", "\r\n", "\r"]),
    st.sampled_from(["", "\ufeff", f'"""Text."""; import torch\n{HEAD}', f"import torch\n{HEAD}"]),
)
def test_every_script_is_ported_to_a_script_or_refused_and_other_lines_stay(
    tmp_path_factory: pytest.TempPathFactory, block: list[Any], newline: str, head: str
) -> None:
    text = (head + _script(block, "")).replace("\n", newline)
    try:
        found = ported(text, tmp_path_factory.getbasetemp())
    except RefusedError:
        return

    ast.parse(found.after.removeprefix("\ufeff"))
    lines = re.split(r"[\r\n]+", text.removeprefix("\ufeff"))
    kept = [
        line for line in lines if not re.search(r"DDP|DistributedData|import|require_|device_ids|net,|\A\"{3}", line)
    ]
    left = iter(re.split(r"[\r\n]+", found.after.removeprefix("\ufeff")))
    assert all(line in left for line in kept)
    if not re.search(r"parallel|require_", text):
        assert (found.after, found.diff, found.is_complete) == (text, "", False)
