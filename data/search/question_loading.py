"""Rows of question sets through HF `datasets`: from the hub, from files, and from a directory that `save_to_disk` wrote.

JSON lines are read through the line builder and parsed here: the JSON builder of `datasets` infers types and turns answers
that look like dates into timestamps. Files are streamed, so that no copy of them is made.
"""

from __future__ import annotations

import glob
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from data.search.question_sets import QuestionSet, Row
from schemas.artifacts import file_errors
from schemas.errors import ArtifactError, ConfigError

LOG = logging.getLogger("rsipo.panels")
PARQUET = (".parquet", ".pq")
# What `save_to_disk` leaves in the directory of a data set, and of several splits.
SAVED = ("dataset_info.json", "dataset_dict.json")


def hub_rows(questions: QuestionSet, split: str, where: str) -> Iterator[tuple[str, Row]]:
    """The rows of a split on the hub, each with its place; nothing of the repository is executed.

    Raises ConfigError for a split that the set does not have, ArtifactError when the hub cannot be reached, wants a login,
    or has the set in another form.
    """
    import datasets

    name = hub_split(questions, split, where)
    place = f"{questions.hub}, split {name}"
    try:
        with _quiet_hub():
            rows = datasets.load_dataset(questions.hub, questions.config, split=name)
    except Exception as error:  # datasets, huggingface_hub and the network raise classes of many modules
        raise _hub_error(error, questions, place, where) from error
    for number, row in enumerate(rows, start=1):
        yield f"{place}, row {number}", row


@contextmanager
def _quiet_hub() -> Iterator[None]:
    """Without the lines that the hub's client logs for each attempt: what went wrong is said once, in the end."""
    loggers = [logging.getLogger(name) for name in ("huggingface_hub", "datasets")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def hub_split(questions: QuestionSet, split: str, where: str) -> str:
    """What the hub calls a split of a set. Raises ConfigError for a set without a hub or a split it does not have."""
    if questions.hub is None:
        raise ConfigError(
            "a set with columns of its own is read from a file", where=where, expected=f"{questions.name}:{split}=FILE"
        )
    if split not in questions.splits:
        raise ConfigError(
            f"{questions.name} has no such split with public answers",
            where=where,
            expected=f"one of {', '.join(questions.splits)}",
            found=repr(split),
        )
    return questions.splits[split]


def _hub_error(error: Exception, questions: QuestionSet, place: str, where: str) -> ArtifactError:
    text = " ".join(str(error).split()) or type(error).__name__
    local = f"load it where there is a network, and name the copy: sets:{questions.name}:SPLIT=FILE"
    if "gated" in text.lower() or "401" in text or "403" in text:
        what, remedy = "the hub wants a login for the data set", "accept its terms on its page and run `hf auth login`"
    elif isinstance(error, ConnectionError | TimeoutError | OSError) or "offline" in text.lower():
        what, remedy = "the hub cannot be reached", local
    else:
        what, remedy = "the hub does not have the data set in the expected form", local
    shown = text if len(text) <= 200 else text[:197] + "..."
    return ArtifactError(what, where=f"{where}, {place}", found=shown, remedy=remedy)


def local_rows(path: Path, split: str) -> Iterator[tuple[str, Row]]:
    """The rows of a local copy, each with its place: Parquet, JSON lines (plain or compressed), a JSON list, or a directory
    of `save_to_disk`. Raises ArtifactError naming the file and the line or row."""
    with file_errors(path):
        if path.is_dir():
            yield from _saved_rows(path, split)
        elif not path.is_file():
            raise ArtifactError("no such question file", where=str(path), remedy="check the path")
        elif path.suffix in PARQUET:
            yield from _parquet_rows(path)
        else:
            yield from _json_rows(path)


def _saved_rows(path: Path, split: str) -> Iterator[tuple[str, Row]]:
    import datasets

    if not any((path / name).is_file() for name in SAVED):
        raise ArtifactError("the directory holds no data set of save_to_disk", where=str(path), expected=SAVED[0])
    try:
        saved = datasets.load_from_disk(str(path))
    except Exception as error:
        raise _unreadable(path, error) from error
    if isinstance(saved, datasets.DatasetDict):
        if split not in saved:
            raise ArtifactError(
                "the directory does not have the split", where=str(path), expected=split, found=", ".join(saved)
            )
        saved = saved[split]
    for number, row in enumerate(saved, start=1):
        yield f"{path}, row {number}", row


def _parquet_rows(path: Path) -> Iterator[tuple[str, Row]]:
    number = 0
    try:
        for number, row in enumerate(_stream("parquet", path), start=1):
            yield f"{path}, row {number}", row
    except (ArtifactError, OSError):
        raise
    except Exception as error:
        raise _unreadable(path, error, number + 1) from error


def _json_rows(path: Path) -> Iterator[tuple[str, Row]]:
    number = 0
    try:
        for number, line in enumerate(_stream("text", path), start=1):
            text = line["text"].removeprefix("\ufeff") if number == 1 else line["text"]
            if number == 1 and text.lstrip().startswith("["):
                yield from _json_list(path)
                return
            if text.strip():
                yield f"{path}, line {number}", _object(text, f"{path}, line {number}")
    except UnicodeDecodeError as error:
        where = f"{path}, after line {number}"
        raise ArtifactError("a line is not text", where=where, expected="UTF-8", found=str(error)) from error
    except (ArtifactError, OSError):
        raise
    except Exception as error:
        raise _unreadable(path, error, number + 1) from error


def _json_list(path: Path) -> Iterator[tuple[str, Row]]:
    """The original HotpotQA and 2WikiMultiHopQA files are one list."""
    whole = next(iter(_stream("text", path, sample_by="document")))["text"].removeprefix("\ufeff")
    for number, row in enumerate(_parsed(whole, str(path), "a JSON list"), start=1):
        where = f"{path}, row {number}"
        yield where, _mapping(row, where)


def _stream(builder: str, path: Path, **settings: Any) -> Iterator[Row]:
    import datasets

    # The name is a pattern to `datasets`: characters such as [ stand for themselves only when escaped.
    files = glob.escape(str(path.absolute()))
    try:
        return iter(datasets.load_dataset(builder, data_files=files, split="train", streaming=True, **settings))
    except StopIteration:  # how `datasets` says that a file is empty
        return iter(())


def _object(line: str, where: str) -> Row:
    return _mapping(_parsed(line, where, "one JSON object"), where)


def _parsed(text: str, where: str, expected: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        remedy = "correct or remove the line"
        raise ArtifactError("not JSON", where=where, expected=expected, found=str(error), remedy=remedy) from error


def _mapping(row: Any, where: str) -> Row:
    if not isinstance(row, dict):
        raise ArtifactError("a row is not a question", where=where, expected="a JSON object", found=type(row).__name__)
    return row


def _unreadable(path: Path, error: Exception, row: int | None = None) -> ArtifactError:
    text = " ".join(str(error.__cause__ or error).split()) or type(error).__name__
    where = str(path) if row is None else f"{path}, row {row}"
    shown = text if len(text) <= 200 else text[:197] + "..."
    return ArtifactError("cannot read the question file", where=where, found=shown, remedy="copy or write it again")
