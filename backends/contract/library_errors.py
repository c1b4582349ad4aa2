"""What a library raised, as part of one line of ours."""

from __future__ import annotations

_MOST_CHARACTERS = 400


def one_line(error: BaseException) -> str:
    """All lines of the message joined, cut where they become a lecture."""
    text = " ".join(str(error).split()).rstrip(".") or type(error).__name__
    return text if len(text) <= _MOST_CHARACTERS else text[: _MOST_CHARACTERS - 4] + " ..."
