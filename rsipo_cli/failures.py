"""How a command ends: one escaped sentence on stderr and a documented exit code, never a traceback on the screen.

Exit codes: 0 done or up to date, 1 the run failed, 2 wrong option or configuration, 3 missing, damaged or stale artefact,
4 another process writes the run, 130 SIGINT, 143 SIGTERM. `RSIPO_TRACEBACK=1` shows tracebacks.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType

from rsipo_cli.text import visible
from schemas.errors import RsipoError

_log_path: Path | None = None


class Stopped(BaseException):
    """A signal asked the command to end. Not an Exception: nothing but the command line may swallow it."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def log_to(path: Path) -> None:
    """Tracebacks of unexpected errors go to this file from now on (`RUN/logs/rsipo.log`)."""
    global _log_path
    _log_path = path


def guarded(command: Callable[[], object]) -> int:
    """Run a command; returns the exit code after telling on stderr what went wrong."""
    _stop_on_signals()
    try:
        command()
        return 0
    except Stopped as stop:
        _say(f"stopped by {signal.Signals(stop.number).name}; the same command continues from here")
        return 128 + stop.number
    except KeyboardInterrupt:
        _say("stopped by SIGINT; the same command continues from here")
        return 130
    except RsipoError as error:
        _show_traceback()
        _say(error.sentence())
        return error.exit_code
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except Exception as error:  # the last line of defence: anything that is not an RsipoError is a defect
        _show_traceback()
        summary = f"{type(error).__name__}: {str(error) or 'no message'}"[:400]
        _say(f"unexpected error, please report it: {summary}; the traceback is in {_write_traceback(error)}")
        return 1


def _stop_on_signals() -> None:
    def stop(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)  # a second signal ends the process at once
        raise Stopped(number)

    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)


def _say(sentence: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # stderr is closed: the exit code still tells
        print(f"rsipo: {visible(sentence)}", file=sys.stderr, flush=True)


def _show_traceback() -> None:
    if os.environ.get("RSIPO_TRACEBACK") == "1":
        traceback.print_exc()


def _write_traceback(error: BaseException) -> str:
    text = f"--- {datetime.now(UTC).isoformat(timespec='seconds')} {' '.join(sys.argv)}\n"
    text += "".join(traceback.format_exception(error)) + "\n"
    for path in (_log_path, Path(tempfile.gettempdir()) / f"rsipo-{os.getpid()}.log"):
        if path is None:
            continue
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "a", encoding="utf-8", errors="backslashreplace") as file:
                file.write(text)
            return str(path)
        except OSError:
            continue
    return "no file (none could be written); set RSIPO_TRACEBACK=1 to see it"
