"""The chat templates that llama.cpp ships, from its source package (or any folder of them).

`pip download --no-deps --no-binary :all: llama-cpp-python` has them under
vendor/llama.cpp/models/templates; SPECDEC_CHAT_TEMPLATES names that folder.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("jinja2")

from dialogue_parsing import parsed
from dialogue_sample import TOOLS

from specdec.dialogue.formats import OutputFormat
from specdec.dialogue.messages import adapted
from specdec.dialogue.recognition import thinking_format, tool_format
from specdec.dialogue.schemas import ArgumentTypes
from specdec.dialogue.traits import traits_of
from specdec.text.chat_format import ChatTemplateError
from specdec.text.chat_template import render_chat

FOLDER = os.environ.get("SPECDEC_CHAT_TEMPLATES")
PATHS = sorted(Path(FOLDER).glob("*.jinja")) if FOLDER else []
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": "Where?"},
    {"role": "user", "content": "Paris."},
]
# Formats of the templates that show earlier calls, by a part of the file's name.
FORMATS = {
    "Apertus": "apertus",
    "Apriel": "tool-calls",
    "Bielik": "hermes",
    "Cohere2MoE": "command-r7b",
    "DeepSeek-R1": "deepseek-v3",
    "DeepSeek-V3.1": "deepseek-v3",
    "DeepSeek-V3.2": "deepseek-v3.2",
    "DeepSeek-V4": "deepseek-v4",
    "deepseek-r1": "deepseek-v3",
    "Devstral": "mistral",
    "GLM": "glm",
    "GigaChat": "gigachat",
    "Hermes": "hermes",
    "Hy3": "hunyuan",
    "Kimi-K2": "kimi-k2",
    "Kimi-K3": "kimi-k3",
    "LFM2": "lfm2",
    "Laguna": "glm",
    "Llama-3.": "llama3",
    "MiMo": "hermes",
    "MiniCPM5": "minicpm5",
    "MiniMax-M1": "tool-calls",
    "MiniMax-M2": "minimax-m2",
    "MiniMax-M3": "minimax-m3",
    "Ministral": "mistral",
    "Mistral": "mistral",
    "Nemotron-3": "qwen3-coder",
    "Nemotron-Nano-v2": "nemotron-v2",
    "QwQ": "hermes",
    "Qwen2.5": "hermes",
    "Qwen3-0": "hermes",
    "Qwen3-Coder": "qwen3-coder",
    "Qwen3.5": "qwen3-coder",
    "Reka": "hermes",
    "Seed-OSS": "seed-oss",
    "SmolLM3": "hermes",
    "Solar": "solar",
    "Spark": "glm",
    "StepFun": "qwen3-coder",
    "command-r-plus": "command-r",
    "command-r7b": "command-r7b",
    "firefunction": "firefunction",
    "functionary-medium-v3.1": "functionary-v3.1",
    "functionary-medium-v3.2": "functionary-v3.2",
    "gemma-4": "gemma4",
    "gpt-oss": "harmony",
    "granite-3": "granite",
    "granite-4": "hermes",
    "ling": "glm",
    "muse": "muse",
}


def test_the_folder_is_there() -> None:
    if FOLDER is None:
        pytest.skip("set SPECDEC_CHAT_TEMPLATES to llama.cpp's models/templates")
    assert len(PATHS) > 50


def rendered(render: Any) -> str:
    """Return a rendered text; the kind of failure where there is none."""
    try:
        return str(render())
    except Exception as error:  # whatever a template makes transformers raise
        is_one_line = "\n" not in str(error)
        return "refused" if is_one_line or not isinstance(error, ChatTemplateError) else "two lines"


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_a_template_gives_what_transformers_gives(path: Path) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    template = path.read_text()

    def theirs(messages: Any, tools: Any) -> str:
        prompts, _ = render_jinja_template(
            [messages], tools=tools, chat_template=template, add_generation_prompt=True, **SPECIAL
        )
        return str(prompts[0])

    refused = 0
    for messages, tools in ((TALK, None), (TALK[1:], None), (TALK[1:], TOOLS), (TALK[1:2], TOOLS)):
        ours = rendered(lambda m=messages, t=tools: render_chat(template, m, SPECIAL, t or ()))
        assert ours == rendered(lambda m=messages, t=tools: theirs(m, t))
        refused += ours == "refused"
    assert refused < 4 or "firefunction" in path.stem  # it wants variables that nobody else has


def turn(n: int, reasoning: str | None) -> dict[str, Any]:
    arguments = [{"city": "Paris", "days": 2}, {"city": "Rome"}][:n]
    calls = [
        {
            "id": f"abcdef12{i}",
            "type": "function",
            "function": {"name": "get_weather", "arguments": value},
        }
        for i, value in enumerate(arguments)
    ]
    thought = {"reasoning_content": reasoning} if reasoning else {}
    return {"role": "assistant", "content": None, "tool_calls": calls, **thought}


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_a_format_reads_the_calls_that_its_template_writes(path: Path) -> None:
    template = path.read_text()
    form, thinking = tool_format(template), thinking_format(template)
    expected = [name for part, name in FORMATS.items() if part in path.stem]
    assert not expected or form.name in expected
    traits = traits_of(template, json.dumps(SPECIAL))
    n = 2 if traits.takes_many_calls else 1
    results = [
        {"role": "tool", "tool_call_id": f"abcdef12{i}", "content": f"RESULT-{i}"} for i in range(n)
    ]
    talk = [{"role": "user", "content": "Weather?"}, turn(n, "Hm."), *results]
    messages, tools = adapted(talk, TOOLS, traits, form)
    text = rendered(lambda: render_chat(template, messages, SPECIAL, tools))
    if "firefunction" in path.stem:
        assert text == "refused"
        return
    for i in range(n):
        assert f"RESULT-{i}" in text  # no result is dropped
    assert "get_weather" in text
    _, question, answer = text.partition("Weather?")
    assert question
    output = OutputFormat(
        tools=form,
        thinking=thinking,
        channels=thinking.channels if thinking else None,
        begins_in="header" if thinking and thinking.channels else "text",
        types=ArgumentTypes(TOOLS),
    )
    if output.channels is not None:
        _, _, answer = answer.partition(output.channels.start)
    parts = parsed(output, [answer[: answer.index("RESULT-0")]])
    calls = [(name, json.loads(arguments)) for name, arguments in parts.calls]
    written = [{"city": "Paris", "days": 2}, {"city": "Rome"}][:n]
    if form.is_bare or not traits.shows_calls or form.name == "command-r":
        return  # the role's header before the answer hides a call without marks
    assert calls == [("get_weather", value) for value in written]
