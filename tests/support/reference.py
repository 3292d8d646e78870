"""The layers as eager PyTorch writes them: what the library replaces, and what tests and benchmarks compare with."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fusedlayers.activations import Activation
from fusedlayers.derivative import branch_bit
from fusedlayers.memory import peak_bytes

Function = Callable[[Tensor], Tensor]


def bias_act(z: Tensor, b: Tensor | None, function: Function, dim: int = -1) -> Tensor:
    """``function(z + b)``, with ``b`` of shape ``(z.shape[dim],)``."""
    if b is not None:
        shape = [1] * z.dim()
        shape[dim] = -1
        z = z + b.view(shape)
    return function(z)


def dense_bias_act(
    x: Tensor, w: Tensor, b: Tensor | None, function: Function, *, residual: Tensor | None = None
) -> Tensor:
    """``function(x w^T + b + residual)``: ``(..., in), (out, in), (out,), (..., out) -> (..., out)``."""
    z = F.linear(x, w, b)
    return function(z if residual is None else z + residual)


def scratch_bytes(x: Tensor, w: Tensor) -> int:
    """The bytes that PyTorch's ``x w^T`` takes beside its result: a CPU without instructions for bfloat16 multiplies in
    float32 first."""

    def product() -> Tensor:
        return x.detach() @ w.detach().t()

    return peak_bytes(product, device=x.device) - product().nbytes


def conv_bias_act(
    x: Tensor,
    w: Tensor,
    b: Tensor | None,
    function: Function,
    *options: Any,
    residual: Tensor | None = None,
    **named: Any,
) -> Tensor:
    """``function(conv(x, w, b) + residual)``, with the options of ``F.conv1d``, ``F.conv2d`` and ``F.conv3d``."""
    z = (F.conv1d, F.conv2d, F.conv3d)[w.dim() - 3](x, w, b, *options, **named)
    return function(z if residual is None else z + residual)


def mlp(x: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None, function: Function) -> Tensor:
    """A dense layer with activation and one without: ``(..., in) -> (..., hidden) -> (..., out)``."""
    return F.linear(dense_bias_act(x, w1, b1, function), w2, b2)


def gated_mlp(
    x: Tensor,
    w_gate: Tensor,
    b_gate: Tensor | None,
    w_up: Tensor,
    b_up: Tensor | None,
    w_down: Tensor,
    b_down: Tensor | None,
    function: Function,
) -> Tensor:
    """``(..., in) -> (..., hidden) -> (..., out)``, one of two dense layers being the other's gate."""
    return F.linear(function(F.linear(x, w_gate, b_gate)) * F.linear(x, w_up, b_up), w_down, b_down)


# --- measuring in numbers of a dtype ----------------------------------------------------------------------------------


def all_values(dtype: torch.dtype) -> Tensor:
    """Every one of the 65,536 numbers of a 16-bit dtype: both zeros, infinities, subnormals and all NaNs."""
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)


def steps(a: Tensor, b: Tensor) -> Tensor:
    """How many representable numbers lie between ``a`` and ``b``, of one dtype; the two zeros are one number."""
    return (_ordinal(a) - _ordinal(b)).abs()


_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def _ordinal(tensor: Tensor) -> Tensor:
    integer = _INTEGERS[tensor.dtype.itemsize]
    bits = tensor.view(integer).to(torch.int64)
    return torch.where(bits < 0, torch.iinfo(integer).min - bits, bits)


def ulp(value: Tensor, dtype: torch.dtype) -> Tensor:
    """The distance between neighbouring numbers of ``dtype`` at ``value``, in float64."""
    info = torch.finfo(dtype)
    exponent = torch.frexp(value.double().abs().clamp_min(info.tiny))[1]
    return torch.exp2(exponent.double() - 1) * info.eps


def encoding_error(y: Tensor, dtype: torch.dtype) -> Tensor:
    """How far the branch bit may move an output: by a unit in the last place, and from what underflows to the smallest
    number that has the bit."""
    return torch.maximum(ulp(y, dtype), torch.tensor(branch_bit.LEAST[dtype], dtype=torch.float64))


