"""The tokenizer of a transformers checkpoint.

Nothing here imports transformers until a tokenizer is loaded.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from backends.checkpoint.json_file import json_fault
from backends.checkpoint.kinds import read_object
from backends.contract.backend import one_line
from offload.formats.lfs import refuse_pointer
from specdec.text.byte_runs import ByteRuns
from specdec.text.chat_format import DEFAULT_OPTIONS, PLAIN, ChatFormat, TemplateOptions
from specdec.text.contract import TokenizerError
from specdec.text.control_tokens import AddedToken, with_one_bos
from specdec.text.conversation import encode_conversation
from specdec.text.detokenizer import UNFINISHED
from specdec.text.token_bytes import HfTokenBytes

# transformers makes a tokenizer from any of these.
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "tekken.json",
)
_JSON_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.json")
_WHOLE_FILE = ("tokenizers", "TokenizersBackend")
"""backend and tokenizer_class of tokenizer_config.json, if tokenizer.json is all there is."""
_BESIDE_TOKENIZERS = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
    "chat_template.json",
    "chat_template.jinja",
)


def grammar_slices() -> list[str]:
    """Return the slice of llguidance's tokenizers with the tokens allowed anywhere in JSON strings.

    They are checked together where all of them may follow, which is 15 times faster. For 150 000
    tokens such a slice takes 13 MB; the three other default slices are for strings of limited
    lengths.
    """
    from llguidance import LLTokenizer

    return LLTokenizer.general_slices()[-1:]


class Tokenizer:
    """A transformers tokenizer with the few operations that generation needs."""

    def __init__(self, hf_tokenizer: Any) -> None:
        self.hf_tokenizer = hf_tokenizer
        ids = hf_tokenizer.get_vocab().values()
        self._n_tokens = max(len(hf_tokenizer), max(ids, default=-1) + 1)
        self._bytes, self._byte_runs = HfTokenBytes(self, hf_tokenizer), ByteRuns(hf_tokenizer)
        self._settings = threading.Lock()  # parsing special tokens is a setting of the whole object
        own = getattr(hf_tokenizer, "chat_template", None)
        self.has_chat_template = bool(own)
        self.chat_format = _own_format(own) if own else PLAIN

    @classmethod
    def from_pretrained(cls, path: str | Path) -> Tokenizer:
        """Load from a checkpoint directory; code in the checkpoint is never run."""
        return cls(_load_hf_tokenizer(Path(path)))

    @property
    def n_tokens(self) -> int:
        """Number of ids with a token; higher ids are padding rows without text."""
        return self._n_tokens

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The tokenizer's end-of-sequence id, if it has one (a model may define more)."""
        eos = self.hf_tokenizer.eos_token_id
        return () if eos is None else (int(eos),)

    def encode(
        self,
        text: str,
        *,
        add_special_tokens: bool = True,
        parse_special: bool = True,
        is_start: bool = True,
    ) -> list[int]:
        """See ChatTokenizer."""
        with self._settings, _first_space(self.hf_tokenizer, is_start):
            ids = self._encode(text, add_special_tokens, parse_special)
            bos = getattr(self.hf_tokenizer, "bos_token_id", None)
            return with_one_bos(ids, bos, lambda: self._encode(text, False, parse_special))

    def _encode(self, text: str, add_special_tokens: bool, parse_special: bool) -> list[int]:
        # Some tokenizers (Mistral's own) refuse the argument, and parse none in any case.
        how = {} if parse_special else {"split_special_tokens": True}
        try:
            ids = self.hf_tokenizer.encode(text, add_special_tokens=add_special_tokens, **how)
        except Exception as error:  # a bare one without a token for unknown text
            raise TokenizerError(
                f"the model's tokenizer cannot read the text {text[:40]!r}: {one_line(error)}: "
                "write it otherwise, or take the tokenizer files of the original model"
            ) from error
        return [int(i) for i in ids]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens; special tokens have none, bytes that are no UTF-8 U+FFFDs."""
        text = self._decode(token_ids)
        return self._decode(self._byte_runs.valid(token_ids)) if UNFINISHED in text else text

    def _decode(self, token_ids: Sequence[int]) -> str:
        return str(
            self.hf_tokenizer.decode(
                list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        )

    def token_bytes(self, token_id: int) -> bytes:
        """See TokenSpeller."""
        return self._bytes(token_id)

    def token_name(self, token_id: int) -> str:
        """See TokenSpeller."""
        name = None
        if 0 <= token_id < self.n_tokens:
            name = self.hf_tokenizer.convert_ids_to_tokens(token_id)
        return f"token_id:{token_id}" if name is None else str(name)

    @cached_property
    def added_tokens(self) -> Mapping[str, AddedToken]:
        """Added tokens by their text. The token for unknown text is not a control token."""
        unknown = getattr(self.hf_tokenizer, "unk_token_id", None)
        return {
            token.content: AddedToken(
                int(i), token.special and i != unknown, token.lstrip, token.rstrip
            )
            for i, token in getattr(self.hf_tokenizer, "added_tokens_decoder", {}).items()
        }

    @property
    def template_tokens(self) -> Mapping[str, Any]:
        return dict(self.hf_tokenizer.special_tokens_map)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] = (),
        options: TemplateOptions = DEFAULT_OPTIONS,
    ) -> list[int]:
        """Return the token ids of a conversation, up to the assistant's answer."""
        return encode_conversation(self, messages, tools, options)

    def grammar_tokenizer(self, end_ids: tuple[int, ...]) -> Any:
        """Return llguidance's LLTokenizer of this vocabulary. Raises ValueError if unsupported."""
        from llguidance.hf import from_tokenizer

        ends, slices = list(end_ids), grammar_slices()
        return from_tokenizer(self.hf_tokenizer, eos_token=ends, slices=slices)


