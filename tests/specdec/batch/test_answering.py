"""Lines answered by a tiny model: records of both formats, and per-line errors."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from tiny_pair import save_model

import specdec
from offload.storage.direct_io import StorageError
from specdec.api import LLM
from specdec.batch.answering import Answer, answer_lines
from specdec.batch.lines import Line
from specdec.batch.records import key_of
from specdec.batch.request import CHAT, COMPLETIONS, Rules
from specdec.checks import ConfigError
from specdec.engine.stream import GenerationStream
from specdec.sampling.params import SamplingParams
from specdec.text.prompts import PromptError

RULES = Rules("the-model", {"max_tokens": 6})


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    model = save_model(tmp_path_factory.mktemp("model"), seed=1)
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    (model / "chat_template.jinja").write_text(template)
    with specdec.load(model, ctx_size=64, threads=1) as loaded:
        yield loaded


def lines_of(*values: Any) -> list[Line]:
    data = [json.dumps(value).encode() for value in values]
    return [Line(index + 1, 7, item, len(item)) for index, item in enumerate(data)]


def answers_to(llm: LLM, *values: Any, rules: Rules = RULES) -> list[Answer]:
    actual: list[Answer] = []
    answer_lines(llm, iter(lines_of(*values)), rules, actual.append)
    return actual


def record_of(llm: LLM, value: Any, rules: Rules = RULES) -> dict[str, Any]:
    (answer,) = answers_to(llm, value, rules=rules)
    assert key_of(answer.record) == answer.key
    return json.loads(answer.record)


def body_of(llm: LLM, url: str, **body: Any) -> dict[str, Any]:
    value = {"custom_id": "one", "method": "POST", "url": url, "body": {"model": "gpt", **body}}
    record = record_of(llm, value)
    assert record["custom_id"] == "one"
    assert record["error"] is None
    assert record["response"]["status_code"] == 200
    return record["response"]["body"]


def test_a_plain_record_has_the_lines_fields_and_the_text(llm: LLM) -> None:
    record = record_of(llm, {"prompt": "abc", "id": 5})
    text = llm.generate("abc", max_tokens=6).text
    usage = {"prompt_tokens": 3, "completion_tokens": 6, "total_tokens": 9}
    del record["digest"]
    assert record == {
        "line": 1,
        "prompt": "abc",
        "id": 5,
        "text": text,
        "finish_reason": "length",
        "usage": usage,
    }


def test_a_sampled_record_has_the_seed_that_gives_it_again(llm: LLM) -> None:
    line = {"prompt": "abc", "temperature": 1, "n": 2, "logprobs": 1}
    record = record_of(llm, line)
    result = llm.generate("abc", max_tokens=6, temperature=1.0, n=2, seed=record["seed"])
    assert [item["text"] for item in record["outputs"]] == [
        output.text for output in result.outputs
    ]
    assert record["usage"]["completion_tokens"] == 12
    assert len(record["logprobs"]) == len(record["top_logprobs"]) == len(record["token_ids"]) == 6
    assert record_of(llm, line) == record
    other = record_of(llm, line, Rules("the-model", {"max_tokens": 6}, seed=1))
    assert other["text"] != record["text"]


def test_a_chat_is_answered_in_openais_format(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hi"}]
    body = body_of(llm, CHAT, messages=messages, logprobs=True, top_logprobs=2)
    assert (body["object"], body["model"], body["created"]) == ("chat.completion", "the-model", 0)
    (choice,) = body["choices"]
    result = llm.generate(messages, max_tokens=6, logprobs=2)
    assert choice["message"] == {"role": "assistant", "content": result.text}
    assert choice["finish_reason"] == "length"
    content = choice["logprobs"]["content"]
    assert [item["logprob"] for item in content] == list(result.logprobs or ())
    data = b"".join(bytes(item["bytes"]) for item in content)
    assert data.decode(errors="replace") == result.text
    assert all(len(item["top_logprobs"]) in (2, 3) for item in content)
    assert body["usage"]["completion_tokens"] == 6


def test_what_ends_an_answer_of_a_conversation_ends_it(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chat format's own stop sequences end the answer, as in the server."""
    messages = [{"role": "user", "content": "hi"}]
    text = llm.generate(messages, max_tokens=6).text
    form = replace(llm.tokenizer.chat_format, stop=(text[2:4],))
    monkeypatch.setattr(llm.tokenizer, "chat_format", form)
    cut = text[: text.index(text[2:4])]
    assert record_of(llm, {"messages": messages})["text"] == cut
    assert record_of(llm, {"messages": messages, "stop": "no"})["text"] == cut


