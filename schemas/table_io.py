"""Rows in, Parquet out, and back: the only module that writes or reads the tables of a run.

A table's step is a folder `RUN/<table>/step=00001/` of part files and, once the stage has finished, a `manifest.json`. A
part is published file by file in the order its tables are given; the last table's file says that the part is complete. The
manifest of a stage's last table says that the step is complete, and names the manifests of the stage's other tables.
Parts carry the hash of their inputs, so that parts of an interrupted stage are taken up only if nothing changed.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from schemas.artifacts import (
    MANIFEST,
    Manifest,
    Status,
    file_errors,
    fsync_path,
    hash_files,
    make_directory,
    read_manifest,
    remove_leftovers,
    status,
    temporary_sibling,
    write_file,
)
from schemas.errors import ArtifactError, NumericsError
from schemas.run_directory import RunDirectory
from schemas.tables import SCHEMAS, VERSION

ROW_GROUP_ROWS = 8192

_PART = re.compile(r"part-(\d{5})\.parquet")
_REBUILT_BY = {
    "rollouts": "rollout",
    "rollout_turns": "rollout",
    "skills": "replay",
    "replays": "replay",
    "replay_turns": "replay",
    "gains": "estimate-gains",
    "type_stats": "estimate-gains",
    "train_rows": "train-step",
    "train_metrics": "train-step",
    "evals": "evaluate",
    "eval_turns": "evaluate",
}

Row = Mapping[str, Any]


def rebuild_command(run: RunDirectory, table: str, step: int) -> str:
    """The command that makes a table's step again, for the end of an error message."""
    command = _REBUILT_BY.get(table)
    if command is None:
        return "remove the file"
    return f"run `rsipo {command} --run {run.root} --step {step} --force`"


def arrow_table(name: str, rows: Sequence[Row]) -> pa.Table:
    """Rows as the Arrow table `name` of `schemas.tables`; keys that are absent become null.

    Raises ArtifactError for an unknown column, a value of another type or a null where none may be, and NumericsError for
    NaN, which must be null.
    """
    schema = SCHEMAS[name]
    if unknown := {key for row in rows for key in row} - set(schema.names):
        raise ArtifactError("a row has an unknown column", where=f"{name}.{min(unknown)}")
    columns = [_column(name, field, rows) for field in schema]
    return pa.Table.from_arrays(columns, schema=schema)


def _column(name: str, field: pa.Field, rows: Sequence[Row]) -> pa.Array:
    where = f"{name}.{field.name}"
    try:
        column = pa.array([row.get(field.name) for row in rows], type=field.type, from_pandas=False)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise ArtifactError("a value has the wrong type", where=where, expected=field.type, found=str(error)) from error
    if not field.nullable and column.null_count:
        first = column.is_null().index(True).as_py()
        raise ArtifactError("a value is missing", where=f"{where}, row {first}", expected=field.type, found="null")
    values = column
    if pa.types.is_large_list(field.type):
        values = column.flatten()
    elif pa.types.is_map(field.type):
        values = column.items
    if pa.types.is_floating(values.type) and pc.any(pc.is_nan(values)).as_py():
        raise NumericsError(
            "a value is not a number", where=where, expected="a number, or null for not scored", found="NaN"
        )
    return column


def write_part(
    run: RunDirectory, step: int, part: int, tables: Mapping[str, Sequence[Row]], inputs_sha256: str
) -> None:
    """Publish one part of a step: `RUN/<table>/step=00001/part-00000.parquet` for each table, in the given order.

    Every table is written to a hidden file and flushed before the first one appears under its name. Raises what
    `arrow_table` raises, and the disk's failures as `schemas.artifacts` describes them.
    """
    prepared: list[tuple[Path, Path]] = []
    try:
        for name, rows in tables.items():
            table = arrow_table(name, rows)
            if rows and pc.any(pc.not_equal(table["step"], step)).as_py():
                raise ArtifactError("a row belongs to another step", where=name, expected=step)
            target = run.step_dir(name, step) / f"part-{part:05d}.parquet"
            prepared.append((temporary_sibling(target), target))
            _write_parquet(table, target, {"rsipo.inputs_sha256": inputs_sha256, "rsipo.part": str(part)})
        for temporary, target in prepared:
            with file_errors(target):
                temporary.replace(target)
                fsync_path(target.parent)
    finally:
        for temporary, _ in prepared:
            temporary.unlink(missing_ok=True)


