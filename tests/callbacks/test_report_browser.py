"""The page of a report in a real browser."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from report_runs import RUN_NAME, Page, fit_two_ranks

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable"))), None
)
QUIET = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--virtual-time-budget=5000"),
)
# The page itself has no script, and would not run one: it is looked at from around it.
LOOK = """
<!doctype html><body style="margin: 0"><iframe style="border: 0; width: WIDTHpx; height: 900px" srcdoc="PAGE"></iframe>
<pre id="found"></pre><script>
document.querySelector("iframe").addEventListener("load", function () {
  const page = this.contentDocument, view = this.contentWindow, width = page.documentElement.clientWidth;
  const shown = all => [...page.querySelectorAll(all)].filter(e => e.getClientRects().length);
  const scrolls = e => view.getComputedStyle(e).overflowX !== "visible";
  const clips = e => e && e !== page.body && (scrolls(e) || clips(e.parentElement));
  const sticks_out = e => !clips(e) && [...e.getClientRects()].some(r => r.right > width + 1);
  document.getElementById("found").textContent = JSON.stringify({
    width: width,
    scroll_width: page.documentElement.scrollWidth,
    outside: shown("main *, header *, nav *").filter(sticks_out).map(e => e.tagName),
    pictures: shown(".card svg").length,
    tables: shown("table").length,
    scrolling: shown(".scroll").filter(e => e.scrollWidth > e.clientWidth + 1).length,
    text_px: Math.min(...shown(".card svg text").map(e => e.getBoundingClientRect().height).filter(h => h)),
    name_px: Math.min(...shown("tbody th").map(e => e.getBoundingClientRect().width)),
    lines: shown("tbody tr:not(:first-child) > *").every(e => {
      const style = view.getComputedStyle(e);  // a collapsed border does not move with a cell that stands still
      return style.borderTopWidth === "1px" && style.borderCollapse === "separate";
    }),
    ran: page.querySelectorAll("script").length,
    background: view.getComputedStyle(page.body).backgroundColor,
  });
});
</script>
"""

pytestmark = pytest.mark.skipif(BROWSER is None, reason="needs Chromium or Chrome to open the page")


def browse(page: Path, *options: str) -> str:
    """Return the document as the browser has it after loading."""
    profile = page.parent / "profile"
    command = [str(BROWSER), *QUIET, f"--user-data-dir={profile}", *options, "--dump-dom", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    shutil.rmtree(profile, ignore_errors=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def look(page: Path, folder: Path, width: int, *options: str) -> dict[str, object]:
    """Return what can be seen of a page in a window of some width."""
    frame = folder / "frame.html"
    text = LOOK.replace("WIDTH", str(width)).replace("PAGE", html.escape(page.read_text(), quote=True))
    frame.write_text(text)
    found = re.search(r'<pre id="found">(.+?)</pre>', browse(frame, "--window-size=1900,1000", *options))
    assert found is not None
    return json.loads(html.unescape(found[1]))


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a run on two ranks, under a name without special characters."""
    folder = tmp_path_factory.mktemp("browser")
    return Path(shutil.copy(fit_two_ranks(folder) / "report.html", folder / "page.html"))


def test_the_browser_sees_headings_tables_and_pictures_and_asks_for_no_other_file(page: Path) -> None:
    seen = Page(browse(page))
    for heading in ("Curves", "Weather & more", "Broken", "FSDP units", "Configuration", "Environment"):
        assert heading in seen.text
    assert RUN_NAME in seen.text
    assert seen.tags.count("svg") == 6
    assert seen.tags.count("table") == 4
    assert "script" not in seen.tags
    assert all(reference.startswith("#") for reference in seen.references)


@pytest.mark.parametrize(("width", "num_scrolling"), [(1800, 0), (1200, 1), (390, 3), (320, 3)])
def test_nothing_is_wider_than_the_window_but_what_scrolls(
    page: Path, tmp_path: Path, width: int, num_scrolling: int
) -> None:
    seen = look(page, tmp_path, width)
    assert seen["width"] == seen["scroll_width"] == width
    assert seen["outside"] == []
    assert (seen["pictures"], seen["tables"], seen["ran"]) == (5, 4, 0)  # of each plot one picture
    assert isinstance(seen["scrolling"], int)
    assert seen["scrolling"] >= num_scrolling
    assert width < 1800 or seen["scrolling"] == 0  # there is room for nine columns
    assert seen["lines"] is True
    assert isinstance(seen["text_px"], int | float)
    assert seen["text_px"] > 9  # can be read
    assert isinstance(seen["name_px"], int | float)
    assert seen["name_px"] > 60  # no column of single letters


@pytest.mark.full
def test_dark_mode_turns_the_page_dark(page: Path, tmp_path: Path) -> None:
    assert look(page, tmp_path, 800, "--blink-settings=preferredColorScheme=1")["background"] == "rgb(251, 251, 250)"
    assert look(page, tmp_path, 800, "--blink-settings=preferredColorScheme=0")["background"] == "rgb(20, 23, 26)"
