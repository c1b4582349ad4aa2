"""Help of the commands on two screens: the usual options with --help, all with --help-all."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import typer
from typer.core import TyperCommand, TyperGroup

from specdec.cli.output import count_of, write_text
from specdec.option import MODELS

WIDTH = 80
_INDENT, _TEXT_COLUMN = 2, 30
_USUAL = frozenset(
    "model draft_model memory_budget device ctx_size threads num_draft_tokens temperature top_p "
    "seed stop host port api_key alias cors_origin text traces minutes".split()
)
"""Options of groups that --help shows."""
_SELDOM = frozenset(("debug", "logprobs", "beam_span"))
"""A command's own options that --help leaves out."""
_SHORT = {
    "model": "A folder, GGUF file, hub id, ollama:NAME, smollm2",
    "draft_model": "A small model of the same vocabulary; mtp; auto",
    "memory_budget": "Memory of the whole process: 3.5GiB, or auto",
    "seed": "The same seed gives the same tokens",
    "chat": "Use a chat template, or a plain transcript",
    "raw": "Complete the text, without a chat template",
    "quiet": "No progress, hints and metrics on stderr",
    "verbose": "Also show the plan, and the libraries' logs",
    "api_key": "Key that clients have to send",
    "prompts": "JSON lines with prompts",
    "within": "Fail if two runs of peers differ by more percent",
    "on": "Another device: laptop, gpu-24gb, or a JSON file",
    "workers": "Number of the cluster's workers",
    "rank": "Measure which of several drafts serves best",
}
"""Texts for --help, where the first clause of the full one would not do."""
_CLAUSE_END = re.compile(r"(?:(?<!e\.g)[.;:]|,? e\.g\.| \(.*) ")
_FIRST = (MODELS, "Options")
"""Panels that come before the others."""
EXAMPLES = {
    "run": (
        'specdec run smollm2 "Why is the sky blue?"',
        'specdec run TARGET -md DRAFT --memory-budget 3.5GiB -p "Why?" -n 200',
        "specdec run TARGET -md auto -f prompt.txt --temperature 0.7 --seed 1",
        "git diff | specdec run TARGET --system 'Review this.' --json",
    ),
    "chat": ("specdec chat smollm2", "specdec chat TARGET -md DRAFT --system 'Be brief.'"),
    "batch": ("specdec batch in.jsonl -m TARGET -md DRAFT -o out.jsonl",),
    "serve": (
        "specdec serve TARGET -md DRAFT --memory-budget 3.5GiB",
        "specdec serve TARGET --host 0.0.0.0 --api-key-file key.txt",
    ),
    "plan": (
        "specdec plan TARGET -md DRAFT --memory-budget 8GiB",
        "specdec plan TARGET -md DRAFT --on laptop",
        "specdec plan user/repo:Q4_K_M --memory-budget 8GiB",
    ),
    "recommend": ("specdec recommend --memory-budget 12GiB --on laptop",),
    "analyze": ("specdec analyze TARGET --phase decode --on gpu-24gb",),
    "check": (
        "specdec check TARGET -md DRAFT",
        "specdec check TARGET -md A -md B --rank --prompts prompts.jsonl",
    ),
    "models": ("specdec models", "specdec models --fits TARGET"),
    "pull": ("specdec pull user/repo", "specdec pull user/repo:Q4_K_M"),
    "rm": ("specdec rm user/repo",),
    "ps": ("specdec ps", "specdec ps --json"),
    "stop": ("specdec stop", "specdec stop smollm2", "specdec stop --all"),
    "profile": ("specdec profile TARGET --json > laptop.json",),
    "pack": ("specdec pack MODEL -o packed",),
    "train-draft": ("specdec train-draft TARGET --from DRAFT --text notes -o my-draft",),
}


class Command(TyperCommand):
    """A command with a short help and a full one."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if "--help-all" in args[: args.index("--") if "--" in args else None]:
            write_text(help_text(self, ctx.command_path, has_all=True))
            raise typer.Exit(0)
        return super().parse_args(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        formatter.write(help_text(self, ctx.command_path, has_all=False))


class Group(TyperGroup):
    """The commands by what they are for."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        formatter.write("\n".join(_group_lines(self, ctx)) + "\n")