def test_a_completion_is_answered_in_openais_format(llm: LLM) -> None:
    body = body_of(llm, COMPLETIONS, prompt="abc", temperature=1, n=2, seed=3, logprobs=2)
    result = llm.generate("abc", max_tokens=6, temperature=1.0, n=2, seed=3)
    assert [item["text"] for item in body["choices"]] == [output.text for output in result.outputs]
    assert [item["index"] for item in body["choices"]] == [0, 1]
    assert len(body["choices"][0]["logprobs"]["tokens"]) == 6
    assert body["object"] == "text_completion"


def test_what_is_wrong_with_one_line_is_its_record(llm: LLM) -> None:
    chat = {"custom_id": "c", "method": "POST", "url": CHAT, "body": {"messages": []}}
    actual = answers_to(llm, {"prompt": "a" * 100}, {"prompt": ""}, [], chat, {"prompt": "abc"})
    assert [item.is_error for item in actual] == [True, True, True, True, False]
    records = [json.loads(item.record) for item in actual]
    assert "100 tokens, which leaves no room in the context of 64" in records[0]["error"]["message"]
    assert records[0]["prompt"] == "a" * 100
    assert "empty" in records[1]["error"]["message"]
    assert records[2]["custom_id"] is None
    assert records[3]["custom_id"] == "c"
    assert records[3]["response"]["status_code"] == 400
    assert "empty" in records[3]["response"]["body"]["error"]["message"]


# --- LLM.generate_each -----------------------------------------------------------------------


def test_each_request_has_its_result(llm: LLM) -> None:
    prompts = ["abc", "", "de", [5, 6], "a" * 100]
    actual = dict(llm.generate_each((prompt, SamplingParams(max_tokens=4)) for prompt in prompts))
    assert sorted(actual) == [0, 1, 2, 3, 4]
    for index in (0, 2, 3):
        assert actual[index].text == llm.generate(prompts[index], max_tokens=4).text  # type: ignore[union-attr]
    assert isinstance(actual[1], PromptError)
    assert isinstance(actual[4], PromptError)


def test_a_request_that_is_no_pair_is_refused_alone(llm: LLM) -> None:
    requests: list[Any] = [3, ("abc",), "abc", ("abc", SamplingParams(max_tokens=1))]
    actual = dict(llm.generate_each(requests))
    assert [isinstance(actual[i], ConfigError) for i in range(4)] == [True, True, True, False]
    assert "must be (prompt, sampling parameters)" in str(actual[0])


def test_requests_are_drawn_as_capacity_permits(llm: LLM) -> None:
    n_drawn = 0

    def endless() -> Iterator[tuple[str, SamplingParams]]:
        nonlocal n_drawn
        while True:
            n_drawn += 1
            yield "abc", SamplingParams(max_tokens=2)

    results = llm.generate_each(endless())
    for _ in range(3):
        next(results)
    assert n_drawn < 2000


def test_many_requests_in_a_row_that_cannot_be_answered_do_not_end_the_others(llm: LLM) -> None:
    prompts = ["a" * 100] * 50 + ["abc"] + [""] * 50 + ["de"]
    actual = dict(llm.generate_each((prompt, SamplingParams(max_tokens=2)) for prompt in prompts))
    assert sorted(actual) == list(range(102))
    assert [index for index in actual if not isinstance(actual[index], PromptError)] == [50, 101]


def test_answered_requests_are_freed(llm: LLM) -> None:
    requests = (("abc", SamplingParams(max_tokens=1)) for _ in range(60))
    for index, _ in llm.generate_each(requests):
        if index == 50:
            streams = [item for item in gc.get_objects() if type(item) is GenerationStream]
            pinned = [stream for stream in streams if stream._session is llm.session]
            assert len(pinned) <= 2 * llm.session.options.max_num_seqs


def test_what_concerns_all_requests_is_raised(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a record it would repeat for every later line."""

    def fail(*_: object, **__: object) -> None:
        raise StorageError("the disk is gone")

    monkeypatch.setattr(llm.target, "forward", fail)
    with pytest.raises(StorageError):
        list(llm.generate_each([("xyz", SamplingParams(max_tokens=2))] * 2))
