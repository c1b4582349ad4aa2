"""Journal of a batch's output: a kill loses no record, and none is written twice.

Records go into OUT.partial, an SQLite database, as lines are answered, in any order. When
the last one is there, OUT is written from it, synced, renamed into place, and OUT.partial removed:
OUT is always whole or not there at all. SQLite commits and syncs each record, through a log beside
the database (OUT.partial-wal), and locks the file against other processes as long as it is open.

A resumed batch reads the options that can change the output (a changed one is refused by name)
and the line number and digest of each record: an input that has grown is answered to its new end,
one whose answered lines have changed is refused. Records of an existing OUT are taken over: the
same command again has nothing left to do, or answers the lines that were added to the input.
"""

from __future__ import annotations

import json
import os
import sqlite3
import stat
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from typing_extensions import Self

from specdec.batch.lines import BatchError, LineKey
from specdec.batch.records import is_error, key_of

INPUT, FINISHED = "input", "finished"
ORDERS = (INPUT, FINISHED)
MADE_IN = (".partial", ".partial-wal", ".partial-journal", ".whole")
"""Suffixes of the temporary files beside the output."""
_FORMAT = 0x73706401
"""SQLite application_id of these tables; changes with their layout."""
_TABLES = f"""
    PRAGMA application_id = {_FORMAT};
    CREATE TABLE options (name TEXT PRIMARY KEY, value TEXT NOT NULL);
    CREATE TABLE records (
        finished INTEGER PRIMARY KEY,
        line INTEGER NOT NULL UNIQUE,
        digest TEXT NOT NULL,
        record BLOB NOT NULL,
        is_in_out INTEGER NOT NULL
    );
"""


