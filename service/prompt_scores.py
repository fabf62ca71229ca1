"""What an answer tells of its prompt: its text (``echo``) and its tokens' log-probabilities; and how many of those,
and of the generated tokens', it may have at all.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.types import SamplingParams, TokenLogprobs
from service.detokenize import Detokenizer
from service.errors import bad_request
from service.prompts import EncodedPrompt
from service.responses import PromptLogprob, PromptLogprobs
from service.schemas import MAX_SCORES, ChatBody, GenerationBody
from service.text import Tokenizer

MIN_LOGPROB = -9999.0
"""What stands for minus infinity, which JSON cannot hold (as in OpenAI's API)."""


def check_scores(body: GenerationBody, prompts: Sequence[EncodedPrompt]) -> None:
    """Refuse an answer with very many log-probabilities of prompt tokens. Raises ``ApiError`` (400)."""
    wanted = 0 if body.prompt_logprobs is None else 1 + body.prompt_logprobs
    if body.echoes:
        wanted += body.scores_per_token
    copies = 1 if isinstance(body, ChatBody) else body.n  # a chat's prompt is told of once
    count = wanted * copies * sum(len(prompt.token_ids) for prompt in prompts)
    if count > MAX_SCORES:
        param = "logprobs" if body.prompt_logprobs is None else "prompt_logprobs"
        raise bad_request(
            f"{param}: the answer would have {count} log-probabilities of prompt tokens (prompts x n x tokens x "
            f"alternatives), at most {MAX_SCORES} are possible.",
            param,
        )


def check_generated_scores(body: GenerationBody, params: Sequence[SamplingParams]) -> None:
    """Refuse an answer that may have very many log-probabilities of generated tokens; a stream too, for all of it
    waits here if its client does not read. ``params`` are those of each prompt. Raises ``ApiError`` (400).
    """
    count = body.scores_per_token * body.n * sum(one.max_tokens for one in params)
    if count > MAX_SCORES:
        raise bad_request(
            f"logprobs: the answer could have {count} log-probabilities of generated tokens (prompts x n x "
            f"max_tokens x (alternatives + 1)), at most {MAX_SCORES} are possible.",
            "logprobs",
        )


def finite(logprob: float) -> float:
    """``logprob``, or the bound in place of what JSON cannot hold."""
    # `max` with the bound first also maps NaN to it.
    return max(MIN_LOGPROB, logprob)


def prompt_text(prompt: EncodedPrompt, tokenizer: Tokenizer) -> str:
    """The prompt as it is echoed."""
    return tokenizer.decode(prompt.token_ids) if prompt.text is None else prompt.text


def prompt_offsets(token_ids: Sequence[int], tokenizer: Tokenizer) -> list[int]:
    """Where each token's text begins, in characters."""
    detokenizer = Detokenizer(tokenizer.token_bytes)
    offsets, length = [], 0
    for token_id in token_ids:
        offsets.append(length)
        length += len(detokenizer.push([token_id]))
    return offsets


def prompt_logprobs(scores: Sequence[TokenLogprobs], num_top: int, tokenizer: Tokenizer) -> PromptLogprobs:
    """``scores``, of the prompt's tokens but the first, as vLLM tells them; each with ``num_top`` alternatives."""
    return [None, *(_alternatives(score, num_top, tokenizer) for score in scores)]


def _alternatives(score: TokenLogprobs, num_top: int, tokenizer: Tokenizer) -> dict[str, PromptLogprob]:
    assert score.rank is not None, "the engine ranks prompt tokens"
    ranked = [(token_id, logprob, rank) for rank, (token_id, logprob) in enumerate(score.top[:num_top], 1)]
    return {
        str(token_id): PromptLogprob(finite(logprob), rank, tokenizer.token_text(token_id))
        for token_id, logprob, rank in ((score.token_id, score.logprob, score.rank), *ranked)
    }
