"""A bounded table of keys and values in one SQLite file that several processes use: the least recently used go first.

The file is no artefact: everything in it can be had again. When it is damaged it is set aside and begun anew; when it cannot
be used (disk full, read-only, another program's database) the process goes on without it; each with one note, never with
an error.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

BUSY_SECONDS = 5.0  # wait for another process's transaction, which takes milliseconds

_APPLICATION = 0x52534951
_VERSION = 2
_FREED_SHARE = 0.1  # of the limit: one eviction makes room for many answers
_ENTRY_BYTES = 128  # bytes on disk of an entry besides its value: key, place in three indexes
_DISK_FACTOR = 1.15  # bytes on disk of a byte of these: partly filled pages
_TOUCHES_KEPT = 4096
_SCHEMA = f"""
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS entries (
    number INTEGER PRIMARY KEY, key BLOB NOT NULL UNIQUE, value BLOB NOT NULL, used INTEGER NOT NULL
);
CREATE INDEX IF NOT EXISTS by_use ON entries (used);
CREATE TABLE IF NOT EXISTS counters (name TEXT PRIMARY KEY, number INTEGER NOT NULL);
INSERT OR IGNORE INTO counters VALUES ('bytes', 0), ('clock', 0);
PRAGMA application_id = {_APPLICATION};
PRAGMA user_version = {_VERSION};
COMMIT;
"""
_HELD_BY_OTHERS = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL}
_ELSEWHERE = {  # causes that lie outside the file: a new one would not help
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_AUTH,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_NOMEM,
}

T = TypeVar("T")

_OPEN_FILES: weakref.WeakSet[CacheFile] = weakref.WeakSet()
_HELD_DURING_A_FORK: list[CacheFile] = []


class DamagedEntry(sqlite3.DatabaseError):
    """A value that nobody stored, or a file of another version: the file is to be set aside."""


class _Foreign(OSError):
    """A database of another program: hands off."""


class CacheFile:
    """The table. Thread safe; `limit_bytes` is about the size of the file; `evictions` counts entries removed."""

    def __init__(self, path: Path, limit_bytes: int, note: Callable[[str], object]) -> None:
        self.evictions = 0
        self._path, self._note = path, note
        self._limit = max(1, int(limit_bytes / _DISK_FACTOR))
        self._lock = threading.RLock()
        self._connection: sqlite3.Connection | None = None
        self._inode: int | None = None
        self._touched: dict[bytes, None] = {}
        self._set_aside_once = self._given_up = False
        _OPEN_FILES.add(self)

    def look_up(self, keys: Sequence[bytes], read: Callable[[bytes], T]) -> dict[bytes, T]:
        """What `read` makes of the values that are there. It may raise DamagedEntry."""

        def work(connection: sqlite3.Connection) -> dict[bytes, T]:
            found = {}
            for key in keys:
                row = connection.execute("SELECT value FROM entries WHERE key = ?", (key,)).fetchone()
                if row is not None:
                    found[key] = read(row[0])
            return found

        with self._lock:
            found = self._guarded(work) or {}
            # Reads stay reads: who used what is written together with the next new entry.
            for key in found:
                self._touched.pop(key, None)
                self._touched[key] = None
            while len(self._touched) > _TOUCHES_KEPT:
                del self._touched[next(iter(self._touched))]
            return found

    def store(self, entries: Mapping[bytes, bytes]) -> None:
        """Keep entries, and forget the least recently used ones where the file would grow too large."""
        fitting = {key: value for key, value in entries.items() if _size(value) <= self._limit}
        with self._lock:
            if not fitting and len(self._touched) < _TOUCHES_KEPT:
                return
            self.evictions += self._guarded(lambda connection: self._write(connection, fitting)) or 0

    def close(self) -> None:
        """Close the file; the next use opens it again."""
        with self._lock:
            self._forget()

    # -- work on the open file -----------------------------------------------------------------------------------------

    def _write(self, connection: sqlite3.Connection, entries: Mapping[bytes, bytes]) -> int:
        connection.execute("BEGIN IMMEDIATE")
        now = _counter(connection, "clock") + 1
        connection.executemany("UPDATE entries SET used = ? WHERE key = ?", [(now, key) for key in self._touched])
        total = _counter(connection, "bytes")
        for key, value in entries.items():
            added = connection.execute(
                "INSERT OR IGNORE INTO entries (key, value, used) VALUES (?, ?, ?)", (key, value, now)
            ).rowcount
            total += _size(value) if added else 0
        evicted = 0
        if total > self._limit:
            total, evicted = _evict(connection, total, int(self._limit * (1 - _FREED_SHARE)))
        connection.executemany("UPDATE counters SET number = ? WHERE name = ?", [(total, "bytes"), (now, "clock")])
        connection.execute("COMMIT")
        self._touched.clear()
        if evicted:
            connection.executescript("PRAGMA incremental_vacuum")  # `execute` would free a single page
        return evicted

    def _guarded(self, work: Callable[[sqlite3.Connection], T]) -> T | None:
        """The result of `work`, None where there is no usable file."""
        while not self._given_up:
            try:
                return work(self._open())
            except (sqlite3.Error, OSError) as error:
                if not self._recovered(error):
                    return None
            except BaseException:  # a signal in the middle: no transaction may stay open
                self._forget()
                raise
        return None

    def _open(self) -> sqlite3.Connection:
        if self._connection is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._inode = _inode(self._path)
            connection = sqlite3.connect(self._path, BUSY_SECONDS, isolation_level=None, check_same_thread=False)
            try:
                _prepare(connection)
            except BaseException:
                connection.close()
                raise
            self._connection = connection
        return self._connection

    # -- failures ------------------------------------------------------------------------------------------------------

    def _recovered(self, error: Exception) -> bool:
        """Whether `work` should be tried again, on a new file."""
        code = getattr(error, "sqlite_errorcode", None)
        cause = None if code is None else code & 0xFF
        self._forget()
        if cause in _HELD_BY_OTHERS:
            return False  # this one goes uncached
        reason = " ".join(f"{error}".split())[:200]
        if not isinstance(error, OSError) and cause not in _ELSEWHERE and not self._set_aside_once:
            self._set_aside_once = True
            if self._set_aside(reason):
                return True
        self._given_up = True
        self._note(f"the cache of queries cannot be used and is left out ({self._path}): {reason}")
        return False

    def _set_aside(self, reason: str) -> bool:
        if _inode(self._path) != self._inode and self._inode is not None:
            return True  # another process has begun a new file
        aside = self._path.with_name(f"{self._path.name}.damaged")
        try:
            os.replace(self._path, aside)
            for suffix in ("-wal", "-shm"):
                self._path.with_name(self._path.name + suffix).unlink(missing_ok=True)
        except OSError:
            return False
        self._note(
            f"the cache of queries was damaged and begins anew ({self._path}): {reason}; the old one is {aside.name}"
        )
        return True

    def _forget(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def before_fork(self) -> None:
        """SQLite's locks do not survive a fork: no connection may be open during one."""
        self._lock.acquire()
        self._forget()

    def after_fork(self) -> None:
        """In parent and child alike; the next use opens the file again."""
        self._lock.release()


