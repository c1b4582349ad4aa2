"""Parser of a line: OpenAI's batch format, or plain {"prompt": ...} and {"messages": ...}."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from hashlib import blake2b
from typing import Any

from offload.units import format_bytes
from specdec.batch.lines import MAX_LINE_BYTES, BatchError, Line
from specdec.batch.records import Form, OpenAiForm, PlainForm
from specdec.checks import ConfigError, check_type
from specdec.sampling.params import SamplingParams
from specdec.text import openai
from specdec.text.prompts import Prompt

MAX_DEPTH = 64
_TOO_DEEP = f"the line is nested more than {MAX_DEPTH} deep: flatten it"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"

# Fields of SamplingParams that a line may set, under their own names.
_SAMPLING = frozenset(
    "temperature top_k top_p min_p typical_p repetition_penalty frequency_penalty presence_penalty "
    "logit_bias no_repeat_ngram_size min_tokens max_tokens seed stop stop_token_ids ignore_eos "
    "json_schema json_object regex grammar n".split()
)
# Accepted and without effect in a batch.
_IGNORED = frozenset(("user", "metadata", "service_tier", "store", "safety_identifier"))
# Accepted with this value only, which is the default.
_ONLY: dict[str, Any] = {"stream": False, "echo": False, "best_of": 1}
_OF_PLAIN = frozenset(("id", "custom_id", "metadata", "model", "prompt", "messages", "logprobs"))
_OF_LINE = frozenset(("custom_id", "method", "url", "body"))
_OF_CHAT = frozenset(
    "model messages max_completion_tokens logprobs top_logprobs response_format".split()
)
_OF_COMPLETION = frozenset(("model", "prompt", "logprobs", "response_format"))
_CONTENTS = ("prompt", "messages")
_OF_MESSAGE = frozenset(("role", "content", "name"))
_JSON_TYPES = {
    list: "an array",
    str: "a string",
    int: "a number",
    float: "a number",
    bool: "a boolean",
    type(None): "null",
}


@dataclass(frozen=True)
class Rules:
    """Settings that hold for every line of a batch."""

    model: str
    """Name of the target, as it was given."""
    sampling: Mapping[str, Any]
    """Defaults for the lines, as fields of SamplingParams."""
    seed: int = 0
    """Seed of the run: a line without a seed gets one derived from this and its line number."""
    weights: str | None = None
    """Fingerprint of the target by `weights_fingerprint`; None: not known."""


class LineError(BatchError):
    """Invalid line. form: the format of its error record."""

    def __init__(self, message: str, form: Form) -> None:
        super().__init__(message)
        self.form = form


@dataclass(frozen=True)
class LineRequest:
    """Request of one line."""

    form: Form
    prompt: Prompt
    params: SamplingParams
    model: str | None
    """Model that the line names."""


def line_seed(run_seed: int, number: int) -> int:
    """Return the seed of a line that has none: the same however often the run is resumed."""
    digest = blake2b(f"{run_seed} {number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")


def read_request(line: Line, rules: Rules) -> LineRequest:
    """Parse a line. Raises LineError for an invalid one."""
    form: Form = OpenAiForm(None, is_chat=False)  # until the line is parsed
    try:
        value = _parse(line)
        if _OF_LINE & value.keys() - {"custom_id"}:
            custom_id = value.get("custom_id")
            url = value.get("url")
            form = OpenAiForm(custom_id if isinstance(custom_id, str) else None, url == CHAT)
            fields = _openai_fields(value)
        else:
            form = PlainForm({name: value[name] for name in value if name in _OF_PLAIN | _SAMPLING})
            fields = _plain_fields(value)
        prompt = _prompt(fields)
        params = _sampling_params(fields, line.number, rules)
        model = fields.get("model")
        check_type("model", model, str, type(None))
    except (BatchError, ConfigError) as error:
        raise LineError(str(error), form) from error
    return LineRequest(form, prompt, params, model)


def _parse(line: Line) -> dict[str, Any]:
    if line.n_bytes > MAX_LINE_BYTES:
        raise BatchError(
            f"the line has {format_bytes(line.n_bytes)}, but at most "
            f"{format_bytes(MAX_LINE_BYTES)} are read: shorten it"
        )
    try:
        text = line.data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BatchError(f"byte {error.start} of the line is not UTF-8: save it as UTF-8") from None
    try:
        value = json.loads(text, parse_float=_finite, parse_constant=_finite)
    except json.JSONDecodeError as error:
        place = f"at character {error.pos}"
        raise BatchError(f"the line is not JSON: {error.msg} {place}") from None
    except RecursionError:
        raise BatchError(_TOO_DEEP) from None
    except ValueError as error:
        reason = str(error).split(";")[0]  # the rest is advice for Python programmers
        raise BatchError(f"the line is not JSON that can be read: {reason}") from None
    if not isinstance(value, dict):
        raise BatchError(
            f"the line holds {_JSON_TYPES[type(value)]}: it must be an object, such as "
            '{"prompt": "..."}'
        )
    if not _is_shallow(value, MAX_DEPTH):
        raise BatchError(_TOO_DEEP)
    return value


def _is_shallow(value: Any, limit: int) -> bool:
    """Return whether lists and objects are nested at most `limit` deep."""
    if not isinstance(value, (dict, list)):
        return True
    inner = value.values() if isinstance(value, dict) else value
    return limit > 0 and all(_is_shallow(item, limit - 1) for item in inner)


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is no number that a record could repeat")
    return number


def _openai_fields(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body's fields under our names."""
    _refuse_unknown("the line", value, _OF_LINE)
    custom_id, method, url, body = (
        value.get(name) for name in ("custom_id", "method", "url", "body")
    )
    if not isinstance(custom_id, str):
        raise BatchError(
            f"custom_id is {_shown(custom_id)}, must be a string: answers are found by it"
        )
    if method != "POST":
        raise BatchError(f"method is {_shown(method)}, must be 'POST'")
    if url not in (CHAT, COMPLETIONS):
        raise BatchError(f"url is {_shown(url)}, must be {CHAT!r} or {COMPLETIONS!r}")
    if not isinstance(body, dict):
        raise BatchError(f"body is {_shown(body)}, must be an object")
    fields = _given(body)
    own = _OF_CHAT if url == CHAT else _OF_COMPLETION
    _refuse_unknown("body", fields, own | _SAMPLING | _IGNORED)
    fields["logprobs"] = _chat_logprobs(fields) if url == CHAT else _completion_logprobs(fields)
    fields |= _constraint(fields.pop("response_format", {"type": "text"}))
    limit = fields.pop("max_completion_tokens", None)
    if limit is not None and fields.setdefault("max_tokens", limit) != limit:
        raise BatchError(
            f"max_tokens is {_shown(fields['max_tokens'])} and max_completion_tokens is "
            f"{_shown(limit)}: leave one of them out"
        )
    return fields


