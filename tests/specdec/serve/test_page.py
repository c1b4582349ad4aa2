"""The page at /: the files served, and their behaviour in a browser (if there is one)."""

from __future__ import annotations

import base64
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serving import Server

FILES = ["/", "/page/style.css", "/page/script.js"]


@pytest.mark.parametrize("path", FILES)
def test_the_page_needs_nothing_from_elsewhere(server: Server, path: str) -> None:
    status, text = server.get(path)
    assert status == 200
    assert not re.search(r"(https?:)?//[a-z0-9-]+\.", text)
    assert "innerHTML" not in text  # model output is text


def test_a_browser_may_load_it_with_the_key_as_password(served_model: Path) -> None:
    with Server(served_model, environment={"SPECDEC_API_KEY": "s3cret"}) as server:
        server.ready()
        assert [server.get(path)[0] for path in FILES] == [401] * 3
        for word, expected in (("s3cret", 200), ("s3cre", 401), ("", 401)):
            given = base64.b64encode(f"any:{word}".encode()).decode()
            assert server.get("/", {"Authorization": f"Basic {given}"})[0] == expected
        assert server.get("/", {"Authorization": "Basic ?"})[0] == 401


def test_events_tell_what_had_been_drafted(server: Server) -> None:
    from serving import events

    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 30, "temperature": 0}
    body |= {"stream": True, "stream_options": {"include_draft": True, "include_usage": True}}
    with server.post_raw("/v1/chat/completions", body) as raw:
        raw.settimeout(60)
        text = b""
        while not text.endswith(b"0\r\n\r\n"):
            text += raw.recv(65536)
    received = events(text.decode().replace("\r\n", "\n"))
    drafts = [event["draft"] for event in received if "draft" in event]
    assert sum(draft["n_tokens"] for draft in drafts) == 30
    n_accepted = received[-1]["usage"]["completion_tokens_details"]["accepted_prediction_tokens"]
    assert 0 <= n_accepted - sum(draft["n_accepted"] for draft in drafts) <= 1  # cut at the end
    for event in received:
        if "draft" in event:
            content = event["choices"][0]["delta"].get("content", "")
            assert event["draft"]["n_accepted_characters"] <= len(content)


# --- in a browser ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api")
    path = shutil.which("chromium")
    if path is None:
        pytest.skip("needs chromium")
    with api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def page(browser: Any, server: Server) -> Iterator[Any]:
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    opened = context.new_page()
    problems: list[str] = []
    opened.on("pageerror", lambda error: problems.append(str(error)))
    opened.on("console", lambda reported: note_error(reported, problems))
    opened.on("request", lambda item: item.url.startswith(server.url) or problems.append(item.url))
    opened.goto(server.url)
    yield opened
    context.close()
    assert not problems


def note_error(reported: Any, problems: list[str]) -> None:
    """Record errors of the script and its rules; a test may intend a status of 400, say."""
    if reported.type == "error" and "Failed to load resource" not in reported.text:
        problems.append(reported.text)


def send(page: Any, text: str) -> None:
    page.get_by_label("Your message").fill(text)
    page.keyboard.press("Enter")


def wait_until_idle(page: Any) -> None:
    page.locator("#stop:disabled").wait_for()
    page.locator("#send:enabled").wait_for()


def test_a_conversation_in_a_browser(page: Any) -> None:
    page.get_by_text("ready", exact=True).wait_for()
    assert page.locator("#model").inner_text() == "tiny"
    assert page.locator("#note").is_hidden()
    assert "budget" in page.locator("#memory").inner_text()
    assert page.locator("#bar span").count() > 2
    page.get_by_text("Settings").click()
    page.get_by_label("Max tokens").fill("40")
    page.get_by_label("Temperature").fill("0")
    send(page, "hello")
    page.locator("#acceptance", has_text="%").wait_for()
    wait_until_idle(page)
    first = page.locator(".assistant .text").inner_text()
    assert first
    assert page.locator(".right").count() > 0  # the draft is the target itself
    assert float(page.locator("#per-pass").inner_text()) > 1
    page.get_by_role("button", name="Regenerate").click()
    page.locator("#acceptance", has_text="%").wait_for()
    wait_until_idle(page)
    assert page.locator(".assistant .text").all_inner_texts() == [first]
    page.get_by_role("button", name="New conversation").click()
    assert page.locator("#log li").count() == 0


