"""Worker process of `backends.llama.trial`, which may crash: load a model, run it, tokenize.

It answers on stdout, one JSON value a line: {"doing": ...} at the start of a stage, and the result
at the end. Output of libraries goes to stderr. The model's files are mapped and not read, except
for the layers that the pass gets to in its time.
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

from backends.ggml.layer_outputs import LayerOutputs
from backends.ggml.library import LOG, LlamaError, LlamaModel
from backends.gguf.model import GgufModel, load_gguf_model
from backends.llama.unread import map_unread
from offload.process.expendable import allow_cpu_seconds, become_expendable

MAX_BYTES = 2 << 30  # of memory, without the mapped model files
MAX_CPU_SECONDS = 20

STACK_BYTES = 64 << 20
"""Stack of the tokenizing thread: llama.cpp may recurse for each character of a line."""
_STACK_BYTES_PER_CHARACTER = 512
"""Upper bound, tested by the worker; std::regex took 293 in all pre-tokenizers of 0.3.36."""
_OTHER_STACK_BYTES = 128 << 10
MAX_CHARACTERS = (STACK_BYTES - _OTHER_STACK_BYTES) // _STACK_BYTES_PER_CHARACTER

_N_CELLS, _NUM_TOKENS = 256, 4
_PASS_SECONDS = 0.2
_CHOSEN, _FLASH = -1, 1
"""Values of flash_attn_type: llama.cpp's choice, and on, as in an exact backend."""
_SMALL_STACK = 1 << 20
_MANY_CHARACTERS = 20_000
"""Characters that leave 50 bytes of the small stack for each: no recursion takes less."""
_N_REPEATED = 20
_LINES = (
    *"aA1! ~\n中あ가😀'",
    *("Aa", "a ", "a1", "!a", "a\u0301", " \n", "a\n", "!\n", " a\n", "\u00a0"),
)
"""Texts that a pre-tokenizer may take for one word when repeated, or split at line breaks."""


class _Refused(Exception):
    """Refusal of the model, with the reason."""


def main() -> int:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    allow_cpu_seconds(MAX_CPU_SECONDS)
    _import_bindings_alone()
    model = load_gguf_model(sys.argv[1])
    become_expendable(MAX_BYTES + sum(file.state.n_bytes for file in model.index.files))
    result: dict[str, Any] = {"refusal": "", "is_llama_error": False}
    try:
        result |= _try(model, lambda doing: _say(answers, {"doing": doing}))
    except LlamaError as error:
        result |= {"refusal": str(error), "is_llama_error": True}
    except _Refused as error:
        result["refusal"] = str(error)
    _say(answers, result)
    return 0


def _say(answers: TextIO, value: dict[str, Any]) -> None:
    print(json.dumps(value), file=answers)


def _import_bindings_alone() -> None:
    """Import llama_cpp without running its `__init__`, which takes longer than the trial."""
    spec = find_spec("llama_cpp")
    if spec is not None:
        sys.modules["llama_cpp"] = module_from_spec(spec)


def _try(model: GgufModel, begin: Callable[[str], None]) -> dict[str, Any]:
    begin("its header and vocabulary are read")
    loaded = map_unread(model)
    complete: set[int] = set()
    for attention in (_CHOSEN, _FLASH):
        begin("a pass of it is made")
        complete |= _run_pass(model, loaded, attention)
    return {"output_layers": sorted(complete), "max_characters": _try_texts(model, loaded, begin)}


def _try_texts(model: GgufModel, loaded: LlamaModel, begin: Callable[[str], None]) -> int | None:
    """Return the maximum length of a line in characters; None: no limit."""
    vocabulary = _Vocabulary(model.path, loaded)
    if vocabulary.is_none:
        return None  # reported when a tokenizer is needed
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


def _run_pass(model: GgufModel, loaded: LlamaModel, attention: int) -> set[int]:
    """Make a context like a backend's, which builds the graphs of decoding and prefill, and run the
    first layers. Return the layers whose outputs are in the graph, for all tokens.

    Raises LlamaError if llama.cpp refuses it with its own attention.
    """
    library, end = loaded.library, time.monotonic() + _PASS_SECONDS
    outputs = LayerOutputs(library, model.architecture, model.hidden_size)
    complete: set[int] = set()

    def see(address: int, ask: bool, _: object) -> bool:
        layer = outputs.named_layer(address)
        if layer is not None and layer >= 0 and outputs.is_complete(address, _NUM_TOKENS):
            complete.add(layer)
        return not ask  # of each node before any runs

    params = library.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch = _N_CELLS, _NUM_TOKENS, _NUM_TOKENS
    params.n_seq_max = params.n_outputs_max = 2
    params.n_threads = params.n_threads_batch = 1
    params.kv_unified = params.swa_full = True
    params.offload_kqv = params.op_offload = False
    params.flash_attn_type = attention
    stop = library.ggml_abort_callback(lambda _: time.monotonic() > end)
    params.abort_callback = stop
    callback = library.ggml_backend_sched_eval_callback(see)
    params.cb_eval = callback
    LOG.clear()
    context = library.llama_init_from_model(loaded.handle, params)
    if context:
        for num_tokens in (_NUM_TOKENS, 1):
            tokens = (library.llama_token * num_tokens)()
            library.llama_decode(context, library.llama_batch_get_one(tokens, num_tokens))
        library.llama_free(context)
    elif attention == _CHOSEN:
        raise LlamaError(f"llama.cpp cannot make a context of {model.path}: {LOG.reason()}")
    return complete


class _Vocabulary:
    def __init__(self, path: Path, model: LlamaModel) -> None:
        self._path, self._library = path, model.library
        self._vocab = model.library.llama_model_get_vocab(model.handle)
        self._n_tokens = model.vocab_size
        kind = model.library.llama_vocab_type(self._vocab)
        self.is_none = kind == model.library.LLAMA_VOCAB_TYPE_NONE

    def tokenize(self, text: bytes, *, add_special: bool = False) -> None:
        """Tokenize `text`. Raises _Refused if an id is no token of the model."""
        # One token for a byte, or three if it is no UTF-8; and special tokens.
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
    """Return the maximum length of a line in characters; None: no limit."""
    if _survives(vocabulary, _MANY_CHARACTERS):
        return None
    if _survives(vocabulary, (_SMALL_STACK - _OTHER_STACK_BYTES) // _STACK_BYTES_PER_CHARACTER):
        return MAX_CHARACTERS
    raise _Refused(
        f"{path}: llama.cpp's tokenizer takes more than {_STACK_BYTES_PER_CHARACTER} bytes of "
        "stack for a character, so that a long line ends the process: use llama-cpp-python 0.3.36"
    )


def _survives(vocabulary: _Vocabulary, n_characters: int) -> bool:
    """Return whether a child process tokenizes lines of that length in a small stack."""

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
    """Yield texts of so many characters; ones of many short lines are longer."""
    for part in _LINES:
        are_many = bool(part.strip()) and part.endswith("\n")
        n = max(n_characters, _MANY_CHARACTERS * are_many)
        yield (part * (n // len(part))).encode()
