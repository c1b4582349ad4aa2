"""Sources of prompts: the command line, a file, stdin, or a user who types lines."""

from __future__ import annotations

import fcntl
import os
import stat
import struct
import sys
import termios
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from offload.units import MIB, format_bytes
from specdec.cli.options import OptionError
from specdec.cli.output import say_hint
from specdec.opening import open_now

MAX_PROMPT_BYTES = 64 * MIB  # far above any context
STDIN = "-"
"""Name of stdin in place of a prompt."""


def prompts_or_stdin(prompts: Sequence[str], files: Sequence[Path]) -> list[str]:
    """Return the prompts as given; "-" where there is none, and stdin is a pipe or a file.

    Raises OptionError where both kinds are given, or no prompt at all.
    """
    if prompts and files:
        raise OptionError("both -p and -f were given: use one of them")
    if prompts or files:
        return list(prompts)
    if not _is_stdin_given():
        raise OptionError(
            "no prompt was given: use -p TEXT or -f FILE, or send the text through a pipe; "
            "`specdec chat` holds a conversation"
        )
    return [STDIN]


def _is_stdin_given() -> bool:
    """Return whether stdin is a pipe, a socket or a file, and no terminal or /dev/null."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (OSError, ValueError):
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode) or stat.S_ISSOCK(mode)


def note_unread_pipe(prompts: Sequence[str]) -> None:
    """Print a note where text lies in a pipe on stdin that the given prompts do not read."""
    if STDIN in prompts:
        return
    try:
        if not stat.S_ISFIFO(os.fstat(sys.stdin.fileno()).st_mode):
            return
        n_bytes = fcntl.ioctl(sys.stdin.fileno(), termios.FIONREAD, struct.pack("i", 0))
    except (OSError, ValueError):
        return
    if any(n_bytes):
        say_hint(
            "the text on stdin is not read, because the prompt is given otherwise; "
            '"... $(cat)" puts it into a prompt'
        )


def read_prompts(prompts: Sequence[str], files: Sequence[Path]) -> list[str]:
    """Return all prompts, which are given either as text or as files."""
    return [
        *(read_prompt(prompt, None) for prompt in prompts),
        *(read_prompt(None, file) for file in files),
    ]


def system_turn(text: str | None) -> list[dict[str, str]]:
    return [] if text is None else [{"role": "system", "content": text}]


def read_prompt(prompt: str | None, file: Path | None) -> str:
    """Return the prompt's text, without one line break at the end of a file or of stdin."""
    text = prompt if prompt not in (None, STDIN) else read_text(file)
    if not text:
        whose = f"{file} is a pipe that nobody writes to: " if file and file.is_fifo() else ""
        whose = "stdin has no text: " if prompt == STDIN else whose
        raise OptionError(f"{whose}the prompt is empty: give some text with -p or -f")
    try:
        text.encode()
    except UnicodeEncodeError as error:  # of -p: bytes that were no UTF-8
        raise OptionError(
            f"-p: character {error.start} of the prompt is not UTF-8: type it in a terminal whose "
            "encoding is UTF-8, or give a file of UTF-8 text with -f"
        ) from None
    return text


def read_text(file: Path | None) -> str:
    """Return the text of a file or of stdin, without one line break at its end."""
    source = "stdin" if file is None else str(file)
    if file is None:
        raw = read_bounded(sys.stdin.buffer, source)
    else:
        with open_now(file) as opened:
            raw = read_bounded(opened, source)
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise OptionError(
            f"{source}: byte {error.start} is not UTF-8: give a file of UTF-8 text"
        ) from None
    return text.removesuffix("\n").removesuffix("\r")


def read_bounded(stream: BinaryIO, source: str) -> bytes:
    """Read a regular file, pipe or terminal to its end, up to MAX_PROMPT_BYTES.

    Raises OptionError for other devices, and for more than MAX_PROMPT_BYTES.
    """
    mode = os.fstat(stream.fileno()).st_mode
    if stat.S_ISBLK(mode) or (stat.S_ISCHR(mode) and not _is_known(stream.fileno())):
        raise OptionError(f"{source} is a device: give a file or a pipe")
    os.set_blocking(stream.fileno(), True)  # a parent may have left a pipe non-blocking
    try:
        raw = stream.read(MAX_PROMPT_BYTES + 1)
    except OSError as error:
        raise OptionError(f"cannot read {source}: {error.strerror}") from error
    if len(raw) > MAX_PROMPT_BYTES:
        limit = format_bytes(MAX_PROMPT_BYTES)
        raise OptionError(f"{source} has more than {limit}: no context is as long as that")
    return raw


def _is_known(descriptor: int) -> bool:
    """Return whether a character device comes to an end: a terminal, or /dev/null."""
    number = os.fstat(descriptor).st_rdev
    return os.isatty(descriptor) or number == os.stat(os.devnull).st_rdev
