"""Normalise sampling options: store tuples where lists or single items may be given."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from specdec.checks import ConfigError, FieldName, as_float, check_type
from specdec.grammar.constraint import schema_text


def stored_values(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the normalised values of options that may be given in several forms.

    given: values by option. Raises ConfigError with the option's name.
    """
    new: dict[str, Any] = {"temperature": as_float("temperature", given["temperature"])}
    stop = () if given["stop"] is None else given["stop"]
    check_type("stop", stop, str, list, tuple)
    new["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
    new["json_schema"] = schema_text(given["json_schema"])
    for name, stored in _STORED_AS.items():
        value = given[name]
        try:
            new[name] = stored(value)
        except (TypeError, ValueError, OverflowError) as error:
            raise ConfigError(
                FieldName(name), f" is {value!r:.80}, of the wrong shape: {error}"
            ) from error
    return new


def _one_or_more(value: Any) -> Any:
    return (value,) if isinstance(value, int) else tuple(value)


def _start_and_factor(value: Any) -> tuple[int, float]:
    start, factor = value
    return int(start), float(factor)


def _items(value: Any) -> Iterable[Any]:
    return () if value is None else value


def _pairs(value: Any) -> Iterable[tuple[Any, Any]]:
    return value.items() if isinstance(value, Mapping) else _items(value)


def _or_none(stored: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else stored(value)


_STORED_AS: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(
        ("suppress_tokens", "begin_suppress_tokens", "stop_token_ids"),
        lambda value: tuple(_items(value)),
    ),
    **dict.fromkeys(("forced_eos_token_id", "eos_token_ids"), _or_none(_one_or_more)),
    "bad_words_ids": lambda value: tuple(tuple(word) for word in _items(value)),
    "sequence_bias": lambda value: tuple((tuple(ids), float(bias)) for ids, bias in _pairs(value)),
    "logit_bias": lambda value: tuple((token, float(bias)) for token, bias in _pairs(value)),
    "exponential_decay_length_penalty": _or_none(_start_and_factor),
}
"""Conversions of fields that may be given in several forms."""
