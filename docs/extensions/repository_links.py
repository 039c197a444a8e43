"""Links between files of the repository: to the page of a file where the site has one, else the text of the link."""

from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform


class RepositoryLinks(SphinxTransform):
    """Resolve relative links from the folder of their own file, also in files included from outside of the site."""

    default_priority = 400  # before Sphinx copies the targets of links to files

    def apply(self, **_: Any) -> None:
        """Replace the links of this page; links to no file stay, and Sphinx reports broken ones."""
        for kind in (addnodes.pending_xref, addnodes.download_reference):
            for link in list(self.document.findall(kind)):
                if link.get("reftype") == "myst" and (file := self._file(link)).is_file():
                    self._replace(link, self._page(file))

    def _replace(self, link: nodes.Element, page: str | None) -> None:
        if page is None:
            link.replace_self(nodes.inline("", "", *link.children))
        elif link.get("refdomain") != "doc":
            _, _, anchor = link["reftarget"].partition("#")
            link["refdomain"], link["reftarget"], link["reftargetid"] = "doc", page, anchor or None
        else:
            link["reftarget"] = page

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


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the transform, and its table from Markdown files outside of the site to pages."""
    app.add_config_value("repository_pages", {}, "env", dict)
    app.add_transform(RepositoryLinks)
    return {"parallel_read_safe": True, "version": "1"}
