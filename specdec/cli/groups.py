"""Groups of command line options made from the fields of a configuration.

Names, types, limits, help and defaults are those of the fields. A command takes one of the groups
below as a parameter, and `with_options` turns it into the options that typer sees.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import typer

from specdec.cli.completion import complete_model
from specdec.cli.input.prompts import read_text
from specdec.cli.naming import as_options, naming_origins, option_name, with_variables
from specdec.cli.options import Debug, OptionError
from specdec.config import MAX_DRAFT_TOKENS, parse_spec_type
from specdec.models.drafts import AUTO_DRAFT
from specdec.models.outlines import planned_name
from specdec.option import (
    BEAMS,
    LIMITS,
    MEMORY,
    MODELS,
    SAMPLING,
    SERVER,
    SPECULATION,
    options_of,
)
from specdec.run_options import RunOptions
from specdec.sampling.params import SamplingParams
from specdec.serve.options import ServeOptions
from specdec.training.options import DATA, TRAINING, TrainOptions


def parse_num_draft_tokens(text: str, option: str = "--num-draft-tokens") -> int | None:
    """Parse a count; "auto" -> None."""
    if text == "auto":
        return None
    is_number = text.isascii() and text.isdigit() and len(text) < 10
    if not is_number or int(text) > MAX_DRAFT_TOKENS:
        raise OptionError(
            f"{option} is {text!r}, must be auto or a whole number from 0 to {MAX_DRAFT_TOKENS}"
        )
    return int(text)


def parse_kv_tokens(text: str) -> int | None:
    """Parse a number of tokens; "auto" -> None."""
    if text == "auto":
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 12 and int(text)):
        raise OptionError(f"--kv-tokens is {text!r}, must be auto or a number of tokens, 1 or more")
    return int(text)


def _parse_early_stopping(text: str) -> bool | str:
    values: dict[str, bool | str] = {"true": True, "false": False, "never": "never"}
    if text not in values:
        raise OptionError(f"--early-stopping is {text!r}, must be true, false or never")
    return values[text]


def one_draft(names: Sequence[str]) -> str:
    if len(names) > 1:
        raise OptionError(
            f"{len(names)} draft models were named ({', '.join(names)}), but a run uses one: "
            "`specdec check --rank --prompts FILE` measures which one serves best"
        )
    return names[0]


# Fields with another type on the command line, and the conversion to the field's value.
_WRITTEN: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "draft_model": (list[str], one_draft),
    "spec_type": (str, parse_spec_type),
    "num_draft_tokens": (str, parse_num_draft_tokens),
    "kv_tokens": (str, parse_kv_tokens),
    "stop": (list[str], tuple),
    "json_schema": (Path, read_text),
    "grammar": (Path, read_text),
    "early_stopping": (str, _parse_early_stopping),
}
_MODELS = ("model", "draft_model")
_FILES = tuple(name for name, (kind, _) in _WRITTEN.items() if kind is Path)


def _given(values: dict[str, Any]) -> dict[str, Any]:
    """Return the options that were given, as values of the fields."""
    return {
        name: _WRITTEN[name][1](value) if name in _WRITTEN else value
        for name, value in values.items()
        if value not in (None, [])
    }


def _one_run(values: dict[str, Any]) -> RunOptions:
    return with_named_draft(as_given(values))


def as_given(values: dict[str, Any]) -> RunOptions:
    return RunOptions(**_given(values))  # errors are reported before models are opened


def _as_named(values: dict[str, Any]) -> RunOptions | None:
    return None if values["model"] is None else as_given(values)


def with_named_draft(options: RunOptions) -> RunOptions:
    """Return the options with the draft that -md auto chooses, and say why."""
    if options.draft_model != AUTO_DRAFT:
        return options
    from specdec.planning import plan

    return plan.with_named_draft(options)


def _planned_run(values: dict[str, Any]) -> RunOptions:
    """As `_one_run`, with headers in place of models that are not on this disk."""
    asked = RunOptions(**_given(values))
    asked = replace(asked, model=str(planned_name(asked.model)))
    draft = with_named_draft(asked).draft_model
    return replace(asked, draft_model=draft and str(planned_name(draft)))


def _run_for_each_draft(values: dict[str, Any]) -> list[RunOptions]:
    drafts = values.pop("draft_model") or [None]
    return [RunOptions(**_given(values), draft_model=draft) for draft in drafts]


def _given_sampling(values: dict[str, Any]) -> dict[str, Any]:
    given = _given(values)
    SamplingParams(**given)
    return given


@dataclass(frozen=True)
class Group:
    """Fields of a configuration as options; a command gets the result of `build`.

    optional: names of required fields that may be left out.
    `build` raises SpecdecError for a user error, before anything is started.
    """

    kind: type[Any]
    names: tuple[str, ...]
    build: Callable[[dict[str, Any]], Any]
    optional: tuple[str, ...] = ()

    def typed(self, values: dict[str, Any]) -> dict[str, str]:
        """Return each field's name in errors: its option, and the file that its text is from."""
        options = {name: option_name(self.kind, name) for name in self.names}
        of_files = (name for name in _FILES if name in options and values[name] is not None)
        return {**options, **{name: f"{options[name]} {values[name]}" for name in of_files}}

    def parameters(self) -> list[Parameter]:
        """Return the parameters that typer sees."""
        hints, defaults = get_type_hints(self.kind), {f.name: f.default for f in fields(self.kind)}
        result = []
        for name in self.names:
            typed = _WRITTEN[name][0] if name in _WRITTEN else _first_type(hints[name])
            default = Parameter.empty if defaults[name] is MISSING else defaults[name]
            if self.kind is SamplingParams or name in self.optional:
                default = None  # only given options override other defaults
            typed = typed | None if default is None else typed
            option = typer_option(self.kind, name)
            annotation = Annotated[typed, option]  # type: ignore[valid-type]  # known only now
            result.append(
                Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
            )
        return result


