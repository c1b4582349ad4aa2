"""What can be told before anything heavy is imported, and notes on options without effect."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specdec.cli_groups import LoadOptions
from specdec.cli_options import OptionError
from specdec.cli_output import say
from specdec.models import check_local_name
from specdec.options import SELF_DRAFT

if TYPE_CHECKING:
    from specdec.api import LLM


def check_models(load: LoadOptions) -> None:
    """Raise ModelNotFound for names that lead nowhere; say what will not be used."""
    check_local_name(load.model)
    if load.draft_model is not None:
        if not load.draft_model.startswith(SELF_DRAFT):
            check_local_name(load.draft_model)
        why = _why_no_draft(load)
        if why:
            say(f"note: the draft model {load.draft_model} is not used: {why}")
    if load.draft_window is not None and (load.draft_model is None or _why_no_draft(load)):
        say("note: --draft-window has no effect without a draft model")


def check_prompt(text: str) -> None:
    if not text:
        raise OptionError("the prompt is empty: give some text with -p or -f")


def note_context(load: LoadOptions, ctx_size: int) -> None:
    """Say that the context is shorter than asked for."""
    if load.ctx_size is not None and ctx_size < load.ctx_size:
        say(f"note: --ctx-size {load.ctx_size} is cut to the model's {ctx_size}")


def check_chat_template(llm: LLM, name: str) -> None:
    if not llm.tokenizer.has_chat_template:
        raise OptionError(f"{name} has no chat template: use `specdec run`, or an instruct model")


def _why_no_draft(load: LoadOptions) -> str:
    keywords = load.as_keywords()
    if keywords["spec_type"] is not None and "draft" not in keywords["spec_type"]:
        return f"--spec-type is {load.spec_type}"
    return "--num-draft-tokens is 0" if keywords["num_draft_tokens"] == 0 else ""