def help_text(command: Any, path: str, *, has_all: bool) -> str:
    """Return the help of a command. has_all: with the options that are seldom needed."""
    params = [item for item in command.params if not item.hidden]
    options = [item for item in params if item.param_type_name == "option"]
    shown = [item for item in options if has_all or _is_usual(item)]
    lines = [_usage(path, params), "", *textwrap.wrap(_sentence(command.help), WIDTH)]
    arguments = [item for item in params if item.param_type_name == "argument"]
    lines += _section("Arguments", [(_argument(item), item.help or "") for item in arguments])
    examples = EXAMPLES.get(command.name or "", ())
    lines += ["", "Examples:", *(f"  {line}" for line in examples)] if examples else []
    panels: dict[str, list[Any]] = {panel: [] for panel in _FIRST}
    for item in shown:
        panels.setdefault(item.rich_help_panel or "Options", []).append(item)
    meaning = _meaning if has_all else _short_meaning
    for panel, items in panels.items():
        lines += _section(panel, [(_names(item), meaning(item)) for item in items])
    n_more = len(options) - len(shown)
    if n_more:
        lines += ["", f"{count_of(n_more, 'more option')}: {path} --help-all"]
    return "\n".join(lines) + "\n"


def _is_usual(option: Any) -> bool:
    is_own = option.rich_help_panel is None and option.name not in _SELDOM
    return is_own or option.name in _USUAL


def _usage(path: str, params: list[Any]) -> str:
    names = {item.name for item in params}
    words = [_argument(item) for item in params if item.param_type_name == "argument"]
    if not words and "model" in names:
        words = ["[MODEL]", "[PROMPT]"] if "prompt" in names else ["[MODEL]"]
    return " ".join(["Usage:", path, *words, "[OPTIONS]"])


def _argument(item: Any) -> str:
    name = (item.metavar or item.name).upper()
    return name if item.required else f"[{name}]"


def _sentence(text: str | None) -> str:
    return " ".join((text or "").split("\n\n")[0].split())


def _names(option: Any) -> str:
    names = ", ".join([*option.opts, *option.secondary_opts])
    return f"{names} {_value(option)}".rstrip()


def _value(option: Any) -> str:
    """Return what is given behind an option: its choices, or the kind of value."""
    if option.is_flag:
        return ""
    if option.metavar:
        return str(option.metavar)
    kinds = {int: "N", float: "X", Path: "FILE"}
    kind = option.type_descriptor.annotation
    kind = next(iter(get_args(kind)), kind)  # of a list
    return kinds.get(kind, "N" if option.type_descriptor.is_ranged else "TEXT")


def _meaning(option: Any) -> str:
    default = shown_default(option)
    meaning = _sentence(option.help)
    return f"{meaning.rstrip('.')} [{default}]" if default else meaning


def _short_meaning(option: Any) -> str:
    """Return a meaning that fits in one line: all of it, or its first clause."""
    if option.name in _SHORT:
        return _SHORT[option.name]
    text = _meaning(option).rstrip(".")
    if len(text) <= WIDTH - _TEXT_COLUMN:
        return text
    return _CLAUSE_END.split(_sentence(option.help).rstrip("."))[0]


def shown_default(option: Any) -> str:
    """Return the text of an option's default, or "" where there is none to show."""
    if isinstance(option.show_default, str):
        return option.show_default
    is_reported = option.show_default and option.default not in (None, False, "")
    return str(option.default) if is_reported else ""


def _section(title: str, rows: list[tuple[str, str]]) -> list[str]:
    return ["", f"{title}:", *(line for row in rows for line in _row(*row))] if rows else []


def _row(name: str, text: str) -> Iterator[str]:
    """Yield the lines of one option: names to the left, meaning to the right of them."""
    head = " " * _INDENT + name
    lines = textwrap.wrap(text, WIDTH - _TEXT_COLUMN)
    if len(head) > _TEXT_COLUMN - 2:
        yield head
    elif lines:
        yield f"{head:{_TEXT_COLUMN}}{lines.pop(0)}"
    for line in lines:
        yield " " * _TEXT_COLUMN + line


def _group_lines(group: Any, ctx: Any) -> Iterator[str]:
    yield f"Usage: {ctx.command_path} COMMAND [OPTIONS]"
    yield ""
    yield _sentence(group.help)
    panels: dict[str, list[tuple[str, str]]] = {}
    for name in group.list_commands(ctx):
        command = group.get_command(ctx, name)
        panels.setdefault(command.rich_help_panel or "Commands", []).append(
            (name, _CLAUSE_END.split(_sentence(command.help).rstrip("."))[0])
        )
    for panel, rows in panels.items():
        yield from ["", f"{panel}:"]
        for name, text in rows:
            head, *rest = textwrap.wrap(text, WIDTH - 16)
            yield f"  {name:12}  {head}"
            yield from (" " * 16 + line for line in rest)
    yield from _section("Options", [(_names(item), _meaning(item)) for item in group.params])
    yield ""
    yield f"Options of a command: {ctx.command_path} COMMAND --help"
