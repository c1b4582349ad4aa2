"""The page in a browser: a server that goes away, a phone, a keyboard alone, light and dark."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import Any

import pytest
from browsing import (
    answers,
    contrast_of,
    open_page,
    script_answer,
    send,
    stall_answers,
    tab_to,
    wait_until_idle,
    wait_until_ready,
)
from serving import Server

PHONE = {"viewport": {"width": 360, "height": 640}, "has_touch": True, "is_mobile": True}
CODE = "```\n" + "long " * 60 + "\n```\n\n" + "text " * 100 + "\n\n| " + "wide | " * 20
TEXT = {"choices": [{"index": 0, "delta": {"content": "Some text"}}]}


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_turns_red_when_the_server_is_gone_and_recovers(
    browser: Any, served_model: Path, scheme: str
) -> None:
    with Server(served_model, "-c", "512") as server:
        server.ready()
        port = server.port
        with open_page(browser, server.url, color_scheme=scheme) as page:
            wait_until_ready(page)
            stall_answers(page, TEXT)  # a text that was under way stays
            send(page, "hello")
            page.locator(".assistant > .text p").wait_for()
            server.end(signal.SIGKILL)
            page.locator("#state.bad", has_text="server not reachable").wait_for()
            assert contrast_of(page, "#state") >= 4.5
            red = page.locator("#state").evaluate("one => getComputedStyle(one).backgroundColor")
            red, green, blue = map(int, re.findall(r"\d+", red))
            assert red > 2 * max(green, blue)
            page.keyboard.press("Escape")
            wait_until_idle(page)
            assert answers(page) == ["Some text"]
            page.evaluate("stalled.restore()")
            send(page, "are you there?")
            page.locator("#log .error", has_text="not reachable: ask again").wait_for()
            with Server(served_model, "-c", "512", "--port", str(port)) as again:
                again.ready()
                page.goto(again.url)
                wait_until_ready(page)
                assert page.locator(".user .text").last.inner_text() == "are you there?"
                page.get_by_role("button", name="Regenerate").click()
                wait_until_idle(page)
                assert len(answers(page)) == 2


def test_an_answer_that_a_lost_connection_cuts_says_so_and_is_kept(page: Any) -> None:
    stall_answers(page, TEXT)
    send(page, "hello")
    page.locator(".assistant > .text p").wait_for()
    page.evaluate("stalled.fail()")
    page.locator("#log .error", has_text="not reachable: ask again").wait_for()
    page.reload()
    assert answers(page) == ["Some text"]


def test_a_server_that_returns_is_found_without_a_reload(browser: Any, served_model: Path) -> None:
    with Server(served_model, "-c", "512") as server:
        server.ready()
        port = server.port
        with open_page(browser, server.url) as page:
            wait_until_ready(page)
            page.evaluate("window.isTheSame = true")
            server.end(signal.SIGKILL)
            page.locator("#state.bad").wait_for()
            with Server(served_model, "-c", "512", "--port", str(port)):
                page.locator("#state", has_text=re.compile("^ready$")).wait_for()
            assert page.evaluate("window.isTheSame")


def test_escape_stops_an_answer_and_keeps_its_text(page: Any) -> None:
    stall_answers(page, TEXT)
    send(page, "hello")
    page.locator(".assistant > .text p").wait_for()
    assert page.locator("#state").inner_text() == "answering"
    assert page.locator("#stop").is_enabled()
    page.keyboard.press("Escape")
    wait_until_idle(page)
    assert answers(page) == ["Some text"]
    assert page.locator("#log .error").count() == 0
    page.reload()
    assert answers(page) == ["Some text"]


def test_the_progress_of_a_long_prompt_is_shown(page: Any) -> None:
    progress = {"total": 4000, "cache": 0, "processed": 1000, "time_ms": 10_000}
    stall_answers(page, {"choices": [], "prompt_progress": progress})
    send(page, "hello")
    page.get_by_text("reading the prompt: 25 % of 4000 tokens, 30 s left").wait_for()
    assert page.get_by_role("progressbar").evaluate("one => one.value") == 0.25
    page.keyboard.press("Escape")
    wait_until_idle(page)
    assert page.get_by_role("progressbar").count() == 0


def test_a_phone_has_the_input_in_view_and_nothing_wider_than_it(
    browser: Any, server: Server
) -> None:
    with open_page(browser, server.url, **PHONE) as page:
        wait_until_ready(page)
        for _ in range(2):
            script_answer(page, {"content": CODE})
            send(page, "word " * 100)
            wait_until_idle(page)
            assert page.evaluate("document.documentElement.scrollWidth") == 360
            for name in ("#prompt", "#send", "#state"):
                box = page.locator(name).bounding_box()
                assert box["x"] >= 0
                assert box["x"] + box["width"] <= 360
                assert box["y"] >= 0
                assert box["y"] + box["height"] <= 640
            assert page.locator("#log").evaluate("one => one.clientHeight") > 250
        end = "one => one.scrollHeight - one.scrollTop - one.clientHeight"
        assert page.locator("#log").evaluate(end) < 40
        page.get_by_role("button", name="Conversations").tap()
        assert page.get_by_role("button", name="New conversation").is_visible()
        page.get_by_role("button", name="New conversation").tap()
        assert page.get_by_role("button", name="New conversation").count() == 0
        page.get_by_role("button", name="Details").tap()
        assert page.get_by_text("tokens per second").is_visible()
        page.get_by_role("button", name="Details").tap()
        assert page.locator("#prompt").is_visible()


def test_panels_of_a_narrow_window_are_used_by_keyboard(browser: Any, server: Server) -> None:
    with open_page(browser, server.url, viewport={"width": 360, "height": 640}) as page:
        wait_until_ready(page)
        tab_to(page, "[data-panel=chats]", "Shift+Tab")
        page.keyboard.press("Enter")
        assert page.evaluate("document.activeElement.id") == "new"
        page.keyboard.press("Escape")
        assert page.evaluate("document.activeElement.dataset.panel") == "chats"
        tab_to(page, "[data-panel=details]")
        page.keyboard.press("Enter")
        assert page.evaluate("document.activeElement.id") == "show-drafts"
        page.set_viewport_size({"width": 1280, "height": 640})
        page.locator("#details:not(.open)").wait_for()
        tab_to(page, "#prompt", "Shift+Tab")  # the chat is not inert any more


def test_everything_is_done_by_keyboard(page: Any) -> None:
    keys = page.keyboard
    script_answer(page, {"content": "```\ncode\n```"})
    keys.type("hello")
    keys.press("Enter")
    wait_until_idle(page)
    tab_to(page, ".code button", "Shift+Tab")
    tab_to(page, ".edit", "Shift+Tab")
    keys.press("Enter")
    keys.press("Control+A")
    keys.type("another")
    script_answer(page, {"content": "changed"})
    keys.press("Enter")
    wait_until_idle(page)
    assert page.locator(".user .text").all_inner_texts() == ["another"]
    assert answers(page) == ["changed"]
    tab_to(page, "#again")
    script_answer(page, {"content": "again"})
    keys.press("Space")
    wait_until_idle(page)
    assert answers(page) == ["again"]
    tab_to(page, "#system-box summary", "Shift+Tab")
    keys.press("Enter")
    keys.press("Tab")
    keys.type("Be brief.")
    tab_to(page, "#new", "Shift+Tab")
    keys.press("Enter")
    assert page.evaluate("document.activeElement.id") == "prompt"
    tab_to(page, ".open", "Shift+Tab")
    keys.press("Enter")
    assert answers(page) == ["again"]
    tab_to(page, "#show-drafts")
    tab_to(page, "summary")


@pytest.mark.parametrize("width", [1280, 360])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_can_be_read_in_light_and_dark(
    browser: Any, server: Server, scheme: str, width: int
) -> None:
    viewport = {"width": width, "height": 700}
    with open_page(browser, server.url, viewport=viewport, color_scheme=scheme) as page:
        wait_until_ready(page)
        draft = {"n_tokens": 9, "n_accepted_characters": 6}
        text = "> quote\n\n`code` [link](https://a.example)\n\n```\ncode\n```"
        script_answer(page, {"reasoning_content": "hm"}, {"content": text, "draft": draft})
        send(page, "hello")
        wait_until_idle(page)
        script_answer(page, {"content": "cut"}, is_whole=False)
        send(page, "more")
        page.get_by_role("alert").wait_for()
        wait_until_idle(page)
        names = ["#state", "#model", ".who", ".user .text", ".right", "blockquote", "p code", "a"]
        names += ["pre code", ".code-bar span", "button.small", ".thinking summary", "#log .error"]
        names += ["#send", "#again", "#system-box summary", "#prompt", "dt", "dd", ".open", ".note"]
        low = {name: contrast_of(page, name) for name in names}
        assert not {name: ratio for name, ratio in low.items() if ratio < 4.5}