def derivative(function: Function, z: Tensor) -> Tensor:
    """``function'`` at float64 ``z``, by autograd."""
    z = z.double().detach().requires_grad_()
    return torch.autograd.grad(function(z).sum(), z)[0]


def second_derivative(function: Function, z: Tensor) -> Tensor:
    """``function''`` at float64 ``z``, by autograd."""
    z = z.double().detach().requires_grad_()
    (slope,) = torch.autograd.grad(function(z).sum(), z, create_graph=True)
    return torch.autograd.grad(slope.sum(), z)[0] if slope.requires_grad else torch.zeros_like(z)


def assert_as_good_as_torch(ours: Tensor, torchs: Tensor, exact: Tensor, luck: float = 0.0) -> None:
    """Neither the largest nor the mean error is more than twice torch's own in the same dtype; or, of one number, for
    which torch's may be small by ``luck``, more than that."""
    assert ours.dtype is torchs.dtype and ours.shape == exact.shape
    tiny = 8 * torch.finfo(torch.float32).eps * float(exact.abs().max()) + luck
    # In 16 bits torch overflows within a quotient, to NaN or infinity: such a number is no measure.
    error, torchs_error = (ours.double() - exact).abs(), (torchs.double() - exact).abs().nan_to_num(0.0, 0.0)
    assert float(error.max()) <= 2 * float(torchs_error.max()) + tiny
    assert float(error.norm()) <= 2 * float(torchs_error.norm()) + tiny * math.sqrt(exact.numel())


def check_gates(backend: Any, activation: Activation, z: Tensor, up: Tensor, dy: Tensor) -> None:
    """A backend's gate and its gradients against float64 and torch's own; written over their operands too."""
    leaves = z.detach().requires_grad_(), up.detach().requires_grad_()
    torchs = activation.plain(leaves[0]) * leaves[1]
    torchs_gradients = torch.autograd.grad(torchs, leaves, dy)
    exact, slope = activation.function(z.double()), derivative(activation.function, z)
    y = backend.gate(z, up, activation, (), None)
    assert_as_good_as_torch(y, torchs.detach(), exact * up.double())
    buffer = z.clone()
    version = buffer._version
    assert backend.gate(buffer, up, activation, (), buffer) is buffer
    assert torch.equal(buffer, y) and buffer._version > version
    dz, of_up = z.clone(), up.clone()
    assert list(backend.gate_gradient(dy.clone(), dz, of_up, activation, (), ())) == []
    assert_as_good_as_torch(dz, torchs_gradients[0], dy.double() * up.double() * slope)
    assert_as_good_as_torch(of_up, torchs_gradients[1], dy.double() * exact)


def are_equal(a: Tensor, b: Tensor) -> bool:
    """To the last bit; NaN is NaN."""
    if a.shape != b.shape or a.dtype is not b.dtype:
        return False
    return torch.equal(a, b) or (torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num()))


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same numbers, zeros with their signs; one NaN is as good as another."""
    pair = (torch.where(t.isnan(), torch.nan, t).contiguous().view(_INTEGERS[t.dtype.itemsize]) for t in (a, b))
    return a.dtype is b.dtype and torch.equal(*pair)


def label(value: object) -> str:
    """A test's id for ``value``: the same in every process, where ``str`` of a function holds its address."""
    return str(getattr(value, "__name__", value))


# --- comparing with eager PyTorch -------------------------------------------------------------------------------------

#: With the output saved, these much of a folded derivative may be wrong, in relative terms, over a few hundred numbers.
FOLDED_TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}


def leaves(*shapes: tuple[int, ...] | None, dtype: torch.dtype = torch.float32) -> list[Any]:
    """Tensors that require grad; None for None."""
    return [None if shape is None else torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]


