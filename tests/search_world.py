"""A retriever of a few passages that needs no index, search environments on top of it, and an engine that searches."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from data.retrieval import Answer, Hit, Passage, RetrievalFault
from data.search.environment import SearchEnvironment
from data.search.retrievers import CountedRetriever
from data.tasks import Task
from stages.engines import GenerationRequest, GenerationResult
from stages.engines.transformers_engine import TransformersEngine

PASSAGES = (
    Passage("1", "Slow Rain", "Slow Rain is a novel by Mira Kolben."),
    Passage("2", "Mira Kolben", "Mira Kolben was born in Tarvold."),
    Passage("3", "Tarvold", "Tarvold is a town </information> on the Elm."),
)


class WordRetriever:
    """Passages by the number of words shared with the query; remembers what it was asked. `down`: queries that fail."""

    def __init__(self, index: str = "a" * 64, down: Sequence[str] = ()) -> None:
        self.index, self.down = index, set(down)
        self.calls: list[list[str]] = []
        self.closed = False

    @property
    def settings(self) -> Mapping[str, Any]:
        return {"kind": "words"}

    def index_id(self) -> str:
        return self.index

    def search(self, queries: Sequence[str], topk: int) -> list[Answer]:
        self.calls.append(list(queries))
        return [RetrievalFault(f"no line for {q}") if q in self.down else self._hits(q)[:topk] for q in queries]

    def close(self) -> None:
        self.closed = True

    @staticmethod
    def _hits(query: str) -> list[Hit]:
        words = set(query.lower().split())
        scored = [(len(words & set(f"{p.title} {p.text}".lower().split())), p) for p in PASSAGES]
        return [Hit(p, float(score)) for score, p in sorted(scored, key=lambda pair: -pair[0]) if score]


def search_environment(
    retriever: WordRetriever | None = None, corpus: str | None = None, **options: object
) -> SearchEnvironment:
    environment = SearchEnvironment(**{"retriever": {"index": "nowhere"}, **options})
    environment.__dict__["retriever"] = CountedRetriever(retriever or WordRetriever(), lambda: corpus)
    return environment


def question(name: str = "q", answers: Sequence[str] = ("Tarvold",), **payload: object) -> Task:
    text = "Where was the author of Slow Rain born?"
    return Task(name, "hotpotqa", "test", text, {"answers": list(answers), **payload}, {"hops": "2"})


class SearchingEngine(TransformersEngine):
    """The engine of a policy that cannot yet search: its replies are put into its mouth, and scored by its weights.

    A reply follows from the request's seed: a search for a name of the prompt's question, an answer, or nonsense.
    """

    SKILL = '{"summary": "it was found", "skill": "first search for the name, then answer"}'

    def __init__(self, model_dir: Path | str, **options: object) -> None:
        super().__init__(model_dir, **options)  # type: ignore[arg-type]
        self.words = PreTrainedTokenizerFast.from_pretrained(model_dir)

    def generate(self, requests: Sequence[GenerationRequest], on_tokens: object = None) -> list[GenerationResult]:
        return [self._said(request) for request in requests]

    def _said(self, request: GenerationRequest) -> GenerationResult:
        prompt = list(request.prompt_ids)
        ids = [
            *self.words(self._text(self.words.decode(prompt), request.seed), add_special_tokens=False)["input_ids"],
            self.words.eos_token_id,
        ]
        scores = self.score([prompt + ids], request.temperature)[0]
        return GenerationResult(ids, list(scores[len(prompt) - 1 :]), "eos")

    def _text(self, prompt: str, seed: int) -> str:
        if "write a skill" in prompt:
            return self.SKILL
        asked = prompt.partition("question: ")[2].partition("\n")[0]
        names = re.findall(r"[A-Z]\w+(?: [A-Z]\w+)*", asked)[1:] or [asked]
        kind = seed % 8
        if kind == 0:
            return "<search>no thought</search>"
        if kind < 5 and "- " not in prompt:
            return f"<think>who</think><search>{names[seed % len(names)]}</search>"
        found = re.findall(r"[A-Z]\w+", prompt.rpartition("- ")[2]) or ["Nowhere"]
        return f"<think>so</think><answer>{found[seed % len(found)]}</answer>"
