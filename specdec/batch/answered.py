"""Which lines of the input are answered, and what they said: 8 bytes for each."""

from __future__ import annotations

from array import array
from pathlib import Path

from specdec.batch.lines import BatchError, LineKey

_MAY_GROW = 1 << 20
"""Lines that an input may get more than it has bytes, while it is answered."""


class AnsweredLines:
    """Digests by the numbers of their lines.

    Args:
        out, partial: where the answers are, for errors.
        n_input_bytes: of the input, which has no more lines than that. So a number that is far off
            does not take memory.
    """

    def __init__(self, out: Path, partial: Path, n_input_bytes: int) -> None:
        self._out, self._partial = out, partial
        self._n_input_bytes = n_input_bytes
        self._digests = array("Q")  # 0 where a line is not answered
        self.n_lines = 0

    @property
    def end(self) -> int:
        """Above all their numbers."""
        return len(self._digests)

    def has(self, key: LineKey) -> bool:
        """Raises BatchError where the line was another one when it was answered."""
        digest = self._digests[key.number] if key.number < self.end else 0
        if digest not in (0, key.digest):
            raise self._of_another(key.number)
        return digest != 0

    def add(self, key: LineKey) -> bool:
        """Whether the line was not answered before. Raises BatchError as `has` does."""
        if self.has(key):
            return False
        if key.number >= self.end:
            self._grow(key.number + 1)
        self._digests[key.number] = key.digest
        self.n_lines += 1
        return True

    def _grow(self, end: int) -> None:
        if end > self._n_input_bytes + _MAY_GROW:
            raise self._of_another(end - 1)
        self._digests.frombytes(bytes((end - self.end) * self._digests.itemsize))

    def _of_another(self, number: int) -> BatchError:
        return BatchError(
            f"{self._out.name} answers another line {number} than the input has, or the same one "
            f"with other options or weights: {self.begin_anew}"
        )

    @property
    def begin_anew(self) -> str:
        """The remedy where the output is another batch's."""
        return (
            f"name another output file, or remove {self._out} and {self._partial.name} to begin "
            "anew"
        )
