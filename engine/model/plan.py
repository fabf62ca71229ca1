"""Matches a checkpoint's headers against a model on the meta device: a fault is found before allocation."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from engine.config import ModelConfig
from engine.errors import CheckpointError
from engine.model.decoder import Decoder, Embedding
from engine.model.draft import MtpDraft
from engine.model.layers import Projection
from engine.model.quant import scale_shape
from engine.model.reader import SCALE_SUFFIX, CheckpointReader
from engine.model.rope import RotaryTable
from engine.model.weights import Target, decoder_targets, draft_targets, embedding_target, head_target

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
# Tables that some exporters store; they follow from the configuration.
_DERIVED = re.compile(r"layers\.\d+\.self_attn\.rotary_emb\.(inv_freq|cos_cached|sin_cached)$")

Targets = dict[str, list[Target]]


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """Modules without storage, and for each tensor the places it fills."""

    decoder: Decoder
    draft: MtpDraft | None
    targets: Targets
    mtp_layers: tuple[int, ...]
    """Layer indices of the MTP layers that the checkpoint really holds, used or not."""
    own_copies: tuple[str, ...]
    """Which of "embedding" and "head" the used MTP layer holds in a version of its own."""
    ignored: tuple[str, ...]
    """Derived tables that are recomputed rather than loaded."""

    @property
    def modules(self) -> list[nn.Module]:
        """The models that are filled, without repetition of what they share."""
        models = [self.decoder] if self.draft is None else [self.decoder, self.draft]
        return list({id(module): module for model in models for module in model.modules()}.values())


def make_plan(
    config: ModelConfig,
    reader: CheckpointReader,
    rotary: RotaryTable,
    *,
    dtype: torch.dtype,
    input_major: bool,
    with_draft: bool,
) -> LoadPlan:
    """Decide where every tensor goes.

    The MTP layer's copies of embedding and head are compared with the main ones: equal ones are shared,
    different ones are loaded for the draft alone.

    Raises:
        CheckpointError: A tensor that is missing, left over, of another shape or of a data type that the
            configuration does not announce; the message names it.
    """
    builder = _Builder(config, reader, rotary, dtype, input_major)
    plan = builder.plan(with_draft)
    _check_coverage(plan)
    return plan


class _Builder:
    def __init__(
        self,
        config: ModelConfig,
        reader: CheckpointReader,
        rotary: RotaryTable,
        dtype: torch.dtype,
        input_major: bool,
    ) -> None:
        self._config = config
        self._reader = reader
        self._rotary = rotary
        self._dtype = dtype
        self._input_major = input_major
        self._seen: set[str] = set()

    def plan(self, with_draft: bool) -> LoadPlan:
        config = self._config
        self._check_counts()
        with torch.device("meta"):
            decoder = Decoder(config, self._rotary, dtype=self._dtype, input_major=self._input_major)
        targets: Targets = {EMBEDDING: [embedding_target(decoder.embedding)]}
        if config.tie_word_embeddings:
            targets[EMBEDDING].append(head_target(decoder.head))
        else:
            targets[HEAD] = [head_target(decoder.head)]
        _collect(targets, decoder_targets(config, decoder))
        self._match(targets)
        if config.tie_word_embeddings and HEAD in self._reader.tensors:
            self._match({HEAD: [head_target(decoder.head)]})
            if not self._equal(HEAD, EMBEDDING):
                raise CheckpointError(f"tie_word_embeddings=True, but {HEAD} differs from model.{EMBEDDING}")
        found = self._find_mtp_layers()
        draft, own = None, {}
        for layer in found:
            wanted = with_draft and layer == config.num_hidden_layers
            candidate, copies, mtp_targets = self._mtp_layer(decoder, layer, compare=wanted)
            if wanted:
                draft, own = candidate, copies
                targets |= mtp_targets
        if with_draft and draft is None:
            raise CheckpointError(
                f"num_nextn_predict_layers={config.num_nextn_predict_layers}, but the checkpoint holds no "
                f"tensor of model.layers.{config.num_hidden_layers} to draft with"
            )
        ignored = tuple(name for name in self._reader.tensors if _DERIVED.fullmatch(name))
        self._check_leftover(ignored)
        return LoadPlan(decoder, draft, targets, found, tuple(own), ignored)

    def _check_counts(self) -> None:
        """Refuse counts that the files cannot hold: making the modules of a billion layers would not end."""
        config, names = self._config, self._reader.tensors
        stated = config.num_hidden_layers
        held = len({name.split(".")[1] for name in names if name.startswith("layers.")})
        if stated > held:
            raise CheckpointError(
                f"config.json: num_hidden_layers={stated}: the checkpoint holds {held} layers"
            )
        experts, parts = config.n_routed_experts, sum(".experts." in name for name in names)
        if experts > parts and any(config.is_moe(layer) for layer in range(stated)):
            raise CheckpointError(
                f"config.json: n_routed_experts={experts}: the checkpoint holds {parts} tensors of such"
            )

    def _find_mtp_layers(self) -> tuple[int, ...]:
        first = self._config.num_hidden_layers
        held = {name.split(".")[1] for name in self._reader.tensors if name.startswith("layers.")}
        layers = range(first, first + self._config.num_nextn_predict_layers)
        return tuple(layer for layer in layers if str(layer) in held)

    def _mtp_layer(
        self, decoder: Decoder, layer: int, *, compare: bool
    ) -> tuple[MtpDraft, dict[str, None], Targets]:
        """A draft over layer ``layer``, its own copies by kind, and what it loads; all names are matched."""
        config, own = self._config, dict[str, None]()
        embedding_name = f"layers.{layer}.{EMBEDDING}"
        head_name = f"layers.{layer}.shared_head.head.weight"
        targets: Targets = {}
        embedding, head = decoder.embedding, decoder.head
        with torch.device("meta"):
            own_embedding = Embedding(config.vocab_size, config.hidden_size, self._dtype)
            own_head = Projection(
                config.hidden_size, config.vocab_size, dtype=self._dtype, input_major=self._input_major
            )
        main_head = EMBEDDING if config.tie_word_embeddings else HEAD
        if embedding_name in self._reader.tensors:
            self._match({embedding_name: [embedding_target(own_embedding)]})
            if compare and not self._equal(embedding_name, EMBEDDING):
                own["embedding"], embedding = None, own_embedding
                targets[embedding_name] = [embedding_target(own_embedding)]
        if head_name in self._reader.tensors:
            self._match({head_name: [head_target(own_head)]})
            if compare and not self._equal(head_name, main_head):
                own["head"], head = None, own_head
                targets[head_name] = [head_target(own_head)]
        with torch.device("meta"):
            draft = MtpDraft(
                config, self._rotary, embedding, head, dtype=self._dtype, input_major=self._input_major
            )
        inner: Targets = {}
        _collect(inner, draft_targets(config, layer, draft))
        self._match(inner)
        return draft, own, targets | inner

    def _match(self, targets: Targets) -> None:
        """Check presence, shape and data type of tensors, and note their names."""
        missing = [name for name in targets if name not in self._reader.tensors]
        if missing:
            first = published_name(missing[0])
            raise CheckpointError(f"{len(missing)} tensors are missing, first {first}")
        for name, places in targets.items():
            info = self._reader.tensors[name]
            if info.shape != places[0].shape:
                raise CheckpointError(
                    f"{info.file}: {info.key} has shape {list(info.shape)}, "
                    f"config.json asks for {list(places[0].shape)}"
                )
            if info.dtype == torch.float8_e4m3fn:
                self._match_scale(name)
        self._seen |= targets.keys()

    def _match_scale(self, name: str) -> None:
        info, scale = self._reader.tensors[name], name + SCALE_SUFFIX
        if self._config.quantisation != "fp8":
            why = "config.json has no quantization_config"
            raise CheckpointError(f"{info.file}: {info.key} is FP8, but {why}")
        if len(info.shape) != 2:
            raise CheckpointError(
                f"{info.file}: {info.key} is FP8 of shape {list(info.shape)}, but only matrices have block scales"
            )
        found = self._reader.tensors.get(scale)
        if found is None:
            raise CheckpointError(f"{info.file}: {info.key} is FP8, but {info.key}{SCALE_SUFFIX} is missing")
        if found.shape != scale_shape(info.shape):
            raise CheckpointError(
                f"{found.file}: {found.key} has shape {list(found.shape)}, "
                f"one scale a block is {list(scale_shape(info.shape))}"
            )
        self._seen.add(scale)

    def _check_leftover(self, ignored: Iterable[str]) -> None:
        left = [name for name in self._reader.tensors if name not in self._seen and name not in ignored]
        if not left:
            return
        info = self._reader.tensors[left[0]]
        index = re.match(r"layers\.(\d+)\.", left[0])
        hint = ""
        if index is not None and int(index[1]) >= self._config.num_hidden_layers:
            hint = (
                f" (num_hidden_layers={self._config.num_hidden_layers}, "
                f"num_nextn_predict_layers={self._config.num_nextn_predict_layers})"
            )
        raise CheckpointError(
            f"{len(left)} tensors have no place in this architecture, first {info.key} in {info.file}{hint}"
        )

    def _equal(self, name: str, other: str) -> bool:
        return torch.equal(self._reader.read(name), self._reader.read(other))


def published_name(name: str) -> str:
    """A tensor's name as checkpoints usually have it."""
    return name if name == HEAD else f"model.{name}"


def _collect(targets: Targets, named: Iterable[tuple[str, Target]]) -> None:
    for name, target in named:
        targets.setdefault(name, []).append(target)


def _check_coverage(plan: LoadPlan) -> None:
    """Each parameter is filled exactly once: the regions of its targets sum to its size."""
    filled: dict[int, int] = {}
    for target in (target for targets in plan.targets.values() for target in targets):
        key = id(target.parameter())
        filled[key] = filled.get(key, 0) + target.region(target.parameter().data).numel()
    for module in plan.modules:
        for name, parameter in module.named_parameters(recurse=False):
            count = filled.get(id(parameter))
            assert count == parameter.numel(), f"{type(module).__name__}.{name}: {count} elements are filled"
