"""Sizes that the scheduler works with, and what they can ever hold."""

from __future__ import annotations

from dataclasses import dataclass

from engine.errors import RequestError
from engine.types import Request


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Of one engine, fixed for its life."""

    max_num_seqs: int
    """Slots."""
    num_pages: int
    """Pages of the pool, the scratch page included."""
    page_size: int
    """Positions a page."""
    prefill_chunk_size: int
    """Most positions prefilled in one iteration, over all requests."""
    max_model_len: int
    """Most tokens of one request, prompt included."""
    stride: int
    """Positions that one step verifies for a row: W = K + 1."""
    prefix_cache: bool
    cache_salt: bytes
    """Root of the prefix cache's keys: everything of the engine's configuration that changes KV."""

    @property
    def room(self) -> int:
        """Positions past the upper bound of seq_len that one more step can touch.

        Verify and extend write W of them; the K - 1 draft steps start where the emitted tokens end, so with
        all drafts accepted they write K - 1 more.
        """
        return self.stride + max(self.stride - 2, 0)

    @property
    def max_request_tokens(self) -> int:
        """Longest prompt + output that a request alone in the pool can reach."""
        capacity = (self.num_pages - 1) * self.page_size
        if capacity >= self.max_model_len:
            return self.max_model_len
        # The last step starts, at the latest, with all tokens but one known and all but two written.
        return max(min(capacity - self.room + 2, self.max_model_len), 0)

    def token_limit(self, request: Request) -> int:
        """Most tokens of ``request``, prompt included: ``max_tokens`` or the context end, what comes first.

        Raises:
            RequestError: An empty or over-long prompt, or a length that the pool cannot hold even for this
                request alone.
        """
        num_prompt, max_tokens = len(request.prompt_token_ids), request.params.max_tokens
        if num_prompt == 0:
            raise RequestError("the prompt has no tokens", "prompt_token_ids")
        if num_prompt + min(max_tokens, 1) > self.max_model_len:
            raise RequestError(
                f"the prompt has {num_prompt} tokens; the context holds {self.max_model_len} with the output",
                "prompt_token_ids",
            )
        if max_tokens < 0:
            raise RequestError(f"max_tokens={max_tokens}: must be at least 0", "max_tokens")
        limit, longest = min(num_prompt + max_tokens, self.max_model_len), self.max_request_tokens
        if limit > longest:
            raise RequestError(
                f"prompt ({num_prompt}) and output ({limit - num_prompt}) make {limit} tokens; "
                f"the KV pool holds at most {longest} of one request",
                "max_tokens" if num_prompt < longest else "prompt_token_ids",
            )
        return limit
