"""Does the README's example run as it is printed?"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_readme_s_example_runs_on_two_ranks(tmp_path: Path) -> None:
    (example,) = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    script = tmp_path / "train.py"
    # A file per rank: what ranks print to one pipe may interleave.
    script.write_text(example + "\nimport os\nopen(f'calls-{os.environ[\"RANK\"]}', 'w').write(str(record.call))\n")

    run = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        check=False,
    )

    assert run.returncode == 0, run.stderr
    assert [(tmp_path / f"calls-{rank}").read_text() for rank in range(2)] == ["20", "20"]
