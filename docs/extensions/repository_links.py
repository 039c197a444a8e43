"""Links between files of the repository: to the page of a file, or to a page that shows a source file."""

import posixpath
import re
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform

SOURCES = "source"  # the folder of the pages that show source files
_META = {"html_theme.sidebar_secondary.remove": True}  # they have no sections


class RepositoryLinks(SphinxTransform):
    """Resolve relative links from the folder of their own file, also in files included from outside of the site."""

    default_priority = 400  # before Sphinx copies the targets of links to files

    def apply(self, **_: Any) -> None:
        """Replace the links of this page; links to no file stay, and Sphinx reports broken ones."""
        for kind in (addnodes.pending_xref, addnodes.download_reference):
            for link in list(self.document.findall(kind)):
                if link.get("reftype") == "myst" and (file := self._file(link)).is_file():
                    self._replace(link, file)

    def _replace(self, link: nodes.Element, file: Path) -> None:
        page = self._page(file)
        if page is None:
            link.replace_self(self._link_to_source(link, file))
        elif link.get("refdomain") != "doc":
            _, _, anchor = link["reftarget"].partition("#")
            link["refdomain"], link["reftarget"], link["reftargetid"] = "doc", page, anchor or None
        else:
            link["reftarget"] = page

    def _link_to_source(self, link: nodes.Element, file: Path) -> nodes.reference:
        """A link to the page of a source file, at the function that the text of the link names."""
        path = file.relative_to(Path(self.env.srcdir).parent).as_posix()
        page = posixpath.relpath(f"{SOURCES}/{path}.html", posixpath.dirname(self.env.docname) or ".")
        target = page + _anchor(file.read_text(encoding="utf-8"), link.astext())
        return nodes.reference("", "", *link.children, internal=True, refuri=target, source_file=path)

    def _file(self, link: nodes.Element) -> Path:
        target = link["reftarget"].partition("#")[0]
        if link.get("refdomain") == "doc":  # a page, or the path of a Markdown file outside of the site
            return Path(self.env.srcdir, f"{target}.md").resolve()
        return Path(link.source or "", "..", target).resolve()

    def _page(self, file: Path) -> str | None:
        """The page of a file."""
        folder = Path(self.env.srcdir)
        if file.suffix == ".md" and file.is_relative_to(folder):
            return file.relative_to(folder).with_suffix("").as_posix()
        page: str | None = self.config.repository_pages.get(file.relative_to(folder.parent).as_posix())
        return page


def _anchor(source: str, name: str) -> str:
    definition = re.search(rf"^def {re.escape(name)}\(", source, re.MULTILINE)
    return f"#line-{source[: definition.start()].count(chr(10)) + 1}" if definition else ""


def source_pages(app: Sphinx) -> Iterator[tuple[str, dict[str, Any], str]]:
    """A page for each source file that a page links, as ``html-collect-pages`` takes them."""
    doctrees = map(app.env.get_doctree, app.env.found_docs)
    links = (link for doctree in doctrees for link in doctree.findall(nodes.reference))
    for path in sorted({link["source_file"] for link in links if "source_file" in link}):
        text = Path(app.srcdir).parent.joinpath(path).read_text(encoding="utf-8")
        language = "python" if path.endswith(".py") else "text"
        code = app.builder.highlighter.highlight_block(text, language, linespans="line")
        body = f"<h1>{escape(path)}</h1>{code}"
        yield f"{SOURCES}/{path}", {"title": path, "body": body, "meta": _META}, "page.html"


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the transform, its table from Markdown files outside of the site to pages, and the source pages."""
    app.add_config_value("repository_pages", {}, "env", dict)
    app.add_transform(RepositoryLinks)
    app.connect("html-collect-pages", source_pages)
    return {"parallel_read_safe": True, "version": "2"}