def _plain_fields(value: Mapping[str, Any]) -> dict[str, Any]:
    fields = _given(value)
    if "prompt" not in fields and "messages" not in fields:
        near = [(name, get_close_matches(name[:64], _CONTENTS, 1)) for name in fields]
        hints = [f": {_shown(name)} should be {match[0]}" for name, match in near if match]
        raise BatchError(
            "the line has neither a prompt nor messages, nor OpenAI's custom_id, method, url, body"
            + "".join(hints[:1])
        )
    _refuse_unknown("the line", fields, _OF_PLAIN | _SAMPLING)
    return fields


def _given(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields without nulls and without those that only state a default."""
    return {
        name: item
        for name, item in value.items()
        if item is not None and not (name in _ONLY and item == _ONLY[name])
    }


def _refuse_unknown(where: str, value: Mapping[str, Any], known: frozenset[str]) -> None:
    unknown = [name for name in value if name not in known]
    if not unknown:
        return
    for name in unknown:
        if name in _ONLY:
            raise BatchError(
                f"{name} is {_shown(value[name])}: a batch has only {_shown(_ONLY[name])}"
            )
    names = ", ".join(_with_near_name(name, known) for name in unknown[:8])
    raise BatchError(f"{where} has fields that are not known here: {names}; leave them out")


def _with_near_name(name: str, known: frozenset[str]) -> str:
    near = get_close_matches(name[:64], sorted(known), 1)
    return f"{_shown(name)} (did you mean {near[0]}?)" if near else _shown(name)


def _constraint(response_format: Any) -> dict[str, Any]:
    """Return OpenAI's response_format as fields of SamplingParams."""
    kind = response_format.get("type") if isinstance(response_format, dict) else None
    spec = response_format.get("json_schema", {}) if kind == "json_schema" else {}
    schema = spec.get("schema") if isinstance(spec, dict) else spec
    is_known = kind in ("text", "json_object", "json_schema") and isinstance(spec, dict)
    if not is_known or not isinstance(schema, (dict, type(None))):
        raise BatchError(
            f"response_format is {_shown(response_format)}: its type must be text, json_object, or "
            "json_schema with an object json_schema.schema"
        )
    return openai.constraint(kind, schema)


def _chat_logprobs(fields: dict[str, Any]) -> bool | int:
    wants_logprobs, n_top = fields.get("logprobs", False), fields.pop("top_logprobs", 0)
    check_type("logprobs", wants_logprobs, bool)
    check_type("top_logprobs", n_top, int)
    try:
        return openai.logprobs(wants_logprobs, n_top)
    except ValueError as error:
        raise BatchError(str(error)) from error


def _completion_logprobs(fields: dict[str, Any]) -> bool | int:
    check_type("logprobs", fields.get("logprobs"), int, type(None))
    return openai.completion_logprobs(fields.get("logprobs"))


def _prompt(fields: Mapping[str, Any]) -> Prompt:
    prompt, messages = fields.get("prompt"), fields.get("messages")
    if prompt is not None and messages is not None:
        raise BatchError("the line has both a prompt and messages: leave one of them out")
    if messages is not None:
        check_type("messages", messages, list)
        return [_message(message) for message in messages]
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, list) or not all(type(token) is int for token in prompt):
        raise BatchError("the prompt must be one text or one list of token ids: one prompt a line")
    return prompt


