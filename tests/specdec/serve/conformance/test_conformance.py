"""Conformance: one table of requests and what must come back, against two models."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("llguidance")

from conformance import Case, run_case
from conformance_chats import CHATS
from conformance_completions import COMPLETIONS
from conformance_messages import MESSAGES
from conformance_responses import RESPONSES
from conformance_status import STATUS
from conformance_tools import TOOLS
from serving import Server

from specdec.models.packaged import PACKAGED

CASES = [*COMPLETIONS, *CHATS, *TOOLS, *RESPONSES, *MESSAGES, *STATUS]
TEMPLATE = (
    "{% if tools %}<|im_start|>system\nTools: {{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}"
    "<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MIN_PASSING = 0.95


def smollm2() -> str:
    """Return the path of SmolLM2-135M-Instruct; skip where its package is not installed."""
    pytest.importorskip("llama_cpp")
    model = PACKAGED["smollm2"]
    if model.file() is None:
        pytest.skip(f"no {model.title}: {model.remedy}")
    return "smollm2"


@pytest.fixture(scope="module", params=["pair", pytest.param("smollm2", marks=pytest.mark.gguf)])
def model(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    template = tmp_path_factory.mktemp("template") / "chat.jinja"
    template.write_text(TEMPLATE)
    named = {"pair": ["pair:target", "-md", "pair:draft"]}.get(request.param) or [smollm2()]
    with Server(*named, "-c", "512", "--chat-template", str(template)) as started:
        yield started.ready()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_request_is_answered_as_elsewhere(model: Server, case: Case) -> None:
    problem = run_case(model, case)
    if case.reason:
        assert problem is not None, "it works now: leave the reason out"
    else:
        assert problem is None, problem


def test_nearly_all_cases_pass() -> None:
    failing = [case.name for case in CASES if case.reason]
    assert len(failing) <= (1 - MIN_PASSING) * len(CASES), failing


def test_every_case_has_its_own_name() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
