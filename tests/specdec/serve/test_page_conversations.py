"""The page in a browser: conversations that are kept, edited and deleted; the system prompt."""

from __future__ import annotations

from typing import Any

from browsing import (
    answers,
    script_answer,
    send,
    stall_answers,
    wait_until_idle,
    wait_until_ready,
)

FULL = """() => {
  Storage.prototype.setItem = () => { throw new DOMException("full", "QuotaExceededError"); };
}"""


def say(page: Any, text: str, answer: str) -> list[dict[str, Any]]:
    requests = script_answer(page, {"content": answer})
    send(page, text)
    wait_until_idle(page)
    return requests


def test_conversations_are_kept_in_the_browser(page: Any) -> None:
    say(page, "first question", "**one**")
    page.get_by_role("button", name="New conversation").click()
    assert answers(page) == []
    say(page, "second question", "two")
    names = page.locator("#conversations .open").all_inner_texts()
    assert names == ["second question", "first question"]
    page.reload()
    wait_until_ready(page)
    assert answers(page) == ["two"]  # the one that this tab had
    page.get_by_role("button", name="first question", exact=True).click()
    assert answers(page) == ["one"]
    assert page.locator(".assistant strong").count() == 1
    requests = say(page, "go on", "three")
    contents = [message["content"] for message in requests[0]["messages"]]
    assert contents == ["first question", "**one**", "go on"]


def test_a_conversation_is_deleted_after_a_question(page: Any) -> None:
    say(page, "first question", "one")
    page.once("dialog", lambda dialog: dialog.dismiss())
    page.get_by_role("button", name="Delete “first question”").click()
    assert page.locator("#conversations li").count() == 1
    page.once("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name="Delete “first question”").click()
    assert page.locator("#conversations li").count() == 0
    assert page.locator("#log li").count() == 0
    assert page.evaluate("localStorage.length") == 0


def test_two_tabs_keep_each_other_informed(page: Any) -> None:
    tab = page.context.new_page()
    tab.goto(page.url)
    wait_until_ready(tab)
    say(page, "first question", "one")
    tab.locator("#conversations .open").wait_for()
    tab.locator("#conversations .open").click()
    assert answers(tab) == ["one"]
    say(tab, "second question", "two")
    page.locator(".assistant", has_text="two").wait_for()
    assert answers(page) == ["one", "two"]


def test_a_message_is_edited_and_sent_again(page: Any) -> None:
    say(page, "first", "one")
    say(page, "second", "two")
    page.get_by_role("button", name="Edit").first.click()
    area = page.get_by_label("Edit your message")
    assert area.input_value() == "first"
    area.press("Escape")
    assert answers(page) == ["one", "two"]
    page.get_by_role("button", name="Edit").last.click()
    page.get_by_label("Edit your message").fill("third")
    requests = script_answer(page, {"content": "three"})
    page.get_by_role("button", name="Send again").click()
    wait_until_idle(page)
    contents = [message["content"] for message in requests[0]["messages"]]
    assert contents == ["first", "one", "third"]
    assert answers(page) == ["one", "three"]
    page.reload()
    assert answers(page) == ["one", "three"]
    assert page.locator(".user .text").all_inner_texts() == ["first", "third"]


def test_a_system_prompt_belongs_to_its_conversation(page: Any) -> None:
    page.get_by_text("System prompt").click()
    page.get_by_label("System prompt").fill("Be brief.")
    requests = say(page, "first", "one")
    assert requests[0]["messages"][0] == {"role": "system", "content": "Be brief."}
    page.get_by_role("button", name="New conversation").click()
    assert page.get_by_label("System prompt").input_value() == "Be brief."
    page.get_by_label("System prompt").fill("")
    requests = say(page, "second", "two")
    assert [message["role"] for message in requests[0]["messages"]] == ["user"]
    page.reload()
    page.get_by_role("button", name="first", exact=True).click()
    assert page.locator("#system").input_value() == "Be brief."


def test_a_full_storage_is_said_and_disturbs_nothing(page: Any) -> None:
    page.evaluate(FULL)
    say(page, "first", "one")
    assert answers(page) == ["one"]
    assert "storage is full" in page.locator("#storage").inner_text()


def test_items_of_others_in_the_storage_are_left_alone(page: Any) -> None:
    page.evaluate(
        """() => {
          localStorage.setItem("specdec.conversation.bad", "{");
          localStorage.setItem("specdec.conversation.odd", '{"id": "odd", "messages": [1]}');
          localStorage.setItem("else", "[]");
        }"""
    )
    page.reload()
    say(page, "first", "one")
    assert page.locator("#conversations li").count() == 1
    assert page.evaluate("localStorage.length") == 4


def test_an_answer_that_was_under_way_when_the_page_was_left_is_kept(page: Any) -> None:
    say(page, "first", "one")
    stall_answers(page, {"choices": [{"index": 0, "delta": {"content": "half of it"}}]})
    send(page, "second")
    page.locator(".assistant", has_text="half of it").wait_for()
    page.reload()
    assert answers(page) == ["one", "half of it"]
    stall_answers(page)
    send(page, "third")
    page.reload()
    assert answers(page) == ["one", "half of it"]
    assert page.locator(".user .text").all_inner_texts() == ["first", "second", "third"]
