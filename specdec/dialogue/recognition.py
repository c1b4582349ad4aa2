"""Recognition of formats, from a chat template and from the added tokens of the vocabulary."""

from __future__ import annotations

from collections.abc import Collection

from specdec.dialogue.formats import ThinkingFormat, ToolFormat
from specdec.dialogue.thinking_formats import THINKING_FORMATS
from specdec.dialogue.tool_formats import HERMES, TOOL_FORMATS


def tool_format(template: str | None, tokens: Collection[str] = ()) -> ToolFormat:
    """Return the format of tool calls.

    template: jinja2 source. If it tells a model of no tools, the result has an `example`.
    tokens: texts of the vocabulary's added tokens, for a template without any mark.
    """
    source = template or ""
    by_template = [form for form in TOOL_FORMATS if _has_marks(form, source, ())]
    if not knows_tools(template):
        return next((form for form in by_template if form.example), HERMES)
    by_tokens = (form for form in TOOL_FORMATS if _has_marks(form, "", tokens))
    return by_template[0] if by_template else next(by_tokens, HERMES)


def knows_tools(template: str | None) -> bool:
    """Return whether a template describes tools to the model, rather than dropping them."""
    return template is not None and any(word in template for word in ("tools", "functions"))


def _has_marks(form: ToolFormat, template: str, tokens: Collection[str]) -> bool:
    return any(all(mark in template or mark in tokens for mark in marks) for marks in form.marks)


def thinking_format(template: str | None, tokens: Collection[str] = ()) -> ThinkingFormat | None:
    """Return the format of reasoning; None if neither the template nor the tokens show one."""
    for form in THINKING_FORMATS:
        marks = form.marks or form.opens[:1]
        if template is not None and all(mark in template for mark in marks):
            return form
    return next(
        (form for form in THINKING_FORMATS if not form.marks and form.opens[0] in tokens), None
    )