@contextmanager
def _first_space(hf_tokenizer: Any, is_start: bool) -> Iterator[None]:
    """Disable Metaspace's space before a text's first word, where the text follows a control
    token."""
    backend = getattr(hf_tokenizer, "backend_tokenizer", None)
    first = [] if is_start or backend is None else list(_at_first(backend.pre_tokenizer))
    for metaspace in first:
        metaspace.prepend_scheme = "never"
    try:
        yield
    finally:
        for metaspace in first:
            metaspace.prepend_scheme = "first"


def _at_first(pre_tokenizer: Any) -> Iterator[Any]:
    if type(pre_tokenizer).__name__ == "Sequence":
        for part in pre_tokenizer:
            yield from _at_first(part)
    elif getattr(pre_tokenizer, "prepend_scheme", None) == "first":
        yield pre_tokenizer


def _own_format(template: Any) -> ChatFormat:
    """Return the format of a template; of several, the two that transformers uses.

    Raises TokenizerError.
    """
    named = template if isinstance(template, dict) else {"default": template}
    for text in named.values():
        if not isinstance(text, str):
            raise TokenizerError(
                f"chat_template in tokenizer_config.json is {text!r:.60}, must be a text: "
                "take the tokenizer files of the original model, or remove that line"
            )
    default = named.get("default") or next(iter(named.values()))
    return ChatFormat(default, tool_template=named.get("tool_use"))


def _load_hf_tokenizer(directory: Path) -> Any:
    """Load transformers' tokenizer; code in the checkpoint is never run.

    For some model types transformers takes a class of their own, with its own rules of splitting
    text, whatever the files name. Files that it saved from a tokenizer.json have these two keys.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    _require_tokenizer_files(directory)
    settings = read_object(directory / "tokenizer_config.json")
    is_whole = (settings.get("backend"), settings.get("tokenizer_class")) == _WHOLE_FILE
    kind = PreTrainedTokenizerFast if is_whole else AutoTokenizer
    try:
        return kind.from_pretrained(str(directory), trust_remote_code=False)
    except Exception as error:  # whatever a broken file makes the libraries raise
        faults = ((name, json_fault(directory / name)) for name in _JSON_FILES)
        fault = next((f"{name} {fault}" for name, fault in faults if fault), one_line(error))
        raise TokenizerError(
            f"cannot load a tokenizer from {directory}: {fault}: "
            "take the tokenizer files of the original model"
        ) from error


def _require_tokenizer_files(directory: Path) -> None:
    """Raise TokenizerError for missing or broken files, which transformers describes poorly."""
    for name in (*_TOKENIZER_FILES, *_BESIDE_TOKENIZERS):
        refuse_pointer(directory / name)  # transformers would use it as template text
    for path in sorted(directory.glob("additional_chat_templates/*.jinja")):
        refuse_pointer(path)
    if not any((directory / name).is_file() for name in _TOKENIZER_FILES):
        raise TokenizerError(
            f"{directory} has no tokenizer.json (nor {', '.join(_TOKENIZER_FILES[1:])}): "
            "copy the tokenizer files of the original model there"
        )
    settings = directory / "tokenizer_config.json"
    if not settings.is_file():
        return
    try:
        is_object = isinstance(json.loads(settings.read_bytes()), dict)
    except (OSError, ValueError, RecursionError):
        is_object = False
    if not is_object:
        raise TokenizerError(
            f"{settings} is not a JSON object: take the file of the original model"
        )
