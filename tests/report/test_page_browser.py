"""The page in a real browser: curves, filters, the pointer, keys, themes, print; no error, no network."""

from __future__ import annotations

import base64
import json
import math
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cohort.report.page import write_report
from cohort.report.series import loess
from tests.report.made_runs import completions, make_run, seeds

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = [
    pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="needs Debian's packages chromium and chromium-driver"),
    pytest.mark.xdist_group("chromium"),  # one browser for all
]
FLAGS = """--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking
--disable-component-update --disable-sync"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from selenium.webdriver import Chrome, ChromeOptions, ChromeService

    options = ChromeOptions()
    options.binary_location = str(CHROMIUM)
    profile = tempfile.mkdtemp(prefix="cohort-chromium-")
    for flag in (*FLAGS.split(), f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = Chrome(options=options, service=ChromeService(DRIVER))
    yield driver
    driver.quit()
    driver.service.stop()
    shutil.rmtree(profile, ignore_errors=True)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    texts = ["<script>document.title = 'owned'</script>", "مرحبا \u202e bidi \x1b[31m", " xyz 😀", " is"]
    stored = {1: completions(), 20: completions(texts=texts), 40: completions()}
    folder = make_run(tmp_path_factory.mktemp("page") / "run <b>1", stored=stored)  # its state is a long text
    return write_report([folder])


@pytest.fixture
def page(browser: Any, report: Path) -> Iterator[Any]:
    """The report, freshly opened; at the end, that nothing went wrong."""
    browser.get_log("performance")
    browser.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": "light"}]}
    )
    browser.get(report.as_uri())
    wait(lambda: browser.execute_script("return document.querySelectorAll('.card').length") > 0)
    yield browser
    assert [entry["message"] for entry in browser.get_log("browser")] == []
    asked = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    urls = {
        one["params"]["request"]["url"].partition("#")[0]
        for one in asked
        if one["method"] == "Network.requestWillBeSent"
    }
    own = "chrome:", "chrome-untrusted:"  # of the new tab that the browser begins with
    assert {url for url in urls if not url.startswith(("data:", *own))} <= {report.as_uri()}


@pytest.fixture
def opened(browser: Any, report: Path) -> Any:
    """The report as an earlier test left it: for functions of the page and its layout."""
    if browser.current_url.partition("#")[0] != report.as_uri():
        browser.get(report.as_uri())
    return browser


def wait(condition: Callable[[], Any], seconds: float = 20.0) -> Any:
    """The first true value of a condition."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, "the page does not get there"
        time.sleep(0.05)
    return found


def js(page: Any, script: str, *arguments: Any) -> Any:
    return page.execute_script(f"return {script}", *arguments)


def press(page: Any, *keys: str) -> None:
    from selenium.webdriver import ActionChains

    ActionChains(page).send_keys(*keys).perform()


def test_curves_are_drawn(page: Any) -> None:
    wait(lambda: js(page, "document.querySelectorAll('#curves canvas').length") > 0)
    ink = """(() => { const c = document.querySelector('#curves canvas'), d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;
      let n = 0; for (let i = 3; i < d.length; i += 4) n += d[i] > 0; return n; })()"""
    assert js(page, ink) > 500
    assert js(page, "document.title") == "run <b>1 \N{EN DASH} Cohort report"
    assert js(page, "document.querySelector('h1').textContent") == "run <b>1"
    js(page, "(byId('key').value = 'kl/k1', byId('add').click())")
    wait(lambda: js(page, "document.querySelectorAll('#chosen canvas').length") == 1)
    assert js(page, "document.querySelector('#chosen .values').textContent") == "last 0.001"


def test_the_fit_is_that_of_python(opened: Any) -> None:
    values = [math.sin(at / 3) + 0.3 * math.cos(7 * at) for at in range(24)]
    drawn = [*values[:5], None, *values[5:]]
    windows = dict(js(opened, "DATA.run.windows"))
    assert list(windows) == [5, 11, 25]  # of 40 steps, for which 5 is a tenth
    for width in (5, 11):
        fit, half = loess(np.array(values), width)
        found = js(opened, f"localFit({json.dumps(drawn)}, {width}, {windows[width]})")
        assert found["mean"].pop(5) is found["low"].pop(5) is found["high"].pop(5) is None
        assert found["mean"] == pytest.approx(fit.tolist(), abs=1e-9)
        assert found["low"] == pytest.approx((fit - half).tolist(), abs=1e-9)
        assert found["high"] == pytest.approx((fit + half).tolist(), abs=1e-9)
    assert js(opened, f"localFit({json.dumps(drawn)}, 25, {windows[25]})") is None, "24 points have no fit over 25"


