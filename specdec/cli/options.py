"""The options that several commands have, each declared once; those of one are beside it.

The names are an interface: a test pins them. The Python keyword of an option is its long name
with underscores. A command takes `LoadOptions` and `SamplingOptions` as parameters, and
`specdec.cli.signature.with_options` turns their fields into the options that typer sees.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from offload.errors import SpecdecError
from specdec.config import MIN_DRAFT_WINDOW

_MODEL, _MEMORY, _SPECULATION, _SAMPLING = "Models", "Memory", "Speculation", "Sampling"


class OptionError(SpecdecError, ValueError):
    """An option's value, or a combination of options, makes no sense."""


Model = Annotated[
    str,
    typer.Option(
        "-m",
        "--model",
        help="Target model: a directory, a .gguf file, a hub id (user/repo) or pair:target.",
        rich_help_panel=_MODEL,
        show_default=False,
    ),
]
DraftModel = Annotated[
    list[str] | None,
    typer.Option(
        "-md",
        "--draft-model",
        help="Draft model with the same vocabulary, named in the same ways; pair:draft.",
        rich_help_panel=_MODEL,
        show_default=False,
    ),
]
MemoryBudget = Annotated[
    str,
    typer.Option(
        "--memory-budget",
        help="Memory of the whole process, e.g. 3.5GiB or 6GB; auto takes the cgroup's limit, "
        "or what other processes leave free, if that is less.",
        rich_help_panel=_MEMORY,
    ),
]
Device = Annotated[
    str,
    typer.Option(
        "--device",
        metavar="cpu|cuda|auto",
        help="Where the target is computed; auto takes the GPU if there is one for it.",
        rich_help_panel=_MEMORY,
    ),
]
VramBudget = Annotated[
    str,
    typer.Option(
        "--vram-budget",
        help="GPU memory of the whole process, e.g. 8GiB; auto takes what is free.",
        rich_help_panel=_MEMORY,
    ),
]
CtxSize = Annotated[
    int | None,
    typer.Option(
        "-c",
        "--ctx-size",
        min=1,
        help="Longest sequence in tokens, prompt included.",
        rich_help_panel=_MEMORY,
        show_default="2048, or less where the model has less",
    ),
]
Enforce = Annotated[
    bool,
    typer.Option(
        "--enforce",
        help="Run inside a memory cgroup of the budget, so that the limit is the kernel's.",
        rich_help_panel=_MEMORY,
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(
        "--threads",
        min=1,
        help="Compute threads.",
        rich_help_panel=_MEMORY,
        show_default="all cores",
    ),
]
PrefetchDepth = Annotated[
    int | None,
    typer.Option(
        "--prefetch-depth",
        min=1,
        help="Layers in the read-ahead ring.",
        rich_help_panel=_MEMORY,
        show_default="planned",
    ),
]
IoThreads = Annotated[
    int | None,
    typer.Option(
        "--io-threads",
        min=1,
        help="Threads that read from storage.",
        rich_help_panel=_MEMORY,
        show_default="4",
    ),
]
LoadMode = Annotated[
    str,
    typer.Option(
        "--load-mode",
        metavar="auto|stream|ram|mmap",
        help="auto streams what does not fit; mmap (GGUF only) leaves it to the page cache.",
        rich_help_panel=_MEMORY,
    ),
]
CacheTypeK = Annotated[
    str | None,
    typer.Option(
        "-ctk",
        "--cache-type-k",
        metavar="f16|q8_0|q4_0",
        help="Number format of the keys in the KV cache (GGUF targets).",
        rich_help_panel=_MEMORY,
        show_default="f16",
    ),
]
CacheTypeV = Annotated[
    str | None,
    typer.Option(
        "-ctv",
        "--cache-type-v",
        metavar="f16|q8_0|q4_0",
        help="Number format of the values in the KV cache (GGUF targets).",
        rich_help_panel=_MEMORY,
        show_default="f16",
    ),
]
SpecType = Annotated[
    str | None,
    typer.Option(
        "--spec-type",
        metavar="draft|ngram|draft,ngram|none",
        help="Where draft tokens come from.",
        rich_help_panel=_SPECULATION,
        show_default="draft,ngram; ngram without a draft model",
    ),
]
NumDraftTokens = Annotated[
    str,
    typer.Option(
        "--num-draft-tokens",
        metavar="N|auto",
        help="Draft tokens per pass; auto takes what a pass verifies for free.",
        rich_help_panel=_SPECULATION,
    ),
]
TreeWidth = Annotated[
    int | None,
    typer.Option(
        "--tree-width",
        min=1,
        help="Most branches below one draft token.",
        rich_help_panel=_SPECULATION,
        show_default="8",
    ),
]
Acceptance = Annotated[
    str,
    typer.Option(
        "--acceptance",
        metavar="match|rejection|block",
        help="Rule by which the target accepts; the last two are for one sampled chain.",
        rich_help_panel=_SPECULATION,
    ),
]
AcceptThreshold = Annotated[
    float | None,
    typer.Option(
        "--accept-threshold",
        metavar="P",
        help="LOSSY: accept a draft token unless the target gives it less than this probability.",
        rich_help_panel=_SPECULATION,
        show_default="off: the output is the target's own",
    ),
]
DraftAhead = Annotated[
    str,
    typer.Option(
        "--draft-ahead",
        metavar="auto|on|off",
        help="Draft while the target's pass runs; auto does where that was measured to pay.",
        rich_help_panel=_SPECULATION,
    ),
]
DraftDevice = Annotated[
    str,
    typer.Option(
        "--draft-device",
        metavar="cpu|cuda|auto",
        help="Where the draft model is computed; auto takes what should be faster.",
        rich_help_panel=_SPECULATION,
    ),
]
DraftWindow = Annotated[
    int | None,
    typer.Option(
        "--draft-window",
        min=MIN_DRAFT_WINDOW,
        help="Show the draft model only so many recent tokens of a long context.",
        rich_help_panel=_SPECULATION,
        show_default="all of them",
    ),
]
PromptCacheFile = Annotated[
    Path | None,
    typer.Option(
        "--prompt-cache-file",
        help="Restore the KV of the last prompt and its text from this file, and save it there.",
        rich_help_panel=_MEMORY,
        show_default="none",
    ),
]
MaxTokens = Annotated[
    int,
    typer.Option("-n", "--max-tokens", min=1, help="Most tokens to generate."),
]
OnDevice = Annotated[
    str | None,
    typer.Option(
        "--on",
        metavar="DEVICE",
        help="Another device: a name (ufs-3.1, sata-ssd, sd-card, gpu-8gb, ...), or a JSON file "
        "that `specdec profile --json` wrote there.",
        show_default="this machine",
    ),
]
Temperature = Annotated[
    float | None,
    typer.Option(
        "--temperature",
        help="0, the default, is greedy.",
        rich_help_panel=_SAMPLING,
    ),
]
TopK = Annotated[
    int | None,
    typer.Option(
        "--top-k", help="Keep the k likeliest tokens; 0 keeps all.", rich_help_panel=_SAMPLING
    ),
]
TopP = Annotated[
    float | None,
    typer.Option(
        "--top-p", help="Keep the likeliest tokens up to this sum.", rich_help_panel=_SAMPLING
    ),
]
MinP = Annotated[
    float | None,
    typer.Option(
        "--min-p",
        help="Drop tokens below this share of the likeliest one.",
        rich_help_panel=_SAMPLING,
    ),
]
RepetitionPenalty = Annotated[
    float | None,
    typer.Option(
        "--repetition-penalty",
        help="Above 1: tokens already seen become less likely.",
        rich_help_panel=_SAMPLING,
    ),
]
Seed = Annotated[
    int | None,
    typer.Option(
        "--seed",
        help="The same seed gives the same tokens, whatever the draft and the budget.",
        rich_help_panel=_SAMPLING,
    ),
]
Stop = Annotated[
    list[str] | None,
    typer.Option(
        "--stop",
        help="Stop before this text; may be given several times.",
        rich_help_panel=_SAMPLING,
        show_default=False,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
Debug = Annotated[
    bool,
    typer.Option("--debug", help="Show the traceback of an error (also SPECDEC_DEBUG=1)."),
]
