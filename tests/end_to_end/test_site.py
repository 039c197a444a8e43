"""The built site: public names in its inventory, links, no resource of another host, and pages in a browser."""

import importlib
import re
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from io import BytesIO
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from PIL import Image
from selenium import webdriver

from tests.helpers.browser import LOADED, Page, open_browser, reason_missing
from tests.helpers.scripts import run_script

sphinx_inventory = pytest.importorskip("sphinx.util.inventory", reason="sphinx is missing; `make docs` installs it")
MODULES = ("legacy_ddp", "legacy_ddp.data", "legacy_ddp.debug", "legacy_ddp.lightning")
# A page of prose and tables, a page of the reference, and a page with long lines of code.
PAGES = ("index.html", "api/wrapper.html", "errors.html")
# `make docs` builds the site, too.
pytestmark = pytest.mark.thorough
SHOWN = """
const article = document.querySelector("article") || document.querySelector("main")
const around = [article]
while (around.at(-1).parentElement) around.push(around.at(-1).parentElement)
around.push(...document.querySelectorAll(".bd-sidebar-secondary"))
return {
  text: article.innerText,
  height: article.getBoundingClientRect().height,
  overflow: Math.max(...around.map(element => element.scrollWidth - element.clientWidth)),
}
"""
# The words of headings and cells that stand on two lines; a hyphen may end a line.
BROKEN_WORDS = r"""
const broken = []
for (const place of document.querySelectorAll("article :is(h1, h2, h3, h4, td, th)")) {
  const walker = document.createTreeWalker(place, NodeFilter.SHOW_TEXT)
  while (walker.nextNode()) {
    for (const word of walker.currentNode.data.matchAll(/[\p{L}\p{N}]+/gu)) {
      const range = document.createRange()
      range.setStart(walker.currentNode, word.index)
      range.setEnd(walker.currentNode, word.index + word[0].length)
      if (new Set([...range.getClientRects()].map(line => Math.round(line.top))).size > 1) broken.push(word[0])
    }
  }
}
return broken
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as by `make docs`."""
    folder = tmp_path_factory.mktemp("site")
    build = run_script(
        *("-m", "sphinx", "-q", "-n", "-W", "--keep-going", "-d", str(folder / "trees"), "docs", str(folder / "html"))
    )
    assert build.returncode == 0, build.stderr
    return folder / "html"


@pytest.fixture(scope="module")
def driver() -> Iterator[webdriver.Chrome]:
    if missing := reason_missing():
        pytest.skip(missing)
    with open_browser() as driver:
        yield driver


Open = Callable[[str, int], Page]


@pytest.fixture
def open_page(site: Path, driver: webdriver.Chrome) -> Open:
    """Opens a page of the site, in a window of a width in pixels."""

    def opened(name: str, width: int) -> Page:
        page = Page(driver, site / name, ready=LOADED)
        page.set_width(width)
        return page

    return opened


def _pages(site: Path) -> list[Path]:
    return [path for path in sorted(site.rglob("*.html")) if "_static" not in path.parts]


def test_the_reference_has_every_public_name(site: Path) -> None:
    inventory = sphinx_inventory.InventoryFile.loads((site / "objects.inv").read_bytes(), uri="")
    documented = {name for kind in ("class", "exception", "function") for name in inventory.data[f"py:{kind}"]}

    assert documented == {f"{name}.{item}" for name in MODULES for item in importlib.import_module(name).__all__}


def test_no_signature_of_the_reference_shows_arguments_that_are_refused(site: Path) -> None:
    signatures = re.findall(r"<dt class=\"sig .*?</dt>", (site / "api" / "wrapper.html").read_text("utf-8"), re.DOTALL)

    assert any("timeout_seconds" in signature for signature in signatures)
    assert not any("unknown" in signature for signature in signatures)


