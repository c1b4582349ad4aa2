"""The models of a run without weights: headers, tokenizer and vocabulary.

The only module that distinguishes model formats. Only the libraries of the formats in use are
imported: a GGUF pair runs without torch and transformers.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from backends.checkpoint.json_file import json_fault
from backends.checkpoint.kinds import read_raw
from backends.contract.backend import one_line
from backends.contract.source import BackendOptions, ModelSource
from backends.heads.kinds import head_kind
from offload.formats.gguf_header import GgufFile
from offload.formats.lfs import refuse_pointer
from offload.formats.tensors import CheckpointError
from specdec.models.heads import HeadFit, compare_head, refuse_head
from specdec.models.names import has_own_files, resolve_model
from specdec.text.contract import ChatTokenizer
from specdec.text.tokenizer import Tokenizer
from specdec.text.vocabulary import Compatibility, Vocabulary, compare_vocabularies

_TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model", "tekken.json", "merges.txt")
logger = logging.getLogger(__name__)
_MIN_SHARE = 0.9
"""Minimum share of a model's ids that have a token: known embeddings are padded by at most 3 %."""


PADDING_KEY = "specdec_padding_begin"
"""Entry of a config.json that `specdec-bench synth` writes: the first id that is padding."""


@dataclass(frozen=True)
class OpenedModel:
    """A model without weights, with its tokenizer."""

    source: ModelSource
    tokenizer: ChatTokenizer
    vocabulary: Vocabulary
    eos_token_ids: tuple[int, ...]
    """Tokens that end a sequence, unless the request has others."""
    chat_eos_token_ids: tuple[int, ...] = ()
    """Tokens that end an answer of a conversation: all that any of the model's files names."""


@dataclass(frozen=True)
class OpenedPair:
    """The models of a run, without weights."""

    target: OpenedModel
    draft: OpenedModel | None

    @property
    def sources(self) -> tuple[ModelSource, ModelSource | None]:
        return self.target.source, None if self.draft is None else self.draft.source


class Sources(Protocol):
    """A target and its draft, as plans need them."""

    @property
    def sources(self) -> tuple[ModelSource, ModelSource | None]: ...


@dataclass(frozen=True)
class SourcePair:
    """Models to plan and not to run, which takes no tokenizer."""

    sources: tuple[ModelSource, ModelSource | None]


def is_gguf(path: Path) -> bool:
    """Return whether a path of `resolve_model` is a GGUF file, not a checkpoint's directory."""
    return path.is_file()


def import_libraries(name: str | Path) -> None:
    """Import the libraries of `open_model`. Raises what `resolve_model` raises."""
    if is_gguf(resolve_model(name)):
        import backends.llama.source
    else:
        import backends.hf.source  # noqa: F401


def open_model(name: str | Path, options: BackendOptions) -> OpenedModel:
    """Read the headers and the tokenizer of a model; see `resolve_model` for names.

    Raises:
        SpecdecError: the model cannot be found, read or run; one line.
    """
    path = resolve_model(name)
    refuse_head(path)
    opened = _open_gguf(path, options) if is_gguf(path) else _open_checkpoint(path, options)
    _refuse_no_tokens(name, opened.vocabulary)
    declared = None if is_gguf(path) else read_raw(path).get(PADDING_KEY)
    _warn_of_few_tokens(name, opened.vocabulary, declared)
    return opened


def open_source(path: Path, options: BackendOptions) -> ModelSource:
    """Read the headers of a model, as `resolve_model` returns it; no tokenizer is needed."""
    if is_gguf(path):
        from backends.llama.source import GgufSource

        return GgufSource(path, options)
    from backends.hf.source import HfSource

    return HfSource(path, options)


def has_tokenizer(path: Path) -> bool:
    """Return whether a model, as `resolve_model` returns it, has a tokenizer beside its headers."""
    if is_gguf(path):
        return "tokenizer.ggml.tokens" in GgufFile.read(path).metadata
    return any(any(path.glob(pattern)) for pattern in _TOKENIZER_FILES)


def _warn_of_few_tokens(name: str | Path, vocabulary: Vocabulary, padding_begin: Any) -> None:
    """Log that ids have no token. padding_begin: the first id of padding, by the config."""
    n_tokens, num_tokens = len(vocabulary.tokens), vocabulary.num_tokens
    n_used = padding_begin if type(padding_begin) is int else num_tokens
    if n_tokens < _MIN_SHARE * min(n_used, num_tokens):
        logger.warning(
            f"the tokenizer of {name} has {n_tokens} tokens, the model {num_tokens}: the others "
            "are never chosen; if they are not padding, take the original model's tokenizer"
        )


