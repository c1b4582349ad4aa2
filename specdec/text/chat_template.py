"""Chat templates: programs of the checkpoint, run in a process that may be lost.

jinja2's sandbox keeps a template from files and from other programs, not from running without end
or from filling the memory: that is left to the kernel's limits. transformers' own way to run one
would bring torch along, 250 MB and three seconds of it.
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
from typing import Any

from offload.process.expendable import command_of
from specdec.text.chat_format import ChatTemplateError
from specdec.text.template_worker import MAX_BYTES, MAX_CPU_SECONDS

_MAX_WALL_SECONDS = 60  # of a machine that is busy elsewhere
_READ_BYTES = 1 << 16


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    special_tokens: Mapping[str, Any],
    tools: Sequence[Any] = (),
    *,
    add_generation_prompt: bool = True,
) -> str:
    """The text of a conversation, up to where the assistant's answer begins.

    Args:
        template: jinja2 source.
        messages: with `role` and `content`, as JSON has them.
        special_tokens: `bos_token`, `eos_token`, ...
        tools: in OpenAI's form, for templates that tell the model of them.
        add_generation_prompt: False ends behind the last message.

    Raises:
        ChatTemplateError: whatever goes wrong in the template, and where it takes more than
            MOST_CPU_SECONDS or MOST_BYTES.
    """
    asked = {
        "template": template,
        "messages": [dict(message) for message in messages],
        "special_tokens": dict(special_tokens),
        "tools": list(tools) or None,
        "add_generation_prompt": add_generation_prompt,
    }
    try:
        line = json.dumps(asked).encode("ascii")
    except (TypeError, ValueError, RecursionError) as error:
        raise ChatTemplateError(f"messages and tools must be JSON: {error}") from error
    answer = json.loads(_WORKER.ask(line))
    if "error" in answer:
        raise ChatTemplateError(answer["error"])
    return str(answer["text"])


class _Worker:
    """The process, started when it is first asked, and again after it was lost. For any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, line: bytes) -> bytes:
        """Its answer. Raises ChatTemplateError where there is none in time."""
        with self._lock:
            if self._process is not None and self._process.poll() is not None:
                self._end()  # lost while nobody asked: it is the first to go where memory ends
            if self._process is None:
                self._process = _start()
            try:
                return _exchange(self._process, line)
            except BaseException:  # an interrupt, too: the answer would be taken for the next one's
                self._end()
                raise

    def close(self) -> None:
        with self._lock:
            self._end()

    def forget(self) -> None:
        """In a fork, which may not read its parent's answers: the process is the parent's."""
        self._lock, self._process = threading.Lock(), None

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            with suppress(OSError):  # what it has not read
                assert pipe is not None
                pipe.close()


def _start() -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command_of("specdec.text.template_worker"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # a terminal's Ctrl-C is not for it
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
        read_chunk = os.read(output, _READ_BYTES) if is_ready else b""
        if not read_chunk:
            raise ChatTemplateError(_LOST)
        answer += read_chunk
    return bytes(answer)


_LOST = (
    f"it takes more than {MAX_CPU_SECONDS} s of a core or {MAX_BYTES >> 20} MiB: take the "
    "original model's template, or name another one with --chat-template"
)
_WORKER = _Worker()
atexit.register(_WORKER.close)
os.register_at_fork(after_in_child=_WORKER.forget)