STOP_AT_FIRST_TEXT = """() => {
  const timer = setInterval(() => {
    if (!document.querySelector(".assistant .text span")) return;
    clearInterval(timer);
    const button = document.getElementById("stop");
    button.dataset.wasRunning = String(!button.disabled);
    button.click();
  }, 5);
}"""
"""A click inside the page: on a busy machine the answer ends before one from outside arrives."""


def test_an_answer_can_be_stopped(page: Any, server: Server) -> None:
    page.get_by_text("ready", exact=True).wait_for()
    page.evaluate(STOP_AT_FIRST_TEXT)
    send(page, "hello")
    page.locator("#stop[data-was-running]").wait_for(state="attached")
    assert page.locator("#stop").get_attribute("data-was-running") == "true"
    wait_until_idle(page)
    server.wait_until_free()


def test_what_goes_wrong_is_shown(page: Any) -> None:
    page.get_by_text("ready", exact=True).wait_for()
    send(page, "<b>x</b>" * 100)
    page.get_by_role("alert").wait_for()
    assert "leaves no room" in page.get_by_role("alert").inner_text()
    assert page.locator("#log b").count() == 0
    send(page, "hello")  # an unanswered message does not disturb
    page.locator("#acceptance", has_text="%").wait_for()
    wait_until_idle(page)
    assert page.locator(".assistant .text").last.inner_text()


def test_a_setting_that_is_wrong_is_shown_before_anything_is_sent(page: Any) -> None:
    """The message used to be added to the conversation without an answer."""
    page.get_by_text("ready", exact=True).wait_for()
    page.get_by_text("Settings").click()
    page.get_by_label("Temperature").fill("9")
    page.get_by_text("Settings").click()
    send(page, "hello")
    assert page.get_by_label("Temperature").is_visible()
    assert page.locator("#log li").count() == 0
    assert page.get_by_label("Your message").input_value() == "hello"
    page.get_by_label("Temperature").fill("0.75")
    send(page, "hello")
    wait_until_idle(page)
    assert page.locator(".assistant .text").inner_text()


def test_an_answer_that_is_cut_off_does_not_look_finished(page: Any) -> None:
    page.get_by_text("ready", exact=True).wait_for()
    cut = 'data: {"choices": [{"index": 0, "delta": {"content": "Paris is"}}]}\n\n'
    page.route("**/v1/chat/completions", lambda route: route.fulfill(status=200, body=cut))
    send(page, "hello")
    page.get_by_role("alert").wait_for()
    assert "ended in the middle" in page.get_by_role("alert").inner_text()
    assert page.locator(".assistant .text").inner_text() == "Paris is"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_can_be_read_and_used_without_a_mouse(page: Any, scheme: str) -> None:
    page.emulate_media(color_scheme=scheme)
    page.get_by_text("ready", exact=True).wait_for()
    names = []
    for _ in range(12):
        page.keyboard.press("Tab")
        names.append(page.evaluate("document.activeElement.id || document.activeElement.tagName"))
    assert {"send", "show-drafts", "SUMMARY"} <= set(names)
    colours = page.evaluate(
        "[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]"
    )
    assert contrast(*colours) >= 7


def contrast(first: str, second: str) -> float:
    """Contrast ratio of WCAG 2, from 1 to 21."""

    def luminance(colour: str) -> float:
        values = [int(item) / 255 for item in re.findall(r"\d+", colour)[:3]]
        linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in values]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((luminance(first), luminance(second)), reverse=True)
    return (high + 0.05) / (low + 0.05)