def test_zeros_of_a_logarithmic_chart_are_counted(opened: Any) -> None:
    assert js(opened, "notDrawn([1, 0, 0, -2, null])") == ", 0 in 2 points, below 0 in 1 point (not drawn)"
    assert js(opened, "notDrawn([1, null])") is None


def test_the_microscope_shows_steps_groups_and_tokens(page: Any) -> None:
    assert js(page, "byId('step').value") == "40"
    assert js(page, "document.querySelectorAll('.card').length") == 4
    first = "document.querySelector('.card .tokens')"
    assert js(page, f"{first}.textContent").startswith(" the sum is42↵\n<|end|>")
    emoji = js(page, "[...document.querySelectorAll('.t.joined')].map(n => [n.textContent, n.dataset.count])")
    assert emoji == [["😀", "3"]]
    js(page, "(byId('quantity').value = 'advantage', byId('quantity').dispatchEvent(new Event('change')))")
    wait(lambda: js(page, f"{first}.querySelectorAll('.p5, .p6').length") == 7)
    assert js(page, "document.querySelectorAll('.card')[3].querySelectorAll('.n5, .n6').length") == 5


def test_numbers_and_causes_under_the_pointer(page: Any) -> None:
    from selenium.webdriver import ActionChains
    from selenium.webdriver.common.by import By

    tokens = page.find_elements(By.CSS_SELECTOR, ".card .t")
    js(page, "document.querySelector('.cards').scrollIntoView({block: 'center'})")
    time.sleep(0.1)
    ActionChains(page).move_to_element(tokens[6]).perform()
    text = wait(lambda: js(page, "byId('pointer').hidden ? '' : byId('pointer').textContent"))
    assert "id 0, token 7 of 7" in text
    assert "Ratio1.002" in text
    assert "Sampler gap0" in text
    assert "No gradient: the trust region clipped it at a high ratio." in text
    ActionChains(page).move_to_element(page.find_element(By.ID, "prompt")).perform()
    wait(lambda: js(page, "byId('pointer').hidden"))


def test_filters(page: Any) -> None:
    def found(**fields: str) -> list[str]:
        js(page, "byId('clear').click()")
        for name, value in fields.items():
            script = "(byId(arguments[0]).value = arguments[1], byId(arguments[0]).dispatchEvent(new Event('input')))"
            js(page, script, name.replace("_", "-"), value)
        texts = js(page, "[...document.querySelectorAll('#matches button')].map(n => n.textContent)")
        return [text.split(":")[0] for text in texts]

    js(page, "byId('filters').open = true")
    assert found(finish="length", reward_high="0") == [f"step {step}, group 7, #4" for step in (1, 20, 40)]
    assert found(clipped="yes", length_low="7") == [f"step {step}, group 7, #1" for step in (1, 20, 40)]
    assert js(page, "byId('count').textContent") == "3 of 12 completions"
    assert js(page, "document.querySelectorAll('.card.dimmed').length") == 3
    js(page, "document.querySelector('#matches button').click()")
    wait(lambda: js(page, "byId('step').value") == "1")
    wait(lambda: js(page, "document.querySelector('.card').classList.contains('chosen')"))
    assert found() == []
    assert js(page, "byId('matches').hidden")


def test_hostile_text_stays_text(page: Any) -> None:
    press(page, ",")
    wait(lambda: js(page, "byId('step').value") == "20")
    press(page, "j")
    assert js(page, "document.querySelectorAll('.card script, .card b b').length") == 0
    assert js(page, "document.title").startswith("run")
    js(page, "document.querySelector('.cards').replaceChildren(...visible('a \u202e \u001b[31m'))")
    assert js(page, "[...document.querySelectorAll('.cards .control')].map(n => n.textContent)") == ["U+202E", "␛"]


