"""Prompts cut from source files: context up to where the body of a C function begins.

    python -m bench.prompts.cut DIR -o c.jsonl

A draft for another kind of text is measured with contexts of that kind: after a short prompt a
small target goes on in the language that it was trained for.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated

import typer

_BODY = re.compile(r"\n\w[\w *]*\([^;{}]*\)\s*\{\n")
"""Head of a C function, up to the line after its brace."""


def cut(path: Path, n_chars: int) -> list[str]:
    """Return the contexts of `n_chars` characters before the functions of a file, apart."""
    text = path.read_text(encoding="utf-8", errors="replace")
    contexts: list[str] = []
    last = 0
    for match in _BODY.finditer(text):
        if match.end() - last >= n_chars:
            last = match.end()
            contexts.append(text[last - n_chars : last])
    return contexts


def main(
    folder: Annotated[Path, typer.Argument(help="Folder with C files.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="Prompts, as JSON lines.")],
    n_prompts: Annotated[int, typer.Option(min=1, help="Number of prompts.")] = 16,
    n_chars: Annotated[int, typer.Option(min=1, help="Characters of each.")] = 2400,
) -> None:
    """Write prompts from C files, the first of each file, then the second ones."""
    files = sorted(folder.rglob("*.c"))
    contexts = {path: cut(path, n_chars) for path in files}
    depth = max(map(len, contexts.values()), default=0)
    chosen = [
        {"id": f"{path.stem}-{i}", "category": "c", "prompt": contexts[path][i]}
        for i in range(depth)
        for path in files
        if i < len(contexts[path])
    ][:n_prompts]
    if not chosen:
        raise typer.BadParameter(f"{folder} has no C file of {n_chars} characters")
    out.write_text("".join(json.dumps(prompt) + "\n" for prompt in chosen), encoding="utf-8")
    typer.echo(f"{out}: {len(chosen)} prompts of {len(files)} files")


if __name__ == "__main__":
    typer.run(main)