def gradients(y: Tensor, dy: Tensor, *sources: Tensor | None) -> list[Tensor]:
    """Of those that require one."""
    return list(torch.autograd.grad(y, [t for t in sources if t is not None and t.requires_grad], dy))


def relative(a: Tensor, b: Tensor) -> float:
    a, b = a.detach().double(), b.detach()
    return float((a - b).norm() / b.norm().clamp_min(1e-30))


def assert_near(found: Iterable[Tensor], expected: Iterable[Tensor], times: float = 1.0) -> None:
    """By norms, within so many times what a folded derivative may err by: numbers next to a fold, and sums that cancel,
    err more."""
    for a, b in zip(found, expected, strict=True):
        assert a.dtype is b.dtype and a.shape == b.shape
        assert relative(a, b.double()) <= times * FOLDED_TOLERANCE[a.dtype]


def compare(
    call: Callable[..., Tensor],
    eager: Callable[..., Tensor],
    activation: Activation,
    *sources: Tensor | None,
    folded: bool = True,
) -> None:
    """Value and gradients of ``call`` may be twice as far from float64's as those of ``eager`` in the same dtype."""
    dtype = next(t.dtype for t in sources if t is not None)
    exact_sources = [None if t is None else t.detach().double().requires_grad_(t.requires_grad) for t in sources]
    exact = eager(*exact_sources, activation.function)
    dy = torch.randn(exact.shape).to(dtype)
    expected = [exact.detach(), *gradients(exact, dy.double(), *exact_sources)]
    results = []
    for function, act in ((call, activation), (eager, activation.plain)):
        y = function(*sources, act)
        assert y.dtype is dtype and y.shape == exact.shape
        results.append([y.detach(), *gradients(y, dy, *sources)])
    # A derivative that is had from a rounded output has that rounding more: softsign's, (1 - |y|)^2, twice.
    tolerance = 3 * torch.finfo(dtype).eps + (FOLDED_TOLERANCE[dtype] if activation.is_folded and folded else 0)
    for ours, eagers, truth in zip(*results, expected, strict=True):
        assert ours.shape == truth.shape and ours.dtype is dtype
        assert relative(ours, truth) <= 2 * relative(eagers, truth) + tolerance


def added(activation: Activation, save: str) -> float:
    """The floor for ``check_orders``: more where a derivative is fitted, which saved outputs tell."""
    if save not in ("auto", "output") or activation.needs_input_reason is not None:
        return 3e-6
    return 3e-6 if activation.fitted_derivative() is None else 1e-4


def check_orders(
    call: Callable[..., Tensor], eager: Callable[..., Tensor], sources: Sequence[Tensor], floor: float = 3e-6
) -> None:
    """Value, and derivatives of first and second order, of ``call`` in float32: by their norms at most twice as far
    from float64's as those of ``eager``, besides the floor."""
    results = []
    for function, dtype in ((call, torch.float32), (eager, torch.float32), (eager, torch.float64)):
        given = [t.detach().to(dtype).requires_grad_(t.requires_grad) for t in sources]
        needed = [t for t in given if t.requires_grad]
        y = function(*given)
        dy = torch.arange(y.numel(), dtype=dtype).cos().view(y.shape).requires_grad_()
        # Those which cannot be differentiated again are computed by other code.
        once = torch.autograd.grad(y, needed, dy.detach(), retain_graph=True)
        first = torch.autograd.grad(y, needed, dy, create_graph=True)
        weights = [torch.arange(t.numel(), dtype=dtype).sin().view(t.shape) for t in first]
        second = torch.autograd.grad(first, [*needed, dy], weights, allow_unused=True, materialize_grads=True)
        results.append([t.detach() for t in (y, *once, *first, *second)])
    size = max(float(truth.norm()) for truth in results[2])
    for place, (ours, torchs, truth) in enumerate(zip(*results, strict=True)):
        error, torchs_error = (float((t.double() - truth).norm()) for t in (ours, torchs))
        assert error <= 2 * torchs_error + floor * float(truth.norm()) + 1e-7 * size, place
