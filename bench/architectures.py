"""``python -m bench architectures``: ``fl.fuse`` on each architecture of transformers, with random weights.

One rule makes a configuration small and invents an input. An architecture that does not train with these, or that has
other bits the second time without ``fuse``, is skipped. Of the others the loss and all gradients are compared to the
last bit. Values are saved once however small they are.
"""

import random
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn

import fusedlayers as fl
from fusedlayers.memory import saved_bytes
from fusedlayers.recipes import masks, region
from fusedlayers.utils.step import tensors_of

from .grid import Benchmark
from .measure import Setting

DEFINITIONS = {
    "same": "whether the loss and all gradients have the same bits after fuse",
    "saved_bytes": "before and after fuse, without inputs, parameters and buffers",
    "skipped": "why an architecture is not compared",
}
HF, DTYPES = "transformers", ("float32", "autocast")
_NAMES = {
    0: "pad_token_id",
    1: "bos_token_id decoder_start_token_id num_experts_per_tok",
    2: "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_key_value_heads eos_token_id",
    4: "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads",
    8: "patch_size rotary_dim num_experts num_local_experts n_routed_experts",
    16: "d_kv head_dim",
    32: "image_size",
    64: "hidden_size d_model dim n_embd embed_dim embedding_size word_embed_proj_dim moe_intermediate_size",
    128: "intermediate_size encoder_ffn_dim decoder_ffn_dim ffn_dim d_ff hidden_dim",
    256: "max_position_embeddings n_positions",
    300: "vocab_size",
}
SIZES = {name: size for size, names in _NAMES.items() for name in names.split()}
MOST = 100_000_000  # parameters: a larger model takes too long


def small(config: Any) -> Any:
    """The configuration, and those in it, with small sizes."""
    for name, value in [*vars(config).items()]:
        if name in SIZES and type(value) is int:
            setattr(config, name, SIZES[name])
        elif hasattr(value, "model_type"):
            small(value)
        elif name.endswith("layer_types") and value:
            setattr(config, name, [value[0], value[-1]])
    return config


def made(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """A model, and its input."""
    hf: Any = import_module(HF)
    model: Any = hf.AutoModel.from_config(small(hf.CONFIG_MAPPING[name]())).float().train()
    if sum(p.numel() for p in model.parameters()) > MOST:
        raise ValueError("it stays large")
    of = {"num_channels": 3, "num_mel_bins": 80, "image_size": 32, **vars(model.config)}
    sizes = of["image_size"] if isinstance(of["image_size"], list | tuple) else [of["image_size"]] * 2
    inputs = {"input_values": (2, 4000), "input_features": (2, of["num_mel_bins"], 300)}
    inputs["pixel_values"] = 2, of["num_channels"], *sizes
    main, tokens = model.main_input_name, partial(torch.randint, 3, 200)
    decoded = {"decoder_input_ids": tokens((2, 12))} if model.config.is_encoder_decoder else {}
    return model, {main: tokens((2, 24)) if main == "input_ids" else torch.randn(inputs[main]), **decoded}


def loss_of(model: nn.Module, inputs: dict[str, Tensor], dtype: str) -> Tensor:
    for seed in (torch.manual_seed, np.random.seed, random.seed):  # masks of sounds are NumPy's
        seed(0)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "autocast"):
        results = [y for y in tensors_of(model(**inputs)) if y.requires_grad]
    return torch.stack([y.float().square().mean() for y in results]).sum()


def trained(model: nn.Module, inputs: dict[str, Tensor], dtype: str) -> list[Tensor]:
    """The loss and the gradients."""
    loss, parameters = loss_of(model, inputs, dtype), [p for p in model.parameters() if p.requires_grad]
    return [loss.detach(), *torch.autograd.grad(loss, parameters, materialize_grads=True)]


def measure_case(case: Any, setting: Setting) -> dict[str, Any]:
    """The JSON row of a case."""
    row: dict[str, Any] = {"id": case.id, "same": {}, "saved_bytes": {}}
    try:
        model, inputs = made(case.id)
        theirs, again = ({dtype: trained(model, inputs, dtype) for dtype in DTYPES} for _ in range(2))
        if not all(all(map(torch.equal, theirs[dtype], again[dtype])) for dtype in DTYPES):
            raise ValueError("it has other bits the second time")
    except Exception as error:  # of code that is not ours
        return {"id": case.id, "skipped": f"{type(error).__name__}: {error}".partition("\n")[0][:80]}
    with patch.object(region, "LEAST_BYTES", 0), patch.object(masks, "LEAST_BYTES", 0):
        for dtype in DTYPES:
            loss, sizes = partial(loss_of, model, inputs, dtype), []
            for change in (fl.unfuse, fl.fuse):
                change(model)
                sizes.append(saved_bytes(loss, exclude=[model, inputs]))
            row["saved_bytes"][dtype] = sizes
            row["same"][dtype] = all(map(torch.equal, trained(model, inputs, dtype), theirs[dtype]))
    return row


def cases(kind: str) -> list[Any]:
    return [SimpleNamespace(id=name) for name in import_module(f"{HF}.models.auto.modeling_auto").MODEL_MAPPING_NAMES]


BENCHMARKS = {
    "architectures": Benchmark(
        "architectures", DEFINITIONS, cases, measure_case, lambda row: [str(row)],
        budget_seconds=1500.0, device="cpu", threads=1, packages=(HF,),
    )
}  # fmt: skip
