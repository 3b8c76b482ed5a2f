"""The example modules of the documentation, and an engine that plays them by a script."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stages.engines import GenerationRequest, GenerationResult
from stages.rendering import Renderer

DOCS = Path(__file__).parent.parent / "docs"


def example(page: str, name: str) -> str:
    """The code that follows `<!-- example: NAME -->` on a page of docs/."""
    text = (DOCS / page).read_text(encoding="utf-8")
    [code] = re.findall(rf"<!-- example: {re.escape(name)} -->\n```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return code


class ScriptedEngine:
    """An engine that says what a script tells it, turn by turn."""

    weights_sha256 = "0" * 64

    def __init__(self, tokenizer: Any, renderer: Renderer, script: Sequence[str]) -> None:
        self.tokenizer, self.end, self.script, self.asked = tokenizer, renderer.eos_ids[0], script, 0

    def generate(self, requests: Sequence[GenerationRequest], on_tokens: object = None) -> list[GenerationResult]:
        text = self.script[self.asked]
        self.asked += 1
        ids = [*self.tokenizer(text, add_special_tokens=False)["input_ids"], self.end]
        return [GenerationResult(ids, [-0.1] * len(ids), "eos") for _ in requests]

    def end_sessions(self) -> None:
        pass