def typer_option(kind: type[Any], name: str) -> Any:
    """Return typer's option for one field."""
    option = options_of(kind)[name]
    return typer.Option(
        *filter(None, (option.short, option_name(kind, name))),
        help=option.help,
        rich_help_panel=option.panel,
        metavar=option.metavar or "|".join(option.choices) or None,
        min=None if option.metavar else option.at_least,  # it would be shown beside the metavar
        show_default=option.shown_default,
        autocompletion=_completion(name, option.choices),
    )


def _completion(name: str, choices: Sequence[str]) -> Callable[[str], list[str]] | None:
    """Return the completion of an option's value; None leaves it to the shell, for files."""
    if name in _MODELS:
        return lambda incomplete: complete_model(incomplete, is_draft=name == "draft_model")
    if choices:
        return lambda incomplete: [item for item in choices if item.startswith(incomplete)]
    return None


def _first_type(hint: Any) -> Any:
    return next(iter(get_args(hint)), hint)


def _names(kind: type[Any], *panels: str, leave_out: tuple[str, ...] = ()) -> tuple[str, ...]:
    result = ((name, item.panel) for name, item in options_of(kind).items())
    return tuple(name for name, panel in result if panel in panels and name not in leave_out)


CHAT = _names(RunOptions, MODELS, MEMORY, SPECULATION)
_TRACES = ("record_traces", "max_traces")
_PROMPT_CACHE = ("prompt_cache_dir", "prompt_cache_size")
_OF_GENERATIONS = (
    *("context_shift", "chat_template", "parse_special"),
    *_PROMPT_CACHE,
    *_TRACES,
)
TARGET = _names(RunOptions, MODELS, MEMORY, leave_out=("draft_model", *_OF_GENERATIONS))
LOAD = _names(RunOptions, MODELS, MEMORY, SPECULATION, leave_out=_OF_GENERATIONS)
_TEACHER = "model memory_budget device vram_budget threads io_threads load_mode".split()
_ROOFLINE = ("model", "ctx_size", "memory_budget", "threads", "cache_type_k", "cache_type_v")

