"""The page in a browser: Markdown, code, thinking and marks of accepted draft tokens."""

from __future__ import annotations

from typing import Any

import pytest
from browsing import answers, script_answer, send, stall_answers, wait_until_idle

MARKDOWN = """# Rivers

Two **long** ones &amp; `a < b`:

1. Nile
2. Amazon
   - in Brazil

| name | km |
|---|---|
| Nile | 6650 |

> quoted

```python
def area(r):
    return 3 * r
```

See [a page](https://example.org/x) or ~~none~~."""

HOSTILE = """<img src=x onerror="document.title='run'"> <script>document.title='run'</script>

[click](javascript:document.title='run') [here](/v1/plan) [vb](vbscript:x) [d](data:text/html,x)

![pixel](https://example.org/leak?q=secret) &#60;b&#62; [t](https://a.example "<b>title</b>")

| <i>a</i> |
|---|
| <svg onload=document.title='run'> |

```<b>
<b>code</b>
```
"""


def show(page: Any, text: str) -> Any:
    """Answer with `text`, and return the element that shows it."""
    script_answer(page, {"content": text})
    send(page, "hello")
    wait_until_idle(page)
    return page.locator(".assistant > .text").last


def test_markdown_is_shown_as_elements(page: Any) -> None:
    text = show(page, MARKDOWN)
    assert text.locator("h3").inner_text() == "Rivers"
    assert text.locator("strong").inner_text() == "long"
    assert text.locator("p code").inner_text() == "a < b"
    assert "ones & a" in text.locator("p").first.inner_text()
    assert text.locator("ol > li").count() == 2
    assert text.locator("ol ul > li").inner_text() == "in Brazil"
    assert text.locator("td").all_inner_texts() == ["Nile", "6650"]
    assert text.locator("blockquote").inner_text() == "quoted"
    assert text.locator("del").inner_text() == "none"
    assert text.locator("pre code").inner_text() == "def area(r):\n    return 3 * r"
    assert text.locator(".code-bar span").inner_text() == "python"
    link = text.locator("a")
    assert link.get_attribute("href") == "https://example.org/x"
    assert link.get_attribute("rel") == "noopener noreferrer"


def test_markdown_of_a_model_loads_and_runs_nothing(page: Any) -> None:
    title = page.title()
    text = show(page, HOSTILE)
    assert text.locator("img, script, svg, b, i, style, iframe").count() == 0
    links = text.locator("a").evaluate_all("all => all.map((one) => one.href)")
    assert links == ["https://example.org/leak?q=secret", "https://a.example/"]
    assert "<script>document.title='run'</script>" in text.inner_text()
    assert "<b>" in text.locator("p", has_text="pixel").inner_text()
    page.wait_for_timeout(100)
    assert page.title() == title


@pytest.mark.parametrize("text", [">" * 20000 + " deep", "[" * 3000, "*a **b " * 800])
def test_markdown_that_is_nested_deeply_is_shown_nevertheless(page: Any, text: str) -> None:
    assert show(page, text).inner_text()
    assert page.get_by_role("alert").count() == 0


def test_code_is_copied(page: Any) -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    text = show(page, MARKDOWN)
    button = text.get_by_role("button", name="Copy code")
    button.click()
    text.get_by_role("button", name="Copied").wait_for()
    read = "navigator.clipboard.readText()"
    assert page.evaluate(read) == "def area(r):\n    return 3 * r"
    page.locator(".assistant .actions .copy").click()
    page.locator(".actions .copy", has_text="Copied").wait_for()
    assert page.evaluate(read) == MARKDOWN


def test_code_is_copied_where_the_browser_has_no_clipboard_for_pages(page: Any) -> None:
    """Plain HTTP from another machine."""
    page.context.grant_permissions(["clipboard-read"])
    page.evaluate("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
    text = show(page, MARKDOWN)
    text.get_by_role("button", name="Copy code").click()
    text.get_by_role("button", name="Copied").wait_for()
    page.get_by_label("Your message").press("Control+V")
    assert page.get_by_label("Your message").input_value() == "def area(r):\n    return 3 * r"


def test_accepted_draft_tokens_are_marked_within_markdown(page: Any) -> None:
    script_answer(
        page,
        {"content": "A **bo", "draft": {"n_tokens": 2, "n_accepted_characters": 0}},
        {"content": "ld** word", "draft": {"n_tokens": 3, "n_accepted_characters": 4}},
        {"content": "😀 and\n\n- a", "draft": {"n_tokens": 3, "n_accepted_characters": 5}},
        {"content": "bc `x`", "draft": {"n_tokens": 3, "n_accepted_characters": 6}},
    )
    send(page, "hello")
    wait_until_idle(page)
    assert answers(page) == ["A bold word😀 and\n\nabc x"]
    assert page.locator(".right").all_inner_texts() == ["ld", "😀 and", "bc ", "x"]
    page.reload()
    assert page.locator(".right").all_inner_texts() == ["ld", "😀 and", "bc ", "x"]
    page.get_by_label("Mark accepted draft tokens").uncheck()
    transparent = "rgba(0, 0, 0, 0)"
    style = "one => getComputedStyle(one).backgroundColor"
    assert page.locator(".right").first.evaluate(style) == transparent


def test_thinking_is_folded(page: Any) -> None:
    requests = script_answer(
        page,
        {"reasoning_content": "First, "},
        {"reasoning_content": "rivers."},
        {"content": "Nile"},
    )
    send(page, "hello")
    wait_until_idle(page)
    thinking = page.locator(".thinking")
    assert thinking.locator("summary").inner_text() == "Thinking"
    assert not page.get_by_text("First, rivers.").is_visible()
    thinking.locator("summary").press("Enter")
    assert page.get_by_text("First, rivers.").is_visible()
    send(page, "more")
    wait_until_idle(page)
    assert requests[1]["messages"][1] == {"role": "assistant", "content": "Nile"}


def test_blocks_that_are_complete_stay_while_a_text_grows(page: Any) -> None:
    """A reader's selection in them would go away, and the focus of a button."""
    event = {"choices": [{"index": 0, "delta": {"content": "```\ncode\n```\n\nand"}}]}
    stall_answers(page, event)
    send(page, "hello")
    page.locator(".assistant > .text p").wait_for()
    page.evaluate("window.kept = document.querySelector('.assistant .code')")
    grow = """async () => {
      const { Markdown } = await import("/page/markdown.js");
      const element = document.createElement("div");
      const view = new Markdown(element);
      view.update("```\\ncode\\n```\\n\\nand", []);
      const first = element.children[0];
      view.update("```\\ncode\\n```\\n\\nand more", []);
      return [first === element.children[0], element.children.length, element.innerText];
    }"""
    is_same, count, text = page.evaluate(grow)
    assert is_same
    assert count == 3  # the code, the space after it, the paragraph
    assert text.endswith("and more")


@pytest.mark.parametrize("note", ["", "the context of 512 tokens is full"])
def test_an_answer_that_a_limit_cut_says_so(page: Any, note: str) -> None:
    script_answer(page, {"content": "Some", "finish_reason": "length", "finish_note": note})
    send(page, "hello")
    wait_until_idle(page)
    expected = note or "The answer was cut off at its limit of tokens."
    assert page.locator(".assistant .note").inner_text() == expected