class Journal:
    """Records of one batch.

    Args:
        out: path of the finished output file.
        options: JSON values of the options that can change the output.

    Raises BatchError if the files belong to another batch or are used by another process.
    """

    def __init__(self, out: Path, options: Mapping[str, Any]) -> None:
        self.out = Path(os.path.realpath(out))
        self.partial = self.out.with_name(self.out.name + ".partial")
        self._options = {name: json.dumps(value) for name, value in options.items()}
        self._is_finished = False
        if not self.out.parent.is_dir():
            raise BatchError(f"there is no folder {self.out.parent} for {self.out.name}: make it")
        _check_regular(self.out)
        _check_regular(self.partial)
        with self._translate_errors():
            self._database = _open_locked(self.partial)
            try:
                self._open_tables()
            except BaseException:
                self._database.close()
                raise
        try:
            self._take_over_out()
        except BaseException:
            self.close()
            raise

    # --- existing files ------------------------------------------------------------------------

    def _open_tables(self) -> None:
        run = self._database.execute
        (n_tables,) = run("SELECT count(*) FROM sqlite_master").fetchone()
        (application_id,) = run("PRAGMA application_id").fetchone()
        is_new = n_tables == application_id == 0
        if not is_new and application_id != _FORMAT:
            raise sqlite3.DatabaseError("a database of another program")
        run("PRAGMA journal_mode = WAL")
        if is_new:
            with _transaction(self._database):
                for statement in filter(str.strip, _TABLES.split(";")):
                    run(statement)
                insert = "INSERT INTO options VALUES (?, ?)"
                self._database.executemany(insert, self._options.items())
        (state,) = run("PRAGMA quick_check(1)").fetchone()
        if state != "ok":
            raise sqlite3.DatabaseError("its pages contradict each other")
        self._check_options(dict(run("SELECT name, value FROM options")))

    def _check_options(self, begun_with: Mapping[str, str]) -> None:
        for name in sorted({*begun_with, *self._options}):
            before, now = begun_with.get(name, "null"), self._options.get(name, "null")
            if before != now:
                raise BatchError(
                    f"{self.partial} was begun with {name} {before}, now it is {now}: go on with "
                    "the same, or remove that file to begin anew"
                )

    def _take_over_out(self) -> None:
        if not self.out.exists():
            return
        with open(self.out, "rb") as file, self._translate_errors(), _transaction(self._database):
            for line in file:
                key = key_of(line)
                if key is None:
                    raise BatchError(
                        f"{self.out} exists, and specdec batch did not write it: name another "
                        "output file, or remove that one"
                    )
                self._add(key, line, is_in_out=True)

    @property
    def n_answered(self) -> int:
        with self._translate_errors():
            return self._database.execute("SELECT count(*) FROM records").fetchone()[0]

    def count_errors(self) -> int:
        """Return the number of records whose line could not be answered."""
        with self._translate_errors():
            rows = self._database.execute("SELECT record FROM records")
            return sum(is_error(record) for (record,) in rows)

    def is_answered(self, key: LineKey) -> bool:
        """Return whether a line has a record; raise BatchError if it answers another line."""
        select = "SELECT digest FROM records WHERE line = ?"
        with self._translate_errors():
            row = self._database.execute(select, (key.number,)).fetchone()
        if row is not None and row[0] != key.hex_digest:
            raise BatchError(
                f"{self.out.name} answers another line {key.number} than the input has, or the "
                f"same one with other options or weights: {self.begin_anew}"
            )
        return row is not None

    @property
    def begin_anew(self) -> str:
        """Remedy for an output that belongs to another batch, as part of an error message."""
        return (
            f"name another output file, or remove {self.out} and {self.partial.name} to begin anew"
        )

    # --- adding records ------------------------------------------------------------------------

    def append(self, key: LineKey, record: bytes) -> None:
        """Add the record of a line, unless it has one.

        Raises BatchError if it cannot be written; records written before stay.
        """
        with self._translate_errors():
            self._add(key, record, is_in_out=False)

    def _add(self, key: LineKey, record: bytes, *, is_in_out: bool) -> None:
        if not self.is_answered(key):
            self._database.execute(
                "INSERT INTO records (line, digest, record, is_in_out) VALUES (?, ?, ?, ?)",
                (key.number, key.hex_digest, record, is_in_out),
            )

    def finish(self, order: str) -> None:
        """Write OUT and rename it into place. Raises BatchError if it cannot be written."""
        whole = self.out.with_name(self.out.name + ".whole")
        column = "line" if order == INPUT else "finished"
        try:
            with open(whole, "wb") as file, self._translate_errors():
                rows = self._database.execute(f"SELECT record FROM records ORDER BY {column}")
                file.writelines(record for (record,) in rows)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            with suppress(OSError):
                whole.unlink()
            raise BatchError(
                f"cannot write {whole}: {error.strerror}; all answers are in {self.partial}: free "
                "as much disk space again, and the same command ends it"
            ) from error
        os.replace(whole, self.out)
        _sync_directory(self.out.parent)
        self._is_finished = True

    def close(self) -> None:
        """Close the database; remove OUT.partial unless it holds records that OUT lacks."""
        run = self._database.execute
        own = "SELECT EXISTS (SELECT 1 FROM records WHERE NOT is_in_out)"
        with closing(self._database), suppress(sqlite3.Error):
            if self._is_finished or not run(own).fetchone()[0]:
                run("PRAGMA journal_mode = DELETE")  # SQLite leaves its log where the file is gone
                self.partial.unlink(missing_ok=True)  # while no other process can have it open

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        """Turn SQLite errors raised in the block into BatchErrors."""
        try:
            yield
        except sqlite3.OperationalError as error:
            if "locked" in str(error):  # its error code is available from Python 3.11 on
                raise BatchError(
                    f"another process writes to {self.partial}: wait for its end, or name another "
                    "output file"
                ) from error
            raise BatchError(
                f"cannot write to {self.partial}: {error}; what was answered before is in it: free "
                "disk space, or name an output file in a folder that is there and can be written"
            ) from error
        except sqlite3.DatabaseError as error:
            raise BatchError(
                f"{self.partial} is damaged, or this version of specdec batch did not write it "
                f"({error}): name another output file, or move that one away"
            ) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _check_regular(path: Path) -> None:
    if path.exists() and not stat.S_ISREG(path.stat().st_mode):
        raise BatchError(f"{path} is no regular file: name one with -o")


def _open_locked(path: Path) -> sqlite3.Connection:
    """Open a database that no other process can read or write until it is closed."""
    database = sqlite3.connect(path, timeout=0, isolation_level=None)
    try:
        database.execute("PRAGMA locking_mode = EXCLUSIVE")
        database.execute("PRAGMA synchronous = FULL")
        database.execute("BEGIN EXCLUSIVE")
        database.execute("ROLLBACK")  # the lock stays
    except BaseException:
        database.close()
        raise
    return database


@contextmanager
def _transaction(database: sqlite3.Connection) -> Iterator[None]:
    database.execute("BEGIN")
    try:
        yield
        database.execute("COMMIT")
    finally:
        if database.in_transaction:
            database.execute("ROLLBACK")


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
