"""The objects a stage needs, built when first asked for and kept: environment, panels, renderer, engine, learner.

A stage that runs alone builds its own bench and closes it; `loop` passes one bench through every stage, so that weights,
grammars and games stay loaded. The bench never decides what a stage does. It owns one rule: generation only ever happens
with the weights that the record names, so every change of weights is followed by a probe (see `stages.probe`).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from data.environments import ClosesResources, CountsWork, Environment, EnvironmentSpec
from data.progress import Reporter, SilentReporter
from data.tasks import Panel, Task
from schemas.artifacts import MANIFEST, read_manifest
from schemas.config import Config
from schemas.errors import ArtifactError
from schemas.run_directory import RunDirectory
from stages import panels
from stages.checkpoints import load_tokenizer, publish_initial_checkpoint, verify_checkpoint
from stages.reports import counter_text
from stages.stage import Stopwatch

if TYPE_CHECKING:
    from stages.engines import Engine
    from stages.episodes import Limits
    from stages.rendering import Renderer

ENVIRONMENT = "environment"  # the input that names the environment and its version


class Workbench:
    """Lazily built parts of one run. Use it as a context manager, or call `close`."""

    def __init__(self, run: RunDirectory, reporter: Reporter | None = None) -> None:
        self.run = run
        self.config: Config = run.config
        self._reporter: Reporter = reporter or SilentReporter()
        self._engine: Engine | None = None
        self._renderers: dict[Path, Renderer] = {}
        self._panels: dict[str, Panel] = {}
        self._counted: dict[str, float] = {}  # the environment's counters when they were last noted
        self._verified: set[int] = set()  # checkpoints whose bytes were compared with their manifests

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- tasks ---------------------------------------------------------------------------------------------------------

    @cached_property
    def environment(self) -> Environment:
        """The environment of `env.name` with `env.options`."""
        return EnvironmentSpec(self.config.env.name, self.config.env.options).build()

    def panel(self, name: str) -> Panel:
        """The run's panel `train` or `evaluate`; resolves the sources on the first call of a run's life."""
        if name not in self._panels:
            self.panel_sha256(name)
            self._panels[name] = panels.load_panel(self.run, name)
        return self._panels[name]

    def panel_sha256(self, name: str) -> str:
        """Recorded hash of a panel, without reading its tasks where the run has resolved it."""
        if not panels.is_resolved(self.run, name):
            panels.resolve_panel(self.run, name, self.environment)
        return str(panels.panel_record(self.run, name)["sha256"])

    def tasks_of_step(self, step: int) -> list[Task]:
        """The tasks that step `step` plays, in playing order."""
        return panels.tasks_of_step(
            self.panel(panels.TRAIN), seed=self.config.run.seed, step=step, per_step=self.config.tasks.per_step
        )

    @property
    def environment_version(self) -> str:
        """Name and version of the environment: an input of everything that is played in it."""
        return f"{self.environment.name} {self.environment.version}"

    def note_environment_change(self, panel: str, reporter: Reporter) -> None:
        """Say so when the environment is another version than the one that the panel was made with."""
        recorded, present = panels.panel_record(self.run, panel)["environment"], self.environment
        if recorded != {"name": present.name, "version": present.version}:
            reporter.note(
                f"this run began with environment {recorded['name']} {recorded['version']}; "
                f"now playing {present.name} {present.version}"
            )

    def note_environment_work(self, watch: Stopwatch, reporter: Reporter) -> None:
        """Record and show what the environment counted since the last call, where it counts anything."""
        environment = self.environment
        if not isinstance(environment, CountsWork):
            return
        totals = dict(environment.counters())
        since = {name: value - self._counted.get(name, 0.0) for name, value in totals.items()}
        self._counted = totals
        for name, value in since.items():
            watch.add(f"{environment.name}_{name}", value)
        if any(since.values()):
            reporter.note(f"{environment.name}: {counter_text(since)}")

    # -- weights -------------------------------------------------------------------------------------------------------

    def weights_sha256(self, step: int) -> str:
        """Recorded weights hash of checkpoint `step`; imports `model.path` as checkpoint 0 where the run has none.

        A checkpoint that retention has removed is looked up in the record of the training step that made it.
        """
        if step == 0:
            return str(publish_initial_checkpoint(self.run).extra["weights_sha256"])
        if (self.run.checkpoint_dir(step) / MANIFEST).is_file():
            return str(read_manifest(self.run.checkpoint_dir(step), verify=False).extra["weights_sha256"])
        trained = self.run.step_dir("train_metrics", step)
        if (trained / MANIFEST).is_file():
            return str(read_manifest(trained, verify=False).extra["weights_sha256"])
        raise ArtifactError(
            "there is no such checkpoint",
            where=str(self.run.checkpoint_dir(step)),
            expected="a complete checkpoint",
            remedy=f"make it with: rsipo train-step --run {self.run.root} --step {step}",
        )

    def model_dir(self, step: int) -> Path:
        """The HF directory of checkpoint `step`. Raises ArtifactError when it is not there (any more) or damaged.

        The first time a checkpoint is asked for, every byte is compared with its manifest.
        """
        recorded = self.weights_sha256(step)
        path = self.run.checkpoint_dir(step) / "model"
        if not path.is_dir():
            raise ArtifactError(
                "the weights of a checkpoint were removed",
                where=str(path),
                expected=f"weights {recorded[:12]}",
                remedy="keep more checkpoints with run.keep_last or run.keep_every",
            )
        if step not in self._verified:
            self.verify(step)
        return path

    def verify(self, step: int) -> None:
        """Compare every byte of checkpoint `step` with its manifest now; ArtifactError that says how to get it back."""
        self._verified.discard(step)
        verify_checkpoint(self.run, step)
        self._verified.add(step)

    def engine(self, step: int) -> Engine:
        """The engine, serving the weights of checkpoint `step`."""
        return self.engine_of(self.model_dir(step), self.weights_sha256(step))

    def engine_of(self, model_dir: Path, weights_sha256: str) -> Engine:
        """The engine, serving the weights of `model_dir`; a change of weights is probed before anything is sampled.

        Raises EngineError when the engine's log-probabilities are not those of the weights on disk.
        """
        from stages.engines import build_engine
        from stages.probe import check_served_weights

        if self._engine is None:
            self._engine = build_engine(
                self.config.engine.name,
                model_dir,
                dtype=self.config.model.dtype,
                threads=self.config.run.threads,
                batch_sequences=self.config.engine.batch_sequences,
                options=self.config.engine.options,
            )
        if self._engine.weights_sha256 != weights_sha256:
            self._engine.load_weights(model_dir, weights_sha256)
            check_served_weights(
                self._engine,
                model_dir,
                weights_sha256,
                dtype=self.config.model.dtype,
                temperature=self.config.rollout.temperature,
                max_gap=self.config.engine.max_logprob_gap,
            )
        return self._engine

    def renderer(self, step: int) -> Renderer:
        """The renderer of checkpoint `step`'s tokenizer and the environment's wording."""
        return self.renderer_of(self.model_dir(step))

    def renderer_of(self, model_dir: Path) -> Renderer:
        """The renderer of the tokenizer in `model_dir`; raises ConfigError when the tokenizer cannot be used."""
        from stages.rendering import Renderer, generation_eos_ids

        if model_dir not in self._renderers:
            prompt = self.config.prompt
            # Training never touches the tokenizer; one renderer at a time is enough, and steps do not pile up.
            self._renderers = {
                model_dir: Renderer(
                    load_tokenizer(model_dir),
                    self.environment.prompts,
                    mode=prompt.mode,
                    history=prompt.history,
                    enable_thinking=prompt.enable_thinking,
                    vocabulary_size=vocabulary_size(model_dir),
                    reply_ends=generation_eos_ids(model_dir),
                )
            }
        return self._renderers[model_dir]

    def context_tokens(self, model_dir: Path) -> int:
        """Positions of a model's context; unlimited where its configuration does not say."""
        config = json.loads((model_dir / "config.json").read_text())
        return int(config.get("max_position_embeddings") or sys.maxsize)

    @property
    def limits(self) -> Limits:
        """The limits of one episode."""
        from stages.episodes import Limits

        prompt = self.config.prompt
        return Limits(
            max_turns=self.config.env.max_turns,
            max_prompt_tokens=prompt.max_prompt_tokens,
            max_reply_tokens=prompt.max_reply_tokens,
            max_episode_tokens=prompt.max_episode_tokens,
        )

    # -- training ------------------------------------------------------------------------------------------------------

    learner: Any = None  # the `stages.learner.Learner` that `train_step` keeps here between steps

    def close(self) -> None:
        """Let go of the environment, the engine and the learner."""
        environment = self.__dict__.pop("environment", None)
        if isinstance(environment, ClosesResources):
            environment.close()
            self._counted = {}
        if self._engine is not None:
            self._engine.close()
            self._engine = None
        if self.learner is not None:
            close = getattr(self.learner, "close", None)
            if close is not None:
                close()
            self.learner = None


def vocabulary_size(model_dir: Path) -> int:
    """Rows of the embedding, as the model's configuration gives them."""
    return int(json.loads((model_dir / "config.json").read_text())["vocab_size"])


@contextmanager
def bench_of(run: RunDirectory, bench: Workbench | None, reporter: Reporter | None = None) -> Iterator[Workbench]:
    """The bench that was passed in, left open; or a new one, closed at the end."""
    if bench is not None:
        yield bench
        return
    with Workbench(run, reporter) as own:
        yield own