def _prepare(connection: sqlite3.Connection) -> None:
    """Make sure that it is a file of ours, or make an empty one ours."""
    connection.execute("BEGIN")  # another process may make the file between two of these
    application, version, tables = (
        connection.execute(query).fetchone()[0]
        for query in ("PRAGMA application_id", "PRAGMA user_version", "SELECT count(*) FROM sqlite_master")
    )
    connection.execute("COMMIT")
    if application not in (0, _APPLICATION) or (application == 0 and tables):
        raise _Foreign("it is a database of another program")
    if application == _APPLICATION and version != _VERSION:
        raise DamagedEntry(f"it was written by another version ({version})")
    if application == 0:
        connection.execute("PRAGMA page_size = 8192")  # an answer of three passages fits into half of one
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")  # both before anything is written
    connection.execute("PRAGMA journal_mode = WAL").fetchall()
    connection.execute("PRAGMA synchronous = NORMAL")  # a cache may lose its last entries, not its consistency
    connection.execute("PRAGMA journal_size_limit = 4194304").fetchall()
    if application == 0:
        connection.executescript(_SCHEMA)


def _counter(connection: sqlite3.Connection, name: str) -> int:
    return int(connection.execute("SELECT number FROM counters WHERE name = ?", (name,)).fetchone()[0])


def _size(value: bytes) -> int:
    return len(value) + _ENTRY_BYTES


def _evict(connection: sqlite3.Connection, total: int, goal: int) -> tuple[int, int]:
    """Remove the least recently used entries until at most `goal` bytes are left: bytes left, entries removed."""
    going = []
    for key, size in connection.execute(
        "SELECT key, length(value) + ? FROM entries ORDER BY used, number", (_ENTRY_BYTES,)
    ):
        if total <= goal:
            break
        going.append((key,))
        total -= size
    connection.executemany("DELETE FROM entries WHERE key = ?", going)
    return total, len(going)


def _inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except OSError:
        return None


def _before_fork() -> None:
    for file in list(_OPEN_FILES):
        file.before_fork()
        _HELD_DURING_A_FORK.append(file)


def _after_fork() -> None:
    while _HELD_DURING_A_FORK:
        _HELD_DURING_A_FORK.pop().after_fork()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)
