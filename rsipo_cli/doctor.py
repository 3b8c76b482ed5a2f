"""`rsipo doctor`: is everything here that a run needs, and does a game play to its end?"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from rsipo_cli import options

if TYPE_CHECKING:
    from packaging.requirements import Requirement

BUNDLED = ("household-tiny", "search-tiny")
LEAST_FREE_BYTES = 500_000_000
EXTRAS = ("dense", "express", "vllm")  # what a user may want besides; `dev` is for working on rsipo


@dataclass(frozen=True)
class Finding:
    """One check: `ok` None means optional and absent."""

    name: str
    ok: bool | None
    text: str


def doctor(as_json: options.AsJson = False) -> None:
    """Check the installation: versions, the game engine, the bundled policy, disk and threads."""
    from rsipo_cli.console import json_text
    from rsipo_cli.text import visible

    found = []
    for finding in findings():
        found.append(finding)
        if not as_json:
            mark = {True: "ok     ", False: "MISSING", None: "absent "}[finding.ok]
            typer.echo(f"{mark}  {finding.name}: {visible(finding.text)}")
    if as_json:
        typer.echo(json_text({finding.name: {"ok": finding.ok, "found": finding.text} for finding in found}))
    missing = [finding.name for finding in found if finding.ok is False]
    if missing:
        typer.echo(f"rsipo: not ready, see: {', '.join(missing)}", err=True)
        raise typer.Exit(1)


def findings() -> Iterator[Finding]:
    """Every check, in the order shown; none of them raises."""
    yield Finding("python", True, f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    yield from _packages()
    for name, check in _CHECKS:
        yield _checked(name, check)


def _packages() -> Iterator[Finding]:
    for requirement, optional in _requirements():
        if requirement.marker is not None and not any(
            requirement.marker.evaluate({"extra": extra}) for extra in ("", *EXTRAS)
        ):
            continue
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            remedy = (
                "optional" if optional else f"install it with: pip install '{requirement.name}{requirement.specifier}'"
            )
            yield Finding(requirement.name, None if optional else False, f"not installed; {remedy}")
            continue
        fits = requirement.specifier.contains(version, prereleases=True)
        wanted = f", expected {requirement.specifier}" if not fits else ""
        yield Finding(requirement.name, fits, f"{version}{wanted}")


def _requirements() -> list[tuple[Requirement, bool]]:
    """What the distribution asks for, and whether it is optional; from pyproject.toml in a checkout that is not installed."""
    from packaging.requirements import Requirement

    pyproject = Path(__file__).parent.parent / "pyproject.toml"
    if pyproject.is_file():
        project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
        optional = project.get("optional-dependencies", {})
        extras = [line for extra in EXTRAS for line in optional.get(extra, [])]
        return [(Requirement(line), False) for line in project["dependencies"]] + [
            (Requirement(line), True) for line in extras
        ]
    lines = importlib.metadata.requires("rsipo") or []
    requirements = [Requirement(line) for line in lines]
    return [(found, "extra" in str(found.marker or "")) for found in requirements]


def _checked(name: str, check: Callable[[], str]) -> Finding:
    try:
        return Finding(name, True, check())
    except Exception as error:  # a broken piece may fail in any way, and the other checks still count
        return Finding(name, False, f"{type(error).__name__}: {error}"[:300])


def _torch() -> str:
    import torch

    value = float((torch.ones(2, 2) @ torch.ones(2, 2)).sum())
    if value != 8.0:
        raise ArithmeticError(f"a matrix product gave {value}")
    cuda = f"{torch.cuda.device_count()} CUDA devices" if torch.cuda.is_available() else "CPU only"
    return f"computes, {cuda}"


def _golden_game() -> str:
    """One generated game, played to a win by the oracle's plan with the driver that runs use."""
    from data.household.environment import HouseholdEnvironment
    from data.household.generator import generate_task
    from data.household.oracle import oracle_plan
    from schemas.errors import EnvironmentFault

    environment = HouseholdEnvironment()
    task = generate_task(7, 0, task_type="pick_and_place_simple", size="small", split="train")
    session = environment.start(task)
    try:
        plan = oracle_plan(task)
        won = False
        for command in plan:
            won = session.step(command).won
        if not won:
            raise EnvironmentFault("the golden game was not won", found=f"{len(plan)} commands played")
    finally:
        session.close()
    return f"{environment.version}: won in {len(plan)} commands"


def _golden_question() -> str:
    """One question about a generated encyclopaedia, answered with what BM25 finds for its subject."""
    import tempfile

    from data.retrieval.index.build import build_index_from
    from data.retrieval.open_index import retriever_of
    from data.search.encyclopaedia import MIN_ARTICLES, generate_world
    from schemas.errors import EnvironmentFault

    world = generate_world(7, MIN_ARTICLES)
    question = next(iter(world.candidates("gen-people", "train")))
    with tempfile.TemporaryDirectory() as folder:
        retriever = retriever_of(build_index_from(world.passages, Path(folder) / "index"))
        [answer] = retriever.search([question.subject], 3)
        retriever.close()
    if isinstance(answer, Exception):
        raise answer
    if not any(question.answer in hit.passage.text for hit in answer):
        raise EnvironmentFault("the golden question's article was not found", found=f"{len(answer)} passages")
    return f"found among {MIN_ARTICLES} articles by BM25"


def _bundled_policies() -> str:
    from importlib import resources

    for name in BUNDLED:
        folder = resources.files("data") / "policies" / name
        names = {entry.name for entry in folder.iterdir()} if folder.is_dir() else set()
        absent = sorted({"config.json", "model.safetensors", "tokenizer.json"} - names)
        if absent:
            raise FileNotFoundError(f"the package lacks {', '.join(absent)} of policy {name}")
    return f"in the package: {', '.join(BUNDLED)}"


def _disk() -> str:
    free = shutil.disk_usage(Path.cwd()).free
    if free < LEAST_FREE_BYTES:
        raise OSError(f"{free / 1e6:,.0f} MB free here, expected at least {LEAST_FREE_BYTES / 1e6:,.0f} MB")
    return f"{free / 1e9:,.1f} GB free here"


def _threads() -> str:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{cores} cores may be used, OMP_NUM_THREADS {os.environ.get('OMP_NUM_THREADS', 'unset')}"


def _household_data() -> str:
    folder = os.environ.get("ALFWORLD_DATA")
    if not folder:
        return "ALFWORLD_DATA is unset: generated games and panels work, official games do not"
    if not Path(folder).is_dir():
        raise FileNotFoundError(f"ALFWORLD_DATA names {folder}, which is not a directory")
    return f"ALFWORLD_DATA is {folder}"


_CHECKS: tuple[tuple[str, Callable[[], str]], ...] = (
    ("torch computes", _torch),
    ("golden game", _golden_game),
    ("golden question", _golden_question),
    ("bundled policies", _bundled_policies),
    ("household data", _household_data),
    ("disk", _disk),
    ("threads", _threads),
)
