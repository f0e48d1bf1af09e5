"""The chat page in headless Chromium."""

import shutil
import time
from collections.abc import Iterator

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.wait import WebDriverWait

from tests.model_serving import TOKEN, EchoServer, echo_server
from tests.trainer.report.test_run_report_browser import BROWSER, DRIVER, FLAGS

pytestmark = pytest.mark.skipif(BROWSER is None or DRIVER is None, reason="no chromium and chromedriver on the PATH")


@pytest.fixture(scope="module")
def server() -> Iterator[EchoServer]:
    with echo_server() as found:
        yield found


@pytest.fixture
def browser(server: EchoServer) -> Iterator[webdriver.Chrome]:
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for flag in FLAGS:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    try:
        driver.get(server.url)
        yield driver
    finally:
        driver.quit()


def send(browser: webdriver.Chrome, text: str) -> None:
    browser.find_element(By.ID, "text").send_keys(text, Keys.ENTER)


def turns(browser: webdriver.Chrome, kind: str) -> list[str]:
    return [node.text for node in browser.find_elements(By.CSS_SELECTOR, f".turn.{kind}")]


def test_a_conversation_is_streamed_and_shown_as_text(server: EchoServer, browser: webdriver.Chrome) -> None:
    wait = WebDriverWait(browser, 20)
    send(browser, "say:hi")
    wait.until(lambda driver: turns(driver, "error"))
    assert "no token, or the wrong one" in turns(browser, "error")[0]
    browser.find_element(By.ID, "token").send_keys(TOKEN)
    html = "<think>hm</think><b onclick=alert(1)>bold</b><img src=x onerror=alert(1)>"
    send(browser, f"say:{html}")
    wait.until(lambda driver: driver.find_element(By.ID, "send").is_enabled())
    assert turns(browser, "assistant") == ["hm", html.removeprefix("<think>hm</think>")]
    assert browser.find_elements(By.CSS_SELECTOR, "#messages img, #messages b") == []
    assert browser.find_element(By.ID, "model").text == "echo"

    # Text is there before the response has ended, and what is stopped leaves the engine.
    server.rollout.tick = 0.05
    send(browser, "say:" + "x" * 400)
    wait.until(lambda driver: "xxxx" in "".join(turns(driver, "assistant")[2:]))
    browser.find_element(By.ID, "stop").click()
    wait.until(lambda driver: driver.find_element(By.ID, "send").is_enabled())
    assert 0 < len(turns(browser, "assistant")[2]) < 400
    deadline = time.monotonic() + 10
    while server.engine.unfinished and time.monotonic() < deadline:
        time.sleep(0.01)
    assert server.engine.unfinished == 0
    # The refused request was the first; errors of the page itself would be here.
    errors = [entry["message"] for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
    assert [error for error in errors if "401" not in error and "favicon" not in error] == []
    browser.find_element(By.ID, "clear").click()
    assert turns(browser, "user") == []
