"""Trial of a GGUF model in a worker process, to find out whether llama.cpp would crash on it.

llama.cpp ends the process on unexpected input: by an uncaught exception while a text is tokenized,
an assertion while a graph is built, or a stack overflow. So `backends.llama.trial_worker` loads the
model first, without its weights; if that process dies, the reason is reported in one line. Results
are in the disk cache by the content of the header, so that a second start needs no trial.
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

_MAX_WALL_SECONDS = 300  # enough on a busy machine
_VERSION = 2  # of the worker; results of another version are not used

_ENDED_ITSELF = {
    signal.SIGABRT: "it aborts",
    signal.SIGSEGV: "it reads where there is no memory, or uses up its stack",
    signal.SIGBUS: "it reads where there is no memory",
    signal.SIGFPE: "it divides by zero",
    signal.SIGILL: "it runs an instruction that this processor lacks",
}
_REASONS = (
    re.compile(r"^.*?([^/\s]+:\d+: .*)$"),  # an assertion: file, line, condition
    re.compile(r"what\(\): +(.*)"),  # an exception
)
_REMEDY = (
    "the file is damaged (download it again), or was not made by llama.cpp's converter (convert it "
    "again)"
)


@dataclass(frozen=True)
class TextLimits:
    """Limits of texts for llama.cpp's tokenizer.

    Args:
        max_characters: maximum length of a line, in a thread with STACK_BYTES; None: no limit.
    """

    max_characters: int | None


@dataclass(frozen=True)
class TrialResult:
    """Results of the trial of a model that runs.

    Args:
        output_layers: layers whose outputs a pass can return (backends/ggml/layer_outputs.py).
    """

    text_limits: TextLimits
    output_layers: frozenset[int] = frozenset()


def try_model(model: GgufModel) -> TrialResult:
    """Try a model. Raises GgufError if llama.cpp would crash, LlamaError if it refuses it."""
    path = cache_folder() / f"gguf-{_digest(model)}.json"
    result = load_cached(path)
    if not _is_answer(result, model.path):
        result = _ask(model)
        result_and_path = {**result, "path": str(model.path)}
        save_cached(path, result_and_path, "whether llama.cpp can run this model")
    if refusal := result["refusal"]:
        raise LlamaError(refusal) if result["is_llama_error"] else GgufError(refusal)
    layers = frozenset(result["output_layers"])
    return TrialResult(TextLimits(result["max_characters"]), layers)


def _digest(model: GgufModel) -> str:
    """Return a digest of everything that the result depends on: headers and library."""
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
    """Return whether a cached result is valid; a refusal must be about the same path."""
    if not isinstance(result, dict) or not isinstance(refusal := result.get("refusal"), str):
        return False
    if refusal:
        return result.get("path") == str(path) and isinstance(result.get("is_llama_error"), bool)
    limit, layers = result.get("max_characters", ""), result.get("output_layers")
    are_layers = isinstance(layers, list) and all(type(layer) is int for layer in layers)
    return are_layers and (limit is None or (type(limit) is int and limit > 0))


def _ask(model: GgufModel) -> dict[str, Any]:
    """Run the worker; return its result.

    Raises GgufError if it exceeded its limits, LlamaError if it failed for another reason.
    """
    process = subprocess.Popen(
        [*command_of("backends.llama.trial_worker"), str(model.path)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "GGML_NO_BACKTRACE": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,  # not interrupted by a terminal's Ctrl-C
    )
    with process:
        try:
            stdout, stderr = process.communicate(timeout=_MAX_WALL_SECONDS)
        except subprocess.TimeoutExpired:
            stdout, stderr = b"", b""
        finally:
            process.kill()
    last = json.loads(stdout.splitlines()[-1]) if stdout else None
    if process.returncode == 0 and last:
        return dict(last)
    stage, lines = last["doing"] if last else "it starts", stderr.decode(errors="replace")
    if -process.returncode in _ENDED_ITSELF:
        reason = _reason(lines, -process.returncode)
        refusal = f"{model.path}: llama.cpp ends the process as {stage} ({reason}): {_REMEDY}"
        return {"refusal": refusal, "is_llama_error": False}
    if process.returncode < 0:  # killed by the kernel, or by us
        raise GgufError(
            f"{model.path}: llama.cpp takes more than {MAX_CPU_SECONDS} s of a core, or more "
            f"memory than there is, as {stage}: {_REMEDY}"
        )
    raise LlamaError(f"{model.path} could not be tried: {lines.strip().splitlines()[-1:]}")


def _reason(stderr: str, number: int) -> str:
    """Return why the worker died, in llama.cpp's words if it printed any."""
    for line in reversed(stderr.splitlines()):
        for pattern in _REASONS:
            if match := pattern.search(line.strip()):
                return match.group(1)[:200]
    return _ENDED_ITSELF[signal.Signals(number)]