Target = Annotated[RunOptions, Group(RunOptions, TARGET, _one_run)]
"""Options of a target alone."""
Load = Annotated[RunOptions, Group(RunOptions, LOAD, _one_run)]
"""Options of a target and of drafting."""
PlannedLoad = Annotated[RunOptions, Group(RunOptions, LOAD, _planned_run)]
"""Load, of models that may be on the hub."""
BatchLoad = Annotated[RunOptions, Group(RunOptions, (*LOAD, *_TRACES), _one_run)]
"""Load, with the recording of traces."""
ChatLoad = Annotated[RunOptions, Group(RunOptions, CHAT, _one_run)]
"""Load, with options of chat templates, the prompt cache and traces."""
ServedLoad = Annotated[RunOptions | None, Group(RunOptions, CHAT, _as_named, ("model",))]
"""ChatLoad, of which the engine's process chooses the draft: see `with_named_draft`. None where no
model is named."""
LoadEachDraft = Annotated[list[RunOptions], Group(RunOptions, LOAD, _run_for_each_draft)]
"""One RunOptions per draft model that is named, or one without a draft."""
TrainTarget = Annotated[RunOptions, Group(RunOptions, tuple(_TEACHER), _one_run)]
"""Options of a target whose distributions a draft is trained with."""
Training = Annotated[
    dict[str, Any], Group(TrainOptions, _names(TrainOptions, DATA, TRAINING), _given)
]
"""Options of a training that were given."""
Roofline = Annotated[RunOptions, Group(RunOptions, _ROOFLINE, _one_run)]
"""Options that determine the arithmetic of a pass."""
Serving = Annotated[
    ServeOptions,
    Group(ServeOptions, _names(ServeOptions, SERVER, LIMITS), lambda v: ServeOptions(**_given(v))),
]
"""Options of a server: address, API key and limits."""
Sampling = Annotated[
    dict[str, Any],
    Group(SamplingParams, _names(SamplingParams, SAMPLING), _given_sampling),
]
"""Sampling options that were given."""
SamplingOrBeams = Annotated[
    dict[str, Any],
    Group(SamplingParams, _names(SamplingParams, SAMPLING, BEAMS), _given_sampling),
]
"""Sampling, with options of beam search and of several sequences."""
Model = Annotated[str, typer_option(RunOptions, "model")]
BeamSpan = Annotated[int, typer_option(RunOptions, "beam_span")]


def _own_name(parameter: Parameter) -> str:
    """Return the name of an option that is no field of a group."""
    metadata = getattr(parameter.annotation, "__metadata__", ())
    written = (word for item in metadata for word in getattr(item, "param_decls", None) or ())
    default = "--" + parameter.name.replace("_", "-")
    return next((word for word in written if word.startswith("--")), default)


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Expand the groups among a command's parameters into options, and add --debug."""
    declared = signature(command, eval_str=True).parameters
    groups = {
        name: extra
        for name, item in declared.items()
        for extra in getattr(item.annotation, "__metadata__", ())
        if isinstance(extra, Group)
    }
    own = {name: _own_name(item) for name, item in declared.items() if name not in groups}
    parameters: list[Parameter] = []
    for name, item in declared.items():
        if name in groups:
            parameters += groups[name].parameters()
        else:
            parameters.append(item.replace(kind=Parameter.KEYWORD_ONLY))
    is_context_declared = "context" in declared
    if not is_context_declared:
        kind = Parameter.KEYWORD_ONLY
        parameters.insert(0, Parameter("context", kind, annotation=typer.Context))
    # `run_app` reads its value from argv.
    parameters.append(Parameter("debug", Parameter.KEYWORD_ONLY, default=False, annotation=Debug))

    def flat(context: typer.Context, debug: bool, **values: Any) -> None:
        of_groups = [item.typed(values) for item in groups.values()]
        typed = dict(ChainMap(own, *of_groups))
        if is_context_declared:
            values["context"] = context
        with naming_origins(context), as_options(with_variables(context, typed)):
            built = {
                name: group.build({field: values.pop(field) for field in group.names})
                for name, group in groups.items()
            }
            command(**built, **values)

    flat.__doc__ = command.__doc__
    flat.__name__ = command.__name__
    flat.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    flat.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    return flat
