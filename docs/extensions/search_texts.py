"""Texts for the results of a search: a script with the text of every section, for a site that is opened as files.

Sphinx fetches a page to quote it, and a browser refuses that where the address begins with ``file:``.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx

SCRIPT = "search_texts.js"


def sections(doctree: nodes.document) -> Iterator[tuple[str, str]]:
    """The anchor and the text of each section, without the title, the sections inside, and the comments of Markdown."""
    for comment in list(doctree.findall(nodes.raw)):
        comment.parent.remove(comment)
    for section in doctree.findall(nodes.section):
        inside = (part for part in section.children if not isinstance(part, nodes.section | nodes.title))
        yield section["ids"][0], " ".join(" ".join(part.astext().split()) for part in inside if part.astext())


def write_texts(app: Sphinx, failure: Exception | None) -> None:
    """Write the texts of all pages next to the other scripts of the site."""
    if failure is None:
        texts = {name: list(sections(app.env.get_doctree(name))) for name in sorted(app.env.found_docs)}
        script = f"const SEARCH_TEXTS = {json.dumps(texts, ensure_ascii=False)};\n"
        Path(app.outdir, "_static", SCRIPT).write_text(script, encoding="utf-8")


def load_texts(app: Sphinx, page: str, *_: Any) -> None:
    """Load the scripts on the page of the search alone."""
    if page == "search":
        app.add_js_file(SCRIPT)
        app.add_js_file("search_quotes.js")


def setup(app: Sphinx) -> dict[str, Any]:
    """Register both steps."""
    app.connect("build-finished", write_texts)
    app.connect("html-page-context", load_texts)
    return {"parallel_read_safe": True, "version": "1"}
