"""Errors of the engine, as clients get them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from offload.errors import SpecdecError
from offload.storage.direct_io import StorageError
from specdec.api import ModelClosed
from specdec.checks import ConfigError
from specdec.grammar.state import GrammarError
from specdec.serve.errors import ApiError, bad_request, broken, draining
from specdec.text.contract import TokenizerError
from specdec.text.prompts import PromptError

_CLIENTS_FAULT = (ConfigError, GrammarError, PromptError, TokenizerError)


@contextmanager
def translated(
    fail: Callable[[ApiError, bool], None], log: Callable[[str], None]
) -> Iterator[None]:
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
        log(f"error: {error}")
        message = "the model failed; the server's log says why"
        fail(ApiError(500, message), isinstance(error, StorageError))
    except OSError:
        raise  # the server's end of the socket is gone
    except Exception as error:
        # Its text may quote a client: the log has its kind only.
        log(f"error: {type(error).__name__} in the engine's process (--debug)")
        fail(broken(), False)
