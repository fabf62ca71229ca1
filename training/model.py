"""The model in plain PyTorch: DeepSeek-V3's layers (MLA, sigmoid-routed experts) and one MTP layer.

Shapes use B rows, T positions, H hidden, N heads, E experts, V vocabulary. Weights are fp32 while training;
`export.py` turns them into the published layout. Experts are computed as one wide masked MLP: at this size
that is faster than any dispatch, and nothing waits for the host.
"""

from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

KV = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Names are those of the published `config.json`."""

    vocab_size: int = 4096
    hidden_size: int = 256
    num_hidden_layers: int = 8
    num_attention_heads: int = 2
    kv_lora_rank: int = 512
    qk_rope_head_dim: int = 64
    qk_nope_head_dim: int = 128
    v_head_dim: int = 128
    first_k_dense_replace: int = 3
    intermediate_size: int = 512
    moe_intermediate_size: int = 128
    n_routed_experts: int = 8
    num_experts_per_tok: int = 2
    routed_scaling_factor: float = 1.0
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 2048

    def published(self) -> dict[str, object]:
        """The whole `config.json`."""
        rest = {
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "deepseek_v3",
            "num_key_value_heads": self.num_attention_heads,
            "q_lora_rank": None,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "norm_topk_prob": True,
            "moe_layer_freq": 1,
            "num_nextn_predict_layers": 1,
            "hidden_act": "silu",
            "rope_interleave": True,
            "rope_scaling": None,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "tie_word_embeddings": False,
            "initializer_range": 0.02,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "pad_token_id": 2,
            "use_cache": True,
            "torch_dtype": "bfloat16",
        }
        return {**rest, **asdict(self)}


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in fp32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] -> [..., H], in x's dtype."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * self.weight).to(x.dtype)


def rope(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotates neighbouring pairs of x [B, n, T, D] by `positions` [T]."""
    half = x.shape[-1] // 2
    frequency = theta ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angle = positions.float()[:, None] * frequency  # [T, D/2]
    cos, sin = angle.cos(), angle.sin()
    even, odd = x.float().unflatten(-1, (half, 2)).unbind(-1)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2).to(x.dtype)


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q, k [B, N, T, D], v [B, N, T, Dv] -> [B, N, T, Dv]. v is padded: fused kernels want equal sizes."""
    padded = F.pad(v, (0, q.shape[-1] - v.shape[-1]))
    return F.scaled_dot_product_attention(q, k, padded, is_causal=True)[..., : v.shape[-1]]


def chain_attention(q: Tensor, true: KV, own: list[KV]) -> Tensor:
    """Attention of draft step s = len(own) + 1, for all rows at once.

    Row p sees the entries that were made from target states at or before p (`true`: causal) and the entries
    that its own chain added in steps 2..s (`own`: one key for each row). All [B, N, T, D].
    """
    k, v = true
    size = q.shape[-2]
    q = q * q.shape[-1] ** -0.5
    mask = torch.ones(size, size, dtype=torch.bool, device=q.device).tril()
    scores = (q @ k.transpose(-1, -2)).float().masked_fill(~mask, float("-inf"))  # [B, N, T, T]
    extra = torch.stack([(q * key).float().sum(-1) for key, _ in own], -1)  # [B, N, T, s-1]
    top = torch.maximum(scores.amax(-1, keepdim=True), extra.amax(-1, keepdim=True)).detach()
    weights, extra = (scores - top).exp(), (extra - top).exp()
    total = weights.sum(-1, keepdim=True) + extra.sum(-1, keepdim=True)
    out = (weights.to(v.dtype) @ v).float()
    for i, (_, value) in enumerate(own):
        out = out + extra[..., i : i + 1] * value.float()
    return (out / total).to(v.dtype)


class Attention(nn.Module):
    """Multi-head latent attention with keys and values written out (training and prefill form)."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.c = c
        heads, nope, v, r = c.num_attention_heads, c.qk_nope_head_dim, c.v_head_dim, c.qk_rope_head_dim
        self.q_proj = nn.Linear(c.hidden_size, heads * (nope + r), bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(c.hidden_size, c.kv_lora_rank + r, bias=False)
        self.kv_a_layernorm = RMSNorm(c.kv_lora_rank, c.rms_norm_eps)
        self.kv_b_proj = nn.Linear(c.kv_lora_rank, heads * (nope + v), bias=False)
        self.o_proj = nn.Linear(heads * v, c.hidden_size, bias=False)

    def project(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, T, H] -> q, k [B, N, T, nope + rope] and v [B, N, T, Dv]."""
        c = self.c
        heads, nope, r = c.num_attention_heads, c.qk_nope_head_dim, c.qk_rope_head_dim
        q = self.q_proj(x).unflatten(-1, (heads, -1)).transpose(1, 2)
        q = torch.cat((q[..., :nope], rope(q[..., nope:], positions, c.rope_theta)), -1)
        latent, key_rope = self.kv_a_proj_with_mqa(x).split((c.kv_lora_rank, r), -1)
        key_rope = rope(key_rope[:, None], positions, c.rope_theta)  # [B, 1, T, rope], shared by the heads
        wide = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (heads, -1)).transpose(1, 2)
        key, value = wide.split((nope, c.v_head_dim), -1)
        return q, torch.cat((key, key_rope.expand(-1, heads, -1, -1)), -1), value

    def output(self, attended: Tensor) -> Tensor:
        """[B, N, T, Dv] -> [B, T, H]."""
        return self.o_proj(attended.transpose(1, 2).flatten(2))


class DenseMLP(nn.Module):
    """Gated MLP."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[B, T, H] -> ([B, T, H], an empty load)."""
        out = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out, x.new_zeros(0, dtype=torch.float32)


class MoE(nn.Module):
    """Sigmoid router with a balancing bias, top-k routed experts, one shared expert."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.c = c
        shape = (c.n_routed_experts, c.moe_intermediate_size, c.hidden_size)
        self.router = nn.Parameter(torch.empty(c.n_routed_experts, c.hidden_size))
        self.register_buffer("bias", torch.zeros(c.n_routed_experts))
        self.gate, self.up = nn.Parameter(torch.empty(shape)), nn.Parameter(torch.empty(shape))
        self.down = nn.Parameter(torch.empty(shape[0], shape[2], shape[1]))
        self.shared_experts = DenseMLP(c.hidden_size, c.moe_intermediate_size)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [B, T, H] -> weights [B, T, E] (zero for experts not chosen), share of choices [E]."""
        with torch.autocast(x.device.type, enabled=False):
            scores = F.linear(x.float(), self.router.float()).sigmoid()
        chosen = (scores + self.bias).topk(self.c.num_experts_per_tok, -1).indices
        mask = torch.zeros_like(scores).scatter(-1, chosen, 1.0)
        weights = scores * mask
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * self.c.routed_scaling_factor
        return weights, mask.mean((0, 1)).detach() / self.c.num_experts_per_tok

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[B, T, H] -> ([B, T, H], load [E])."""
        weights, load = self.route(x)
        shared = self.shared_experts
        gate = torch.cat((self.gate.flatten(0, 1), shared.gate_proj.weight))
        up = torch.cat((self.up.flatten(0, 1), shared.up_proj.weight))
        down = torch.cat((self.down.transpose(0, 1).flatten(1), shared.down_proj.weight), 1)
        inner = F.silu(F.linear(x, gate)) * F.linear(x, up)  # [B, T, (E + 1) * I]
        every = torch.cat((weights, torch.ones_like(weights[..., :1])), -1).to(inner.dtype)
        inner = inner.unflatten(-1, (-1, self.c.moe_intermediate_size)) * every[..., None]
        return F.linear(inner.flatten(-2), down), load


class Layer(nn.Module):
    """Pre-norm decoder layer."""

    def __init__(self, c: ModelConfig, dense: bool) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = Attention(c)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.mlp = DenseMLP(c.hidden_size, c.intermediate_size) if dense else MoE(c)

    def finish(self, x: Tensor, attended: Tensor) -> tuple[Tensor, Tensor]:
        """Adds attention [B, N, T, Dv] and the MLP to x [B, T, H]."""
        x = x + self.self_attn.output(attended)
        out, load = self.mlp(self.post_attention_layernorm(x))
        return x + out, load

    def forward(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, KV]:
        """x [B, T, H] -> x, load, (k, v)."""
        q, k, v = self.self_attn.project(self.input_layernorm(x), positions)
        x, load = self.finish(x, causal_attention(q, k, v))
        return x, load, (k, v)


class Draft(nn.Module):
    """The MTP layer: from (hidden state of position i, token i + 1) to token i + 2."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.enorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.hnorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.eh_proj = nn.Linear(2 * c.hidden_size, c.hidden_size, bias=False)
        self.layer = Layer(c, dense=False)
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)

    def chain(self, hidden: Tensor, embedded: list[Tensor]) -> tuple[list[Tensor], Tensor]:
        """Runs one chain for each row, as the engine does: step 1 from the target's (normed) state, later
        steps from the draft's own. hidden [B, T, H]; embedded[s] [B, T, H] holds token p + 1 + s for row p.

        Returns the normed states [B, T, H] of each step, and the mean load of the experts.
        """
        rows = torch.arange(hidden.shape[1], device=hidden.device)
        states, loads, true, own = [], [], None, []
        for step, tokens in enumerate(embedded):
            x = self.eh_proj(torch.cat((self.enorm(tokens), self.hnorm(hidden)), -1))
            attention = self.layer.self_attn
            q, k, v = attention.project(self.layer.input_layernorm(x), rows + step)
            if true is None:
                true, attended = (k, v), causal_attention(q, k, v)
            else:
                own.append((k, v))
                attended = chain_attention(q, true, own)
            x, load = self.layer.finish(x, attended)
            hidden = self.norm(x)
            states.append(hidden)
            loads.append(load)
        return states, torch.stack(loads).mean(0)


