"""Byte counts: GB and GiB differ, invalid input is refused in one line."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.errors import SpecdecError
from offload.units import GIB, MIB, UnitError, format_bytes, format_down, parse_bytes


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [
        ("3.5GiB", 3758096384),
        ("6GB", 6 * 10**9),
        ("6gb", 6 * 10**9),
        ("512MiB", 2**29),
        ("512 MiB ", 2**29),
        ("4G", 2**32),
        ("4096B", 4096),
        (4096, 4096),
        ("0B", 0),
        (".5k", 512),
        ("1.b", 1),
        ("7B", 7),
        ("2TiB", 2**41),
        ("1PB", 10**15),
        ("0.0000001GB", 100),
        ("0.3B", 0),
    ],
)
def test_parses(text: str | int, n_bytes: int) -> None:
    assert parse_bytes(text) == n_bytes


@pytest.mark.parametrize(
    "text",
    ["", " ", "GiB", "-1", "1e3", "1,5G", "1 zb", "1GiBs", "0x10", "٣G", "1\n2", "9" * 400, -1,
     2**63, "9000PiB", 1.5, None, True, "nan", "inf", "1.2.3G", "+5"],
)  # fmt: skip
def test_refuses(text: object) -> None:
    with pytest.raises(UnitError) as caught:
        parse_bytes(text)  # type: ignore[arg-type]
    assert isinstance(caught.value, SpecdecError)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["3.5", "4096", "0", " 6 ", ".5"])
def test_asks_for_a_unit(text: str) -> None:
    with pytest.raises(UnitError, match="has no unit; write for example 3.5GiB, 6GB or 4096B"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (2**20 - 1, "1.00 MiB"),
        (3758096384, "3.50 GiB"),
        (2**50, "1.00 PiB"),
        (-1536, "-1.50 KiB"),
    ],
)
def test_formats(n_bytes: int, text: str) -> None:
    assert format_bytes(n_bytes) == text


@given(st.integers(0, 2**62))
def test_formatted_text_parses_back_to_within_its_digits(n_bytes: int) -> None:
    assert abs(parse_bytes(format_bytes(n_bytes)) - n_bytes) <= max(1, n_bytes * 0.006)


def test_a_limit_is_not_exceeded_when_it_is_typed_in() -> None:
    text = format_down(25276518400)
    assert text == "24105 MiB (23.54 GiB)"
    assert 25276518400 - MIB < parse_bytes(text.partition(" (")[0]) <= 25276518400
    assert format_down(GIB - 1) == "1023 MiB"


@given(st.text(max_size=30))
def test_any_text_gives_a_count_or_a_unit_error(text: str) -> None:
    with contextlib.suppress(UnitError):
        assert parse_bytes(text) >= 0