def _message(message: Any) -> dict[str, str]:
    if not isinstance(message, dict):
        raise BatchError(
            f"messages holds {_shown(message)}: it must be objects with role and content"
        )
    given = _given(message)
    _refuse_unknown("a message", given, _OF_MESSAGE)
    content = given.pop("content", None)
    if isinstance(content, list):  # OpenAI's parts
        content = [_text_part(part) for part in content]
    elif content is not None and not isinstance(content, str):
        raise BatchError(f"content of a message is {_shown(content)}: it must be a text")
    for name in ("role", *("name",)[: "name" in given]):
        if not isinstance(given.get(name), str):
            raise BatchError(f"{name} of a message is {_shown(given.get(name))}: it must be a text")
    return openai.template_message(given["role"], content, name=given.get("name"))


def _text_part(part: Any) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    raise BatchError(
        f"content of a message holds {_shown(part)}: only parts of type 'text' are read"
    )


def _sampling_params(fields: Mapping[str, Any], number: int, rules: Rules) -> SamplingParams:
    given = {name: fields[name] for name in fields if name in _SAMPLING or name == "logprobs"}
    check_type("ignore_eos", given.get("ignore_eos", False), bool)
    if "logit_bias" in given:
        given["logit_bias"] = _token_biases(given["logit_bias"])
    given.setdefault("seed", line_seed(rules.seed, number))
    return SamplingParams(**{**rules.sampling, **given})


def _token_biases(bias: Any) -> dict[int, Any]:
    """Return {token id: bias}; the keys of a JSON object are strings."""
    try:
        return {int(token): value for token, value in dict(bias).items()}
    except (TypeError, ValueError):
        raise BatchError(
            f"logit_bias is {_shown(bias)}: it must be an object of token ids and numbers"
        ) from None


def _shown(value: Any) -> str:
    """Return a value for an error message, cut to 60 characters."""
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
