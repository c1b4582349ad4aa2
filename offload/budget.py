"""A ledger of memory: parts are reserved by name before they are allocated.

    total = base + headroom + reserved + available

`base` is what the process took before any reservation (interpreter, libraries), `headroom` is for
what libraries allocate beside it (scratch of matmuls, compute buffers); the caller measures both.
"""

from __future__ import annotations

import threading

from offload.errors import SpecdecError
from offload.units import format_bytes

MEMORY = "memory"
"""The ledger of the host's memory."""


class BudgetExceeded(SpecdecError):
    """A reservation does not fit; names it, its size, what is left, and a budget that would do.

    ledger: which budget, MEMORY (of the host) or "VRAM".
    """

    def __init__(
        self,
        name: str,
        requested_bytes: int,
        left_bytes: int,
        smallest_budget_bytes: int,
        advice: str = "",
        *,
        ledger: str = MEMORY,
    ) -> None:
        self.name = name
        self.requested_bytes = requested_bytes
        self.left_bytes = left_bytes
        self.ledger = ledger
        self.smallest_budget_bytes = smallest_budget_bytes
        super().__init__(
            f"{name} needs {format_bytes(requested_bytes)}, but the {ledger} budget has "
            f"{format_bytes(left_bytes)}; the smallest budget that works is "
            f"{format_up(smallest_budget_bytes)}{advice}"
        )


def format_up(n_bytes: int) -> str:
    """Format as `format_bytes` does, but rounded up, so that the figure is enough when typed in.

    Whole MiB, because two decimals of a GiB can be 5 MiB short.
    """
    return f"{-(-n_bytes // 2**20)} MiB"


class Reservation:
    """A named part of a budget, reserved until `release` (or the end of a with-block)."""

    def __init__(self, budget: MemoryBudget, name: str, n_bytes: int) -> None:
        self.name = name
        self.n_bytes = n_bytes
        self._budget = budget

    def release(self) -> None:
        """Release the bytes; releasing twice is allowed."""
        self._budget._release(self)

    def __enter__(self) -> Reservation:
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()


class MemoryBudget:
    """The memory that the whole process may use; thread-safe.

    ledger: name of the memory, for errors.

    Raises:
        BudgetExceeded: base and headroom alone exceed the total.
    """

    def __init__(
        self,
        total_bytes: int,
        base_bytes: int = 0,
        headroom_bytes: int = 0,
        *,
        ledger: str = MEMORY,
    ) -> None:
        if min(total_bytes, base_bytes, headroom_bytes) < 0:
            raise ValueError("a memory budget has no negative parts")
        self.total_bytes = total_bytes
        self.base_bytes = base_bytes
        self.headroom_bytes = headroom_bytes
        self.ledger = ledger
        self._reservations: list[Reservation] = []
        self._lock = threading.Lock()
        if base_bytes + headroom_bytes > total_bytes:
            needed = base_bytes + headroom_bytes
            raise BudgetExceeded("the process itself", needed, total_bytes, needed, ledger=ledger)

    @property
    def available_bytes(self) -> int:
        """Bytes that can still be reserved."""
        with self._lock:
            return self._left()

    def reserve(self, name: str, n_bytes: int) -> Reservation:
        """Reserve `n_bytes` under `name` (names need not be unique).

        Raises:
            BudgetExceeded: fewer are left; nothing is reserved then.
        """
        if n_bytes < 0:
            raise ValueError(f"{name} cannot reserve {n_bytes} bytes")
        with self._lock:
            left = self._left()
            if n_bytes > left:
                minimum = self.total_bytes - left + n_bytes
                raise BudgetExceeded(name, n_bytes, left, minimum, ledger=self.ledger)
            reservation = Reservation(self, name, n_bytes)
            self._reservations.append(reservation)
            return reservation

    def with_total(self, total_bytes: int) -> MemoryBudget:
        """Return a budget of another size with the same parts. Raises BudgetExceeded."""
        other = MemoryBudget(total_bytes, self.base_bytes, self.headroom_bytes, ledger=self.ledger)
        for reservation in self._reservations:
            other.reserve(reservation.name, reservation.n_bytes)
        return other

    def table(self) -> list[tuple[str, int]]:
        """Return (name, bytes) of every part, what is left included; they sum to the total."""
        with self._lock:
            parts = [(r.name, r.n_bytes) for r in self._reservations]
            return [
                ("base", self.base_bytes),
                ("headroom", self.headroom_bytes),
                *parts,
                ("available", self._left()),
            ]

    def _release(self, reservation: Reservation) -> None:
        with self._lock:
            # By identity: two reservations of the same name and size are different ones.
            self._reservations = [r for r in self._reservations if r is not reservation]

    def _left(self) -> int:
        reserved = sum(reservation.n_bytes for reservation in self._reservations)
        return self.total_bytes - self.base_bytes - self.headroom_bytes - reserved
