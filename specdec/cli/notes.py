"""Checks before heavy imports, and notes on options without effect."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from offload.units import format_bytes
from specdec.cli.output import say, say_hint
from specdec.models.names import check_local_draft, check_local_name, resolve_headers
from specdec.models.weight_files import weight_files
from specdec.pair import PAIR_PREFIX
from specdec.run_options import OFF, RunOptions

if TYPE_CHECKING:
    from specdec.api import LLM
    from specdec.planning.run_plan import RunPlan


def check_models(load: RunOptions) -> None:
    """Raise ModelNotFound for unknown names; print notes on options without effect."""
    check_local_name(load.model)
    if load.draft_model is not None:
        check_local_draft(load.draft_model)
        why = _why_no_draft(load)
        if why:
            say(f"note: the draft model {load.draft_model} is not used: {why}")
    if load.draft_window is not None and (load.draft_model is None or _why_no_draft(load)):
        say("note: --draft-window has no effect without a draft model")
    for option, why in _without_effect(load):
        say(f"note: {option} has no effect: {why}")


def note_plan(load: RunOptions, plan: RunPlan) -> None:
    """Print notes on options that the plan cannot follow."""
    if load.exact != OFF and not plan.exactness.is_exact:
        say(f"note: the output may differ from plain decoding's: {plan.exactness.reason}")
    if load.prefetch_depth is not None and not plan.placement.n_streamed_layers:
        say("note: --prefetch-depth has no effect: no layer of the target streams")
    # The weights of a GGUF file that are not streamed are llama.cpp's to read.
    is_read_by_us = plan.placement.streams or not resolve_headers(load.model).is_file()
    if load.io_threads is not None and not is_read_by_us:
        say("note: --io-threads has no effect: nothing of the target streams")
    if plan.uses_mmap:
        _note_mapped(load, plan.budget_bytes)


def say_plan_notes(plan: RunPlan) -> None:
    """Print the notes of the plan itself, which `specdec plan` prints among its lines."""
    for note in plan.notes:
        say(f"note: {note}")


def _note_mapped(load: RunOptions, budget_bytes: int) -> None:
    files = weight_files(resolve_headers(load.model))
    n_bytes = sum(path.stat().st_size for path in files)
    if n_bytes > budget_bytes:
        say(
            f"note: --load-mode mmap maps {format_bytes(n_bytes)} of weights, more than the memory "
            f"budget of {format_bytes(budget_bytes)}: their pages are the page cache's, which "
            "specdec neither counts nor limits; the peak shown may be above the budget"
        )


def note_plain_transcript(llm: LLM) -> None:
    """Print a note if the model has no chat template."""
    if not llm.tokenizer.has_chat_template and llm.session.options.chat_template is None:
        say(
            "note: the model has no chat template: it is given a plain transcript; "
            "--chat-template names another form, an instruct model has its own"
        )


def note_embedded(model: str | Path) -> None:
    """Print a hint if the model is one of the embedded ones, which answer no questions."""
    if str(model).startswith(PAIR_PREFIX):
        say_hint(
            f"{model} is for demonstrations and tests: it continues Python source and answers no "
            "questions; for answers use -m smollm2"
        )


def _without_effect(load: RunOptions) -> Iterator[tuple[str, str]]:
    """Yield drafting options without effect, and the reason."""
    if not load.spec.spec_type:
        given = {
            "--tree-width": load.tree_width is not None,
            "--acceptance": load.acceptance != "match",
            "--accept-threshold": load.accept_threshold is not None,
            "--draft-ahead": load.draft_ahead == "on",
        }
        yield from ((name, "nothing is drafted") for name, is_given in given.items() if is_given)
    elif load.draft_ahead == "on":
        if load.draft_model is None or _why_no_draft(load):
            yield "--draft-ahead", "only a draft model drafts ahead"
        elif load.acceptance != "match":
            yield "--draft-ahead", f"chains for {load.acceptance} are drawn before each pass"


def _why_no_draft(load: RunOptions) -> str:
    if load.spec_type is not None and "draft" not in load.spec_type:
        return f"--spec-type is {','.join(load.spec_type) or 'none'}"
    return "--num-draft-tokens is 0" if load.num_draft_tokens == 0 else ""
