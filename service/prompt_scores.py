"""What an answer tells of its prompt: its text (``echo``) and its tokens' log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence

from engine.types import TokenLogprobs
from service.detokenize import Detokenizer
from service.errors import bad_request
from service.prompts import EncodedPrompt
from service.responses import PromptLogprob, PromptLogprobs
from service.schemas import ChatBody, GenerationBody
from service.text import Tokenizer

MIN_LOGPROB = -9999.0
"""What stands for minus infinity, which JSON cannot hold (as in OpenAI's API)."""

MAX_SCORES = 1 << 18
"""Most log-probabilities of prompt tokens in an answer, each token's own included: some 17 MB."""


def check_scores(body: GenerationBody, prompts: Sequence[EncodedPrompt]) -> None:
    """Refuse an answer with very many log-probabilities of prompt tokens. Raises ``ApiError`` (400)."""
    wanted = 0 if body.prompt_logprobs is None else 1 + body.prompt_logprobs
    if body.echoes and body.num_logprobs is not None:
        wanted += 1 + body.num_logprobs
    copies = 1 if isinstance(body, ChatBody) else body.n  # a chat's prompt is told of once
    count = wanted * copies * sum(len(prompt.token_ids) for prompt in prompts)
    if count > MAX_SCORES:
        param = "logprobs" if body.prompt_logprobs is None else "prompt_logprobs"
        raise bad_request(
            f"{param}: the answer would have {count} log-probabilities of prompt tokens (prompts x n x tokens x "
            f"alternatives), at most {MAX_SCORES} are possible.",
            param,
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
