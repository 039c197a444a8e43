"""A headless browser with an empty profile and without network access."""

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.support.ui import WebDriverWait

_PROGRAMS = ("chromium", "chromedriver")
_SWITCHES = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--host-resolver-rules=MAP * ~NOTFOUND",
    "--force-prefers-reduced-motion",
)
# Bokeh draws inside shadow trees, which a search from the document skips.
_ALL = """
const found = []
const walk = root => {
  for (const element of root.querySelectorAll("*")) {
    found.push(element)
    if (element.shadowRoot) walk(element.shadowRoot)
  }
}
walk(document)
"""
LOADED = "return document.readyState == 'complete'"
DRAWN = f"{LOADED} && window.Bokeh && Bokeh.documents.every(item => item.is_idle)"


def reason_missing() -> str | None:
    """The reason for a missing browser; None if a browser is installed."""
    missing = [program for program in _PROGRAMS if shutil.which(program) is None]
    return f"{' and '.join(missing)} not found; make browser installs Debian's" if missing else None


class Page:
    """A page in the browser, once the script ``ready`` returns true. ``query``: the end of the address."""

    def __init__(self, driver: webdriver.Chrome, path: Path, *, ready: str = DRAWN, query: str = "") -> None:
        self.driver = driver
        self._wait = WebDriverWait(driver, 60, poll_frequency=0.05)
        self.url = path.as_uri() + query
        driver.get("about:blank")  # the start page of the browser loads many files
        for kind in ("browser", "performance"):
            driver.get_log(kind)  # discard entries of the previous page
        driver.get(self.url)
        self._wait.until(lambda browser: browser.execute_script(ready))

    def run(self, script: str, *arguments: Any) -> Any:
        """The result of ``script``, in which ``found`` holds all elements, including shadow trees."""
        return self.driver.execute_script(_ALL + script, *arguments)

    def wait_for(self, script: str, *arguments: Any) -> Any:
        """The first result of ``script`` which is not null."""
        return self._wait.until(lambda _: self.run(script, *arguments))

    def set_width(self, width: int) -> None:
        """Give the page a width in pixels, which may be less than that of any window."""
        size = {"width": width, "height": 1000, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)

    def point(self, x: float, y: float) -> None:
        moved = {"type": "mouseMoved", "x": x, "y": y}
        self.driver.execute_cdp_cmd("Input.dispatchMouseEvent", moved)

    def console_errors(self) -> list[str]:
        """Warnings and errors in the console of the browser."""
        entries = self.driver.get_log("browser")
        return [entry["message"] for entry in entries if entry["level"] in ("SEVERE", "WARNING")]

    def requests(self) -> list[str]:
        """The requested addresses, without data of the page itself."""
        events = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        sent = [event for event in events if event["method"] == "Network.requestWillBeSent"]
        urls = [event["params"]["request"]["url"] for event in sent]
        return [url for url in urls if not url.startswith(("data:", "blob:"))]


@contextmanager
def open_browser() -> Iterator[webdriver.Chrome]:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = webdriver.ChromeOptions()
        options.binary_location = str(shutil.which("chromium"))
        for switch in (*_SWITCHES, f"--user-data-dir={profile}", "--window-size=1280,1000"):
            options.add_argument(switch)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        driver = webdriver.Chrome(options, Service(executable_path=shutil.which("chromedriver")))
        try:
            yield driver
        finally:
            driver.quit()
