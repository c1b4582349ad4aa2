"""Tokenizer of a GGUF model: llama.cpp's own, without the model's weights.

It has the members of `specdec.text.tokenizer.Tokenizer`, so that all code for that works with it
unchanged. Neither torch nor transformers is imported.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from backends.ggml.library import LOG, load_library
from backends.llama.trial import TextLimits
from offload.process.worker import call_in_thread
from specdec.text.chat_format import DEFAULT_OPTIONS, PLAIN, ChatFormat, TemplateOptions
from specdec.text.contract import TokenizerError
from specdec.text.control_tokens import AddedToken, with_one_bos
from specdec.text.conversation import encode_conversation
from specdec.text.llama_tokenize import NO_LIMITS, LlamaTokenize
from specdec.text.tokenizer import grammar_slices
from specdec.text.vocabulary import Vocabulary


class GgufTokenizer:
    """The vocabulary in a GGUF file's metadata; only the header of the file is read."""

    def __init__(self, path: str | Path, limits: TextLimits = NO_LIMITS) -> None:
        """Open the tokenizer. Raises TokenizerError if llama.cpp cannot use it.

        Args:
            limits: limits that `backends.llama.trial` found for this file; without them llama.cpp
                may crash the process on the file, or on a text.
        """
        self.path = Path(path)
        self._library = library = load_library()
        params = library.llama_model_default_params()
        params.vocab_only = True
        params.n_gpu_layers = 0
        LOG.clear()
        self._model = self._load(params)
        if not self._model:
            raise TokenizerError(f"cannot load a tokenizer from {path}: {LOG.reason()}")
        self._free = weakref.finalize(self, library.llama_model_free, self._model)
        self._vocab = library.llama_model_get_vocab(self._model)
        if library.llama_vocab_type(self._vocab) == library.LLAMA_VOCAB_TYPE_NONE:
            self.close()
            raise TokenizerError(f"{path} has no tokenizer: use a GGUF file that contains one")
        self._tokenize = LlamaTokenize(library, self._vocab, limits)
        self._num_tokens: int = library.llama_vocab_n_tokens(self._vocab)
        self._attributes = [
            int(library.llama_vocab_get_attr(self._vocab, i)) for i in range(self._num_tokens)
        ]
        self._n_tokens = self._num_tokens
        while self._n_tokens and self._is(self._n_tokens - 1, library.LLAMA_TOKEN_ATTR_UNUSED):
            self._n_tokens -= 1
        self._drops_first_space = self._find_first_space_rule()
        template = self._read_chat_template()
        self.has_chat_template = template is not None
        self.chat_format = PLAIN if template is None else ChatFormat(template)
        self._pieces: dict[int, bytes] = {}

    def _load(self, params: Any) -> Any:
        """Load in a thread: llama.cpp calls back for its log, where Ctrl-C would be lost."""
        path, load = os.fsencode(self.path), self._library.llama_model_load_from_file
        return call_in_thread(lambda: load(path, params), "specdec-vocabulary")

    @classmethod
    def from_file(cls, path: str | Path, limits: TextLimits = NO_LIMITS) -> GgufTokenizer:
        """Open the tokenizer; the counterpart of `Tokenizer.from_pretrained`."""
        return cls(path, limits)

    @property
    def n_tokens(self) -> int:
        """Number of ids with a token; higher ids are padding rows without text."""
        return self._n_tokens

    @cached_property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a generation: ends of text, turn and message."""
        is_end = self._library.llama_vocab_is_eog
        return tuple(i for i in range(self._n_tokens) if is_end(self._vocab, i))

    def encode(
        self,
        text: str,
        *,
        add_special_tokens: bool = True,
        parse_special: bool = True,
        is_start: bool = True,  # llama.cpp treats text after control tokens the same
    ) -> list[int]:
        """See ChatTokenizer."""
        ids = self._encode(text, add_special_tokens, parse_special)
        bos = self._special_ids()["bos"]
        return with_one_bos(ids, bos, lambda: self._encode(text, False, parse_special))

    def _encode(self, text: str, add_special_tokens: bool, parse_special: bool) -> list[int]:
        return self._tokenize(
            text, add_special_tokens=add_special_tokens, parse_special=parse_special
        )

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens; special tokens have none, partial characters give U+FFFD."""
        pieces = [self._piece(int(i)) for i in token_ids if not self._is_special(int(i))]
        if pieces and self._drops_first_space:
            pieces[0] = pieces[0].removeprefix(b" ")
        return b"".join(pieces).decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """See TokenSpeller."""
        return b"" if self._is_special(token_id) else self._piece(token_id)

    def token_name(self, token_id: int) -> str:
        """See TokenSpeller."""
        name = self._text(token_id) if 0 <= token_id < self._n_tokens else ""
        return name or f"token_id:{token_id}"

    @cached_property
    def added_tokens(self) -> Mapping[str, AddedToken]:
        """Added tokens by their text."""
        library = self._library
        control, user = library.LLAMA_TOKEN_ATTR_CONTROL, library.LLAMA_TOKEN_ATTR_USER_DEFINED
        return {
            self._text(i): AddedToken(
                i,
                self._is(i, control),
                self._is(i, library.LLAMA_TOKEN_ATTR_LSTRIP),
                self._is(i, library.LLAMA_TOKEN_ATTR_RSTRIP),
            )
            for i in range(self._n_tokens)
            if self._is(i, control | user)
        }

    @property
    def template_tokens(self) -> Mapping[str, Any]:
        ids = self._special_ids().items()
        return {f"{role}_token": self._text(i) for role, i in ids if i is not None}

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] = (),
        options: TemplateOptions = DEFAULT_OPTIONS,
    ) -> list[int]:
        """Return the token ids of a conversation, up to the assistant's answer."""
        return encode_conversation(self, messages, tools, options)

    def grammar_tokenizer(self, end_ids: tuple[int, ...]) -> Any:
        """Return llguidance's LLTokenizer of this vocabulary; it may not outlive this object.

        Tokens without text have none there either: a grammar can only name them.
        """
        from llguidance import LLTokenizer

        special = b"\xff"  # llguidance marks tokens whose name is not their bytes so
        pieces = [
            special + self._text(i).encode() if self._is_special(i) else self._piece(i)
            for i in range(self._num_tokens)
        ]
        return LLTokenizer.from_llamacpp(  # type: ignore[attr-defined]  # not in its stubs
            tokens=pieces,
            vocab_ptr=self._vocab,
            tokenize_fptr=self._tokenize.function,
            eos_token=list(end_ids),
            slices=grammar_slices(),
        )

    def vocabulary(self) -> Vocabulary:
        """Return the vocabulary, comparable with a transformers tokenizer's."""
        library = self._library
        unused, added = (
            library.LLAMA_TOKEN_ATTR_UNUSED,
            library.LLAMA_TOKEN_ATTR_CONTROL | library.LLAMA_TOKEN_ATTR_USER_DEFINED,
        )
        ids = range(self._n_tokens)
        return Vocabulary(
            tokens=tuple(None if self._is(i, unused) else self._text(i) for i in ids),
            num_tokens=self._num_tokens,
            special=self._special_ids(),
            added=frozenset(i for i in ids if self._is(i, added)),
        )

    def close(self) -> None:
        """Free the vocabulary now; the tokenizer cannot be used afterwards."""
        self._free()
        self._model = self._vocab = None

    def __enter__(self) -> GgufTokenizer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _is(self, token_id: int, attributes: int) -> bool:
        return bool(self._attributes[token_id] & attributes)

    def _is_special(self, token_id: int) -> bool:
        """Return whether an id has no text: control tokens, and ids without a token."""
        library = self._library
        silent = library.LLAMA_TOKEN_ATTR_CONTROL | library.LLAMA_TOKEN_ATTR_UNUSED
        return not 0 <= token_id < self._n_tokens or self._is(token_id, silent)

    def _piece(self, token_id: int) -> bytes:
        """Return the bytes of one token."""
        piece = self._pieces.get(token_id)
        if piece is None:
            piece = self._pieces[token_id] = self._read_piece(token_id)
        return piece

    def _read_piece(self, token_id: int, n_bytes: int = 64) -> bytes:
        buffer = ctypes.create_string_buffer(n_bytes)
        to_piece = self._library.llama_token_to_piece
        n_used = to_piece(self._vocab, token_id, buffer, n_bytes, 0, False)
        if n_used < 0:  # the required size
            return self._read_piece(token_id, -n_used)
        return buffer.raw[:n_used]

    def _text(self, token_id: int) -> str:
        """Return the token as stored: byte-level BPE writes a space as \u0120."""
        raw = self._library.llama_vocab_get_text(self._vocab, token_id)
        return bytes(raw or b"").decode("utf-8", errors="replace")

    def _special_ids(self) -> dict[str, int | None]:
        library = self._library
        ids = {
            "bos": library.llama_vocab_bos(self._vocab),
            "eos": library.llama_vocab_eos(self._vocab),
            "pad": library.llama_vocab_pad(self._vocab),
        }
        return {role: i if 0 <= i < self._n_tokens else None for role, i in ids.items()}

    def _find_first_space_rule(self) -> bool:
        """Return whether decoding drops the first space, which Sentencepiece puts before a text."""
        kind = self._library.llama_vocab_type(self._vocab)
        if kind != self._library.LLAMA_VOCAB_TYPE_SPM:
            return False
        return self._metadata("tokenizer.ggml.add_space_prefix") != "false"

    def _metadata(self, key: str) -> str | None:
        buffer: Any = ctypes.create_string_buffer(64)
        n_used = self._library.llama_model_meta_val_str(
            self._model, key.encode(), buffer, len(buffer)
        )
        return None if n_used < 0 else buffer.value.decode("utf-8", errors="replace")

    def _read_chat_template(self) -> str | None:
        raw = self._library.llama_model_chat_template(self._model, None)
        return None if raw is None else bytes(raw).decode("utf-8", errors="replace")