def _write_parquet(table: pa.Table, target: Path, facts: dict[str, str]) -> None:
    """Write the hidden sibling of `target`, flushed."""
    metadata = {**(table.schema.metadata or {}), **{key.encode(): value.encode() for key, value in facts.items()}}
    with file_errors(target):
        make_directory(target.parent)
        temporary = temporary_sibling(target)
        pq.write_table(
            table.replace_schema_metadata(metadata),
            temporary,
            compression="zstd",
            row_group_size=ROW_GROUP_ROWS,
            write_page_checksum=True,
        )
        fsync_path(temporary)


def write_loose_part(run: RunDirectory, name: str, step: int, label: str, rows: Sequence[Row]) -> Path:
    """Publish `part-<label>.parquet` of a table that has no manifest (`timings`); returns its path."""
    target = run.step_dir(name, step) / f"part-{label}.parquet"
    try:
        _write_parquet(arrow_table(name, rows), target, {})
        with file_errors(target):
            temporary_sibling(target).replace(target)
            fsync_path(target.parent)
    finally:
        temporary_sibling(target).unlink(missing_ok=True)
    return target


def parts_done(run: RunDirectory, tables: Sequence[str], step: int, inputs_sha256: str) -> set[int]:
    """Parts that every table has, readable to the last page and made from these inputs; all other files are removed.

    Call it under the lock. A removed part takes the step's manifests with it.
    """
    found = {name: _part_files(run.step_dir(name, step)) for name in tables}
    done = set.intersection(*(set(files) for files in found.values())) if found else set()
    done = {part for part in done if all(_is_intact(found[name][part], name, part, inputs_sha256) for name in tables)}
    owed = [(name, path) for name in tables for part, path in found[name].items() if part not in done]
    if owed:
        with file_errors(run.step_dir(tables[-1], step)):
            for name in reversed(tables):
                (run.step_dir(name, step) / MANIFEST).unlink(missing_ok=True)
            for _, path in owed:
                path.unlink()
    for name in tables:
        remove_leftovers(run.step_dir(name, step))
    return done


def _part_files(folder: Path) -> dict[int, Path]:
    entries = sorted(folder.iterdir()) if folder.is_dir() else []
    return {int(match[1]): path for path in entries if (match := _PART.fullmatch(path.name))}


def _is_intact(path: Path, name: str, part: int, inputs_sha256: str) -> bool:
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            facts = file.schema_arrow.metadata or {}
            expected = {b"rsipo.inputs_sha256": inputs_sha256.encode(), b"rsipo.part": str(part).encode()}
            if any(facts.get(key) != value for key, value in expected.items()) or not _has_schema(file, name):
                return False
            for group in range(file.num_row_groups):
                file.read_row_group(group)
    except (OSError, pa.ArrowException):
        return False
    return True


def _has_schema(file: pq.ParquetFile, name: str) -> bool:
    schema, facts = SCHEMAS[name], file.schema_arrow.metadata or {}
    own = schema.metadata or {}
    return file.schema_arrow.equals(schema) and all(facts.get(key) == value for key, value in own.items())


def finish_step(
    run: RunDirectory,
    tables: Sequence[str],
    step: int,
    *,
    kind: str,
    inputs: dict[str, str],
    extra: dict[str, Any] | None = None,
) -> Manifest:
    """Write the manifest of each table's step; the last one completes the step and is returned.

    Its `extra` also holds `tables`, the manifest hashes of the stage's other tables. Raises ArtifactError when a table has
    no part or a part is missing in between.
    """
    others: dict[str, str] = {}
    manifest: Manifest | None = None
    for name in tables:
        folder = run.step_dir(name, step)
        parts = sorted(_part_files(folder))
        if not parts or parts != list(range(len(parts))):
            raise ArtifactError(
                "parts of a table are missing", where=str(folder), expected="parts 0, 1, 2, ...", found=parts
            )
        with file_errors(folder):
            files = {file: entry for file, entry in hash_files(folder).items() if _PART.fullmatch(file)}
        facts = {**(extra or {}), "tables": others} if name == tables[-1] else dict(extra or {})
        manifest = Manifest(kind, dict(inputs), files, facts)
        write_file(folder / MANIFEST, manifest.to_bytes())
        others = {**others, name: manifest.sha256}
    if manifest is None:
        raise ArtifactError("a stage without a table cannot be finished", where=kind)
    return manifest


