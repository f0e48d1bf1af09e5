"""The report in a browser: headless Chromium, driven like a person would. (.ci/run installs it where it can.)"""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import Select

from tests.trainer.report.test_run_report import HOSTILE, make_run, sessions
from trainer.cluster.watchdog import CallSpan
from trainer.report.run_report import write_report
from trainer.run.events import Events
from trainer.run.run_dir import GLOBAL_STEP, json_line
from trainer.run.timing import Span
from trainer.tracking.tracker import Tracker

BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    BROWSER is None or DRIVER is None, reason="no chromium and chromedriver on the PATH: apt-get install chromium chromium-driver"
)
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--window-size=1280,1400",
)  # fmt: skip


def token_line(step: int, row: int) -> str:
    """A line of the token dump. Rewards 0, 0.5, 1; trainer log-probs above the rollout's at even tokens, below at odd ones."""
    tokens = ["The", " sum", " is", f" {row}", "\n", HOSTILE]
    gaps = [0.5, -0.25, 0.0, -0.5, 0.125, 0.001]
    return json_line(
        {
            GLOBAL_STEP: step, "uid": row, "prompt": "What is 1 + 1?\n", "ground_truth": "2", "score": row / 2, "length": 900,
            "tokens": tokens, "rollout": [-1.0] * 6, "trainer": [-1.0 + gap for gap in gaps],
            "advantages": [-1.5, 1.0, 1.0, 1.0, 1.0, 1.0],
        }
    )  # fmt: skip


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = make_run(tmp_path_factory.mktemp("run"))
    tracker = Tracker([], run_dir / "other", "p", "e", {"trainer": {}})
    spans = [Span("gen", ("workers",), 100.0, 102.0), Span("adv", (), 102.0, 102.1), Span("step", (), 100.0, 104.5)]
    generation, update = (
        CallSpan("generation", "workers", 100.0, (102.0, 101.5)),
        CallSpan("update of actor", "workers", 102.2, (104.4, 104.3)),
    )
    tracker.log_spans(spans, [CallSpan("weight sync", "workers", 90.0, (99.0, 99.0)), generation, update], 40)
    tracker.close()
    (run_dir / "other" / "timeline.jsonl").rename(run_dir / "timeline.jsonl")
    (run_dir / "answers.jsonl").write_text("".join(token_line(step, row) for step in (10, 20, 30, 40) for row in range(3)))
    Events(run_dir).add(7, "low disk", "2 GB are free")
    return write_report(run_dir)


