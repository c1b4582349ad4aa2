"""What both backends do after an operation that broke off: leave what the contract says."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import TypeVar

from backends.contract.backend import Backend, BackendError
from backends.contract.nodes import NodeTable

_T = TypeVar("_T")


class MendingBackend(Backend):
    """A backend whose operations are repaired where an error or an interrupt cuts them short."""

    _is_closed = False
    _n_intact: int | None = None
    """While an operation runs, or was cut short: the committed tokens that it leaves alone."""

    @property
    @abstractmethod
    def _table(self) -> NodeTable:
        """The committed prefix and the live nodes."""

    @property
    def committed_ids(self) -> Sequence[int]:
        """See Backend.committed_ids; before a repair, what the repair will leave."""
        held = self._table.committed
        return held if self._n_intact is None else held[: self._n_intact]

    @property
    def next_node_id(self) -> int:
        return self._table.next_id

    @abstractmethod
    def _repair(self, n_intact: int) -> None:
        """Cut the cache to `n_intact` tokens, drop live nodes, let a ring begin at layer 0.

        Called again where it was interrupted itself.
        """

    def _mending(self, operation: Callable[[], _T], n_intact: int | None = None) -> _T:
        """Call `operation`; after any failure, leave what the contract says.

        No context manager: Ctrl-C could come between its code and the with-block's.

        Args:
            n_intact: committed tokens that the operation leaves alone; None: all.
        """
        if self._is_closed:
            raise BackendError("the backend is closed; load the model again")
        self._mend()
        self._n_intact = self.n_committed if n_intact is None else n_intact
        try:
            result = operation()
        except BaseException:
            self._mend()
            raise
        self._n_intact = None
        return result

    def _mend(self) -> None:
        """Repair what broke off; says last that it is done, so that it is redone if cut short."""
        if self._n_intact is not None:
            self._repair(self._n_intact)
            self._n_intact = None
