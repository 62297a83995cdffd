"""A headless Chromium for the tests of pages. Modules that import this are skipped where there is none."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import pytest

_CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_DRIVER = shutil.which("chromedriver")
_webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
needs_browser = pytest.mark.skipif(
    not _CHROMIUM or not _DRIVER,
    reason="there is no chromium with its chromedriver here (apt-get install chromium-driver)",
)

_SWITCHES = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage"
)
# returns the title of each chart with the number of its opaque colors
CHART_COLORS: Final = """
return [...document.querySelectorAll('.chart')].map((card) => {
  const canvas = card.querySelector('canvas');
  if (!canvas) return [card.querySelector('h3').textContent, 0];
  const pixels = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
  const colors = new Set();
  for (let i = 0; i < pixels.length; i += 4)
    if (pixels[i + 3] > 200) colors.add((pixels[i] << 16) | (pixels[i + 1] << 8) | pixels[i + 2]);
  return [card.querySelector('h3').textContent, colors.size];
});
"""


@contextlib.contextmanager
def open_browser(profile: Path, switch: str, logs: Mapping[str, str]) -> Iterator[Any]:
    """Start a browser with one more command-line switch and these logs, by their level."""
    from selenium.webdriver.chrome.service import Service

    options = _webdriver.ChromeOptions()
    options.binary_location = _CHROMIUM
    for one in (*_SWITCHES.split(), switch, f"--user-data-dir={profile}"):
        options.add_argument(one)
    options.set_capability("goog:loggingPrefs", dict(logs))
    driver = _webdriver.Chrome(options=options, service=Service(_DRIVER))
    try:
        yield driver
    finally:
        driver.quit()
