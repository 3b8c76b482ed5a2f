"""The options of the search environment (`env.options.*`), checked like the rest of the configuration."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from schemas.config import Section

DEFAULT_NAME = "unnamed"  # of a server's index that nobody named


class RetrieverOptions(Section):
    kind: Literal["bm25", "dense", "http"] = Field(
        "bm25", description="`bm25` or `dense`: an index on this machine; `http`: a server."
    )
    index: str = Field(
        DEFAULT_NAME,
        min_length=1,
        description="Directory of the index, or `generated:articles=3000,seed=1`; for `http` the name or hash of its index.",
    )
    url: str | None = Field(
        None, description="`http`: where the server is; the variable RSIPO_RETRIEVER_URL, if set, replaces it."
    )
    protocol: Literal["auto", "queries", "query"] = Field(
        "auto", description="`http`: a list of `queries` a request, one `query`, or find out. [O]"
    )
    timeout_seconds: float = Field(30.0, gt=0, description="`http`: longest wait for one request. [O]")
    retries: int = Field(3, ge=0, description="`http`: how often a failed request is sent again. [O]")
    retry_wait_seconds: float = Field(
        0.5, ge=0, description="`http`: wait before the first retry; doubles each time. [O]"
    )
    batch_queries: int = Field(32, ge=1, description="`http`: most queries of one request. [O]")
    concurrency: int = Field(8, ge=1, description="`http`: most requests under way at once. [O]")

    @model_validator(mode="after")
    def _belongs_together(self) -> RetrieverOptions:
        if self.kind == "http":
            return self
        if self.index == DEFAULT_NAME:
            raise ValueError(f"retriever.index is missing: a {self.kind} retriever needs the directory of its index")
        defaults = type(self).model_fields
        for name in (
            "url",
            "protocol",
            "timeout_seconds",
            "retries",
            "retry_wait_seconds",
            "batch_queries",
            "concurrency",
        ):
            if getattr(self, name) != defaults[name].default:
                raise ValueError(f"retriever.{name} belongs to retriever.kind http and would be ignored")
        return self


class CacheOptions(Section):
    path: str | None = Field(
        None,
        min_length=1,
        description="The file, which several processes may share; unset: `queries.sqlite` in the cache directory.",
    )
    max_megabytes: int = Field(1024, ge=1, description="Largest size; the answers used longest ago make room. [O]")


class SearchOptions(Section):
    prompts: Literal["standard", "compact"] = Field(
        "standard", description="`standard`: instruction-tuned models; `compact`: the bundled small policy."
    )
    topk: int = Field(3, ge=1, le=100, description="Passages of one search. [S] 3")
    passage_words: int = Field(
        100, ge=0, description="Longest text of a passage in an observation, in words; 0 shows it whole. [O]"
    )
    retriever: RetrieverOptions = Field(description="Where passages come from.")
    cache: CacheOptions | None = Field(None, description="Answers kept on disk; without this table there is no cache.")
