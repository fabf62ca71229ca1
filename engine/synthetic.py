"""Models with random weights, and steps whose acceptance is forced: for ``eyas bench gpu`` and nothing else.

The weights are made on the device, scaled as an initialisation should be (activations stay of order one), and
can be written as a checkpoint that any other server loads.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any, Final, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from engine.config import ModelConfig
from engine.errors import ConfigError
from engine.kv.pool import LatentPool
from engine.layout import uniform_layout
from engine.model.decoder import Decoder, Embedding
from engine.model.draft import MtpDraft
from engine.model.layers import HeadProjection, Projection, RmsNorm
from engine.model.loader import ROUTER_BIAS, LoadedModel
from engine.model.moe import Moe, Router
from engine.model.plan import EMBEDDING, HEAD, LoadPlan, Targets, published_name
from engine.model.reader import INDEX
from engine.model.report import CheckpointReport
from engine.model.rope import RotaryTable
from engine.model.weights import Target, decoder_targets, draft_targets, embedding_target, head_target
from engine.spec import Accepted, Rows, StepOps
from engine.state import SlotState

Routing = Literal["spread", "concentrated"]

SHARD_BYTES = 4 << 30
"""Most bytes of tensors in one file of a written checkpoint."""

# V3 names the architecture for every shape: it is the one whose MTP layer other servers load, and its
# configuration states the router that a V2 model would imply.
_COMMON: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "torch_dtype": "bfloat16",
    "hidden_act": "silu", "attention_bias": False, "tie_word_embeddings": False, "bos_token_id": 0,
    "eos_token_id": 1, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "rope_scaling": None,
    "rope_interleave": True, "max_position_embeddings": 8192, "moe_layer_freq": 1,
    "num_nextn_predict_layers": 1, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}  # fmt: skip
_SOFTMAX = {
    "scoring_func": "softmax", "topk_method": "greedy", "norm_topk_prob": False, "n_group": 1,
    "topk_group": 1, "routed_scaling_factor": 1.0,
}  # fmt: skip
_SIGMOID = {
    "scoring_func": "sigmoid", "topk_method": "noaux_tc", "norm_topk_prob": True, "n_group": 8,
    "topk_group": 4, "routed_scaling_factor": 2.5,
}  # fmt: skip
PRESETS: Final[dict[str, dict[str, Any]]] = {
    "v2-lite": _COMMON | _SOFTMAX | {
        "hidden_size": 2048, "num_hidden_layers": 27, "first_k_dense_replace": 1, "intermediate_size": 10944,
        "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": None, "n_routed_experts": 64,
        "num_experts_per_tok": 6, "n_shared_experts": 2, "moe_intermediate_size": 1408, "vocab_size": 102400,
    },
    "v3-like": _COMMON | _SIGMOID | {
        "hidden_size": 7168, "num_hidden_layers": 4, "first_k_dense_replace": 1, "intermediate_size": 18432,
        "num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536, "n_routed_experts": 256,
        "num_experts_per_tok": 8, "n_shared_experts": 1, "moe_intermediate_size": 2048, "vocab_size": 129280,
    },
    "tiny": _COMMON | _SIGMOID | {
        "hidden_size": 64, "num_hidden_layers": 3, "first_k_dense_replace": 1, "intermediate_size": 96,
        "num_attention_heads": 2, "num_key_value_heads": 2, "q_lora_rank": 24, "n_routed_experts": 32,
        "num_experts_per_tok": 4, "n_shared_experts": 1, "moe_intermediate_size": 32, "vocab_size": 512,
        "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
        "max_position_embeddings": 2048,
    },
}  # fmt: skip
"""``config.json`` of each shape. ``v3-like`` has DeepSeek-V3's layers, but as few as one GPU holds (97 GB)."""


def random_model(
    raw: Mapping[str, Any],
    config: ModelConfig,
    routing: Routing,
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_positions: int,
    seed: int,
    save_to: Path | None = None,
) -> LoadedModel:
    """A target and its MTP draft with random weights.

    Every weight is representable in ``config.dtype``, so a written checkpoint holds exactly these.

    Args:
        raw: The content of ``config.json`` that ``config`` was read from.
        routing: ``spread``: router rows are random, so experts are chosen about evenly. ``concentrated``: router
            rows are zero, so that all scores of a token are equal, whatever the token; the bias, or the order of
            ties where there is none, then chooses the same experts for every token.
        max_positions: Positions that a forward can name.
        save_to: Directory to write the weights to.

    Raises:
        ConfigError: ``save_to`` holds a checkpoint already.
    """
    if save_to is not None and any(save_to.glob("*.safetensors")):
        raise ConfigError(f"--save-weights {save_to}: holds a checkpoint already")
    plan = _make_plan(config, dtype, device, max_positions)
    _initialise(plan, config, routing, torch.Generator(device).manual_seed(seed))
    if save_to is not None:
        save_checkpoint(plan, raw, config.dtype, save_to)
    for module in plan.modules:
        if isinstance(module, RmsNorm | Projection | HeadProjection | Moe):
            module.prepare()
    return LoadedModel(plan.decoder, plan.draft, _report(config, plan))