@pytest.fixture(scope="module")
def browser(page: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER or ""
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
    driver = webdriver.Chrome(options, Service(DRIVER))
    driver.get(page.as_uri())
    yield driver
    driver.quit()


def seen(browser: webdriver.Chrome) -> list[str]:
    return [one.text for one in browser.find_elements(By.CSS_SELECTOR, "article.one") if one.is_displayed()]


def colours(browser: webdriver.Chrome) -> list[str]:
    """Colours of the tokens of the first visible response."""
    card = next(one for one in browser.find_elements(By.CSS_SELECTOR, "article.one") if one.is_displayed())
    return [token.value_of_css_property("background-color") for token in card.find_elements(By.CSS_SELECTOR, ".token")]


def type_into(browser: webdriver.Chrome, name: str, words: str) -> None:
    field = browser.find_element(By.ID, name)
    field.clear()
    field.send_keys(words)


def test_page_opens_without_an_error_and_fetches_nothing(browser: webdriver.Chrome, page: Path) -> None:
    assert "sort" in browser.title
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []
    sent = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    addresses = {event["params"]["request"]["url"] for event in sent if event["method"] == "Network.requestWillBeSent"}
    assert {address for address in addresses if not address.startswith(("data:", "chrome:"))} == {page.as_uri()}


def test_page_has_every_section(browser: webdriver.Chrome) -> None:
    headings = [heading.text for heading in browser.find_elements(By.TAG_NAME, "h2")]
    for begins in ("What happened", "Curves", "Where the time goes", "Step 40, by worker", "Training answers", "Sample answers"):
        assert any(heading.startswith(begins) for heading in headings), begins
    (lanes,) = browser.find_elements(By.CSS_SELECTOR, "svg[aria-label='what each worker did in the step']")
    labels = lanes.find_elements(By.CSS_SELECTOR, "text[text-anchor=end]")
    assert [label.text for label in labels] == ["workers 0", "workers 1", "controller"]
    bars = [bar.get_attribute("textContent") for bar in lanes.find_elements(By.CSS_SELECTOR, "rect title")]
    assert "update of actor: 2.200 to 4.400 s" in bars and "generation: 0.000 to 1.500 s" in bars and len(bars) == 5
    assert not browser.find_element(By.TAG_NAME, "pre").is_displayed()
    browser.find_element(By.XPATH, "//summary[text()='Configuration']").click()
    assert "project_name: project" in browser.find_element(By.TAG_NAME, "pre").text
    assert "python" in browser.find_element(By.XPATH, "//details[summary='Environment']").text


def test_chart_shows_values_at_the_pointer(browser: webdriver.Chrome) -> None:
    chart = next(card for card in browser.find_elements(By.CSS_SELECTOR, ".chart") if "Held-out accuracy" in card.text)
    svg, tip = chart.find_element(By.TAG_NAME, "svg"), chart.find_element(By.CSS_SELECTOR, ".tip")
    assert not tip.is_displayed()
    ActionChains(browser).move_to_element_with_offset(svg, svg.size["width"] // 2 - 20, 0).perform()
    assert tip.is_displayed() and tip.text.splitlines()[0] == "step 40" and "all 0.75" in tip.text
    ActionChains(browser).move_to_element_with_offset(svg, 30 - svg.size["width"] // 2, 0).perform()
    assert tip.text.splitlines()[0] == "step 0" and "all 0.25" in tip.text
    ActionChains(browser).move_to_element(browser.find_element(By.TAG_NAME, "h1")).perform()
    assert not tip.is_displayed()


def test_reward_filters_responses(browser: webdriver.Chrome) -> None:
    assert {text.partition("step ")[2].split(" ")[0] for text in seen(browser)} == {"40"}, "the last step by default"
    Select(browser.find_element(By.ID, "step")).select_by_value("")
    assert len(seen(browser)) == 9 + 6 - 4, "three last steps, and the first and the last row of the step before"
    Select(browser.find_element(By.ID, "step")).select_by_value("40")
    assert [text.splitlines()[0].split("step")[0].strip() for text in seen(browser)] == ["reward 0", "reward 0.5", "reward 1"]
    type_into(browser, "least", "0.5")
    assert len(seen(browser)) == 2 and "2 of 11 answers" in browser.find_element(By.ID, "count").text
    type_into(browser, "most", "0.5")
    (text,) = seen(browser)
    assert "reward 0.5" in text and "step 40 · 900 tokens, the first 6 · ground truth 2" in text
    assert HOSTILE in text and "What is 1 + 1?" in text
    type_into(browser, "least", "")
    assert len(seen(browser)) == 2
    type_into(browser, "most", "")


def test_tokens_are_coloured_by_log_prob_or_by_advantage(browser: webdriver.Chrome) -> None:
    def strength(colour: str) -> float:
        return float(re.split(r"[ ,/]+", colour.rstrip(")"))[-1]) if colour != "rgba(0, 0, 0, 0)" else 0.0

    gap = colours(browser)
    assert browser.find_element(By.ID, "largest").text == "largest 0.5"
    assert strength(gap[2]) == 0.0 and strength(gap[0]) > strength(gap[4]) > 0 and strength(gap[3]) > strength(gap[1]) > 0
    red, _, blue = map(float, re.findall(r"[\d.]+", gap[0])[:3])
    assert blue > red, "above is blue"
    red, _, blue = map(float, re.findall(r"[\d.]+", gap[3])[:3])
    assert red > blue, "below is red"
    assert [browser.find_element(By.ID, end).text for end in ("low", "high")] == ["-0.5", "+0.5"]
    token = next(one for one in browser.find_elements(By.CSS_SELECTOR, ".token") if one.is_displayed())
    assert token.get_attribute("title") == "log-prob -1 rollout, -0.5 trainer, difference 0.5; advantage -1.5"
    browser.find_element(By.XPATH, "//label[span='advantage']").click()
    advantage = colours(browser)
    assert browser.find_element(By.ID, "largest").text == "largest 1.5"
    assert len(set(advantage[1:])) == 1 and strength(advantage[0]) > strength(advantage[1]) > 0 and advantage != gap
    token = browser.find_element(By.CSS_SELECTOR, ".token")
    assert token.get_attribute("title") == "log-prob -1 rollout, -0.5 trainer, difference 0.5; advantage -1.5"
    browser.find_element(By.XPATH, "//label[contains(., 'trainer')]").click()
    assert colours(browser) == gap


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_enough_contrast_in_light_and_dark_mode(browser: webdriver.Chrome, scheme: str, tmp_path: Path) -> None:
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]})
    ground = luminance(browser, ".card", "background-color")
    assert (ground < 0.1) == (scheme == "dark")
    for words in (".one .text", ".one .label", "td", "h3", ".switch", "text"):
        own = luminance(browser, words, "fill" if words == "text" else "color")
        contrast = (max(own, ground) + 0.05) / (min(own, ground) + 0.05)
        assert contrast >= 4.5, (words, contrast)
    assert browser.get_screenshot_as_file(str(tmp_path / f"{scheme}.png"))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_conversation_is_unfolded_below_its_tokens(browser: webdriver.Chrome, scheme: str, tmp_path: Path) -> None:
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]})
    browser.get(write_report(sessions(tmp_path)).as_uri())
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []
    cards = browser.find_elements(By.CSS_SELECTOR, "article.one")
    assert len(cards) == 8 and len(browser.find_elements(By.CSS_SELECTOR, "article.one details")) == 8
    colours = [token.value_of_css_property("background-color") for token in cards[0].find_elements(By.CSS_SELECTOR, ".token")]
    assert colours[0] == colours[2] == "rgba(0, 0, 0, 0)" != colours[1], "the observed token is shaded"
    titles = [token.get_attribute("title") for token in cards[0].find_elements(By.CSS_SELECTOR, ".token")]
    assert titles[1] == "observed: not sampled by the model, not trained" and titles[0] and titles[0].startswith("log-prob -1")
    turns = cards[0].find_elements(By.CSS_SELECTOR, ".turn")
    assert len(turns) == 4 and not turns[0].is_displayed()
    cards[0].find_element(By.TAG_NAME, "summary").click()
    assert turns[0].is_displayed() and turns[1].text.splitlines()[0] == "assistant truncated reward -0.5"
    shades = [turn.value_of_css_property("background-color") for turn in turns]
    assert shades[0] == shades[2] == colours[1] and shades[1] == shades[3] == "rgba(0, 0, 0, 0)"
    ground = luminance(browser, ".turn", "background-color")
    for words in (".turn .text", ".turn .role"):
        own = luminance(browser, words, "color")
        assert (max(own, ground) + 0.05) / (min(own, ground) + 0.05) >= 4.5, words


def luminance(browser: webdriver.Chrome, selector: str, name: str) -> float:
    """Relative luminance of an sRGB colour, as WCAG 2 defines it."""
    colour = browser.find_element(By.CSS_SELECTOR, selector).value_of_css_property(name)
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
