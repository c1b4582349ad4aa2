"""Exit codes and one-line errors, for `specdec` and `specdec-bench` alike.

0 success; 2 user error, reported in one line; 130 Ctrl-C; 141 broken pipe on stdout; a signal that
ends us gives 128 + its number, as shells report it (SIGTERM: 143). Anything else is a bug, and
keeps its traceback and Python's exit code 1. `--debug` or SPECDEC_DEBUG=1 shows the traceback of a
user error too.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import typer
from typer.completion import shell_complete
from typer.exceptions import TyperException

from offload.errors import SpecdecError, naming_options
from specdec.cli.arguments import understood
from specdec.cli.naming import DEFAULTS_FILE, variable_of
from specdec.cli.output import SHOWN, OutputError, write_text
from specdec.cli.remedies import remedy_for

EXIT_ERROR = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells report it
EXIT_BROKEN_PIPE = 141  # 128 + SIGPIPE


@dataclass(frozen=True)
class Invocation:
    """Arguments of the command; `context.obj` for commands."""

    argv: tuple[str, ...]


def run_app(app: typer.Typer, name: str, argv: Sequence[str]) -> int:
    """Run a typer app and return the exit code; never raises for a user error."""
    command = typer.main.get_command(app)
    _hide_flag_types(command)
    asked = f"_{name.replace('-', '_').upper()}_COMPLETE"  # by the script of a shell
    if asked in os.environ:
        return shell_complete(command, {}, name, asked, os.environ[asked])

    SHOWN.metrics, SHOWN.plan = True, False

    def work() -> None:
        arguments = understood(argv, command)
        with command.make_context(name, arguments, obj=Invocation(tuple(argv))) as context:
            command.invoke(context)

    return guard(name, work, debug=wants_debug(argv))


def wants_debug(argv: Sequence[str]) -> bool:
    """Return whether errors are shown with their traceback."""
    return "--debug" in argv or os.environ.get("SPECDEC_DEBUG", "") not in ("", "0")


def _hide_flag_types(command: Any) -> None:
    """Hide the type of flags, which typer's help shows as `--json <bool>`."""

    def hide(item: Any) -> None:
        make_help_option = item.get_help_option

        def help_option(context: Any) -> Any:
            option = make_help_option(context)
            if option is not None:
                option.metavar = ""
            return option

        item.get_help_option = help_option
        for option in item.params:
            if getattr(option, "is_flag", False):
                option.metavar = ""

    hide(command)
    for item in getattr(command, "commands", {}).values():
        hide(item)


def guard(name: str, work: Callable[[], None], *, debug: bool = False) -> int:
    """Call `work`; turn its exceptions into an exit code and at most one line."""
    with naming_options():
        return _guarded(name, work, debug or wants_debug(()))


def _guarded(name: str, work: Callable[[], None], debug: bool) -> int:
    is_stdout_closed = _open_standard_streams()
    _make_streams_robust()
    try:
        if is_stdout_closed:
            raise OutputError("stdout is closed: send it to a file, or to /dev/null")
        work()
        write_text("")  # flush
        return 0
    except typer.Exit as stop:
        return stop.exit_code
    except (KeyboardInterrupt, typer.Abort):
        print(f"{name}: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        return _forget_stdout()
    except TyperException as error:
        message = f"{_origin(error)}{_with_value(error)}"
        return _fail(name, f"{message} (see {_command_path(name, error)} --help)")
    except OutputError as error:
        _forget_stdout()
        return _fail(name, str(error), debug)
    except SpecdecError as error:
        return _fail(name, str(error), debug)
    except MemoryError:
        return _fail(name, "out of memory: give a smaller --memory-budget or context", debug)
    except OSError as error:
        return _fail(name, _describe(error), debug)


def _fail(name: str, message: str, debug: bool = False) -> int:
    if debug:
        traceback.print_exc()
    print(f"{name}: error: {' '.join(message.split())}", file=sys.stderr)
    return EXIT_ERROR


def _describe(error: OSError) -> str:
    reason = error.strerror or str(error) or type(error).__name__
    return f"{error.filename}: {reason}" if error.filename else reason


def _with_value(error: TyperException) -> str:
    """Return the message with the given value in place of the validator's word "Input"."""
    message = error.format_message().rstrip(".")
    list_errors = getattr(error.__cause__, "errors", None)  # of pydantic's ValidationError
    if list_errors is None:
        return message + remedy_for(message, getattr(error, "ctx", None))
    message = message.partition(", unable to parse")[0]
    return message.replace("Input should", f"{list_errors()[0]['input']!r} should", 1)


def _origin(error: TyperException) -> str:
    """Return the settings file or the variable that the wrong value comes from, as a prefix."""
    option, context = getattr(error, "param", None), getattr(error, "ctx", None)
    if option is None or context is None:
        return ""
    source = context.get_parameter_source(option.name)
    if source is not None and source.name == "DEFAULT_MAP":
        return f"{context.meta[DEFAULTS_FILE]}: "
    variable = variable_of(context, option.name)
    return "" if variable is None else f"{variable}: "


def _command_path(name: str, error: TyperException) -> str:
    context = getattr(error, "ctx", None)
    return context.command_path if context is not None else name


def _open_standard_streams() -> bool:
    """Open closed standard streams on /dev/null; return whether stdout was closed.

    Python leaves None in their place. A file that is opened later, such as a model's, must not
    get their numbers: what libraries print would go into it.
    """
    is_stdout_closed = sys.stdout is None
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)  # children would find it closed again
    os.close(descriptor)
    sys.stdin = sys.stdin or os.fdopen(0, closefd=False)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)
    return is_stdout_closed


def _make_streams_robust() -> None:
    """Show characters that the terminal's encoding lacks as a question mark, without an error.

    Invalid bytes on stdin are passed on, and refused where the text is used.
    """
    names = {"stdin": "surrogateescape", "stdout": "replace", "stderr": "replace"}
    for name, errors in names.items():
        reconfigure = getattr(getattr(sys, name), "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors=errors)


def _forget_stdout() -> int:
    """Point stdout at /dev/null, so that the interpreter's last flush stays silent too."""
    with suppress(OSError, ValueError):  # stdout may be no real file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return EXIT_BROKEN_PIPE
