"""Batched generation with the model of `model.py`: bf16, a plain key/value cache, one CUDA graph a step."""

import copy

import torch
from model import Model
from torch import Tensor


def serving_copy(model: Model) -> Model:
    """The model as it is published: bf16 (fp32 without a GPU, from rounded weights), router bias fp32."""
    half = copy.deepcopy(model).bfloat16()
    half = half if next(model.parameters()).is_cuda else half.float()
    half.residual_dtype = half.lm_head.weight.dtype
    for mine, theirs in zip(half.moe_layers(), model.moe_layers(), strict=True):
        mine.bias = theirs.bias.clone()
    return half.eval().requires_grad_(False)


class Generator:
    """Continues `rows` prompts of equal length up to `length` tokens, each row at its own temperature."""

    def __init__(self, model: Model, rows: int, length: int) -> None:
        self.model, self.rows, self.length = model, rows, length
        c, weight = model.c, model.lm_head.weight
        self.device = weight.device
        shape = (c.num_hidden_layers, rows, c.num_attention_heads, length)
        key_size = c.qk_nope_head_dim + c.qk_rope_head_dim
        self.keys = torch.zeros(*shape, key_size, device=self.device, dtype=weight.dtype)
        self.values = torch.zeros(*shape, c.v_head_dim, device=self.device, dtype=weight.dtype)
        self.tokens = torch.zeros(rows, length, dtype=torch.long, device=self.device)
        self.position = torch.zeros(1, dtype=torch.long, device=self.device)
        self.temperature = torch.zeros(rows, 1, device=self.device)
        self.limits = [length * i // 4 for i in range(1, 5)]
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def pick(self, states: Tensor) -> Tensor:
        """Samples from states [rows, H] by the Gumbel trick (temperature 0: the largest logit); -> [rows]."""
        logits = self.model.lm_head(states).float()
        noise = -torch.log(-torch.log(torch.rand_like(logits).clamp(1e-10, 1 - 1e-7)))
        return (logits + self.temperature * noise).argmax(-1)

    def attend(self, index: int, q: Tensor, limit: int) -> Tensor:
        """q [rows, N, 1, D] over the cache up to the current position; `limit` bounds it from above."""
        k, v = self.keys[index, :, :, :limit], self.values[index, :, :, :limit]
        scores = (q @ k.transpose(-1, -2)).float() * q.shape[-1] ** -0.5  # [rows, N, 1, limit]
        hidden = torch.arange(limit, device=self.device) > self.position
        return scores.masked_fill(hidden, float("-inf")).softmax(-1).to(v.dtype) @ v

    def step(self, limit: int) -> None:
        """Reads the token at `position`, writes the next one, and moves on."""
        tokens = self.tokens.gather(1, self.position.expand(self.rows, 1))
        x = self.model.embed(tokens)
        for index, layer in enumerate(self.model.layers):
            q, k, v = layer.self_attn.project(layer.input_layernorm(x), self.position)
            self.keys[index].index_copy_(2, self.position, k)
            self.values[index].index_copy_(2, self.position, v)
            x, _ = layer.finish(x, self.attend(index, q, limit))
        chosen = self.pick(self.model.norm(x)[:, 0])
        self.position += 1
        self.tokens.index_copy_(1, self.position, chosen[:, None])

    def prefill(self, prompts: Tensor, batch: int = 64) -> None:
        """prompts [rows, P]: fills the cache and writes token P."""
        size = prompts.shape[1]
        self.tokens[:, :size] = prompts
        last = []
        for start in range(0, self.rows, batch):
            part = slice(start, start + batch)
            states, _, cache = self.model(prompts[part])
            last.append(states[:, -1])
            for index, (k, v) in enumerate(cache):
                self.keys[index, part, :, :size] = k
                self.values[index, part, :, :size] = v
        self.tokens[:, size] = self.pick(torch.cat(last))
        self.position.fill_(size)

    def capture(self, limit: int) -> torch.cuda.CUDAGraph:
        """One step as a graph; the state that the warm-up changes is put back."""
        saved = self.position.clone(), self.tokens.clone()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.step(limit)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        self.position.copy_(saved[0])
        with torch.cuda.graph(graph):
            self.step(limit)
        self.position.copy_(saved[0])
        self.tokens.copy_(saved[1])
        return graph

    @torch.no_grad()
    def __call__(self, prompts: Tensor, temperatures: Tensor) -> Tensor:
        """prompts [rows, P], temperatures [rows] -> [rows, length]. Rows run on past EOS."""
        self.temperature.copy_(temperatures[:, None])
        self.prefill(prompts)
        for position in range(prompts.shape[1], self.length - 1):
            limit = next(bound for bound in self.limits if bound > position)
            if self.device.type != "cuda":
                self.step(limit)
                continue
            if limit not in self.graphs:
                self.graphs[limit] = self.capture(limit)
            self.graphs[limit].replay()
        return self.tokens.clone()
