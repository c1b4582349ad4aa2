"""Option dataclasses as parameters of a command."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from inspect import Parameter, Signature, signature
from typing import Any, get_type_hints

from specdec.cli.options import Debug


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Let a command take option dataclasses: their fields become its options."""
    declared = signature(command, eval_str=True).parameters
    groups: dict[str, Any] = {
        name: one.annotation for name, one in declared.items() if is_dataclass(one.annotation)
    }

    def flat(**values: Any) -> None:
        built = {
            name: group(**{field.name: values.pop(field.name) for field in fields(group)})
            for name, group in groups.items()
        }
        command(**built, **values)

    parameters: list[Parameter] = []
    for name, one in declared.items():
        if name in groups:
            parameters += _fields_as_options(groups[name])
        else:
            parameters.append(one.replace(kind=Parameter.KEYWORD_ONLY))
    flat.__doc__ = command.__doc__
    flat.__name__ = command.__name__
    flat.__annotations__ = {one.name: one.annotation for one in parameters}
    flat.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    return flat


def with_debug(command: Callable[..., None]) -> Callable[..., None]:
    """Add --debug, which `run_app` reads from the words themselves, to a command's options."""
    declared = signature(command, eval_str=True).parameters.values()
    parameters = [one.replace(kind=Parameter.KEYWORD_ONLY) for one in declared]
    parameters.append(Parameter("debug", Parameter.KEYWORD_ONLY, default=False, annotation=Debug))

    def accepting(debug: bool, **values: Any) -> None:
        command(**values)

    accepting.__doc__ = command.__doc__
    accepting.__annotations__ = {one.name: one.annotation for one in parameters}
    accepting.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    return accepting


def _fields_as_options(group: Any) -> list[Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [
        one.replace(kind=Parameter.KEYWORD_ONLY, annotation=hints[name])
        for name, one in signature(group).parameters.items()
    ]