def weight_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """What `random_model` takes of a device's memory for weights."""
    plan = _make_plan(config, dtype, torch.device("meta"), max_positions=1)
    parameters = {id(one): one for module in plan.modules for one in module.parameters()}
    return sum(one.numel() * one.element_size() for one in parameters.values())


def _make_plan(config: ModelConfig, dtype: torch.dtype, device: torch.device, max_positions: int) -> LoadPlan:
    """Modules with storage on ``device``, unfilled, and the checkpoint's names of their parts."""
    rotary, input_major = RotaryTable(config, max_positions, device), device.type == "cpu"
    with torch.device(device):
        decoder = Decoder(config, rotary, dtype=dtype, input_major=input_major)
        draft = MtpDraft(
            config, rotary, decoder.embedding, decoder.head, dtype=dtype, input_major=input_major
        )
    mtp = config.num_hidden_layers
    targets: Targets = {}
    for name, target in (
        (EMBEDDING, embedding_target(decoder.embedding)),
        (HEAD, head_target(decoder.head)),
        *decoder_targets(config, decoder),
        # Shared with the target, but servers of V3 checkpoints look for the layer's own copies
        (f"layers.{mtp}.{EMBEDDING}", embedding_target(decoder.embedding)),
        (f"layers.{mtp}.shared_head.head.weight", head_target(decoder.head)),
        *draft_targets(config, mtp, draft),
    ):
        targets.setdefault(name, []).append(target)
    return LoadPlan(decoder, draft, targets, (mtp,), (), ())


def _initialise(plan: LoadPlan, config: ModelConfig, routing: Routing, generator: torch.Generator) -> None:
    """Norms are ones; weights are normal with variance 1 / fan-in, the embedding's 1."""
    for module in plan.modules:
        if isinstance(module, Router) and module.bias is not None:
            module.bias.data.zero_()
        for parameter, fan_in in _random_parts(module, config):
            parameter.data.normal_(0.0, fan_in**-0.5, generator=generator)
            if parameter.dtype != config.dtype:
                parameter.data.copy_(parameter.data.to(config.dtype))
    if routing == "concentrated":
        for module in plan.modules:
            if isinstance(module, Router):
                _concentrate(module)


def _random_parts(module: nn.Module, config: ModelConfig) -> list[tuple[Tensor, int]]:
    """A module's own random parameters with their fan-ins; its norms are filled here."""
    own = dict(module.named_parameters(recurse=False))
    if isinstance(module, RmsNorm):
        own.pop("weight").data.fill_(1.0)
    elif isinstance(module, Embedding):
        return [(own["weight"], 1)]
    elif isinstance(module, Projection):
        return [(own["weight"], own["weight"].shape[0])]
    elif isinstance(module, HeadProjection):
        return [(own["weight"], config.kv_lora_rank)]  # parts of kv_b_proj, whose input is the latent
    elif isinstance(module, Moe):
        return [(own["gate_up"], module.hidden), (own["down"], module.inner)]
    elif isinstance(module, Router):
        own.pop("bias", None)
    assert not own, f"{type(module).__name__} has parameters that nothing initialises: {', '.join(own)}"
    return []


def _concentrate(router: Router) -> None:
    weight = router.projection.weight
    assert weight is not None
    weight.data.zero_()
    if router.bias is not None:
        router.bias.data.copy_(-torch.arange(len(router.bias)) / len(router.bias))


def _report(config: ModelConfig, plan: LoadPlan) -> CheckpointReport:
    routers = [module for module in plan.modules if isinstance(module, Router)]
    target = sum(parameter.numel() for parameter in plan.decoder.parameters())
    unique = {id(parameter): parameter for module in plan.modules for parameter in module.parameters()}
    return CheckpointReport(
        path=Path("random"),
        config=config,
        num_files=0,
        file_bytes=0,
        stored_dtypes={},
        target_parameters=target,
        draft_parameters=sum(parameter.numel() for parameter in unique.values()) - target,
        fp32_parameters=sum(p.numel() for router in routers for p in router.parameters()),
        mtp_layers_held=1,
        own_copies=(),
        ignored_tensors=0,
    )


# --- a written checkpoint -----------------------------------------------------------------------------------


