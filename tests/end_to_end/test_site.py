"""The built site: public names in its inventory, no resource of another host, and three pages in a browser."""

import importlib
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from io import BytesIO
from pathlib import Path

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
needs_browser = pytest.mark.skipif(reason_missing() is not None, reason=str(reason_missing()))
SHOWN = """
const article = document.querySelector("article") || document.querySelector("main")
const around = [article]
while (around.at(-1).parentElement) around.push(around.at(-1).parentElement)
return {
  text: article.innerText,
  height: article.getBoundingClientRect().height,
  overflow: Math.max(...around.map(element => element.scrollWidth - element.clientWidth)),
}
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
    with open_browser() as driver:
        yield driver


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


class _Resources(HTMLParser):
    """The addresses of the scripts, styles, fonts and images of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in ("script", "link", "img", "iframe", "source"):
            self.found += [value for name, value in attrs if name in ("src", "href") and value]


def test_no_page_loads_anything_of_another_host(site: Path) -> None:
    pages = _pages(site)
    assert len(pages) > 30
    for page in pages:
        resources = _Resources()
        resources.feed(page.read_text(encoding="utf-8"))

        assert [address for address in resources.found if "//" in address] == [], page


@needs_browser
@pytest.mark.parametrize("width", [400, 1280])
@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_readable_in_both_modes_and_fits_its_window(
    site: Path, driver: webdriver.Chrome, name: str, width: int
) -> None:
    page = Page(driver, site / name, ready=LOADED)
    page.set_width(width)
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


@needs_browser
def test_no_page_is_wider_than_a_narrow_window(site: Path, driver: webdriver.Chrome) -> None:
    excess = {}
    for path in _pages(site):
        page = Page(driver, path, ready=LOADED)
        page.set_width(400)
        excess[path.relative_to(site).as_posix()] = page.run(SHOWN)["overflow"]

    assert [name for name, pixels in excess.items() if pixels > 0] == []


@needs_browser
def test_a_report_of_80_columns_fits_into_a_window_of_1280_pixels(site: Path, driver: webdriver.Chrome) -> None:
    page = Page(driver, site / "debugging.html", ready=LOADED)
    page.set_width(1280)

    measured = "block => [block.innerText, block.scrollWidth - block.clientWidth]"
    blocks = page.run(f"return [...document.querySelectorAll('pre')].map({measured})")
    reports = [(text, excess) for text, excess in blocks if max(map(len, text.splitlines())) <= 80]
    assert len(reports) > 5
    assert [text for text, excess in reports if excess > 0] == []
