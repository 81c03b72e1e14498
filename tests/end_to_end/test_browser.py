"""The page in a real browser: it opens from disk without a complaint, sorts, filters, and fits."""

import io
import shutil

import matplotlib.image
import numpy as np
import pytest

from tests.support import synthetic
from tests.unit.report.test_page import HOSTILE
from tpbench.report.command import main

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")


def start():
    """Start a browser that keeps its console messages. Skips the test if no browser is installed."""
    webdriver = pytest.importorskip("selenium.webdriver")
    if not (BROWSER and DRIVER):
        pytest.skip("no chromium and chromedriver here (Debian: apt-get install chromium chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    return webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))


def look(browser, file, width, *, dark=False):
    """Open a file in a window of that width, in light or dark mode."""
    scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme})
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.get(file.as_uri())


@pytest.fixture(scope="module")
def chromium():
    started = start()
    yield started
    started.quit()


def write_rows(folder, run):
    synthetic.write(synthetic.cells(kernels_version="k"), folder, run)
    hostile = f"<script>window.owned=1</script><img src=x onerror='window.owned=1'> {HOSTILE}"
    return synthetic.write([synthetic.cell(hostile, 32768, 1, status="error", reason=hostile)], folder, f"hostile{run}")


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return write_rows(tmp_path_factory.mktemp("browser"), "first")


@pytest.fixture(scope="module")
def report(rows):
    file = rows / "report.html"
    assert main([str(rows), "--format", "html", "-o", str(file)]) == 0
    return file


def column(chromium, sheet, index):
    """(text, number) of a column's cells that can be seen, from top to bottom."""
    return chromium.execute_script(
        """return Array.from(document.querySelectorAll(".sheet[data-name='" + arguments[0] + "']")[0]
        .querySelectorAll("tbody tr:not([hidden])"), row => [row.cells[arguments[1]].textContent,
        "v" in row.cells[arguments[1]].dataset ? Number(row.cells[arguments[1]].dataset.v) : null])""",
        sheet, index,
    )  # fmt: skip


def unfold(chromium, selector):
    """Open every folded part around and inside the first element of that selector."""
    chromium.execute_script(
        """const first = document.querySelector(arguments[0]);
        for (let part = first; part; part = part.parentElement) if (part.tagName === "DETAILS") part.open = true;
        first.querySelectorAll("details").forEach(part => { part.open = true; });""",
        selector,
    )
    chromium.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")


@pytest.mark.parametrize("width, dark", [(1400, False), (1400, True), (2000, True), (1000, False), (390, False)])
def test_it_opens_and_fits(chromium, report, width, dark):
    look(chromium, report, width, dark=dark)
    assert chromium.get_log("browser") == []
    answers = "return document.querySelector('.answer').getBoundingClientRect().bottom"
    assert 0 < chromium.execute_script(answers) < 450
    unfold(chromium, "main")
    ends = "return Array.from(document.querySelectorAll('.verdicts :is(td, th)'), c => c.getBoundingClientRect().right)"
    assert 0 < max(chromium.execute_script(ends)) <= width  # the last column is on the screen, too
    assert chromium.get_log("browser") == []
    assert chromium.execute_script("return document.documentElement.scrollWidth") <= width
    if width < 400:  # nothing to scroll to, also inside
        right = (
            "return Math.max(...Array.from(document.querySelectorAll('main *'), e => e.getBoundingClientRect().right))"
        )
        assert chromium.execute_script(right) <= width
    assert not chromium.execute_script("return window.owned")
    assert chromium.execute_script("return performance.getEntriesByType('resource').length") == 0
    assert chromium.execute_script("return document.querySelectorAll('figure svg').length") >= 2
    picture = matplotlib.image.imread(io.BytesIO(chromium.get_screenshot_as_png()))[..., :3]
    assert (np.median(picture) < 0.3) == dark
    contrast = picture.max() - picture.min()
    assert contrast > 0.6


