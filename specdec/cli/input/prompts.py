"""Sources of prompts: the command line, a file, stdin, or a user who types lines."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from offload.units import MIB, format_bytes
from specdec.cli.options import OptionError
from specdec.opening import open_now

MAX_PROMPT_BYTES = 64 * MIB  # far above any context


def check_prompt_options(prompts: Sequence[str], files: Sequence[Path]) -> None:
    if bool(prompts) == bool(files):
        problem = "both -p and -f were given" if prompts else "no prompt was given"
        raise OptionError(f"{problem}: use one of -p TEXT, -p - (stdin) or -f FILE")


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
    text = prompt if prompt not in (None, "-") else read_text(file)
    if not text:
        whose = f"{file} is a pipe that nobody writes to: " if file and file.is_fifo() else ""
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
