"""Paths of this checkout, and the code on its pages."""

import re
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[2]


def python_blocks(page: str | Path) -> list[str]:
    """The blocks of Python of a page, by its path from the root."""
    text = (ROOT / page).read_text(encoding="utf-8")
    blocks = re.findall(r"^( *)```python\n(.*?)^\1```$", text, re.MULTILINE | re.DOTALL)
    return [textwrap.dedent(block) for _, block in blocks]
