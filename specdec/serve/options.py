"""Options of the server: its address, its API key and the limits of clients."""

from __future__ import annotations

import ipaddress
import math
import os
from dataclasses import dataclass
from pathlib import Path

from offload.units import UnitError, parse_bytes
from specdec.checks import ConfigError, FieldName, check_type
from specdec.opening import open_now
from specdec.option import LIMITS, SERVER, check_options, option
from specdec.sampling.params import UNLIMITED_TOKENS
from specdec.serve.router.keep_alive import EXAMPLES, parse_keep_alive

API_KEY_VARIABLE = "SPECDEC_API_KEY"
MAX_REPLICAS = 256
_MAX_KEY_BYTES = 4096
_PRESET_KEEP_ALIVE_SECONDS = 300.0  # Ollama's


@dataclass(frozen=True)
class ServeOptions:
    """Server options of the command line; load options are separate."""

    host: str = option(
        "127.0.0.1", "Address to listen at; any but this machine's own needs a key.", SERVER
    )
    port: int = option(
        8080, "Port to listen at; 0 takes a free one.", SERVER, at_least=0, at_most=65535
    )
    api_key: str | None = option(
        None,
        f"Key that clients have to send; better in {API_KEY_VARIABLE}, since others see arguments.",
        SERVER,
        shown_default=f"{API_KEY_VARIABLE}, else none",
    )
    api_key_file: Path | None = option(
        None, "File whose first line is that key.", SERVER, shown_default="none"
    )
    alias: str | None = option(
        None,
        "Name that clients know the model by; several with commas.",
        SERVER,
        shown_default="the last part of the target's name",
    )
    strict_model: bool = option(
        False, "Refuse requests that name another model; else any name is answered.", SERVER
    )
    preset: Path | None = option(
        None,
        "TOML file with a section for each of several models, loaded on demand within one "
        "--memory-budget.",
        SERVER,
        metavar="FILE",
        shown_default="none",
    )
    ray: str | None = option(
        None,
        "Run an engine on each of several machines of a Ray cluster; auto: the one that runs here, "
        "or one of this machine alone.",
        SERVER,
        metavar="auto|ADDRESS",
        shown_default="none",
    )
    replicas: int | None = option(
        None,
        "With --ray: number of engines, one on each machine.",
        SERVER,
        at_least=1,
        at_most=MAX_REPLICAS,
        shown_default="one on each machine there is",
    )
    keep_alive: str | None = option(
        None,
        "Time without a request after which a model is unloaded: 5m, seconds, or -1 for never.",
        SERVER,
        metavar="TIME",
        shown_default="5m with --preset, else -1",
    )
    cors_origin: str | None = option(
        None,
        "Origin of web pages that may use the server; several with commas, * for all.",
        SERVER,
        shown_default="none",
    )
    log_file: Path | None = option(
        None,
        "File to append the server's lines and one line per request to.",
        SERVER,
        shown_default="none",
    )
    max_body: str = option("1MiB", "Longest request.", LIMITS)
    max_headers: int = option(100, "Maximum number of headers of a request.", LIMITS, at_least=1)
    max_choices: int = option(
        8,
        "Maximum number of sequences of one request: its prompts times its n.",
        LIMITS,
        at_least=1,
        at_most=1024,
    )
    max_output_tokens: int = option(
        16384,
        "Maximum number of tokens of each sequence of a request; -1: what the context holds.",
        LIMITS,
        at_least=-1,
    )
    max_logprobs: int = option(
        20000,
        "Maximum log-probabilities of a request, its prompts' included: sequences x tokens x "
        "(top_logprobs + 1).",
        LIMITS,
        at_least=1,
    )
    max_queue: int = option(
        32, "Maximum number of requests that run or wait; others get 429.", LIMITS, at_least=1
    )
    max_connections: int = option(
        256, "Maximum number of open connections, and of requests at once.", LIMITS, at_least=2
    )
    request_timeout: float = option(
        600.0,
        "Seconds that a request may go without progress, waiting included.",
        LIMITS,
        above=0.0,
    )
    engine_timeout: float = option(
        120.0,
        "Seconds without a sign of life before the engine is restarted.",
        LIMITS,
        at_least=4.0,
    )
    read_timeout: float = option(20.0, "Seconds for a request to arrive.", LIMITS, above=0.0)
    write_timeout: float = option(
        20.0, "Seconds that a client may leave its answer unread.", LIMITS, above=0.0
    )
    drain_timeout: float = option(
        30.0, "Seconds for running requests to end after SIGTERM.", LIMITS, at_least=0.0
    )

    @property
    def output_limit(self) -> int:
        """Maximum number of tokens of a sequence."""
        return UNLIMITED_TOKENS if self.max_output_tokens == -1 else self.max_output_tokens

    def __post_init__(self) -> None:
        """Raise ConfigError for invalid values or combinations."""
        for name in ("host", "max_body"):
            check_type(name, getattr(self, name), str)
        for name in ("api_key", "alias", "ray", "keep_alive", "cors_origin"):
            check_type(name, getattr(self, name), str, type(None))
        check_options(self)
        if self.max_output_tokens == 0:
            raise ConfigError(FieldName("max_output_tokens"), " is 0, must be positive, or -1")
        if self.max_body_bytes == 0:
            raise ConfigError(FieldName("max_body"), " is 0, must be positive: try 1MiB")
        if self.preset is not None and self.alias is not None:
            raise ConfigError(
                FieldName("alias"),
                " names one model, but ",
                FieldName("preset"),
                " has several: give each its alias there",
            )
        if self.preset is not None and self.ray is not None:
            raise ConfigError(
                FieldName("ray"),
                " runs one model on several machines, and ",
                FieldName("preset"),
                " several models on one: leave one out",
            )
        if self.replicas is not None and self.ray is None:
            raise ConfigError(FieldName("replicas"), " needs ", FieldName("ray"))
        self.keep_alive_seconds  # noqa: B018  # raises ConfigError
        if self.api_key is not None and self.api_key_file is not None:
            raise ConfigError(
                "give either ",
                FieldName("api_key"),
                " or ",
                FieldName("api_key_file"),
                ", not both",
            )

    @property
    def max_body_bytes(self) -> int:
        try:
            return parse_bytes(self.max_body)
        except UnitError as error:
            raise ConfigError(FieldName("max_body"), f": {error}") from error

    @property
    def keep_alive_seconds(self) -> float:
        """Seconds that a model stays loaded without a request; may be infinite."""
        if self.keep_alive is None:
            return math.inf if self.preset is None else _PRESET_KEEP_ALIVE_SECONDS
        try:
            return parse_keep_alive(self.keep_alive)
        except ValueError as error:
            raise ConfigError(
                FieldName("keep_alive"), f" is {self.keep_alive!r}, must be {EXAMPLES}"
            ) from error

    @property
    def aliases(self) -> tuple[str, ...]:
        return _listed(self.alias)

    @property
    def cors_origins(self) -> tuple[str, ...]:
        return _listed(self.cors_origin)

    @property
    def is_local(self) -> bool:
        """Return whether only programs of this machine can reach the server."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def key(self) -> str | None:
        """Return the API key from the option, the file or the variable; None without one.

        Raises ConfigError if a key is required and missing, or cannot be read.
        """
        key = self.api_key
        if self.api_key_file is not None:
            key = _read_key(self.api_key_file)
        elif key is None:
            key = os.environ.get(API_KEY_VARIABLE) or None
        if key is not None and (not key.isascii() or not key.isprintable() or not key.strip()):
            raise ConfigError("the API key must be of printable ASCII characters, at least one")
        if key is None and not self.is_local:
            raise ConfigError(
                FieldName("host"),
                f" is {self.host}, which others reach: clients need a key there; set "
                f"{API_KEY_VARIABLE} or ",
                FieldName("api_key_file"),
                ", or listen at 127.0.0.1",
            )
        return key


def _listed(text: str | None) -> tuple[str, ...]:
    return tuple(item.strip() for item in (text or "").split(",") if item.strip())


def _read_key(path: Path) -> str:
    try:
        with open_now(path) as file:
            raw = file.read(_MAX_KEY_BYTES)
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(
            "cannot read ", FieldName("api_key_file"), f" {path}: {reason}"
        ) from error
    lines = raw.decode("ascii", errors="replace").splitlines()
    return lines[0].strip() if lines else ""