def test_pages_named_in_docstrings_are_links(site: Path) -> None:
    sources = [path.read_text(encoding="utf-8") for path in sorted((site / "api").glob("*.html"))]

    assert [found for source in sources for found in re.findall(r"docs/[\w/-]+\.md", source)] == []
    wrapper = (site / "api" / "wrapper.html").read_text(encoding="utf-8")
    assert re.search(r'href="\.\./transport\.html"><span class="doc">The host transport</span>', wrapper)


class _Addresses(HTMLParser):
    """The addresses, the anchors, and the texts with the style of a link and without an address, of a page."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.resources: list[str] = []
        self.anchors: set[str] = set()
        self.false_links: list[str] = []
        self._in_link = False
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = [value for name, value in attrs if name in ("src", "href") and value]
        if tag in ("script", "link", "img", "iframe", "source"):
            self.resources += found
        self.links += found
        self.anchors.update(value for name, value in attrs if name == "id" and value)
        self._in_link |= tag == "a"
        style = dict(attrs).get("class") or ""
        if style.startswith(("xref download", "xref myst")) and not self._in_link:
            self.false_links.append(style)

    def handle_endtag(self, tag: str) -> None:
        self._in_link &= tag != "a"


def test_no_relative_link_of_the_site_is_dead(site: Path) -> None:
    pages = {page: _Addresses(page) for page in _pages(site)}
    dead = []
    for page, addresses in pages.items():
        for link in addresses.links:
            url = urlsplit(link)
            target = (page.parent / unquote(url.path)).resolve() if url.path else page
            anchors = pages[target].anchors if target in pages and url.fragment else {unquote(url.fragment)}
            if not url.scheme and not (target.exists() and unquote(url.fragment) in anchors):
                dead.append((page.relative_to(site).as_posix(), link))
        dead += [(page.relative_to(site).as_posix(), style) for style in addresses.false_links]

    assert dead == []


def test_the_link_of_a_test_leads_to_its_line(site: Path) -> None:
    links = [link for link in _Addresses(site / "faults.html").links if link.startswith("source/tests/")]
    assert len(links) > 90
    for link in links:
        path, _, anchor = link.partition("#")
        page = (site / path).read_text(encoding="utf-8")
        assert re.search(rf'<span id="{anchor}">(?:<span[^>]*></span>)*<span class="k">def</span>', page), link


def test_no_page_loads_anything_of_another_host(site: Path) -> None:
    pages = _pages(site)
    assert len(pages) > 30
    for page in pages:
        assert [address for address in _Addresses(page).resources if "//" in address] == [], page


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_readable_in_both_modes_and_fits_its_window(
    open_page: Open, driver: webdriver.Chrome, name: str
) -> None:
    page = open_page(name, 1280)
    papers = {}
    for mode in ("light", "dark"):
        page.run("document.documentElement.dataset.theme = arguments[0]", mode)
        shown = page.run(SHOWN)
        assert len(shown["text"]) > 500
        assert shown["height"] > 300
        assert shown["overflow"] <= 0
        paper, ink = _screenshot_levels(driver)
        assert abs(paper - ink) > 100
        papers[mode] = paper

    assert papers["light"] > 240
    assert papers["dark"] < 50
    assert not [url for url in page.requests() if not url.startswith("file:")]


def _screenshot_levels(driver: webdriver.Chrome) -> tuple[int, int]:
    """The grey level of most pixels of a screenshot, and the level that is farthest from it on 500 pixels or more."""
    counts = Image.open(BytesIO(driver.get_screenshot_as_png())).convert("L").histogram()
    paper = counts.index(max(counts))
    return paper, max((level for level, count in enumerate(counts) if count >= 500), key=lambda x: abs(x - paper))


def test_every_page_fits_a_narrow_window_and_keeps_its_words_whole(site: Path, open_page: Open) -> None:
    excess, broken = {}, {}
    # Pages of source files are all alike.
    for path in [*(path for path in _pages(site) if site / "source" not in path.parents), _pages(site / "source")[0]]:
        name = path.relative_to(site).as_posix()
        page = open_page(name, 390)
        excess[name], broken[name] = page.run(SHOWN)["overflow"], page.run(BROKEN_WORDS)

    assert {name: pixels for name, pixels in excess.items() if pixels > 0} == {}
    assert {name: words for name, words in broken.items() if words} == {}


def test_a_row_of_sentences_is_a_block_in_a_narrow_window(open_page: Open) -> None:
    page = open_page("faults.html", 390)
    widths = "return [...document.querySelector('table.rows-as-blocks tbody tr').cells].map(cell => cell.clientWidth)"
    blocks = page.run(widths)
    page.set_width(1440)

    assert min(blocks) == max(blocks) > 300
    assert sum(page.run(widths)) <= 1440


def test_removed_lines_are_red_and_new_lines_are_green(open_page: Open) -> None:
    page = open_page("migration.html", 1280)
    for mode in ("light", "dark"):
        page.run("document.documentElement.dataset.theme = arguments[0]", mode)
        colour = "return getComputedStyle(document.querySelector(arguments[0])).backgroundColor"
        removed, new = (
            [int(level) for level in re.findall(r"\d+", page.run(colour, kind))[:3]] for kind in (".gd", ".gi")
        )
        assert max(removed) == removed[0] > removed[1]
        assert max(new) == new[1] > new[0]


def test_a_search_works_without_a_server_quotes_the_pages_and_finds_a_section_first(
    site: Path, driver: webdriver.Chrome
) -> None:
    items = (
        "const items = [...document.querySelectorAll('#search-results li')]; return items.length ? items.map({}) : null"
    )
    page = Page(driver, site / "search.html", ready=LOADED, query="?q=faulthandler")
    for text in page.wait_for(items.format("item => item.innerText")):
        assert "faulthandler" in text.partition("\n")[2].lower()

    page = Page(driver, site / "search.html", ready=LOADED, query="?q=average+gradients+by+hand")
    first = urlsplit(page.wait_for(items.format("item => item.querySelector('a').href"))[0])
    assert (Path(first.path).name, first.fragment) == ("migration.html", "average-gradients-by-hand")


def test_a_report_of_80_columns_fits_into_a_window_of_1280_pixels(open_page: Open) -> None:
    page = open_page("debugging.html", 1280)
    measured = "block => [block.innerText, block.scrollWidth - block.clientWidth]"
    blocks = page.run(f"return [...document.querySelectorAll('pre')].map({measured})")
    reports = [(text, excess) for text, excess in blocks if max(map(len, text.splitlines())) <= 80]
    assert len(reports) > 5
    assert [text for text, excess in reports if excess > 0] == []


@pytest.mark.parametrize("name", ["index.html", "overview.html", "errors.html"])
def test_examples_and_messages_are_whole_and_as_wide_as_the_text_at_1440_pixels(open_page: Open, name: str) -> None:
    page = open_page(name, 1440)
    blocks = page.run(
        "return [...document.querySelectorAll('article pre')]"
        ".map(block => [block.scrollWidth - block.clientWidth, block.getBoundingClientRect().right])"
    )
    texts = page.run(
        "return [...document.querySelectorAll('article section > p')].map(part => part.getBoundingClientRect().right)"
    )
    assert max(excess for excess, _ in blocks) <= 0
    assert {round(right) for _, right in blocks} == {round(max(texts))}


def test_the_drawing_of_the_first_page_is_readable_on_a_small_screen(open_page: Open) -> None:
    page = open_page("index.html", 390)
    scale = page.run("const image = document.querySelector('article img'); return image.width / image.naturalWidth")
    assert 13 * scale > 11  # pixels of its letters


def test_no_heading_of_a_sidebar_touches_its_border(open_page: Open) -> None:
    gap = open_page("errors.html", 1440).run("""
const title = document.querySelector(".bd-sidebar-primary .bd-links__title"), range = document.createRange()
range.selectNodeContents(title)
const border = document.querySelector(".bd-sidebar-primary").getBoundingClientRect().right
return border - range.getBoundingClientRect().right
""")
    assert gap > 8
