"""Gates in each backend: rows that other values lie between, as the halves of a packed layer's result have."""

import importlib

import pytest
import torch
from gpu import DEVICE

from fusedlayers import kernels
from fusedlayers.activations import resolve


@pytest.mark.usefixtures("interpreter_converts")
@pytest.mark.parametrize("name", ["cpu", "triton"])
def test_backends_agree_on_rows_with_gaps(name: str) -> None:
    whole, among_others = torch.randn(50, 700, device=DEVICE), torch.randn(3, 1, 10, 60, device=DEVICE)[:, :, :5]
    for packed in (whole, among_others):
        gate, up = packed.to("cpu" if name == "cpu" else DEVICE).chunk(2, -1)
        dy, found = torch.randn_like(gate), []
        for backend in (kernels.reference, importlib.import_module(f"fusedlayers.kernels.{name}")):
            out = torch.empty_like(gate), torch.empty_like(up)
            backend.gate_gradient(dy, gate, up, resolve("mish"), (), (), out)
            found.append([backend.gate(gate, up, resolve("mish"), (), None), *out])
        for ours, reference in zip(*found, strict=True):
            torch.testing.assert_close(ours, reference, rtol=1e-5, atol=1e-6)


def test_offsets_between_rows_have_64_bits_where_32_do_not_suffice() -> None:
    """However few elements there are."""
    gates = pytest.importorskip("fusedlayers.kernels.triton.gates")
    rows = torch.empty(2**31 + 64, dtype=torch.float16, device="meta").as_strided((3, 16), (2**30, 1))
    assert rows.numel() == 48 and gates._extent(rows) == 2**31 + 16
    assert gates.index_of(gates._extent(rows)).primitive_bitwidth == 64
    assert gates.index_of(gates._extent(rows[:2])).primitive_bitwidth == 32
