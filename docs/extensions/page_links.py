"""Links from docstrings to pages: ``docs/transport.md`` is a path for readers of the source, and a link on the site."""

import re
from typing import Any

from sphinx.application import Sphinx

_PAGE = re.compile(r"\bdocs/([\w/-]+)\.md\b")


def link_pages(app: Sphinx, kind: str, name: str, item: Any, options: Any, lines: list[str]) -> None:  # noqa: ARG001
    """Replace the paths of pages in the lines of a docstring, as ``autodoc-process-docstring`` passes them."""
    lines[:] = [_PAGE.sub(r":doc:`/\1`", line) for line in lines]


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the replacement for every docstring."""
    app.connect("autodoc-process-docstring", link_pages)
    return {"parallel_read_safe": True, "version": "1"}
