"""Run a function in a forked child that is killed with SIGKILL right before its n-th system call of some kinds."""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable
from typing import Any

CALLS = ("fsync", "rename", "replace", "mkdir", "unlink", "rmdir")


def calls_until_end(action: Callable[[], object]) -> int:
    """How many of the counted calls an undisturbed run of `action` makes (in a child process)."""
    read, write = os.pipe()
    counter = _Counter(stop=0)
    child = os.fork()
    if child == 0:
        _run(action, counter, lambda: os.write(write, str(counter.count).encode()))
    _wait(child)
    os.close(write)
    with os.fdopen(read) as pipe:
        return int(pipe.read())


def killed_at(stop: int, action: Callable[[], object]) -> bool:
    """Run `action` in a child, killed before call number `stop` (1, 2, ...); False when it ended before that."""
    child = os.fork()
    if child == 0:
        _run(action, _Counter(stop), lambda: None)
    return _wait(child)


class _Counter:
    def __init__(self, stop: int) -> None:
        self.count, self.stop = 0, stop

    def install(self) -> None:
        for name in CALLS:
            setattr(os, name, self._counted(getattr(os, name)))

    def _counted(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            self.count += 1
            if self.count == self.stop:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **options)

        return call


def _run(action: Callable[[], object], counter: _Counter, finish: Callable[[], object]) -> None:
    """The child's life; never returns."""
    status = 1
    try:
        signal.alarm(60)
        counter.install()
        action()
        finish()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _wait(child: int) -> bool:
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL, f"the child ended by signal {os.WTERMSIG(status)}"
        return True
    assert os.WEXITSTATUS(status) == 0, "the child failed, see its traceback"
    return False
