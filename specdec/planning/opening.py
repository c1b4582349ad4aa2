"""The models of a plan, without their weights."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from backends.contract.source import BackendOptions, ModelSource
from backends.heads.kinds import head_kind
from backends.heads.opened import mtp_source, open_head
from specdec.checks import ConfigError, FieldName
from specdec.models.heads import refuse_head
from specdec.models.names import MTP_HEAD, has_own_files, resolve_model
from specdec.models.opened import (
    OpenedModel,
    OpenedPair,
    SourcePair,
    Sources,
    has_tokenizer,
    open_model,
    open_source,
)
from specdec.models.outlines import planned_name
from specdec.run_options import RunOptions
from specdec.text.chat_format import chat_format
from specdec.text.vocabulary import compare_vocabularies

logger = logging.getLogger(__name__)


def open_to_plan(options: RunOptions) -> Sources:
    """Open the models, or outlines of those that are not on this disk.

    Raises what `open_pair` raises, and HubError.
    """
    draft_model = options.draft_model and planned_name(options.draft_model)
    options = replace(options, model=planned_name(options.model), draft_model=draft_model)
    named = [name for name in (options.model, options.draft) if name and has_own_files(name)]
    models = [path for path in map(resolve_model, named) if head_kind(path) is None]
    if all(map(has_tokenizer, models)):
        return open_pair(options)
    if len(models) > 1:
        logger.warning("no tokenizers here: whether the draft has the target's is not known")
    return open_sources(options)


def open_sources(options: RunOptions) -> SourcePair:
    """Open the models without weights and tokenizers. Raises what `plan_run` raises."""
    path = resolve_model(options.model)
    refuse_head(path)
    target = open_source(path, options.backend)
    _check_options(options, target)
    # Cache types apply to the target only: a draft's KV is small.
    of_draft = BackendOptions(options.backend.n_threads)
    draft: ModelSource | None = None
    if options.draft == MTP_HEAD:
        draft = mtp_source(target, of_draft)
    elif options.draft is not None:
        path = resolve_model(options.draft)
        draft = open_head(path, target, of_draft) or open_source(path, of_draft)
    return SourcePair((target, draft))


def open_pair(options: RunOptions) -> OpenedPair:
    """Open the models without weights. Raises what `plan_run` raises, BudgetExceeded excepted."""
    target = open_model(options.model, options.backend)
    if options.chat_template is not None:
        target.tokenizer.chat_format = chat_format(options.chat_template)
    if options.parse_special:
        form = replace(target.tokenizer.chat_format, parse_special=True)
        target.tokenizer.chat_format = form
    draft = None
    if options.draft == MTP_HEAD:
        options_of_head = BackendOptions(options.backend.n_threads)
        draft = replace(target, source=mtp_source(target.source, options_of_head))
    elif options.draft is not None:
        draft = _open_draft(options.draft, target, options)
    _check_options(options, target.source)
    return OpenedPair(target, draft)


def _open_draft(name: str | Path, target: OpenedModel, options: RunOptions) -> OpenedModel:
    """Open a draft head for this target, or a draft model."""
    # Cache types apply to the target only: a draft's KV is small.
    options_of_draft = BackendOptions(options.backend.n_threads)
    head = open_head(resolve_model(name), target.source, options_of_draft)
    if head is not None:
        return replace(target, source=head)
    draft = open_model(name, options_of_draft)
    compare_vocabularies(target.vocabulary, draft.vocabulary).require_compatible()
    return draft


def _check_options(options: RunOptions, target: ModelSource) -> None:
    if options.load_mode == "mmap" and not target.can_mmap:
        raise ConfigError(
            FieldName("load_mode"),
            f" mmap is for GGUF models: {options.model} can be streamed or loaded in ram",
        )
    limit, num_draft_tokens = target.max_tree_leaves, options.spec.num_draft_tokens
    if limit is not None and options.num_beams > limit:
        raise ConfigError(
            FieldName("num_beams"),
            f" is {options.num_beams}, but a GGUF target follows at most {limit} beams",
        )
    if limit is not None and num_draft_tokens is not None and num_draft_tokens > limit:
        raise ConfigError(
            FieldName("num_draft_tokens"),
            f" is {num_draft_tokens}, but a GGUF target verifies at most {limit} at a time",
        )
