"""Does the loop of docs/restart.md survive a kill?"""

import re
from pathlib import Path

import pytest

from tests.helpers.paths import ROOT
from tests.helpers.scripts import assert_same_bits, fork_script, load

KILL = """    if (step, rank, os.environ["TORCHELASTIC_RESTART_COUNT"]) == (12, 1, "0"):
        os.kill(os.getpid(), 9)
"""
CALL = "    model.all_reduce()\n"


@pytest.mark.thorough
@pytest.mark.slow
def test_the_loop_of_the_page_survives_a_kill(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "restart.md").read_text(encoding="utf-8")
    (loop,) = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    assert loop.count(CALL) == 1
    variable, launch = re.search(r"^    (TORCH_\w+=1) torchrun (.*) train\.py$", page, re.MULTILINE).groups()  # type: ignore[union-attr]  # it is there
    states = []
    for name, text in (("undisturbed", loop), ("killed", loop.replace(CALL, KILL + CALL))):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "train.py").write_text(text)
        run = fork_script(
            *("-m", "torch.distributed.run", *launch.split(), str(folder / "train.py")),
            environment=dict([variable.split("=")]),
            cwd=folder,
            forks_children=True,
        )
        assert run.returncode == 0, run.stderr
        assert run.stderr.count("exitcode: -9") == (name == "killed"), run.stderr
        states.append(load(folder / "checkpoint.pt"))

    assert states[0]["step"] == 30
    assert_same_bits(*states)
