"""Remedies for words of a command line that a command does not take."""

from __future__ import annotations

from typing import Any

_REMEDIES = (
    ("Missing option '-m'", ": name a model, smollm2 for example"),
    ("No such command 'list'", ": use specdec models"),
    ("No such command 'show'", ": use specdec models, or specdec plan -m MODEL"),
)
"""Beginnings of typer's messages, and what is added to them."""
_EXTRA = "Got unexpected extra argument"
_PROMPT_OPTIONS = ("-p", "--prompt", "-f", "--file")
_CHAT = ": a chat takes its messages at its own prompt or from a pipe; specdec run takes -p"


def remedy_for(message: str, context: Any) -> str:
    """Return what is added to typer's message; "" where nothing helps.

    Args:
        context: typer's context of the command, or None.
    """
    if context is not None:
        if message.startswith(_EXTRA):
            return _remedy_for_extra_words(context)
        option = message.removeprefix("No such option: ").partition(" ")[0]
        if context.info_name == "chat" and option in _PROMPT_OPTIONS:
            return _CHAT
    return next((end for begin, end in _REMEDIES if message.startswith(begin)), "")


def _remedy_for_extra_words(context: Any) -> str:
    params = context.command.params
    names = {item.name for item in params}
    if context.info_name == "chat":
        return _CHAT
    if "prompt" in names:
        typed = {word.partition("=")[0] for word in context.obj.argv}
        given = next((option for option in _PROMPT_OPTIONS if option in typed), None)
        if given is None:
            return ": quote a prompt of several words, and name the model once"
        return (
            f": {given} gives the prompt already: leave one of the two out, or quote a prompt of "
            "several words"
        )
    if any(item.param_type_name == "argument" for item in params):
        return ""
    if "model" in names:
        return ": name the model once"
    if context.info_name == "recommend":
        return ": it takes options alone; specdec plan -m MODEL is about one model"
    return ": it takes options alone"
