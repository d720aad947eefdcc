"""The page at / in a browser: chat, the map that fills, a block that opens.

Skipped without Playwright or Chromium. KVMEM_SCREENSHOTS: folder for pictures of it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from servers import Server, our_server

playwright = pytest.importorskip("playwright.sync_api")

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="there is no Chromium")

STORY = "The lighthouse keeper of Farholm kept the brass key under the third stair. " * 40
SCREENSHOTS = os.environ.get("KVMEM_SCREENSHOTS")  # read before tests hide the environment
SECONDS = 60_000  # milliseconds


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as run:
        browser = run.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def small_view(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose view is shorter than the story."""
    with our_server(
        smollm2, tmp_path_factory.mktemp("page"), "-c", "512", "-np", "1", "--n-query", "64"
    ) as server:
        yield server


@pytest.fixture
def page(browser: Any, small_view: Server) -> Iterator[Any]:
    page = browser.new_page(viewport={"width": 1200, "height": 760})
    page.set_default_timeout(SECONDS)
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
    page.on(
        "request",
        lambda request: None if request.url.startswith(small_view.url) else wrong.append(request.url),
    )
    page.goto(small_view.url)
    page.wait_for_selector("#model:not(:empty)")
    yield page
    page.close()
    assert not wrong


def ask(page: Any, text: str) -> None:
    n = page.locator("#messages li.assistant").count()
    page.fill("#question", text)
    page.click("#send")
    page.wait_for_selector(f"#messages li.assistant:nth-of-type({2 * n + 2}) span:nth-of-type(2):not(:empty)")
    page.wait_for_selector("#stop[disabled]")


def test_chat_fills_the_map_and_a_block_opens(page: Any) -> None:
    page.fill("#max-tokens", "16")
    ask(page, STORY + "Where is the key?")
    assert page.inner_text("#model").endswith("512 tokens")
    n = page.locator("#map button").count()
    assert n > 16
    tiers = {page.locator("#map button").nth(i).get_attribute("data-tier") for i in range(n)}
    assert "device" in tiers and tiers <= {"device", "host", "disk"}
    ask(page, "Who kept the brass key of Farholm?")
    assert page.locator("#map button").count() >= n
    assert page.locator("#map button[data-recalled=true]").count() > 4
    assert "recall" in page.inner_text("#steps")

    page.locator("#map button").nth(5).click()
    page.wait_for_selector("#block:not([hidden])")
    assert page.inner_text("#block-title") == "tokens 160 to 191"
    assert "lighthouse" in page.inner_text("#block-text")
    page.click("#pin")
    page.wait_for_selector('#map button[data-pinned="true"]')
    page.click("#pin")
    page.wait_for_selector('#map button[data-pinned="true"]', state="detached")

    page.fill("#query", "the third stair")
    page.click("#search button")
    page.wait_for_selector("#map button[data-found=true]")


def test_text_of_others_is_text(page: Any) -> None:
    page.fill("#max-tokens", "2")
    ask(page, "<img src=x onerror=alert(1)><script>alert(2)</script>")
    assert page.inner_text("#messages li.user").startswith("<img src=x")
    assert page.locator("#messages img, #messages script").count() == 0


def test_an_answer_can_be_stopped_and_the_conversation_goes_on(page: Any) -> None:
    page.fill("#max-tokens", "2000")
    page.fill("#question", "Count from one to a thousand in words.")
    page.click("#send")
    page.wait_for_selector("#messages li.assistant span:nth-of-type(2):not(:empty)")
    page.click("#stop")
    page.wait_for_selector("#stop[disabled]")
    page.fill("#max-tokens", "4")
    ask(page, "And now?")
    assert page.locator("#messages li").count() == 4
    page.reload()
    page.wait_for_selector("#messages li:nth-of-type(4)")


def test_a_question_that_was_not_answered_can_be_sent_again(page: Any) -> None:
    page.fill("#max-tokens", "2")
    failed = 'data: {"error":{"message":"no luck"}}\n\n'
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(status=200, content_type="text/event-stream", body=failed),
    )
    page.fill("#question", "Is it late?")
    page.click("#send")
    page.wait_for_selector("#messages li.error")
    page.wait_for_selector("#stop[disabled]")
    assert page.locator("#messages li.user").count() == 0
    assert page.input_value("#question") == "Is it late?"
    page.unroute("**/v1/chat/completions")
    page.click("#send")
    page.wait_for_selector("#messages li.assistant span:nth-of-type(2):not(:empty)")
    page.wait_for_selector("#stop[disabled]")
    assert page.locator("#messages li.user").count() == 1


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_narrow_screen(page: Any, scheme: str) -> None:
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size({"width": 360, "height": 640})
    for tab, seen, hidden in (("chat", "#chat", "#memory"), ("memory", "#memory", "#chat")):
        page.click(f"#show-{tab}")
        assert page.locator(seen).is_visible() and not page.locator(hidden).is_visible()
        box = page.locator("body").bounding_box()
        assert box["width"] <= 360
        assert page.locator(seen).bounding_box()["width"] <= 360
    if SCREENSHOTS:
        page.screenshot(path=f"{SCREENSHOTS}/narrow-{scheme}.png")
