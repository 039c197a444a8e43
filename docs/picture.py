"""Picture of the page about a trace: `make picture TRACE=...` writes docs/report.png.

Needs Debian's chromium and chromium-driver (`make browser`), bokeh and selenium.
"""

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

from PIL import Image
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.support.ui import WebDriverWait

from legacy_ddp.debug._page import write_page
from legacy_ddp.debug._trace.read import open_run

DRAWN = "return document.readyState == 'complete' && window.Bokeh && Bokeh.documents.every(one => one.is_idle)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("traces", nargs="+", type=Path, metavar="TRACE", help="one folder, or two")
    parser.add_argument("-o", "--output", type=Path, default=Path(__file__).with_name("report.png"))
    parser.add_argument("--width", type=int, default=1280, help="of the picture, in pixels")
    parser.add_argument("--height", type=int, default=0, help="of the picture; the whole page, if not given")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "report.html"
        write_page([open_run(trace) for trace in options.traces], page)
        take_picture(page, options.output, options.width, options.height)
    print(f"{options.output}: {options.output.stat().st_size} bytes", file=sys.stderr)


def take_picture(page: Path, output: Path, width: int, height: int) -> None:
    """Open a page in a browser, wait until it is drawn, and save what it looks like."""
    with tempfile.TemporaryDirectory() as profile:
        options = webdriver.ChromeOptions()
        options.binary_location = str(shutil.which("chromium"))
        for switch in ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"):
            options.add_argument(switch)
        options.add_argument(f"--user-data-dir={profile}")
        browser = webdriver.Chrome(options, Service(executable_path=shutil.which("chromedriver")))
        try:
            browser.set_window_size(width, height or 1000)
            browser.get(page.resolve().as_uri())
            browser.execute_script("return document.fonts.ready")
            _wait(browser)
            metrics = {"width": width, "height": height or _height(browser), "deviceScaleFactor": 1, "mobile": False}
            browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
            _wait(browser)
            browser.save_screenshot(str(output))
            _make_small(output)
        finally:
            browser.quit()


def _wait(browser: webdriver.Chrome) -> None:
    WebDriverWait(browser, 60).until(lambda driver: driver.execute_script(DRAWN))
    # Two frames, for what was drawn to be seen.
    browser.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")


def _make_small(picture: Path) -> None:
    """A page has few colours: 256 of them take a third of the bytes."""
    with Image.open(picture) as image:
        image.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(picture, optimize=True)


def _height(browser: webdriver.Chrome) -> int:
    return int(browser.execute_script("return document.documentElement.scrollHeight"))


if __name__ == "__main__":
    main()