def test_keys(page: Any) -> None:
    from selenium.webdriver import Keys

    press(page, "j", "j", "k")
    assert js(page, "[...document.querySelectorAll('.card')].findIndex(n => n.classList.contains('chosen'))") == 0
    before = js(page, "byId('quantity').value")
    press(page, "c")
    assert js(page, "byId('quantity').value") != before
    js(page, "document.querySelector('.card .tokens').focus()")
    press(page, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    assert js(page, "document.querySelector('.t.at').textContent") == " sum"
    assert "token 2 of 7" in js(page, "byId('pointer').textContent")
    press(page, Keys.ESCAPE)
    assert js(page, "byId('pointer').hidden")
    js(page, "document.querySelector('#curves .plot').focus()")
    press(page, Keys.ARROW_RIGHT)
    assert "step 1" in js(page, "document.querySelector('#curves .values').textContent")
    js(page, "document.activeElement.blur()")
    press(page, "?")
    assert js(page, "byId('help').open")


def test_themes(page: Any) -> None:
    paper = "getComputedStyle(document.body).backgroundColor"
    assert js(page, paper) == "rgb(255, 255, 255)"
    page.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    )
    wait(lambda: js(page, paper) == "rgb(22, 22, 24)")
    press(page, "t")
    assert js(page, paper) == "rgb(255, 255, 255)"
    press(page, "t")
    assert js(page, paper) == "rgb(22, 22, 24)"
    js(page, "localStorage.clear()")


def test_print_shows_all_charts_in_light_colours(page: Any) -> None:
    press(page, "t")
    pdf = base64.b64decode(page.print_page())
    assert pdf.startswith(b"%PDF")
    drawn, all_charts = js(page, "[charts.filter(c => c.plot).length, charts.length]")
    assert drawn == all_charts
    assert js(page, "document.documentElement.dataset.theme") == "dark", "the theme is as before"
    js(page, "localStorage.clear()")


def test_the_page_fits_a_phone(opened: Any) -> None:
    opened.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": 390, "height": 800, "deviceScaleFactor": 1, "mobile": False}
    )
    try:
        wait(lambda: js(opened, "innerWidth") == 390)
        assert js(opened, "document.documentElement.scrollWidth") <= 390
    finally:
        opened.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_runs_are_compared(browser: Any, tmp_path: Path) -> None:
    target = write_report(seeds(tmp_path), tmp_path / "report.html")
    browser.get_log("browser")
    browser.get(target.as_uri())
    wait(lambda: js(browser, "document.querySelectorAll('canvas').length") > 0)
    js(browser, "(byId('axis').value = 'tokens', byId('axis').dispatchEvent(new Event('change')))")
    values = "document.querySelector('#compared .values').textContent"
    assert "learning_rate 1e-05" in js(browser, values)
    assert browser.get_log("browser") == []


def test_a_run_without_steps_and_a_long_completion(browser: Any, tmp_path: Path) -> None:
    long = completions(texts=["the " * 30_000], token_ids=[[2] * 29_999 + [0]], sampler_logps=[[math.nan] * 30_000])
    given = [at in range(10_000, 10_010) or at in range(25_000, 25_010) for at in range(30_000)]
    long |= {name: [[one for one, skip in zip(values[0], given, strict=True) if not skip]] for name, values in long.items()
        if isinstance(values[0], list) and name != "token_ids"}  # fmt: skip
    long |= {"drawn": [[not one for one in given]], "turn_lengths": [[10_000, 14_990, 4990]]}
    target = write_report([make_run(tmp_path / "run", lines=[], stored={1: long})])
    browser.get_log("browser")
    browser.get(target.as_uri())
    wait(lambda: js(browser, "document.querySelectorAll('.t').length") == 500)
    press(browser, "j")
    wait(lambda: js(browser, "document.querySelectorAll('.t').length") == 4000)
    js(browser, "(() => { const box = document.querySelector('.card .tokens'); box.scrollTop = box.scrollHeight; })()")
    wait(lambda: js(browser, "document.querySelectorAll('.t').length") == 8000)
    assert js(browser, "document.querySelector('.card header').textContent").startswith("#1reward 1")
    answer, drawn = "answer, not drawn by the policy", "drawn by the policy"
    assert js(browser, "document.querySelector('.card .tokens').completion.turns") == [
        *([0, f"turn 1, {drawn}"], [10_000, answer], [10_010, f"turn 2, {drawn}"]),
        [16_000, f"turn 3, {drawn}, goes on"],  # token 26,000: the first after the gap
    ]
    shown = js(browser, "[...document.querySelectorAll('.turn')].map(n => n.textContent)")
    assert shown == [f"turn 1, {drawn}"], "the others are further down"
    js(browser, "(byId('quantity').value = 'entropy', byId('quantity').dispatchEvent(new Event('change')))")
    wait(lambda: js(browser, "document.querySelectorAll('.card .p6').length") > 0)  # without numbers of the sampler
    assert browser.get_log("browser") == []
