"""Choice of the replica that gets a request, by the prompt that it has computed before.

The server has no tokenizer, so a prefix is known by its text: hashes of the conversation from its
beginning, each over all before it, as a prefix cache has them of blocks of tokens.
"""

from __future__ import annotations

import json
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, NamedTuple

from specdec.serve.api.chat import ChatRequest
from specdec.serve.api.completions import CompletionRequest

_FIRST_BYTES = 64
_GROWTH = 16
"""Each prefix within a text is longer than the one before it by 1/16, and by at least 64 bytes: a
megabyte has 130 of them, and a match is at most 6 % shorter than what two texts have in common."""
_MAX_PREFIXES = 1 << 15
"""Known prefixes, the least recently used of which are forgotten: about 6 MB."""


class Prefix(NamedTuple):
    """Beginning of a prompt, of so many bytes."""

    num_bytes: int
    digest: bytes


def prompt_prefixes(form: Any) -> tuple[Prefix, ...]:
    """Return the prefixes of a request's prompt, the shortest first; none if its KV is not cached.

    form: ChatRequest or CompletionRequest; others have no prompt. Of several prompts the first.
    """
    if isinstance(form, ChatRequest):
        parts = _chat_parts(form)
    elif isinstance(form, CompletionRequest):
        parts = _completion_parts(form)
    else:
        return ()
    if form.cache_prompt is False:
        return ()
    try:
        return prefixes_of(parts)
    except (OverflowError, RecursionError, ValueError):  # values that JSON or 64 bits cannot hold
        return ()


def _chat_parts(form: ChatRequest) -> Iterator[bytes]:
    for item in (*(form.tools or ()), *form.messages):
        yield json.dumps(item.model_dump(exclude_none=True)).encode("ascii")


def _completion_parts(form: CompletionRequest) -> Iterator[bytes]:
    prompt: Any = form.prompt
    if isinstance(prompt, list) and not isinstance(prompt[0], int):
        prompt = prompt[0]
    if isinstance(prompt, str):
        yield prompt.encode("utf-8", "surrogatepass")
    else:
        yield array("Q", prompt).tobytes()


def prefixes_of(parts: Iterable[bytes]) -> tuple[Prefix, ...]:
    """Return the prefixes of a sequence of parts: up to the end of each, and within long ones."""
    state, length, boundary = blake2b(digest_size=8), 0, _FIRST_BYTES
    result = []
    for part in parts:
        start = 0
        while start < len(part):
            piece = part[start : start + boundary - length]
            state.update(piece)
            start, length = start + len(piece), length + len(piece)
            if length == boundary:
                boundary += max(_FIRST_BYTES, boundary // _GROWTH)
            elif start < len(part):
                continue
            result.append(Prefix(length, state.digest()))
    return tuple(result)


class PrefixTable:
    """Prefixes that replicas have computed, in bounded memory."""

    def __init__(self, max_prefixes: int = _MAX_PREFIXES) -> None:
        self._max_prefixes = max_prefixes
        self._replicas: OrderedDict[bytes, int] = OrderedDict()  # digest -> bits of replicas

    def __len__(self) -> int:
        return len(self._replicas)

    def add(self, prefixes: Iterable[Prefix], replica: int) -> None:
        """Note that a replica computes a prompt with these prefixes."""
        for prefix in prefixes:
            bits = self._replicas.pop(prefix.digest, 0)
            self._replicas[prefix.digest] = bits | 1 << replica
        while len(self._replicas) > self._max_prefixes:
            self._replicas.popitem(last=False)

    def forget(self, replica: int) -> None:
        """Forget all prefixes of a replica, whose engine has ended."""
        for digest, bits in list(self._replicas.items()):
            left = bits & ~(1 << replica)
            if left:
                self._replicas[digest] = left
            else:
                del self._replicas[digest]

    def known_bytes(self, prefixes: tuple[Prefix, ...], replica: int) -> int:
        """Return the length of the longest of these prefixes that a replica has."""
        for prefix in reversed(prefixes):
            if self._replicas.get(prefix.digest, 0) >> replica & 1:
                return prefix.num_bytes
        return 0


@dataclass(frozen=True)
class Load:
    """Requests of a replica, and sequences that share its passes."""

    num_requests: int
    num_slots: int

    @property
    def is_full(self) -> bool:
        return self.num_requests >= self.num_slots


class ReplicaChooser:
    """Chooses the replica that gets a request.

    It is the one with the longest prefix of the prompt, if that is at least half of it: less, such
    as a short system prompt that all have, would send all requests to one replica (the rule and the
    half are SGLang's router's). A full replica is passed over while another one is not. Without a
    known prefix, and among equal ones, the least loaded gets it, and among these the one that was
    not chosen for the longest time.

    Attributes:
        num_by_prefix: requests that went to a replica for its prefix. num_by_load: the other ones.
    """

    def __init__(self) -> None:
        self.num_by_prefix = self.num_by_load = 0
        self._table = PrefixTable()
        self._num_choices = 0
        self._last_choice: dict[int, int] = {}

    def choose(self, loads: Mapping[int, Load], prefixes: tuple[Prefix, ...]) -> int:
        """Return the replica for a request. loads: of all that take requests."""
        free = [replica for replica, load in loads.items() if not load.is_full] or list(loads)
        known = {replica: self._used_bytes(prefixes, replica) for replica in free}
        chosen = min(
            free,
            key=lambda replica: (
                -known[replica],
                loads[replica].num_requests,
                self._last_choice.get(replica, 0),
            ),
        )
        self.num_by_prefix += known[chosen] > 0
        self.num_by_load += not known[chosen]
        self._num_choices += 1
        self._last_choice[chosen] = self._num_choices
        self._table.add(prefixes, chosen)
        return chosen

    def _used_bytes(self, prefixes: tuple[Prefix, ...], replica: int) -> int:
        num_bytes = self._table.known_bytes(prefixes, replica)
        return num_bytes if prefixes and 2 * num_bytes >= prefixes[-1].num_bytes else 0

    def forget(self, replica: int) -> None:
        """Forget the prefixes of a replica whose engine has ended."""
        self._table.forget(replica)
