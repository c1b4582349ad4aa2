"""A browser for the tests of the server's page."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

_ENDING = ("finish_reason", "finish_note")
MUST_RUN = "SPECDEC_TEST_BROWSER"
"""Environment variable: 1 makes a missing browser a failure (.ci/run)."""


@contextmanager
def open_browser() -> Iterator[Any]:
    """Start Debian's chromium, or skip the test."""
    path = shutil.which("chromium")
    if path is None or importlib.util.find_spec("playwright") is None:
        reason = "needs chromium and the Python package playwright"
        if os.environ.get(MUST_RUN) == "1":
            pytest.fail(f"{reason}: {MUST_RUN} is 1")
        pytest.skip(reason)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield opened
        opened.close()


@contextmanager
def open_page(browser: Any, url: str, **context: Any) -> Iterator[Any]:
    """Open the page of a server with an empty storage; fail at errors of its script or policy."""
    options = {"viewport": {"width": 1280, "height": 800}, **context}
    opened = browser.new_context(**options)
    page = opened.new_page()
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda reported: _note_error(reported, problems))
    page.on("request", lambda item: item.url.startswith(url) or problems.append(item.url))
    page.goto(url)
    yield page
    opened.close()
    assert not problems


def _note_error(reported: Any, problems: list[str]) -> None:
    """Record errors of the script and its policy; a test may intend a status of 400, say."""
    if reported.type == "error" and "Failed to load resource" not in reported.text:
        problems.append(reported.text)


def wait_until_ready(page: Any) -> None:
    page.locator("#state", has_text=re.compile("^ready$")).wait_for()


def send(page: Any, text: str) -> None:
    page.get_by_label("Your message").fill(text)
    page.keyboard.press("Enter")


def wait_until_idle(page: Any) -> None:
    page.locator("#stop:disabled").wait_for()
    page.locator("#send:enabled").wait_for()


def answers(page: Any) -> list[str]:
    """Return the texts of the model's answers, as they are shown."""
    return page.locator(".assistant > .text").all_inner_texts()  # type: ignore[no-any-return]


def script_answer(
    page: Any, *deltas: dict[str, Any], is_whole: bool = True
) -> list[dict[str, Any]]:
    """Answer the page's chats with `deltas` instead of a model.

    A delta may have `draft`, a field of events, and `finish_reason` and `finish_note`, fields of
    choices. Returns a list that gets the requests.
    """
    requests: list[dict[str, Any]] = []
    lines = []
    for delta in deltas:
        ending = {name: delta[name] for name in _ENDING if name in delta}
        content = {name: delta[name] for name in delta if name not in {"draft", *_ENDING}}
        event: dict[str, Any] = {"choices": [{"index": 0, "delta": content, **ending}]}
        if "draft" in delta:
            event["draft"] = delta["draft"]
        lines.append(f"data: {json.dumps(event)}\n\n")
    body = "".join(lines) + ("data: [DONE]\n\n" if is_whole else "")

    def fulfil(route: Any) -> None:
        requests.append(route.request.post_data_json)
        route.fulfill(status=200, body=body, content_type="text/event-stream")

    page.unroute("**/v1/chat/completions")
    page.route("**/v1/chat/completions", fulfil)
    return requests


def contrast(first: str, second: str) -> float:
    """Contrast ratio of WCAG 2, from 1 to 21, of two colours as getComputedStyle writes them."""

    def luminance(colour: str) -> float:
        values = [int(item) / 255 for item in re.findall(r"\d+", colour)[:3]]
        linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in values]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((luminance(first), luminance(second)), reverse=True)
    return (high + 0.05) / (low + 0.05)


_STALL = """(text) => {
  const real = window.fetch;
  window.stalled = { restore() { window.fetch = real; } };
  window.fetch = (path, options) => {
    if (path !== "/v1/chat/completions") return real(path, options);
    const stream = new ReadableStream({ start(controller) {
      controller.enqueue(new TextEncoder().encode(text));
      window.stalled.fail = () => controller.error(new TypeError("network error"));
      options.signal.addEventListener("abort", () => controller.error(options.signal.reason));
    } });
    return Promise.resolve(new Response(stream));
  };
}"""


def stall_answers(page: Any, *events: dict[str, Any]) -> None:
    """Answer the page's chats with `events` and nothing after them, until they are stopped."""
    page.evaluate(_STALL, "".join(f"data: {json.dumps(event)}\n\n" for event in events))


def tab_to(page: Any, selector: str, key: str = "Tab") -> None:
    """Press `key` until the element that `selector` matches has the focus."""
    for _ in range(60):
        page.keyboard.press(key)
        if page.evaluate("(selector) => document.activeElement.matches(selector)", selector):
            return
    raise AssertionError(f"{selector} is not reached by {key}")


_COLOURS = """(element) => {
  const transparent = "rgba(0, 0, 0, 0)";
  let ground = element;
  while (getComputedStyle(ground).backgroundColor === transparent) ground = ground.parentElement;
  return [getComputedStyle(element).color, getComputedStyle(ground).backgroundColor];
}"""


def contrast_of(page: Any, selector: str) -> float:
    """Return the contrast of the first element that `selector` matches with what is behind it."""
    return contrast(*page.locator(selector).first.evaluate(_COLOURS))
