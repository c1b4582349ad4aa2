"""An output of a model, and what is in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

CALLS = (("get_weather", {"city": "Paris", "days": 2}), ("get_weather", {"city": "Rome"}))
FIRST = CALLS[:1]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "City."},
                    "days": {"type": "integer", "description": "Number of days."},
                    "code": {"type": "string", "description": "Code."},
                    "tags": {
                        "type": "array",
                        "description": "Tags.",
                        "items": {"type": "string"},
                    },
                },
                "required": ["city"],
            },
        },
    }
]


@dataclass(frozen=True)
class Sample:
    """An output in a format, and its parts."""

    tools: str
    text: str
    calls: tuple[tuple[str, dict[str, Any]], ...] = CALLS
    content: str = ""
    reasoning: str = ""
    thinking: str | None = None
    begins_in: str = "text"
