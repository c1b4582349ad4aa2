"""Options of llama.cpp, vLLM and Ollama: their names here, or what does the same.

An option that only tunes the speed there is skipped with a note. One that decides what is computed,
or where, is refused with the option that does it here: to skip it would be a surprise.
"""

from __future__ import annotations

from dataclasses import dataclass

_RENAMED_TO = {
    "--max-tokens": "--n-predict --predict --num-predict --max-new-tokens",
    "--temperature": "--temp",
    "--repetition-penalty": "--repeat-penalty",
    "--draft-model": "--model-draft --speculative-model -hfd --hf-repo-draft",
    "--num-draft-tokens": "--spec-draft-n-max --draft-max --draft-n --draft "
    "--num-speculative-tokens",
    "--model": "-hf -hfr --hf-repo",
    "--threads": "-t --num-thread",
    "--seed": "-s",
    "--ctx-size": "--max-model-len --num-ctx",
    "--parallel": "--max-num-seqs",
    "--alias": "-a --served-model-name",
    "--preset": "--models-preset",
    "--keep-alive": "--sleep-idle-seconds",
    "--system": "-sys --system-prompt",
    "--stop": "-r --reverse-prompt",
    "--chat-template": "--chat-template-file",
    "--grammar": "--grammar-file",
    "--json-schema": "-jf --json-schema-file",
}
ON_SERVERS = dict.fromkeys(
    "-n --max-tokens --n-predict --predict --num-predict".split(), "--max-output-tokens"
)
"""Names of the limit of an answer, for commands that only have the limit of all answers."""
_FORMER = {
    "--rounds": "--steps",
    "--texts": "--sequences",
    "--ways-per-prompt": "--modes-per-prompt",
    "--least-prompts": "--min-prompts",
}
"""Earlier names of our own."""
RENAMED = {old: new for new, names in _RENAMED_TO.items() for old in names.split()} | _FORMER
"""Another name of an option -> its name here; a value follows as it did."""

REPLACED = {
    "-no-cnv": "--raw",
    "--no-conversation": "--raw",
    "-st": "--chat",
    "--single-turn": "--chat",
    "--log-disable": "--quiet",
    "--mmap": "--load-mode=mmap",
}
"""A flag -> the flag here, or the option with its value."""

NONE, VALUE, SWITCH = "none", "value", "switch"
"""Kinds of words behind an option: nothing, a value, or perhaps on, off or auto."""


@dataclass(frozen=True)
class Skipped:
    """Options without effect here, and the reason."""

    names: tuple[str, ...]
    reason: str
    value: str = NONE


@dataclass(frozen=True)
class Refused:
    """Options that are refused, and what to use."""

    names: tuple[str, ...]
    remedy: str
    value: str = VALUE


def _skip(names: str, reason: str, value: str = NONE) -> Skipped:
    return Skipped(tuple(names.split()), reason, value)


def _refuse(names: str, remedy: str, value: str = VALUE) -> Refused:
    return Refused(tuple(names.split()), remedy, value)


