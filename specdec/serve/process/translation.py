"""Errors of the engine, as clients get them."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from offload.errors import SpecdecError
from offload.storage.direct_io import StorageError
from specdec.api import ModelClosed
from specdec.checks import ConfigError
from specdec.grammar.state import GrammarError
from specdec.serve.errors import ApiError, bad_request, broken, described_fault, draining
from specdec.serve.process.messages import ServerGone
from specdec.text.contract import TokenizerError
from specdec.text.prompts import PromptError

_CLIENTS_FAULT = (ConfigError, GrammarError, PromptError, TokenizerError)


@dataclass(frozen=True)
class Log:
    """Errors for the server's operator. say: takes a line. is_debug: whether tracebacks follow."""

    say: Callable[[str], None]
    is_debug: bool = False

    def fault(self, error: Exception) -> None:
        """Tell of an error of ours."""
        self.say(f"error: {described_fault(error)}")
        if self.is_debug:
            traceback.print_exception(type(error), error, error.__traceback__)


@contextmanager
def translated(fail: Callable[[ApiError, bool], None], log: Log) -> Iterator[None]:
    """Pass errors to `fail` as (ApiError, whether the model's files cannot be read); log those that
    are the server's fault."""
    try:
        yield
    except ApiError as error:
        fail(error, False)
    except _CLIENTS_FAULT as error:
        fail(bad_request(str(error)), False)
    except ModelClosed:
        fail(draining(), False)
    except SpecdecError as error:
        log.say(f"error: {error}")
        message = "the model failed; the server's log says why"
        fail(ApiError(500, message), isinstance(error, StorageError))
    except ServerGone:
        raise  # nobody waits for an answer
    except Exception as error:
        log.fault(error)
        fail(broken(), False)
