"""Fused models that generate, with adapters, in several processes, and on a GPU that is not there: losses and
gradients are those of the plain model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from settings import ROOT
from torch import Tensor, nn

import fusedlayers as fl
from fusedlayers.memory import saved_bytes

pytestmark = pytest.mark.usefixtures("small_values_are_replayed")


def _llama() -> Any:
    hf = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return hf.LlamaForCausalLM(hf.LlamaConfig(vocab_size=96, pad_token_id=0, bos_token_id=1, eos_token_id=2, **sizes))


def _tokens() -> Tensor:
    return torch.randint(3, 96, (2, 24), generator=torch.Generator().manual_seed(0))


def test_generate() -> None:
    model = _llama().eval()
    expected = model.generate(_tokens()[:, :4], max_new_tokens=8, do_sample=False)
    fl.fuse(model)
    assert torch.equal(model.generate(_tokens()[:, :4], max_new_tokens=8, do_sample=False), expected)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("when", ["before", "after"])
def test_adapters(when: str) -> None:
    peft = pytest.importorskip("peft")
    inputs = {"input_ids": _tokens(), "use_cache": False}
    found, bytes_kept = [], []
    for is_fused in (False, True):
        model = _llama()
        if is_fused and when == "before":
            fl.fuse(model)
        torch.manual_seed(1)
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_dropout=0.1, target_modules="all-linear")).train()
        for name, parameter in model.named_parameters():
            if "lora_B" in name:  # which is 0 at first
                nn.init.constant_(parameter, 0.02)
        if is_fused and when == "after":
            fl.fuse(model)
        bytes_kept.append(saved_bytes(lambda m=model: m(**inputs)[0], exclude=[model, inputs]))
        torch.manual_seed(2)
        y = model(**inputs)[0]
        y.square().mean().backward()
        found.append([y.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
        model.eval().merge_and_unload()(**inputs)
    assert all(map(torch.equal, *found)) and bytes_kept[1] < 0.8 * bytes_kept[0]


ON_A_GPU = """
import json, torch
from torch import nn
from bench.gpu import fake as fake_gpu
from bench.overhead import Own
from bench.zoo import TransformerBlock
import fusedlayers as fl

fake = fake_gpu.install()
model = nn.Sequential(TransformerBlock(256, 512, True), nn.Linear(256, 512), Own(), nn.Linear(512, 8)).bfloat16()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
fl.fuse(model)
x = torch.randn(4, 256, 256).bfloat16()
for number in range(3):
    fake.launches.clear()
    with torch.profiler.profile(acc_events=True) as profile:
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
names = [event.name for event in profile.events()]
looks = ("item", "_local_scalar_dense", "equal", "nonzero", "is_nonzero", "_to_cpu")
print(json.dumps([[n for n in names if n in {f"aten::{look}" for look in looks}], [l.kernel for l in fake.launches]]))
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has a driver of its own")
def test_a_training_step_looks_at_no_value_on_the_device() -> None:
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(ROOT)
    done = subprocess.run([sys.executable, "-c", ON_A_GPU], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    looks, launches = json.loads(done.stdout)
    assert looks == launches == []