def save_checkpoint(plan: LoadPlan, raw: Mapping[str, Any], dtype: torch.dtype, directory: Path) -> None:
    """Write ``config.json`` and safetensors files, with the names and shapes of the Hugging Face layout.

    Args:
        plan: Filled, and not prepared yet (which may repack weights).
        dtype: Of the tensors; router biases stay fp32, as they are published.
    """
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(dict(raw), indent=2) + "\n", encoding="utf-8")
    types = {name: torch.float32 if name.endswith(ROUTER_BIAS) else dtype for name in plan.targets}
    shards: list[list[str]] = [[]]
    size = 0
    for name, places in plan.targets.items():
        num_bytes = torch.Size(places[0].shape).numel() * types[name].itemsize
        if shards[-1] and size + num_bytes > SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += num_bytes
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        tensors = {published_name(name): _stored(plan.targets[name], types[name]) for name in names}
        save_file(tensors, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _stored(places: list[Target], dtype: torch.dtype) -> Tensor:
    """The checkpoint tensor that would fill ``places`` with what they hold, on the CPU.

    Every arrangement only moves elements, so what it does to their numbers tells where each one came from.
    """
    shape = torch.Size(places[0].shape)
    device = places[0].parameter().device
    numbers = torch.arange(shape.numel(), device=device).view(shape)
    stored = torch.empty(shape.numel(), dtype=dtype, device=device)
    missing = shape.numel()
    for place in places:
        sources, held = place.arrange(numbers), place.region(place.parameter().data)
        assert sources.shape == held.shape, "a tensor is arranged to the shape of the place that it fills"
        stored[sources.flatten()] = held.flatten().to(dtype)
        missing -= held.numel()
    assert missing == 0, "the places of a tensor hold each of its elements once"
    return stored.view(shape).cpu()


# --- forced acceptance --------------------------------------------------------------------------------------


def forced_counts(accept_length: float, num_positions: int, max_drafts: int) -> list[int]:
    """Drafts to accept in a step that starts with ``seq_len`` written positions, for each ``seq_len``.

    Steps end at the positions floor(n * accept_length), n = 1, 2, ..., so that any m whole steps emit
    m * accept_length tokens, less than one more or less; a first step from elsewhere goes to the next such end.
    """
    length = Fraction(accept_length).limit_denominator(1000)
    counts = []
    for seq_len in range(num_positions):
        steps = -(-(seq_len + 1) // length)  # the least n with n * length >= seq_len + 1
        counts.append(min(int(steps * length) - seq_len - 1, max_drafts))
    return counts


class ForcedOps:
    """``StepOps`` that accept as many drafts as ``forced_counts`` says, whatever the target thinks of them.

    The tokens stay the models': the target's argmax of each greedy row; in sampled ones the drafts stand where more
    of them are accepted than sampling accepted. The cost is that of ``ops`` and a few kernels on ``[B]``. A greedy
    row's argmax must have been computed at all W places, and places past its own count are reported as ``IGNORED``
    where they are not finite.

    Args:
        accept_length: From 1 to K + 1 tokens a step.
    """

    def __init__(
        self, ops: StepOps, state: SlotState, pool: LatentPool, k: int, accept_length: float
    ) -> None:
        self._ops = ops
        positions = state.block_table.shape[1] * pool.page_size
        counts = forced_counts(accept_length, positions, k)
        self._counts = torch.tensor(counts, device=state.core.device)
        self.load, self.place, self.propose = ops.load, ops.place, ops.propose
        self.commit, self.begin = ops.commit, ops.begin

    @property
    def checks(self) -> bool:
        return self._ops.checks

    @checks.setter
    def checks(self, on: bool) -> None:
        self._ops.checks = on

    def accept(self, rows: Rows, logits: Tensor, allowed: Tensor | None) -> Accepted:
        """See ``StepOps``."""
        accepted = self._ops.accept(rows, logits, allowed)
        stride = accepted.emitted.shape[1]
        if stride == 1:  # a retry after a fault verifies no drafts
            return accepted
        count = torch.minimum(self._counts.index_select(0, rows.seq_len), rows.num_drafts[:, 0])
        more = count - accepted.count
        emitted, history = accepted.emitted, accepted.history
        offsets = uniform_layout(1, stride, logits.device).offsets
        if rows.variant.sampled:
            own = offsets <= accepted.count[:, None]  # [B, W]
            drafts = torch.cat([rows.tokens[:, 1:], rows.tokens[:, -1:]], dim=1)  # the last place has none
            emitted = torch.where(own, emitted, drafts)
        if history is not None:
            history = emitted.masked_fill(offsets > count[:, None], -1)
        return replace(
            accepted,
            emitted=emitted,
            count=count,
            seq_len=accepted.seq_len + more,
            last=accepted.last + more,
            history=history,
        )
