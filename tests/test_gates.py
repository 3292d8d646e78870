"""Gates that save their two factors and write the gradients over them."""

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpu import DEVICE
from reference import compare, leaves
from torch import Tensor

from fusedlayers import kernels
from fusedlayers.activations import Activation, resolve
from fusedlayers.memory import saved_bytes
from fusedlayers.ops.replayed_nodes import can_gate, gate_act

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ACTIVATIONS = ("silu", "gelu", "relu", "sigmoid", "gelu_tanh", "mish", "softsign")


def _gated(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    return gate_act(activation, kernels.choose(gate, activation), gate, up, activation.function(gate))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_gates_are_as_exact_as_torch(name: str, dtype: torch.dtype) -> None:
    gate, up = leaves((7, 5, 300), (7, 5, 300), dtype=dtype)
    compare(_gated, lambda g, u, act: act(g) * u, resolve(name), gate, up, folded=False)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda t: t.t(),
    "channels last": lambda t: t.view(4, 8, 5, 10).contiguous(memory_format=torch.channels_last),
    "rows with gaps": lambda t: t[:, 10:],
    "every second": lambda t: t[::2],
    "every second column": lambda t: t[:, ::2],
    "one row": lambda t: t[3],
    "expanded rows": lambda t: t[:1].expand(40, 40),
    "expanded columns": lambda t: t[:, :1].expand(40, 40),
    "expanded between": lambda t: t[:, None].expand(40, 3, 40),
}
#: Of which can_gate knows nothing, or whose elements share their memory.
LEFT = ("transposed", "channels last", "expanded rows", "expanded columns", "expanded between")


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_layouts(name: str, dtype: torch.dtype) -> None:
    both = leaves((40, 40), (40, 40), dtype=dtype)
    view = LAYOUTS[name]
    for other in (view, lambda t: view(t).contiguous()):
        if can_gate(view(both[0]), other(both[1])):
            compare(
                lambda g, u, act, other=other: _gated(view(g), other(u), act), lambda g, u, act: act(view(g)) * view(u),
                resolve("silu"), *both, folded=False,
            )  # fmt: skip
        else:
            assert name in LEFT


def test_the_factors_are_saved_alone() -> None:
    (x,) = leaves((40, 300))
    assert saved_bytes(lambda: _gated(x * 1, x * 1, resolve("silu")), exclude=[x]) == 2 * x.nbytes


def test_gradients_are_written_over_factors_that_nobody_else_holds() -> None:
    (x,) = leaves((40, 300))
    given: list[int] = []
    backend: Any = kernels.choose(x)
    for is_held in (False, True):
        written: list[int] = []

        class Noting:
            gate = staticmethod(backend.gate)

            @staticmethod
            def gate_gradient(*arguments: Any, written: list[int] = written) -> Any:
                written.extend(t.data_ptr() for t in arguments[-1])
                return backend.gate_gradient(*arguments)

        gate, up = x * 1, x.cos()
        given = [gate.data_ptr(), up.data_ptr()]
        before = gate.detach().clone()
        y = gate_act(resolve("silu"), Noting, gate, up, torch.nn.functional.silu(gate))  # type: ignore[arg-type]
        if not is_held:
            del gate, up
        y.sum().backward()
        assert (written == given) == (not is_held)
        if is_held:
            assert torch.equal(gate, before)


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
    triton_gates = pytest.importorskip("fusedlayers.kernels.triton.triton_gates")
    rows = torch.empty(2**31 + 64, dtype=torch.float16, device="meta").as_strided((3, 16), (2**30, 1))
    assert rows.numel() == 48 and triton_gates._extent(rows) == 2**31 + 16
    assert triton_gates.index_of(triton_gates._extent(rows)).primitive_bitwidth == 64
    assert triton_gates.index_of(triton_gates._extent(rows[:2])).primitive_bitwidth == 32
