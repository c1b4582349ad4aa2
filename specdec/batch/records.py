"""Output records: OpenAI's batch output, or the line's own fields and the answer.

Nothing in a record depends on when it was made, so that the same batch gives the same file byte by
byte: `created` of OpenAI's bodies is 0. Every record names the line that it answers, by number and
digest: a resumed batch goes by these.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from specdec.batch.lines import LineKey
from specdec.engine.sequences.outputs import CompletionOutput, GenerationResult
from specdec.text.contract import TokenSpeller
from specdec.text.logprobs import chat_logprobs, completion_logprobs
from specdec.text.token_strings import TokenStrings

INVALID = "invalid_request"
_OPENAI_ID = re.compile(r"batch_req_([0-9]{1,18})_([0-9a-f]{16})")
_DIGEST = re.compile(r"[0-9a-f]{16}")


class Form(Protocol):
    """Format of the record of a line."""

    def answered(
        self, key: LineKey, result: GenerationResult, tokenizer: TokenSpeller, model: str
    ) -> dict[str, Any]: ...

    def failed(self, key: LineKey, message: str) -> dict[str, Any]: ...


@dataclass(frozen=True)
class PlainForm:
    """Records of plain lines. repeated: fields of the line that are repeated."""

    repeated: Mapping[str, Any]

    def answered(
        self, key: LineKey, result: GenerationResult, tokenizer: TokenSpeller, model: str
    ) -> dict[str, Any]:
        outputs = [_plain_output(output) for output in result.outputs]
        record = {**_plain_key(key), **self.repeated, **outputs[0], "usage": _usage(result)}
        return record if len(outputs) == 1 else {**record, "outputs": outputs}

    def failed(self, key: LineKey, message: str) -> dict[str, Any]:
        return {**_plain_key(key), **self.repeated, "error": _error(message)}


@dataclass(frozen=True)
class OpenAiForm:
    """Records of OpenAI's batch format; also of unreadable lines, without a custom_id."""

    custom_id: str | None
    is_chat: bool

    def answered(
        self, key: LineKey, result: GenerationResult, tokenizer: TokenSpeller, model: str
    ) -> dict[str, Any]:
        choice = _chat_choice if self.is_chat else _completion_choice
        body = {
            "id": f"{'chatcmpl' if self.is_chat else 'cmpl'}-{key}",
            "object": "chat.completion" if self.is_chat else "text_completion",
            "created": 0,
            "model": model,
            "choices": [
                {
                    "index": index,
                    **choice(output, TokenStrings(tokenizer, result.prompt_token_ids)),
                    "finish_reason": output.finish_reason,
                    **output.note,
                }
                for index, output in enumerate(result.outputs)
            ],
            "usage": _usage(result),
        }
        return self._record(key, 200, body, None)

    def failed(self, key: LineKey, message: str) -> dict[str, Any]:
        detail = {
            "message": message,
            "type": "invalid_request_error",
            "param": None,
            "code": INVALID,
        }
        return self._record(key, 400, {"error": detail}, _error(message))

    def _record(
        self, key: LineKey, status: int, body: Mapping[str, Any], error: Mapping[str, str] | None
    ) -> dict[str, Any]:
        return {
            "id": f"batch_req_{key}",
            "custom_id": self.custom_id,
            "response": {"status_code": status, "request_id": f"req_{key}", "body": body},
            "error": error,
        }


def to_line(record: Mapping[str, Any]) -> bytes:
    """Encode a record as one line of JSON; escaped, for its text may be no valid UTF-8."""
    return json.dumps(record, allow_nan=False).encode() + b"\n"


def key_of(line: bytes) -> LineKey | None:
    """Return the key of the line that a record answers; None if it is no whole record of ours."""
    try:
        record = json.loads(line) if line.endswith(b"\n") else None
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict):
        return None
    number, digest = record.get("line"), record.get("digest")
    if number is None:
        match = _OPENAI_ID.fullmatch(str(record.get("id")))
        number, digest = (int(match[1]), match[2]) if match else (0, "")
    if type(number) is not int or not 1 <= number < 1 << 63 or not _DIGEST.fullmatch(str(digest)):
        return None
    return LineKey(number, int(str(digest), 16))


def is_error(record: bytes) -> bool:
    """Return whether a record, of ours, says that its line could not be answered."""
    return json.loads(record).get("error") is not None


def _plain_key(key: LineKey) -> dict[str, Any]:
    return {"line": key.number, "digest": key.hex_digest}


def _error(message: str) -> dict[str, str]:
    return {"code": INVALID, "message": message}


def _usage(result: GenerationResult) -> dict[str, int]:
    n_prompt = result.stats.prompt_tokens
    n_generated = sum(len(output.token_ids) for output in result.outputs)
    return {
        "prompt_tokens": n_prompt,
        "completion_tokens": n_generated,
        "total_tokens": n_prompt + n_generated,
    }


def _plain_output(output: CompletionOutput) -> dict[str, Any]:
    record: dict[str, Any] = {"text": output.text, "finish_reason": output.finish_reason}
    record |= output.note
    if output.seed is not None:
        record["seed"] = output.seed
    if output.logprobs is not None:
        record |= {"token_ids": output.token_ids, "logprobs": output.logprobs}
    if output.top_logprobs is not None:
        record["top_logprobs"] = output.top_logprobs
    return record


def _chat_choice(output: CompletionOutput, strings: TokenStrings) -> dict[str, Any]:
    logprobs = None
    if output.logprobs is not None:
        tops = output.top_logprobs
        logprobs = chat_logprobs(strings, output.token_ids, output.logprobs, tops)
    return {"message": {"role": "assistant", "content": output.text}, "logprobs": logprobs}


def _completion_choice(output: CompletionOutput, strings: TokenStrings) -> dict[str, Any]:
    logprobs = None
    if output.logprobs is not None:
        tops = output.top_logprobs
        logprobs = completion_logprobs(strings, output.token_ids, output.logprobs, tops)
    return {"text": output.text, "logprobs": logprobs}
