"""What an evaluation is made with: the run's own settings, or with `--out` those that were given. Pure, loads no model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from schemas.config import Config
from schemas.errors import ConfigError


@dataclass(frozen=True)
class EvaluationOptions:
    """The options of one evaluation; None is the configuration's value. `batch` changes no result."""

    model: str | None = None
    panel: str | None = None
    attempts: int | None = None
    seed: int | None = None
    temperature: float | None = None
    batch: int | None = None

    def of_the_run(self, config: Config) -> Config:
        """`config`. Raises ConfigError for an option that would put another evaluation under the run's name."""
        given = {"panel": (self.panel, config.tasks.evaluate), "model": (self.model, None)}
        given |= {name: (value, getattr(config.evaluate, name)) for name, value in self._section().items()}
        for name, (value, own) in given.items():
            if value is not None and value != own:
                raise ConfigError(
                    "this evaluation is not the run's own",
                    where=f"--{name}",
                    expected=repr(own) if own is not None else "a checkpoint of the run",
                    found=repr(value),
                    remedy="write it elsewhere with --out DIR",
                )
        return config

    def applied(self, config: Config) -> Config:
        """`config` with the options that were given, for an evaluation in a directory of its own."""
        given = {name: value for name, value in self._section().items() if value is not None}
        sections: dict[str, Any] = {"evaluate": config.evaluate.model_copy(update=given)}
        if self.panel is not None:
            sections["tasks"] = config.tasks.model_copy(update={"evaluate": self.panel})
        if self.model is not None:
            sections["model"] = config.model.model_copy(update={"path": self.model})
        return config.model_copy(update=sections)

    def batch_of(self, config: Config) -> int:
        """Episodes played together."""
        return self.batch or config.evaluate.batch_episodes

    def _section(self) -> dict[str, Any]:
        return {"attempts": self.attempts, "seed": self.seed, "temperature": self.temperature}