def test_the_first_screen_is_an_answer_and_the_rest_is_drawn_when_opened(chromium, report):
    look(chromium, report, 1280)
    assert chromium.find_element("css selector", ".answer").text.startswith("Fastest in ")
    drawn = "return Array.from(document.querySelectorAll(arguments[0])).filter(part => part.checkVisibility()).length"
    figures, pictures = (chromium.execute_script(drawn, name) for name in ("figure", "figure svg"))
    assert figures == 1 and 0 < pictures < 20 and chromium.execute_script(drawn, ".sheet") == 2
    first = chromium.find_element("css selector", "#s0 .verdicts tbody").text
    assert "triton_tp" in first and "good" in first
    unfold(chromium, "#s0")
    assert chromium.execute_script(drawn, "#s0 .sheet") >= 4
    assert chromium.execute_script("return document.documentElement.scrollWidth") <= 1280


def test_a_link_opens_and_shows_a_row(chromium, report):
    look(chromium, report, 1280)
    ids = chromium.execute_script("return Array.from(document.querySelectorAll('td[id]'), cell => cell.id)")
    assert len(ids) == len(set(ids)) > 50
    chromium.execute_script("document.querySelectorAll('details').forEach(part => { part.open = false; })")
    chromium.execute_script("location.hash = arguments[0]", ids[-1])
    chromium.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")
    cell = chromium.find_element("css selector", "td:target")
    assert cell.is_displayed() and f"row {ids[-1]}" in cell.get_attribute("title")


def test_the_meaning_of_a_mark_opens_by_keyboard(chromium, report):
    look(chromium, report, 1280)
    unfold(chromium, "#s0")
    mark = chromium.find_element("css selector", "#s0 details.mark")
    chromium.execute_script("arguments[0].open = false", mark)
    mark.find_element("css selector", "summary").send_keys("\ue007")  # enter
    assert mark.get_attribute("open") and len(mark.text.splitlines()) == 2


def test_a_phone_shows_a_table_of_a_metric_without_scrolling_sideways(chromium, report):
    look(chromium, report, 360)
    unfold(chromium, "#s0")
    sheet = chromium.find_element("css selector", "#s0 .sheet[data-name=time_ms]")
    shown = "return Array.from(arguments[0].querySelectorAll('td'), cell => cell.getBoundingClientRect().right)"
    assert 0 < max(chromium.execute_script(shown, sheet)) <= 360
    label = "return getComputedStyle(arguments[0].querySelector('td:not(.key-cell)'), '::before').content"
    assert chromium.execute_script(label, sheet) == '"triton_tp "'
    assert " -" not in sheet.text  # a value that is missing has no line


def test_lines_of_plots_show_in_both_modes(chromium, report):
    seen = []
    for dark in (False, True):
        look(chromium, report, 1280, dark=dark)
        seen.append(
            chromium.execute_script("""
            const path = document.querySelector("figure svg path[style*='--s0']");
            const text = document.querySelector("figure svg text");
            return [getComputedStyle(path).stroke, getComputedStyle(text).fill]""")
        )
    assert seen[0][0] != seen[1][0] and seen[0][1] != seen[1][1]
    assert seen[0] == ["rgb(22, 104, 184)", "rgb(29, 31, 33)"]


def test_sort_and_filter(chromium, report):
    look(chromium, report, 1280)
    unfold(chromium, ".sheet[data-name=time_ms]")
    sheet = chromium.find_element("css selector", ".sheet[data-name=time_ms]")
    head = sheet.find_elements("css selector", "th button")[4]
    head.click()
    numbers = [number for _, number in column(chromium, "time_ms", 4)]
    known = [number for number in numbers if number is not None]
    assert known == sorted(known) and len(known) >= 8 and numbers[len(known) :] == [None] * (len(numbers) - len(known))
    head.click()
    again = [number for _, number in column(chromium, "time_ms", 4)]
    assert again[: len(known)] == sorted(known, reverse=True) and again[-1] is None
    search = sheet.find_element("css selector", "input")
    search.send_keys("131072 -oom")
    assert {text for text, _ in column(chromium, "time_ms", 0)} == {"131072"}
    assert "rows" in sheet.find_element("css selector", "output").text
    search.clear()
    search.send_keys("nothing has this")
    assert column(chromium, "time_ms", 0) == []
    assert chromium.get_log("browser") == []