def stage_status(run: RunDirectory, tables: Sequence[str], step: int, inputs: Mapping[str, str]) -> Status:
    """Status of a stage's step, by the manifest of its last table; the other tables must be the ones it names.

    Raises ArtifactError when a published table is damaged or another one than the stage wrote.
    """
    *others, last = tables
    result = status(run.step_dir(last, step), inputs)
    if result.state == "absent":
        return result
    named = read_manifest(run.step_dir(last, step), verify=False).extra.get("tables", {})
    for name in others:
        folder = run.step_dir(name, step)
        if read_manifest(folder, verify=False).sha256 != named.get(name):
            raise ArtifactError(
                "a table is not the one its stage wrote",
                where=str(folder),
                expected=f"manifest {str(named.get(name))[:12]}",
                remedy=rebuild_command(run, name, step),
            )
    return result


def step_manifest(run: RunDirectory, table: str, step: int) -> Manifest:
    """The manifest of a table that another stage reads, presence and sizes checked.

    Raises ArtifactError that names the command which makes the table when it is missing or damaged.
    """
    return read_manifest(run.step_dir(table, step), verify=False, remedy=rebuild_command(run, table, step))


def clear_step(run: RunDirectory, tables: Sequence[str], step: int) -> None:
    """Remove a step of some tables, the completing manifest first: a kill in between leaves an unfinished step."""
    for name in reversed(tables):
        folder = run.step_dir(name, step)
        with file_errors(folder):
            (folder / MANIFEST).unlink(missing_ok=True)
    for name in tables:
        folder = run.step_dir(name, step)
        with file_errors(folder):
            if folder.is_dir():
                shutil.rmtree(folder)


def read_table(run: RunDirectory, name: str, step: int, columns: Sequence[str] | None = None) -> pa.Table:
    """A finished step of a table, rows in the order of its parts; all columns, or those named.

    Every file is checked against the manifest before it is parsed. Raises ArtifactError naming the file and the command
    that rebuilds it.
    """
    folder, remedy = run.step_dir(name, step), rebuild_command(run, name, step)
    schema = SCHEMAS[name]
    wanted = schema if columns is None else pa.schema([schema.field(column) for column in columns], schema.metadata)
    manifest = read_manifest(folder, remedy=remedy)
    paths = [folder / file_name for file_name in sorted(manifest.files)]
    return _concatenate(paths, name, wanted, remedy)


def read_parts(run: RunDirectory, name: str, step: int, columns: Sequence[str] | None = None) -> pa.Table:
    """The parts of a step that are published so far, finished or not; pages are checked against their own checksums."""
    schema = SCHEMAS[name]
    wanted = schema if columns is None else pa.schema([schema.field(column) for column in columns], schema.metadata)
    files = _part_files(run.step_dir(name, step))
    return _concatenate([files[part] for part in sorted(files)], name, wanted, rebuild_command(run, name, step))


def _concatenate(paths: Sequence[Path], name: str, wanted: pa.Schema, remedy: str) -> pa.Table:
    parts = []
    for path in paths:
        try:
            with pq.ParquetFile(path, page_checksum_verification=True) as file:
                if not _has_schema(file, name):
                    raise ArtifactError(
                        "a file has another schema than this release",
                        where=str(path),
                        expected=f"version {VERSION} of {name}",
                        found=_version_of(file),
                        remedy=remedy,
                    )
                part = file.read(columns=wanted.names).select(wanted.names)
        except (OSError, pa.ArrowException) as error:
            raise ArtifactError("a file cannot be read", where=str(path), found=str(error), remedy=remedy) from error
        # Parquet names the inner fields of lists and maps its own way; the values are the same.
        parts.append(part.cast(wanted))
    return pa.concat_tables(parts) if parts else wanted.empty_table()


def _version_of(file: pq.ParquetFile) -> str:
    facts = file.schema_arrow.metadata or {}
    version, table = facts.get(b"rsipo.version", b"none"), facts.get(b"rsipo.table", b"another table")
    return f"version {version.decode(errors='replace')} of {table.decode(errors='replace')}"
