"""Settings are in setup.cfg; here is what it cannot say."""

import re
from pathlib import Path

from setuptools import setup

# An image, or a link, to a file of the source tree: [text](docs/page.md#heading)
LINK = re.compile(r"!?\[([^\]]*)\]\((?!https?:|#)([^)#\s]+)(?:#[^)]*)?\)")


def long_description() -> str:
    """README.md without links to files of the source tree, which a package index does not show."""
    readme = (Path(__file__).parent / "README.md").read_text(encoding="utf-8")
    return LINK.sub(lambda found: f"{found[1]} (`{found[2]}` in the source)", readme)


setup(long_description=long_description(), long_description_content_type="text/markdown")
