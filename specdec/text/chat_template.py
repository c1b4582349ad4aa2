"""Chat templates: programs of the checkpoint, run in an expendable process.

jinja2's sandbox keeps a template from files and from other programs, not from running forever or
from filling the memory: the kernel's limits do. transformers' own renderer would import torch,
which takes 250 MB and three seconds.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Any

from offload.process.expendable import command_of
from specdec.text.chat_format import ChatTemplateError
from specdec.text.template_worker import MAX_BYTES, MAX_CPU_SECONDS

_MAX_WALL_SECONDS = 60  # generous, for a machine that is busy otherwise
_READ_BYTES = 1 << 16


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    special_tokens: Mapping[str, Any],
    tools: Sequence[Any] = (),
    *,
    add_generation_prompt: bool = True,
    variables: Mapping[str, Any] = MappingProxyType({}),
) -> str:
    """Render the text of a conversation, up to where the assistant's answer begins.

    Args:
        template: jinja2 source.
        messages: JSON objects with `role` and `content`.
        special_tokens: `bos_token`, `eos_token`, ...
        tools: tools in OpenAI's form, for templates that describe them to the model.
        add_generation_prompt: False ends after the last message.
        variables: other variables of the template.

    Raises:
        ChatTemplateError: an error in the template, or it takes more than MAX_CPU_SECONDS or
            MAX_BYTES.
    """
    request = {
        "template": template,
        "messages": [dict(message) for message in messages],
        "special_tokens": dict(special_tokens),
        "tools": list(tools) or None,
        "add_generation_prompt": add_generation_prompt,
        "variables": dict(variables),
    }
    try:
        line = json.dumps(request).encode("ascii")
    except (TypeError, ValueError, RecursionError) as error:
        raise ChatTemplateError(f"messages and tools must be JSON: {error}") from error
    answer = json.loads(_WORKER.ask(line))
    if "error" in answer:
        raise ChatTemplateError(answer["error"])
    return str(answer["text"])


class _Worker:
    """The worker process, started at the first request and again after a loss. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, line: bytes) -> bytes:
        """Return the worker's answer. Raises ChatTemplateError if there is none in time."""
        with self._lock:
            if self._process is not None and self._process.poll() is not None:
                self._end()  # killed while idle: it is the first victim when memory runs out
            if self._process is None:
                self._process = _start()
            try:
                return _exchange(self._process, line)
            except BaseException:  # an interrupt, too: the next request would read this answer
                self._end()
                raise

    def close(self) -> None:
        with self._lock:
            self._end()

    def forget(self) -> None:
        """Forget the process in a fork: it belongs to the parent, and so do its answers."""
        self._lock, self._process = threading.Lock(), None

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            with suppress(OSError):  # unread input
                assert pipe is not None
                pipe.close()


def _start() -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command_of("specdec.text.template_worker"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # so that a terminal's Ctrl-C does not reach it
    )


def _exchange(process: subprocess.Popen[bytes], line: bytes) -> bytes:
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(line + b"\n")
        process.stdin.flush()
    except BrokenPipeError as error:
        raise ChatTemplateError(_LOST) from error
    end = time.monotonic() + _MAX_WALL_SECONDS
    answer, output = bytearray(), process.stdout.fileno()
    readable = select.poll()
    readable.register(output, select.POLLIN)
    while not answer.endswith(b"\n"):
        is_ready = readable.poll(1000 * max(end - time.monotonic(), 0.0))
        data = os.read(output, _READ_BYTES) if is_ready else b""
        if not data:
            raise ChatTemplateError(_LOST)
        answer += data
    return bytes(answer)


_LOST = (
    f"it takes more than {MAX_CPU_SECONDS} s of a core or {MAX_BYTES >> 20} MiB: take the "
    "original model's template, or name another one with --chat-template"
)
_WORKER = _Worker()
atexit.register(_WORKER.close)
os.register_at_fork(after_in_child=_WORKER.forget)
