"""The process that `backends.llama.trial` may lose: a model, the begin of a pass, and all bytes.

Answers on stdout, a JSON value a line: {"doing": ...} as a stage begins, at the end what was found.
What libraries print goes to stderr. The model's files are mapped and not read, but for the layers
that the pass comes to in its time.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from typing import Any, TextIO

from backends.ggml.library import LOG, LlamaError, LlamaModel
from backends.gguf.model import GgufModel, load_gguf_model
from backends.llama.unread import map_unread
from offload.process.expendable import allow_cpu_seconds, become_expendable

MAX_BYTES = 2 << 30  # beside the model's files, which are mapped
MAX_CPU_SECONDS = 20

STACK_BYTES = 64 << 20
"""Stack of the thread that tokenizes: llama.cpp may call itself for each character of a line."""
_STACK_BYTES_PER_CHARACTER = 512
"""At most; the worker tries it. 293 were measured of std::regex in all pre-tokenizers of 0.3.36."""
_OTHER_STACK_BYTES = 128 << 10
MAX_CHARACTERS = (STACK_BYTES - _OTHER_STACK_BYTES) // _STACK_BYTES_PER_CHARACTER

_N_CELLS, _NUM_TOKENS = 256, 4
_PASS_SECONDS = 0.2
_CHOSEN, _FLASH = -1, 1
"""Attention: the one that llama.cpp chooses, and the one that an exact backend has."""
_SMALL_STACK = 1 << 20
_MANY_CHARACTERS = 20_000
"""In a small stack, 50 bytes for each: no function calls itself in less."""
_N_REPEATED = 20
_LINES = (
    *"aA1! ~\n中あ가😀'",
    *("Aa", "a ", "a1", "!a", "a\u0301", " \n", "a\n", "!\n", " a\n", "\u00a0"),
)
"""Texts that a pre-tokenizer may take for one word when repeated, or part at line breaks."""


class _Refused(Exception):
    """The model is refused, by this reason."""


def main() -> int:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    allow_cpu_seconds(MAX_CPU_SECONDS)
    _import_bindings_alone()
    model = load_gguf_model(sys.argv[1])
    become_expendable(MAX_BYTES + sum(file.state.n_bytes for file in model.index.files))
    result: dict[str, Any] = {"refusal": "", "is_llama_error": False}
    try:
        result["max_characters"] = _try(model, lambda doing: _say(answers, {"doing": doing}))
    except LlamaError as error:
        result |= {"refusal": str(error), "is_llama_error": True}
    except _Refused as error:
        result["refusal"] = str(error)
    _say(answers, result)
    return 0


def _say(answers: TextIO, value: dict[str, Any]) -> None:
    print(json.dumps(value), file=answers)


def _import_bindings_alone() -> None:
    """The rest of llama-cpp-python takes longer than all that is done here."""
    spec = find_spec("llama_cpp")
    if spec is not None:
        sys.modules["llama_cpp"] = module_from_spec(spec)


def _try(model: GgufModel, begin: Callable[[str], None]) -> int | None:
    begin("its header and vocabulary are read")
    loaded = map_unread(model)
    for attention in (_CHOSEN, _FLASH):
        begin("a pass of it is made")
        _run_pass(model.path, loaded, attention)
    vocabulary = _Vocabulary(model.path, loaded)
    if vocabulary.is_none:
        return None  # said by whoever wants a text
    begin("its special tokens are added")
    vocabulary.tokenize(b"", add_special=True)
    for byte in range(256):
        begin(f"the byte 0x{byte:02X} is tokenized")
        vocabulary.tokenize(bytes([byte]))
    begin("a text is tokenized")
    vocabulary.tokenize(bytes(range(256)) * 2)
    for part in _LINES:
        vocabulary.tokenize(part.encode() * _N_REPEATED, add_special=True)
    begin("its tokens are spelled")
    vocabulary.spell_all()
    begin("a long line is tokenized")
    return _max_characters(model.path, vocabulary)


def _run_pass(path: Path, model: LlamaModel, attention: int) -> None:
    """Make a context as a backend does, which builds the graphs of a pass and of a prompt's, and
    compute the first layers. Raises LlamaError where it is refused with the attention of choice."""
    library, end = model.library, time.monotonic() + _PASS_SECONDS
    params = library.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch = _N_CELLS, _NUM_TOKENS, _NUM_TOKENS
    params.n_seq_max = params.n_outputs_max = 2
    params.n_threads = params.n_threads_batch = 1
    params.kv_unified = params.swa_full = True
    params.offload_kqv = params.op_offload = False
    params.flash_attn_type = attention
    stop = library.ggml_abort_callback(lambda _: time.monotonic() > end)
    params.abort_callback = stop
    LOG.clear()
    context = library.llama_init_from_model(model.handle, params)
    if context:
        for num_tokens in (_NUM_TOKENS, 1):
            tokens = (library.llama_token * num_tokens)()
            library.llama_decode(context, library.llama_batch_get_one(tokens, num_tokens))
        library.llama_free(context)
    elif attention == _CHOSEN:
        raise LlamaError(f"llama.cpp cannot make a context of {path}: {LOG.reason()}")


class _Vocabulary:
    def __init__(self, path: Path, model: LlamaModel) -> None:
        self._path, self._library = path, model.library
        self._vocab = model.library.llama_model_get_vocab(model.handle)
        self._n_tokens = model.vocab_size
        kind = model.library.llama_vocab_type(self._vocab)
        self.is_none = kind == model.library.LLAMA_VOCAB_TYPE_NONE

    def tokenize(self, text: bytes, *, add_special: bool = False) -> None:
        """Raises _Refused where what comes back are no tokens of the model."""
        # One for a byte, or three where it is no UTF-8; and what is added.
        library, max_count = self._library, 3 * len(text) + 8
        ids = (library.llama_token * max_count)()
        n = library.llama_tokenize(self._vocab, text, len(text), ids, max_count, add_special, True)
        wrong = next((i for i in ids[: max(n, 0)] if not 0 <= i < self._n_tokens), None)
        if n < 0 or wrong is not None:
            raise _Refused(
                f"{self._path}: llama.cpp makes {wrong if n >= 0 else 'too many tokens'} of the "
                f"text {text[:8]!r}, and the model's tokens are 0 to {self._n_tokens - 1}: the "
                "file names no token for what is unknown; convert the original model again"
            )

    def spell_all(self) -> None:
        ids = (self._library.llama_token * self._n_tokens)(*range(self._n_tokens))
        self._library.llama_detokenize(self._vocab, ids, self._n_tokens, None, 0, False, True)


def _max_characters(path: Path, vocabulary: _Vocabulary) -> int | None:
    """Characters of a line; None where its length does not matter."""
    if _bears(vocabulary, _MANY_CHARACTERS):
        return None
    if _bears(vocabulary, (_SMALL_STACK - _OTHER_STACK_BYTES) // _STACK_BYTES_PER_CHARACTER):
        return MAX_CHARACTERS
    raise _Refused(
        f"{path}: llama.cpp's tokenizer takes more than {_STACK_BYTES_PER_CHARACTER} bytes of "
        "stack for a character, so that a long line ends the process: use llama-cpp-python 0.3.36"
    )


def _bears(vocabulary: _Vocabulary, n_characters: int) -> bool:
    """Try lines of that length in a small stack, in a process of its own."""

    def tokenize() -> None:
        for text in _lines(n_characters):
            vocabulary.tokenize(text)

    child = os.fork()
    if child == 0:
        threading.stack_size(_SMALL_STACK)
        thread = threading.Thread(target=tokenize)
        thread.start()
        thread.join()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def _lines(n_characters: int) -> Iterator[bytes]:
    """Lines of so many characters; where lines are short their number must not matter."""
    for part in _LINES:
        are_many = bool(part.strip()) and part.endswith("\n")
        n = max(n_characters, _MANY_CHARACTERS * are_many)
        yield (part * (n // len(part))).encode()
