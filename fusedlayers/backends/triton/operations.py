"""Matmuls and convolutions on a GPU with the activation after them; backward, a matmul and the activation before it.

The vendor's result goes into a buffer that an elementwise kernel overwrites; or a matmul's epilogue is that kernel
(``gemm.py``), where that is faster (``dispatch.py``).
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..._torch import addmm_activation
from ...activations import Activation
from ..base import ActivationGradients, GradientRequest
from ..operations import MATMUL, Matmul, Operation, Weight
from . import dispatch, gemm
from .codegen import source
from .dispatch import LIBRARY, Question
from .elementwise import bias_act, gradient
from .fallback import ERRORS, has_failed, note
from .gates import gate, gate_gradient


def has_faster_linear(x: Tensor, w: Tensor) -> bool:
    """Whether ``linear`` is faster than ``F.linear`` for these: no, it is the same."""
    return False


def linear(x: Tensor, w: Tensor, b: Tensor | None, *, out: Tensor | None = None) -> Tensor:
    """``x w^T + b``, in ``out`` or in a new buffer."""
    if out is None:
        return F.linear(x, w, b)
    return torch.mm(x, w.t(), out=out) if b is None else torch.addmm(b, x, w.t(), out=out)


faster_linear = F.linear


def add_linear(total: Tensor, x: Tensor, w: Tensor) -> None:
    """``total + x w^T`` over ``total``, by the matmul itself."""
    torch.addmm(total, x, w.t(), out=total)


def operation_act(
    operation: Operation,
    x: Tensor,
    w: Weight,
    b: Tensor | None,
    activation: Activation,
    operands: Sequence[Tensor] = (),
    *,
    encode: bool = False,
) -> Tensor:
    """``activation(operation(x, w, b), *operands)`` in one new buffer; ``encode`` puts the branch in it."""
    if isinstance(operation, Matmul) and x.is_contiguous() and not dispatch.is_settled(x.device):
        layer = Layer(operation.flattened(x), w, b, activation, operands, encode)
        return operation.unflattened(layer.run_best(), x)
    return _in_two_steps(operation, x, w, b, activation, operands, encode)


def _in_two_steps(
    operation: Operation,
    x: Tensor,
    w: Weight,
    b: Tensor | None,
    activation: Activation,
    operands: Sequence[Tensor],
    encode: bool,
) -> Tensor:
    z, kernel_b = (operation(x, w, None), b) if operation.leaves_bias else (operation(x, w, b), None)
    return bias_act(z, kernel_b, activation, operands, dim=operation.dim, encode=encode, out=z)


class Layer(NamedTuple):
    """``activation(x w^T + b, *operands)``."""

    x: Tensor
    w: Tensor
    b: Tensor | None
    activation: Activation
    operands: Sequence[Tensor] = ()
    encode: bool = False

    def choose(self) -> str:
        """The fastest way to compute it."""
        x, w, activation = self.x, self.w, self.activation
        question = Question(
            _role("layer", x.dtype, bias=self.b is not None, encoded=self.encode, operands=len(self.operands)),
            _identity(activation),
            x.dtype,
            x.shape[0],
            w.shape[0],
            x.shape[1],
        )
        return dispatch.choose(question, x.device, self)

    def run_best(self) -> Tensor:
        candidate = self.choose()
        if candidate != LIBRARY and not has_failed(candidate, self):
            try:
                return self.run(candidate)
            except ERRORS as error:
                note(error, candidate, self)
        return self.run(LIBRARY)

    @property
    def candidates(self) -> list[str]:
        """The names of the ways to compute it, first the library's."""
        relu = self.activation.name == "relu" and self.b is not None
        return [LIBRARY, *[RELU_EPILOGUE] * relu, *_tilings(self.x, self.w)]

    def run(self, candidate: str) -> Tensor:
        x, w, b, activation, operands, encode = self
        if candidate == LIBRARY:
            return _in_two_steps(MATMUL, x, w, b, activation, operands, encode)
        if candidate == RELU_EPILOGUE:
            assert b is not None
            return addmm_activation(b, x, w.t())
        tiling = _tilings(x, w)[candidate]
        return gemm.linear_act(x, w, b, activation, operands, encode=encode, tiling=tiling)

    def other(self, rows: int) -> Layer:
        """The same on so many rows of scratch numbers."""
        inner = self.x.shape[1]
        x, w = _random(self.x, rows, inner=inner), _random(self.w, inner=inner)
        b = None if self.b is None else _random(self.b)
        if b is not None:
            b[0] = torch.nan  # which the vendor's relu may turn into a number
        return self._replace(x=x, w=w, b=b)

    def scratch(self, rows: int) -> dispatch.Run:
        layer = self.other(rows)
        return lambda candidate: [layer.run(candidate)]


def has_epilogue(
    x: Tensor, w: Tensor, b: Tensor | None, activation: Activation, *, encode: bool, cast: torch.dtype | None = None
) -> bool:
    """Whether ``operation_act`` applies the activation in the matmul's epilogue, without a pass of its own.

    ``cast`` is the dtype that x and w are to be cast to first.
    """
    if dispatch.is_settled(x.device):
        return False
    x, w = (x, w) if cast is None else (x.to(cast), w.to(cast))
    return Layer(x, w, b, activation, (), encode).choose() != LIBRARY


