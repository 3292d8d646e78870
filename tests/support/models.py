"""Models of the transformers package with random weights.

Without that package, as on machines that measure on GPUs, there are none, and what imports this is skipped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

hf = pytest.importorskip("transformers")
DacEncoder = pytest.importorskip("transformers.models.dac.modeling_dac").DacEncoder
WhisperEncoder = pytest.importorskip("transformers.models.whisper.modeling_whisper").WhisperEncoder

#: Widths that are large enough for the fused layers not to leave the work to PyTorch.
WIDTH, HIDDEN, LAYERS, TOKENS = 64, 128, 2, 24
_SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": WIDTH,
    "intermediate_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
}
_SPECIAL: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_VISION: dict[str, Any] = {key: value for key, value in _SIZES.items() if key != "vocab_size"}
_IMAGES: dict[str, Any] = {"image_size": 32, "patch_size": 8}


@dataclass(frozen=True)
class Case:
    """A model without dropout, and what it is called with."""

    name: str
    make: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, Any]]

    def __str__(self) -> str:
        return self.name


def tokens() -> dict[str, Any]:
    return {"input_ids": torch.randint(3, 96, (2, TOKENS))}


def with_labels() -> dict[str, Any]:
    found = tokens()
    return {**found, "labels": found["input_ids"], "use_cache": False}


def images() -> dict[str, Any]:
    return {"pixel_values": torch.randn(2, 3, 32, 32)}


def _t5(kind: str) -> nn.Module:
    return hf.T5ForConditionalGeneration(
        hf.T5Config(
            vocab_size=96, d_model=WIDTH, d_ff=HIDDEN, num_layers=LAYERS, num_heads=4, d_kv=16, dropout_rate=0.0,
            feed_forward_proj=kind, decoder_start_token_id=0,
        )
    )  # fmt: skip


def _decoder(kind: str, **more: Any) -> nn.Module:
    config = getattr(hf, f"{kind}Config")(**_SIZES, **_SPECIAL, **more)
    return getattr(hf, f"{kind}ForCausalLM")(config)  # type: ignore[no-any-return]


def _gpt2() -> nn.Module:
    rates = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    sizes = {"vocab_size": 96, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": 4}
    return hf.GPT2LMHeadModel(hf.GPT2Config(**sizes, **_SPECIAL, **rates))


def _whisper() -> nn.Module:
    config = hf.WhisperConfig(
        d_model=WIDTH, encoder_layers=LAYERS, encoder_attention_heads=4, encoder_ffn_dim=HIDDEN, num_mel_bins=16,
        max_source_positions=TOKENS, dropout=0.0, attention_dropout=0.0, activation_dropout=0.0,
    )  # fmt: skip
    return WhisperEncoder(config)


def _dinov2(**more: Any) -> nn.Module:
    sizes = {key: value for key, value in _VISION.items() if key != "intermediate_size"}
    return hf.Dinov2Model(hf.Dinov2Config(**sizes, mlp_ratio=2, **_IMAGES, **_NO_DROPOUT, **more))


def _efficientnet() -> nn.Module:
    # As trained networks have them: with the initial ones, which are near 0, outputs tell inputs too coarsely.
    model = hf.EfficientNetModel(
        hf.EfficientNetConfig(
            width_coefficient=0.25, depth_coefficient=0.25, hidden_dim=320, image_size=32, dropout_rate=0.0,
            drop_connect_rate=0.0,
        )
    )  # fmt: skip
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.ones_(module.weight)
    return model


CASES = [
    Case("bert", lambda: hf.BertModel(hf.BertConfig(**_SIZES, **_NO_DROPOUT)), tokens),
    Case("gpt-2", _gpt2, with_labels),
    Case("vit", lambda: hf.ViTModel(hf.ViTConfig(**_VISION, **_IMAGES)), images),
    Case("dinov2-swiglu", lambda: _dinov2(use_swiglu_ffn=True), images),
    Case("whisper-encoder", _whisper, lambda: {"input_features": torch.randn(2, 16, 2 * TOKENS)}),
    Case("t5-relu", lambda: _t5("relu"), with_labels),
    Case("t5-gated-gelu", lambda: _t5("gated-gelu"), with_labels),
    Case("llama", lambda: _decoder("Llama"), with_labels),
    Case("gemma", lambda: _decoder("Gemma", num_key_value_heads=2, head_dim=16), with_labels),
    Case("phi-3", lambda: _decoder("Phi3"), with_labels),
    Case(
        "convnext",
        lambda: hf.ConvNextModel(hf.ConvNextConfig(hidden_sizes=[16, 32], depths=[1, 1], num_stages=2)),
        images,
    ),
    Case(
        "resnet",
        lambda: hf.ResNetModel(hf.ResNetConfig(embedding_size=16, hidden_sizes=[32, 64], depths=[2, 2])),
        images,
    ),
    Case(
        "dac-encoder",
        lambda: DacEncoder(hf.DacConfig(encoder_hidden_size=16, downsampling_ratios=[2, 4], hidden_size=64)),
        lambda: {"hidden_state": torch.randn(2, 1, 256)},
    ),
    Case("efficientnet", _efficientnet, images),
]