_TABLE: tuple[Skipped | Refused, ...] = (
    _skip("-fa --flash-attn", "attention is chosen so that the output stays exact", SWITCH),
    _skip("--jinja", "chat templates are always rendered by jinja"),
    _skip("-cnv --conversation", "`specdec chat` is a conversation, and `run` answers one message"),
    _skip("--mlock", "what --memory-budget holds in memory stays there"),
    _skip("--no-mmap", "layers that do not fit are streamed; --load-mode ram reads all at once"),
    _skip(
        "-b --batch-size -ub --ubatch-size --max-num-batched-tokens",
        "a prompt is computed in chunks as large as --memory-budget allows",
        VALUE,
    ),
    _skip("-tb --threads-batch -td --threads-draft", "--threads is for all passes", VALUE),
    _skip(
        "--draft-min --draft-n-min --draft-p-min --spec-draft-n-min --spec-draft-p-min",
        "the size of a draft is decided at every step; --num-draft-tokens limits it",
        VALUE,
    ),
    _skip("-cd --ctx-size-draft", "the draft has the target's --ctx-size", VALUE),
    _skip("--no-warmup --warmup --enforce-eager", "there is no warm-up to leave out"),
    _skip("-cb --cont-batching --enable-chunked-prefill", "requests always share passes"),
    _skip("--enable-prefix-caching --cache-prompt", "prefixes of prompts are always reused"),
    _skip("--no-display-prompt --simple-io --nowordwrap", "only the output is printed"),
    _skip("--color -co", "the output is plain"),
    _skip("--metrics --slots --props", "the server always has /metrics"),
    _skip("--enable-auto-tool-choice", "tools are recognised from the model's chat template"),
    _skip(
        "--tool-call-parser --reasoning-parser --reasoning-format",
        "tools and reasoning are recognised from the model's chat template",
        VALUE,
    ),
    _skip("--no-context-shift", "a text ends where the context is full: that is the default"),
    _skip("--keep", "--context-shift always keeps the first four tokens", VALUE),
    _skip("--cpu-moe -cmoe", "experts are cached within --memory-budget"),
    _skip(
        "--n-cpu-moe -ncmoe -ot --override-tensor",
        "--memory-budget decides what is in memory",
        VALUE,
    ),
    _skip("--keepalive", "a command keeps its model until it ends; serve has --keep-alive", VALUE),
    _skip("--models-max", "as many models are loaded as --memory-budget holds", VALUE),
    _skip("--numa --prio --poll", "the kernel places threads; --threads sets how many", VALUE),
    _refuse(
        "-ngl --gpu-layers --n-gpu-layers -ngld --gpu-layers-draft",
        "GGUF files run on the CPU here; --device cuda places a checkpoint's layers by plan, and "
        "--vram-budget 8GiB limits it",
    ),
    _refuse("--gpu-memory-utilization", "give the GPU's memory in bytes: --vram-budget 8GiB"),
    _refuse("--cpu-offload-gb --swap-space", "give the memory in bytes: --memory-budget 16GiB"),
    _refuse(
        "-sm --split-mode -ts --tensor-split -mg --main-gpu -tp --tensor-parallel-size "
        "-pp --pipeline-parallel-size",
        "a model runs on one device; `batch` and `serve --ray auto` use several machines",
    ),
    _refuse(
        "-dp --data-parallel-size",
        "several machines have an engine each: `specdec serve --ray auto --replicas N`",
    ),
    _refuse("--speculative-config", "give -md MODEL, and --num-draft-tokens N for a limit"),
    _refuse(
        "--kv-cache-dtype",
        "the KV cache of the target has -ctk TYPE and -ctv TYPE, as in -ctk fp8 -ctv fp8",
    ),
    _refuse(
        "--prompt-cache --prompt-cache-file",
        "KV of prompts is kept in a folder: --prompt-cache-dir DIR",
    ),
    _refuse("--dtype --quantization", "a model runs in the number format of its files"),
    _refuse("--trust-remote-code", "code of a checkpoint is never run", NONE),
    _refuse("--lora --lora-modules", "merge the adapter into the model first"),
    _refuse("--tokenizer", "a model runs with its own tokenizer, in its folder"),
    _refuse("-mu --model-url", "`specdec pull user/repo:Q4_K_M` downloads a model"),
    _refuse("--mmproj -mm --image", "images are not taken; the language part of such a model runs"),
    _refuse("--embeddings --embedding --reranking", "only generation is offered", NONE),
    _refuse(
        "--mirostat --dry-multiplier --xtc-probability --dynatemp-range --typical --tfs",
        "this sampler is not offered; --top-k, --top-p and --min-p are",
    ),
    _refuse("-i --interactive --interactive-first -if", "`specdec chat` is a conversation", NONE),
    _refuse("-e --escape", "escapes stay as they are typed; a shell expands $'a\\nb'", NONE),
)
SKIPPED = {name: item for item in _TABLE if isinstance(item, Skipped) for name in item.names}
REFUSED = {name: item for item in _TABLE if isinstance(item, Refused) for name in item.names}


def table() -> str:
    """Return a table in Markdown of all these options, for docs/cli.md."""
    rows = [(names.split(), f"`{new}`") for new, names in _RENAMED_TO.items()]
    rows.append(([*ON_SERVERS], "of `serve`: `--max-output-tokens`"))
    for new in dict.fromkeys(REPLACED.values()):
        flag = new.replace("=", " ")
        rows.append(([old for old, flag in REPLACED.items() if flag == new], f"`{flag}`"))
    for item in _TABLE:
        does = f"skipped: {item.reason}" if isinstance(item, Skipped) else item.remedy
        rows.append((list(item.names), does))
    lines = [f"| {', '.join(f'`{name}`' for name in names)} | {use} |" for names, use in rows]
    return "\n".join(["| elsewhere | here |", "|---|---|", *lines]) + "\n"