class Backwards(NamedTuple):
    """The gradients of ``linear(hidden, w)`` by the pre-activations of ``hidden``."""

    dy: Tensor
    w: Tensor
    parts: Sequence[Tensor]
    activation: Activation
    operands: Sequence[Tensor]
    request: GradientRequest
    hidden: bool

    def choose(self) -> str:
        """The fastest way to compute it."""
        dy, w, activation = self.dy, self.w, self.activation
        request = self.request
        role = _role(
            "gradient",
            dy.dtype,
            given_output=request.saved == "output",
            gated=len(self.parts) > 1,
            hidden=self.hidden,
            bias=request.needs_bias,
            operands=sum(request.needs_operands),
        )
        question = Question(role, _identity(activation), dy.dtype, dy.shape[0], w.shape[1], w.shape[0])
        return dispatch.choose(question, dy.device, self)

    @property
    def candidates(self) -> list[str]:
        """The names of the ways to compute it, first the library's."""
        return [LIBRARY, *_tilings(self.dy, self.w)]

    def run(self, candidate: str) -> ActivationGradients:
        dy, w, parts, activation, operands, request, hidden = self
        if candidate != LIBRARY:
            tiling = _tilings(dy, w)[candidate]
            return gemm.linear_gradient(dy, w, parts, activation, operands, request, hidden=hidden, tiling=tiling)
        of_hidden, made = linear(dy, w.t(), None), None
        if len(parts) > 1:
            z, up = parts
            made = gate(z, up, activation, operands, None) if hidden else None
            shares = gate_gradient(of_hidden, z, up, activation, operands, request.needs_operands)
            return ActivationGradients(made, None, shares)
        if hidden:
            made = bias_act(parts[0], None, activation, operands, dim=-1, encode=False, out=None)
        _, db, *shares = gradient(of_hidden, parts[0], activation, operands, request, dim=-1)
        return ActivationGradients(made, db, shares)

    def other(self, rows: int) -> Backwards:
        """The same on so many rows of scratch numbers."""
        inner = self.w.shape[0]
        dy, w = _random(self.dy, rows, inner=inner), _random(self.w, inner=inner)
        return self._replace(dy=dy, w=w, parts=[_random(part, rows) for part in self.parts])

    def scratch(self, rows: int) -> dispatch.Run:
        job = self.other(rows)

        def run(candidate: str) -> list[Tensor]:
            # Written over a copy, whose time all candidates share: gradients of gradients would soon be infinite.
            parts = [part.clone() for part in job.parts]
            made, db, shares = job._replace(parts=parts).run(candidate)
            return [t for t in (*parts, made, db, *shares) if t is not None]

        return run


def linear_gradient(
    dy: Tensor,
    w: Tensor,
    parts: Sequence[Tensor],
    activation: Activation,
    operands: Sequence[Tensor],
    request: GradientRequest,
    *,
    hidden: bool,
) -> ActivationGradients | None:
    """Write the gradients of the pre-activations of ``linear(hidden, w)`` over ``parts``; None, and nothing written,
    where one step takes longer than several."""
    if dispatch.is_settled(dy.device):
        return None
    job = Backwards(dy, w, parts, activation, operands, request, hidden)
    candidate = job.choose()
    if candidate == LIBRARY or has_failed(candidate, job):
        return None
    try:
        return job.run(candidate)
    except ERRORS as error:
        note(error, candidate, job)
        return None


def describe_matmuls(w: Tensor, activation: Activation) -> list[str]:
    """Lines for people: how layers and blocks multiply by ``w``."""
    columns, inner = w.shape
    return dispatch.answers_for(_identity(activation), columns, inner, w.device)


# --- the candidates ---------------------------------------------------------------------------------------------------

#: cuBLASLt's own epilogue, which torch calls.
RELU_EPILOGUE = "library with relu"


def _role(name: str, dtype: torch.dtype, **flags: int) -> str:
    """The computation in words: what its time depends on besides sizes."""
    flags["tf32"] = dtype is torch.float32 and dispatch.tf32_is_allowed()
    return " ".join([name, *(flag if flag != "operands" else f"operands={n}" for flag, n in flags.items() if n)])


@functools.lru_cache(4096)
def _identity(activation: Activation) -> str:
    """A name that no two functions share."""
    if activation.row is not None and not (activation.is_traced or activation.row.is_custom):
        return activation.name
    text = source(activation, "forward", given="input", dtype=torch.float32)
    return f"{activation.name}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def _tilings(a: Tensor, b: Tensor) -> dict[str, gemm.Tiling]:
    """The tilings for these matrices, by name: none unless their rows, and the result's, begin at multiples of 16
    bytes."""
    if not (a.is_contiguous() and b.is_contiguous() and a.dtype is b.dtype):
        return {}
    if (a.data_ptr() | b.data_ptr()) % 16 or any(size * b.element_size() % 16 for size in b.shape):
        return {}
    if a.dtype.itemsize == 4 and not dispatch.tf32_is_allowed():
        return {}
    return gemm.tilings(a.device, a.dtype.itemsize)


def _random(like: Tensor, rows: int | None = None, *, inner: int = 1) -> Tensor:
    """Numbers from a generator of its own, which leaves the caller's as it is. Sums of ``inner`` products are of the
    order of 1."""
    shape = like.shape if rows is None else (rows, *like.shape[1:])
    generator = torch.Generator(like.device).manual_seed(0)
    numbers = torch.empty(shape, dtype=like.dtype, device=like.device).normal_(generator=generator)
    return numbers.mul_(inner**-0.25)
