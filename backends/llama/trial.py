"""Whether llama.cpp bears a GGUF model: asked in a process that may be lost.

llama.cpp ends the process over what it did not expect: an exception that nobody catches while a
text is tokenized, an assertion while a graph is built, a stack that is used up. So a model is first
loaded without its weights by `backends.llama.trial_worker`, whose end, whatever it is, is told in
one line. What was found is kept by the content of the header: a second start asks nobody.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backends.ggml.library import LlamaError, library_folder, llama_version
from backends.gguf.model import GgufModel
from backends.llama.trial_worker import MAX_CPU_SECONDS
from offload.formats.gguf_header import GgufError, GgufFile
from offload.process.disk_cache import cache_folder, load_cached, save_cached
from offload.process.expendable import command_of

_MAX_WALL_SECONDS = 300  # of a machine that is busy elsewhere
_VERSION = 1  # of the worker: what another one found is found out again

_ENDED_ITSELF = {
    signal.SIGABRT: "it aborts",
    signal.SIGSEGV: "it reads where there is no memory, or uses up its stack",
    signal.SIGBUS: "it reads where there is no memory",
    signal.SIGFPE: "it divides by zero",
    signal.SIGILL: "it runs an instruction that this processor lacks",
}
_REASONS = (
    re.compile(r"^.*?([^/\s]+:\d+: .*)$"),  # of an assertion: file, line, condition
    re.compile(r"what\(\): +(.*)"),  # of an exception
)
_REMEDY = (
    "the file is damaged (download it again), or was not made by llama.cpp's converter (convert it "
    "again)"
)


@dataclass(frozen=True)
class SequenceLimits:
    """Limits of a text for llama.cpp's tokenizer.

    Args:
        most_characters: of a line, in a thread with STACK_BYTES; None: of any length.
    """

    max_characters: int | None


def try_model(model: GgufModel) -> SequenceLimits:
    """Raises GgufError where llama.cpp would end the process, LlamaError where it refuses."""
    cached = cache_folder() / f"gguf-{_digest(model)}.json"
    result = load_cached(cached)
    if not _is_answer(result, model.path):
        result = _ask(model)
        save_cached(
            cached, {**result, "path": str(model.path)}, "whether llama.cpp bears this model"
        )
    if refusal := result["refusal"]:
        raise LlamaError(refusal) if result["is_llama_error"] else GgufError(refusal)
    return SequenceLimits(result["max_characters"])


def _digest(model: GgufModel) -> str:
    """A short name of all that decides what is found: the headers and the library."""
    library = (library_folder() / "libllama.so").stat()
    versions = f"{_VERSION} {llama_version()} {library.st_size} {library.st_mtime_ns}"
    digest = hashlib.sha256(versions.encode())
    for file in model.index.files:
        digest.update(_header(file))
    return digest.hexdigest()[:32]


def _header(file: GgufFile) -> bytes:
    try:
        with file.path.open("rb") as opened:
            return opened.read(file.data_offset)
    except OSError as error:
        raise GgufError(f"cannot read {file.path}: {error.strerror or error}") from error


def _is_answer(result: Any, path: Path) -> bool:
    """Whether it is what `try_model` keeps; a refusal names the file that it was about."""
    if not isinstance(result, dict) or not isinstance(refusal := result.get("refusal"), str):
        return False
    if refusal:
        return result.get("path") == str(path) and isinstance(result.get("is_llama_error"), bool)
    limit = result.get("max_characters", "")
    return limit is None or (type(limit) is int and limit > 0)


def _ask(model: GgufModel) -> dict[str, Any]:
    """Return what the worker found.

    Raises GgufError where it took too much, LlamaError where it broke.
    """
    process = subprocess.Popen(
        [*command_of("backends.llama.trial_worker"), str(model.path)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "GGML_NO_BACKTRACE": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,  # a terminal's Ctrl-C is not for it
    )
    with process:
        try:
            said, complained = process.communicate(timeout=_MAX_WALL_SECONDS)
        except subprocess.TimeoutExpired:
            said, complained = b"", b""
        finally:
            process.kill()
    last = json.loads(said.splitlines()[-1]) if said else None
    if process.returncode == 0 and last:
        return dict(last)
    stage, lines = last["doing"] if last else "it starts", complained.decode(errors="replace")
    if -process.returncode in _ENDED_ITSELF:
        reason = _reason(lines, -process.returncode)
        refusal = f"{model.path}: llama.cpp ends the process as {stage} ({reason}): {_REMEDY}"
        return {"refusal": refusal, "is_llama_error": False}
    if process.returncode < 0:  # by the kernel, or by us
        raise GgufError(
            f"{model.path}: llama.cpp takes more than {MAX_CPU_SECONDS} s of a core, or more "
            f"memory than there is, as {stage}: {_REMEDY}"
        )
    raise LlamaError(f"{model.path} could not be tried: {lines.strip().splitlines()[-1:]}")


def _reason(complained: str, number: int) -> str:
    """Why it ended, in llama.cpp's words where it left some."""
    for line in reversed(complained.splitlines()):
        for pattern in _REASONS:
            if match := pattern.search(line.strip()):
                return match.group(1)[:200]
    return _ENDED_ITSELF[signal.Signals(number)]