def _refuse_no_tokens(name: str | Path, vocabulary: Vocabulary) -> None:
    """Raise CheckpointError where there is no token that could be chosen."""
    if not vocabulary.tokens:
        raise CheckpointError(
            f"the tokenizer of {name} has no token in use, the model {vocabulary.num_tokens}: take "
            "the original model's tokenizer, or convert the original model again"
        )


def read_vocabulary(name: str | Path) -> Vocabulary:
    """Read a model's vocabulary; a checkpoint's weights may be missing.

    The header of a GGUF file is checked as for a run, before llama.cpp reads it.
    """
    vocabulary = _read_vocabulary(resolve_model(name))
    _refuse_no_tokens(name, vocabulary)
    return vocabulary


def _read_vocabulary(path: Path) -> Vocabulary:
    refuse_head(path)
    if is_gguf(path):
        return _open_gguf(path, BackendOptions()).vocabulary
    import backends.hf  # noqa: F401  # first: it bounds how long torch's threads spin
    from backends.checkpoint.config import load_config

    num_tokens = load_config(path).get_text_config().vocab_size
    return Vocabulary.from_tokenizer(Tokenizer.from_pretrained(path).hf_tokenizer, num_tokens)


def compare_draft(target: str | Path, draft: str | Path) -> Compatibility | HeadFit:
    """Compare a target with its draft model or head by name, as `specdec check` does.

    A head is compared by its shapes, so the target's weights must be there.
    """
    if has_own_files(draft) and head_kind(resolve_model(draft)) is None:
        return compare_models(target, draft)
    source = open_model(target, BackendOptions()).source
    return compare_head(source, str(target), str(draft))


def compare_models(target: str | Path, draft: str | Path) -> Compatibility:
    """Compare the vocabularies of two models by name."""
    return compare_vocabularies(read_vocabulary(target), read_vocabulary(draft))


def _open_checkpoint(directory: Path, options: BackendOptions) -> OpenedModel:
    from backends.hf.source import HfSource

    source = HfSource(directory, options)
    tokenizer = Tokenizer.from_pretrained(directory)
    vocabulary = Vocabulary.from_tokenizer(tokenizer.hf_tokenizer, source.vocab_size)
    whole = source.model.model.config
    configured = getattr(whole, "eos_token_id", None) or source.model.config.eos_token_id
    named = _named_eos_ids(directory, configured)
    # As transformers: the generation config's ids replace the others, where it has any.
    eos = next((ids for ids in named if ids), tokenizer.eos_token_ids)
    all_eos = tuple(dict.fromkeys(i for ids in (*named, tokenizer.eos_token_ids) for i in ids))
    return OpenedModel(source, tokenizer, vocabulary, eos, all_eos)


def _open_gguf(path: Path, options: BackendOptions) -> OpenedModel:
    from backends.llama.source import GgufSource
    from specdec.text.gguf_tokenizer import GgufTokenizer

    source = GgufSource(path, options)
    tokenizer = GgufTokenizer.from_file(path, source.trial.text_limits)
    eos = tokenizer.eos_token_ids  # llama.cpp finds all ids in a file
    return OpenedModel(source, tokenizer, tokenizer.vocabulary(), eos, eos)


def _named_eos_ids(directory: Path, configured: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the end-of-sequence ids of generation_config.json, and those of the model's config.

    configured: eos_token_id of config.json; a wrapper's own, if it has any, before its text part's.
    """
    from transformers import GenerationConfig

    eos: Any = None
    path = directory / "generation_config.json"
    if path.is_file():
        refuse_pointer(path)
        try:
            eos = GenerationConfig.from_pretrained(directory).eos_token_id
        except Exception as error:  # whatever a broken file makes the library raise
            fault = json_fault(path) or f"cannot be read: {one_line(error)}"
            raise CheckpointError(f"{path} {fault}: fix it or remove it") from error
    return _token_ids(directory, eos), _token_ids(directory, configured)


def _token_ids(directory: Path, eos: Any) -> tuple[int, ...]:
    if eos is None:
        return ()
    ids = tuple(eos) if isinstance(eos, (list, tuple)) else (eos,)
    if not all(type(token_id) is int and token_id >= 0 for token_id in ids):
        raise CheckpointError(
            f"{directory}: eos_token_id is {eos!r}, must be a token id or a list of them: "
            "fix generation_config.json or config.json"
        )
    return ids