class Model(nn.Module):
    """Target and draft; they share the embedding and the head."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.c = c
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(Layer(c, i < c.first_k_dense_replace) for i in range(c.num_hidden_layers))
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.lm_head = nn.Linear(c.hidden_size, c.vocab_size, bias=False)
        self.draft = Draft(c)
        self.residual_dtype = torch.float32
        for name, p in self.named_parameters():
            if p.ndim > 1:
                residual = name.endswith(("o_proj.weight", "down_proj.weight", ".down"))
                nn.init.normal_(p, std=0.02 / (2 * c.num_hidden_layers) ** 0.5 if residual else 0.02)

    def embed(self, tokens: Tensor) -> Tensor:
        """[B, T] -> [B, T, H], in the type of the residual stream."""
        return self.embed_tokens(tokens).to(self.residual_dtype)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, list[KV]]:
        """tokens [B, T] -> normed states [B, T, H], loads [MoE layers, E], keys and values of each layer."""
        x = self.embed(tokens)
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        loads, cache = [], []
        for layer in self.layers:
            x, load, kv = layer(x, positions)
            loads.append(load)
            cache.append(kv)
        return self.norm(x), torch.stack([load for load in loads if load.numel()]), cache

    def moe_layers(self) -> list[MoE]:
        """The routed layers, the draft's last: the order in which loads are reported."""
        return [m for m in self.modules() if isinstance(m, MoE)]
