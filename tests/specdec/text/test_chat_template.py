"""Chat templates in a subprocess: equal to transformers' result, without lasting effects."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("jinja2")

from specdec.pair import pair_path
from specdec.text import chat_template
from specdec.text.chat_format import NAMED, ChatTemplateError
from specdec.text.chat_template import render_chat
from specdec.text.template_worker import MAX_CHARACTERS
from specdec.text.tokenizer import Tokenizer

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "é <hi> \ud800"},
    {
        "role": "assistant",
        "tool_calls": [
            {"type": "function", "function": {"name": "add", "arguments": {"a": [1, "ü"]}}}
        ],
    },
    {"role": "tool", "content": "3", "tool_call_id": "c"},
]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
TEMPLATES = [
    NAMED["chatml"].template,
    "{{ bos_token }}{% for m in messages %}{% if m.tool_calls %}{{ m.tool_calls | tojson }}"
    "{% else %}{{ m.content | trim }}{% endif %}{{ eos_token }}\n{% endfor %}",
    "{% for t in tools or [] %}{{ t | tojson(indent=2) }}{% break %}{% endfor %}{{ documents }}",
    "{% generation %}  {{ messages | length }}{% endgeneration %}\n"
    "{%- if add_generation_prompt %} and {% endif %}",
]


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("tools", [[], TOOLS])
def test_the_text_is_transformers(template: str, tools: list[Any]) -> None:
    tokenizer = Tokenizer.from_pretrained(pair_path("pair:draft")).hf_tokenizer
    expected = tokenizer.apply_chat_template(
        TALK,
        tools=tools or None,
        chat_template=template,
        add_generation_prompt=True,
        tokenize=False,
    )
    assert render_chat(template, TALK, tokenizer.special_tokens_map, tools) == expected


ENDLESS = "{{ 10 ** (10 ** 10) }}"
HUGE = [
    "{{ 'x' * 10 ** 10 }}",
    "{% set n = namespace(x='x') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "{{ '%01000000000d' % 1 }}",
]


@pytest.mark.slow
@pytest.mark.parametrize("template", [ENDLESS, *HUGE])
def test_a_template_without_end_is_ended(template: str) -> None:
    """Such a template blocked the server from reading prompts, and filled the memory."""
    with pytest.raises(ChatTemplateError, match="it takes more than 5 s of a core or 512 MiB"):
        render_chat(template, TALK, {})
    assert render_chat("{{ messages | length }}", TALK, {}) == "4"


def test_a_text_that_is_too_long() -> None:
    with pytest.raises(ChatTemplateError, match=f"more than {MAX_CHARACTERS}"):
        render_chat("{{ 'x' * 20000000 }}", TALK, {})


def test_what_is_no_json_is_refused() -> None:
    with pytest.raises(ChatTemplateError, match="must be JSON"):
        render_chat("x", [{"role": "user", "content": object()}], {})


def number() -> int:
    """Number of template processes."""
    process = chat_template._WORKER._process
    assert process is not None
    return process.pid


def test_the_process_is_reused_and_replaced_when_it_is_lost() -> None:
    """A late request used to fail with the message that its template takes too much."""
    assert render_chat("a", TALK, {}) == "a"
    first = number()
    with pytest.raises(ChatTemplateError):
        render_chat("{{ 1 / 0 }}", TALK, {})
    assert render_chat("b" * 300_000, TALK, {}) == "b" * 300_000
    assert number() == first
    lost = chat_template._WORKER._process
    assert lost is not None
    lost.kill()  # as when the system's memory ends: it is the first to go
    lost.wait()
    assert render_chat("c", TALK, {}) == "c"
    assert number() != first


def test_threads_get_their_own_outputs() -> None:
    strings: dict[int, str] = {}

    def ask(i: int) -> None:
        strings[i] = render_chat(f"{i} {{{{ messages | length }}}}", TALK[: i % 4], {})

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert strings == {i: f"{i} {i % 4}" for i in range(16)}


def test_the_working_directory_lends_no_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The working directory may have downloaded files, one of which would be run."""
    (tmp_path / "json.py").write_text("open('ran', 'w').close()\n")
    monkeypatch.chdir(tmp_path)
    chat_template._WORKER.close()
    assert render_chat("a", TALK, {}) == "a"
    assert not (tmp_path / "ran").exists()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # for forking with threads
def test_a_fork_has_a_process_of_its_own() -> None:
    """Both used to read from one pipe, and received each other's results."""
    assert render_chat("a", TALK, {}) == "a"
    first, is_right = number(), False
    child = os.fork()
    if child == 0:
        try:
            is_right = render_chat("b", TALK, {}) == "b" and number() != first
        finally:
            os._exit(0 if is_right else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert render_chat("c", TALK, {}) == "c"
    assert number() == first
