"""Generation with transformers models, in this process: the engine of CPUs and of tests, and the reference of the others.

Plain temperature sampling over the whole vocabulary (a truncated distribution would make the recorded log-probabilities
those of another policy). What is sampled does not depend on the batch: a decision close to a tie is taken again from the
logits of the row alone, computed in one pass over its ids without a cache. That is exact for float32; with bfloat16 the
wider `tie_margin` makes it very likely. `transformers.generate` is not used: it cannot keep sequences between turns.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from schemas.errors import EngineError
from stages.engines import GenerationRequest, GenerationResult
from stages.engines.decoder_choice import choose_decoder
from stages.engines.model_loading import copy_weights, load_module, load_tokenizer
from stages.engines.reply import Reply
from stages.engines.sampling import choose
from stages.rendering import check_vocabulary, end_of_turn_ids
from stages.threads import set_threads

TIE_MARGIN = {torch.float32: 1e-4}  # of the CDF; the noise of fp32 logits moves it by less than 1e-5
LOW_PRECISION_TIE_MARGIN = 1e-2
SCORE_LOGITS = 2**26  # logits held at once while scoring


class TransformersEngine:
    """See `stages.engines.Engine`.

    Options: `device`; `cache_gib`, memory of the key-value pool; `tie_margin`, see `stages.engines.sampling.choose`;
    `decoder` "auto", "slots", "padded" or "single" (see `stages.engines.decoder_choice`). `recomputed` counts the decisions
    taken again, `sampled` all of them. Raises EngineError when the model cannot be loaded completely.
    """

    def __init__(
        self,
        model_dir: Path | str,
        *,
        dtype: str = "float32",
        threads: int = 0,
        batch_sequences: int = 128,
        device: str = "cpu",
        **options: object,
    ) -> None:
        set_threads(threads)
        module = load_module(model_dir, dtype, device)
        self._set_up(module, load_tokenizer(model_dir), batch_sequences, **options)

    @classmethod
    def from_module(
        cls,
        module: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        batch_sequences: int = 128,
        **options: object,
    ) -> TransformersEngine:
        """An engine around a model that is already loaded; its parameters are shared, not copied."""
        engine = cls.__new__(cls)
        engine._set_up(module.eval(), tokenizer, batch_sequences, **options)
        return engine

    def _set_up(
        self,
        module: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        batch_sequences: int,
        *,
        cache_gib: float = 4.0,
        tie_margin: float | None = None,
        decoder: str = "auto",
    ) -> None:
        self.module = module
        self.weights_sha256: str | None = None
        self.vocabulary_size = int(module.get_input_embeddings().weight.shape[0])
        check_vocabulary(tokenizer, self.vocabulary_size)
        self.eos_ids = frozenset(end_of_turn_ids(tokenizer)) | _generation_eos_ids(module)
        self.context_length: int | None = getattr(module.config, "max_position_embeddings", None)
        self.batch_sequences = batch_sequences
        self.tie_margin = TIE_MARGIN.get(module.dtype, LOW_PRECISION_TIE_MARGIN) if tie_margin is None else tie_margin
        self.decoder_name, self._decoder = choose_decoder(module, decoder, batch_sequences, int(cache_gib * 2**30))
        self.recomputed = self.sampled = 0

    def load_weights(self, model_dir: Path, weights_sha256: str) -> None:
        """See `Engine.load_weights`: copies in place; EngineError for other names, shapes or values that are not finite."""
        copy_weights(self.module, Path(model_dir))
        self._decoder.clear()
        self.weights_sha256 = weights_sha256

    @torch.inference_mode()
    def generate(
        self, requests: Sequence[GenerationRequest], on_tokens: Callable[[int], None] | None = None
    ) -> list[GenerationResult]:
        """See `Engine.generate`. `on_tokens` hears of the number of tokens sampled in each pass.

        Raises EngineError for a request that cannot be served and for logits that are not finite.
        """
        replies = [Reply(index, request) for index, request in enumerate(requests)]
        self._check(replies)
        self._decoder.begin_call()
        try:
            for batch in self._batches(replies):
                self._sample(batch, on_tokens)
        except BaseException:
            self._decoder.clear()  # a cache in the middle of a batch is of no use to anyone
            raise
        return [reply.result() for reply in replies]

    @torch.inference_mode()
    def score(self, sequences: Sequence[Sequence[int]], temperature: float) -> list[list[float]]:
        """See `Engine.score`. Padded on the right, in batches of similar lengths; temperature 0 scores at 1."""
        scores: list[list[float]] = [[] for _ in sequences]
        order = sorted((i for i in range(len(sequences)) if len(sequences[i]) > 1), key=lambda i: len(sequences[i]))
        while order:
            rows = max(1, SCORE_LOGITS // (self.vocabulary_size * len(sequences[order[-1]])))
            batch, order = order[-rows:], order[:-rows]
            width = max(len(sequences[i]) for i in batch)
            ids = torch.tensor(
                [[*sequences[i], *[0] * (width - len(sequences[i]))] for i in batch], device=self.module.device
            )
            logits = self.module(input_ids=ids, use_cache=False).logits[:, :-1].float() / (temperature or 1.0)
            logprobs = torch.log_softmax(logits, dim=-1).gather(2, ids[:, 1:, None])[..., 0]
            for i, row in zip(batch, logprobs.tolist(), strict=True):
                scores[i] = row[: len(sequences[i]) - 1]
        return scores

    def end_sessions(self) -> None:
        """See `Engine.end_sessions`."""
        self._decoder.clear()

    def close(self) -> None:
        """Free the caches; the module stays with whoever else holds it."""
        self._decoder.clear()

    def _check(self, replies: list[Reply]) -> None:
        sessions = [reply.request.session for reply in replies if reply.request.session is not None]
        if len(sessions) != len(set(sessions)):
            raise EngineError("two requests of one call name the same session")
        for reply in replies:
            if not reply.ids or reply.request.max_new_tokens < 1 or reply.request.temperature < 0:
                raise EngineError(
                    "a request cannot be served",
                    where=f"request {reply.index}",
                    expected="a prompt of one token or more, max_new_tokens >= 1, temperature >= 0",
                    found=f"{len(reply.ids)}, {reply.request.max_new_tokens}, {reply.request.temperature}",
                )
            if min(reply.ids) < 0 or max(reply.ids) >= self.vocabulary_size:
                raise EngineError(
                    "a prompt holds a token id that the model does not have",
                    where=f"request {reply.index}",
                    expected=f"0 to {self.vocabulary_size - 1}",
                    found=f"{min(reply.ids)} to {max(reply.ids)}",
                )
            if self.context_length is not None and reply.longest > self.context_length:
                raise EngineError(
                    "prompt and reply do not fit the model's context",
                    where=f"request {reply.index}",
                    expected=f"at most {self.context_length} tokens (max_position_embeddings)",
                    found=f"{reply.prompt_length} + {reply.request.max_new_tokens}",
                    remedy="lower prompt.max_prompt_tokens, prompt.max_reply_tokens or prompt.max_episode_tokens",
                )

    def _batches(self, replies: list[Reply]) -> list[list[Reply]]:
        """Replies of similar lengths together, as many as the limits on rows and memory allow."""
        order = sorted(replies, key=lambda reply: (reply.longest, reply.index))
        batches = []
        while order:
            rows = min(self.batch_sequences, self._decoder.rows_at_once(order[-1].longest))
            batches.append(sorted(order[-rows:], key=lambda reply: reply.index))
            order = order[:-rows]
        return batches

    def _sample(self, replies: list[Reply], on_tokens: Callable[[int], None] | None) -> None:
        live = replies
        logits = self._decoder.start(replies)
        while True:
            self._decide(live, logits)
            if on_tokens is not None:
                on_tokens(len(live))
            live = [reply for reply in live if reply.stop_reason is None]
            if not live:
                break
            logits = self._decoder.step(live)
        self._decoder.finish(replies)

    def _decide(self, live: list[Reply], logits: torch.Tensor) -> None:
        """Sample one token for every live reply."""
        tokens, logprobs, near_tie = self._choose(live, logits, self.tie_margin)
        for row, reply in enumerate(live):
            token, logprob = tokens[row], logprobs[row]
            if near_tie[row]:
                [token], [logprob], _ = self._choose([reply], self._lone_logits(reply.ids), 0.0)
                self.recomputed += 1
            reply.append(token, logprob, self.eos_ids)
        self.sampled += len(live)

    def _choose(
        self, replies: list[Reply], logits: torch.Tensor, margin: float
    ) -> tuple[list[int], list[float], list[bool]]:
        device = logits.device
        uniforms = torch.tensor([reply.uniform for reply in replies], dtype=torch.float64, device=device)
        temperatures = torch.tensor([r.request.temperature for r in replies], dtype=torch.float64, device=device)
        try:
            choice = choose(logits, uniforms, temperatures, margin)
        except FloatingPointError as error:
            raise EngineError(
                "the model's logits are not finite",
                where=f"weights {self.weights_sha256}",
                remedy="the checkpoint is damaged or training diverged: go back to an earlier one",
            ) from error
        return choice.tokens.tolist(), choice.logprobs.tolist(), choice.near_tie.tolist()

    def _lone_logits(self, ids: list[int]) -> torch.Tensor:
        """Next-token logits (1, vocabulary) in the shape that does not depend on any batch or session."""
        input_ids = torch.tensor([ids], device=self.module.device)
        return self.module(input_ids=input_ids, use_cache=False, logits_to_keep=1).logits[:, -1]


def _generation_eos_ids(module: PreTrainedModel) -> Collection[int]:
    config = getattr(module, "generation_config", None)
    ids = getattr(config, "eos_token_id", None)
    return frozenset() if ids is None else frozenset([ids] if isinstance(ids, int) else ids)
