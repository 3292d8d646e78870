"""Activations printed as Triton device functions.

The kernels know no activation: they take ``FORWARD`` and ``GRADIENT``, jitted functions of float32 blocks, as
compile-time arguments. Those are printed here from the same torch function that everything else uses: traced to
pointwise operations (``activations/trace.py``), one line each. What else the function reads, its operands, lies in one
buffer (``pack``); the printed functions load it themselves, so that kernels take the same arguments for all.

Triton has no erfc, expm1, log1p, tanh or pow of its own. The first four are written below in its own operations, so
that they run in the interpreter and on every vendor's devices; erfc from a polynomial that is fitted when it is first
needed.
"""

from __future__ import annotations

import functools
import hashlib
import linecache
import logging
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...activations import Activation
from ...activations.inverse import Piece, interpolate
from ...activations.trace import NotPointwise, Operation, Pointwise, trace
from ...clean import in_clean_state

#: How each operation is written; {0}, {1}, ... are its arguments.
_TEMPLATES = {
    "abs": "tl.abs({0})",
    "add": "{0} + {1}",
    "bitwise_and": "{0} & {1}",
    "bitwise_left_shift": "{0} << {1}",
    "bitwise_not": "~{0}",
    "bitwise_or": "{0} | {1}",
    "bitwise_right_shift": "{0} >> {1}",
    "bitwise_xor": "{0} ^ {1}",
    "ceil": "tl.ceil({0})",
    "cos": "tl.cos({0})",
    "div": "{0} / {1}",
    "eq": "{0} == {1}",
    "erf": "tl.erf({0})",
    "erfc": "_erfc({0})",
    "exp": "tl.exp({0})",
    "exp2": "tl.exp2({0})",
    "expm1": "_expm1({0})",
    "floor": "tl.floor({0})",
    "ge": "{0} >= {1}",
    "gt": "{0} > {1}",
    "isnan": "{0} != {0}",
    "le": "{0} <= {1}",
    "log": "tl.log({0})",
    "log1p": "_log1p({0})",
    "log2": "tl.log2({0})",
    "logical_and": "{0} & {1}",
    "logical_not": "~{0}",
    "logical_or": "{0} | {1}",
    "lt": "{0} < {1}",
    "maximum": "tl.maximum({0}, {1}, tl.PropagateNan.ALL)",
    "minimum": "tl.minimum({0}, {1}, tl.PropagateNan.ALL)",
    "mul": "{0} * {1}",
    "ne": "{0} != {1}",
    "neg": "-{0}",
    "pow": "_pow({0}, {1})",
    "reciprocal": "1.0 / {0}",
    "rsqrt": "tl.rsqrt({0})",
    "sigmoid": "tl.sigmoid({0})",
    "sign": "_sign({0})",
    "sin": "tl.sin({0})",
    "softshrink_backward": "tl.where(tl.abs({1}) <= {2}, 0.0, {0})",
    "sqrt": "tl.sqrt({0})",
    "sub": "{0} - {1}",
    "tanh": "_tanh({0})",
    "where": "tl.where({0}, {1}, {2})",
}

_TYPES = {torch.float32: "tl.float32", torch.int32: "tl.int32", torch.int64: "tl.int64", torch.bool: "tl.int1"}

Role = Literal["forward", "gradient"]
_log = logging.getLogger("fusedlayers")


def device_function(
    activation: Activation, role: Role, *, given: str, dtype: torch.dtype, needs: tuple[bool, ...] = ()
) -> Any:
    """The jitted function of float32 blocks that a kernel takes.

    "forward" is ``(z, operand_ptr, channel, channels) -> y``. "gradient" is ``(dy, saved, operand_ptr, channel,
    channels) -> (dz, ...)``, with dy times the derivative by each operand that needs one behind dz.

    Args:
        given: for "forward", "output" if the result is saved and carries the branch; for "gradient", what was saved.
        dtype: of the tensor in memory, in whose last bit the branch is.
        needs: which operands need a gradient.

    Raises:
        NotPointwise: the function cannot be printed; the message names the operation.
    """
    # The dtype shows only in the branch bit: other functions are shared by all dtypes, and compiled once.
    coded = activation.is_folded and given == "output"
    return _compile(activation, role, given, dtype if coded else torch.float32, needs)


@functools.lru_cache(4096)
def computes(activation: Activation) -> bool:
    """Whether the activation can be printed: of the table all can, of users' functions those of known operations."""
    if not (activation.is_traced or (activation.row is not None and activation.row.is_users)):
        return True
    try:
        device_function(activation, "forward", given="input", dtype=torch.float32)
        needs = (True,) * len(activation.operand_dims)
        device_function(activation, "gradient", given="input", dtype=torch.float32, needs=needs)
    except NotPointwise as reason:
        _log.warning("%s is left to torch operations on GPUs because %s", activation.name, reason)
        return False
    return True


def source(activation: Activation, role: Role, *, given: str, dtype: torch.dtype, needs: tuple[bool, ...] = ()) -> str:
    """The text of ``device_function``."""
    # On a machine without a GPU torch 2.11 makes a stand-in for one when it first traces, and frees it with the thread
    # that traced (pytorch#178950). Tracing happens on a short-lived thread; the caller's lasts.
    torch._C._ensureCUDADeviceGuardSet()
    operands = {f"p{i}": dim is not None for i, dim in enumerate(activation.operand_dims)}
    function: Callable[..., Tensor | tuple[Tensor, ...]]
    if role == "forward":
        inputs = ["z"]
        function = activation.function if given == "input" else lambda z: activation.encoded(z, dtype)
    elif given == "output":
        inputs = ["dy", "y"]
        function = lambda dy, y: (dy * activation.derivative_given_output(y, dtype),)  # noqa: E731  # as those beside it
    else:
        inputs = ["dy", "z"]
        function = activation.gradients(needs)
    name = f"{re.sub('[^A-Za-z0-9_]', '_', activation.name)}_{role}"
    return print_function(name, trace(function, [*inputs, *operands]), operands, as_tuple=role == "gradient")


def pack(operands: Sequence[Tensor], like: Tensor) -> Tensor:
    """All operands in one float32 buffer: those with a number for each channel first, then single ones."""
    if not operands:
        return like  # a pointer that is not read
    ordered = sorted(operands, key=lambda p: p.numel() == 1)
    return torch.cat([p.detach().reshape(-1).to(torch.float32) for p in ordered])


def print_function(
    name: str, pointwise: Pointwise, operands: Mapping[str, bool] = MappingProxyType({}), *, as_tuple: bool = False
) -> str:
    """``pointwise`` as the text of a Triton device function. Its inputs that are ``operands`` are loaded: from the
    channel's place where there is a number for each channel, else from behind those."""
    blocks = [name for name in pointwise.inputs if name not in operands]
    lines = [f"def {name}({', '.join([*blocks, *_POINTERS])}):"]
    uses = Counter(a for operation in pointwise.operations for a in operation.arguments if isinstance(a, str))
    uses.update(a for a in pointwise.outputs if isinstance(a, str))
    uses.update(str(o.arguments[0]) for o in pointwise.operations if o.op == "pow" and o.arguments[1] == 2)  # a product
    lines += [f"    {text}" for text in _loads({name: kind for name, kind in operands.items() if uses[name]}, operands)]
    inlined: dict[str, str] = {}
    for operation in pointwise.operations:
        text = _expression(operation, inlined)
        # Values that are used once are written where they are used, as long as the lines stay short.
        if uses[operation.name] == 1 and len(text) <= _INLINE and operation.name not in pointwise.outputs:
            inlined[operation.name] = text if text[-1] == ")" and text.startswith(("tl.", "_")) else f"({text})"
        else:
            lines.append(f"    {operation.name} = {text}")
    results = [
        _literal(output, inlined)
        if isinstance(output, str) and output not in operands
        else f"tl.full({blocks[0]}.shape, {_literal(output, inlined)}, tl.float32)"
        for output in pointwise.outputs
    ]
    returned = f"({', '.join(results)},)" if as_tuple else results[0]
    return "\n".join([*lines, f"    return {returned}", ""])


_POINTERS = ("operand_ptr", "channel", "channels")


def _loads(wanted: Mapping[str, bool], operands: Mapping[str, bool]) -> Iterator[str]:
    vectors = [name for name, by_channel in operands.items() if by_channel]
    numbers = [name for name, by_channel in operands.items() if not by_channel]
    for name, by_channel in wanted.items():
        before = vectors.index(name) if by_channel else len(vectors)
        offset = [f"{before} * channels"] if before else []
        offset.append("channel" if by_channel else str(numbers.index(name)))
        mask = ", mask=channel < channels, other=0.0" if by_channel else ""
        yield f"{name} = tl.load(operand_ptr + {' + '.join(offset)}{mask})"


#: Three of these and what stands around them still make a line of less than 140 characters.
_INLINE = 36


def _expression(operation: Operation, inlined: Mapping[str, str]) -> str:
    arguments = [_literal(a, inlined) for a in operation.arguments]
    if operation.op in ("cast", "bitcast"):
        bitcast = ", bitcast=True" if operation.op == "bitcast" else ""
        return f"{arguments[0]}.to({_TYPES[operation.dtype]}{bitcast})"
    if operation.op == "pow" and operation.arguments[1] == 2:
        return f"{arguments[0]} * {arguments[0]}"
    template = _TEMPLATES.get(operation.op)
    if template is None:
        raise NotPointwise(f"{operation.op} has no Triton counterpart here")
    return template.format(*arguments)


def _literal(argument: object, inlined: Mapping[str, str]) -> str:
    if isinstance(argument, float) and not math.isfinite(argument):
        return f'float("{argument}")'
    return inlined.get(str(argument), str(argument))


#: One for each activation, as long as a parameter that changes from step to step has not replaced it.
@functools.lru_cache(4096)
def _compile(activation: Activation, role: Role, given: str, dtype: torch.dtype, needs: tuple[bool, ...]) -> Any:
    return compile_function(source(activation, role, given=given, dtype=dtype, needs=needs))


def compile_function(text: str) -> Any:
    """``text``, one device function, jitted. Triton reads the text of what it compiles: linecache hands it out."""
    from . import device

    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    filename = f"<fusedlayers generated {digest}>"
    linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
    scope: dict[str, Any] = {**device.FUNCTIONS, "tl": tl, "__name__": __name__}
    if "_erfc(" in text and "def _erfc" not in text:
        scope["_erfc"] = _erfc()
    exec(compile(text, filename, "exec"), scope)
    (name,) = (line.split("(")[0].removeprefix("def ") for line in text.splitlines() if line.startswith("def "))
    return triton.jit(scope[name])


@functools.cache
def _erfc() -> Any:
    return compile_function(erfc_source())


@functools.cache
@in_clean_state
def erfc_source() -> str:
    """erfc on float32, in two pieces.

    Far from 0 as ``t exp(-x^2) P(t)`` with ``t = 1 / (1 + x/2)``: erfcx(x) / t, which P approximates, varies little
    over all x in this variable, so that the relative error stays at rounding level until erfc underflows. Negative x by
    ``erfc(-x) = 2 - erfc(x)``. Near 0 as ``(1 - x) - x Q(x^2)``, which is rounded little more than once. That is where
    GELU has its minimum, and an output there has to tell the derivative, whose largest error was twice that of torch's
    operations with P alone.
    """
    far, near = erfc_pieces(_ERFC_DEGREES)
    return "\n".join(
        [
            "def _erfc(x):",
            "    a = tl.abs(x)",
            "    t = 1.0 / (1.0 + 0.5 * a)",
            *_horner("p", far, "t"),
            "    e = t * tl.exp(-a * a) * p",
            *_horner("q", near, "(a * a)"),
            f"    return tl.where(a < {_ERFC_NEAR}, (1.0 - x) - x * q, tl.where(x < 0, 2.0 - e, e))",
            "",
        ]
    )


def erfc_pieces(degrees: tuple[int, int]) -> tuple[Piece, Piece]:
    """P and Q."""

    def ratio(t: Tensor) -> Tensor:
        return torch.special.erfcx(2 / t - 2) / t

    def quotient(square: Tensor) -> Tensor:
        x = torch.sqrt(square)
        return torch.special.erf(x) / x - 1

    # t down to where erfc(x) has left float32's range.
    far = interpolate(ratio, 1 / (1 + 10.1 / 2), 1 / (1 + _ERFC_NEAR / 2), degrees[0])
    return far, interpolate(quotient, 0.0, _ERFC_NEAR**2, degrees[1])


#: Where the pieces meet, and the first degrees at which the errors of P (relative) and Q are below a fifth of float32's
#: rounding, so that they no longer show (``test_codegen``).
_ERFC_NEAR = 0.75
_ERFC_DEGREES = (8, 5)


def _horner(name: str, piece: Piece, variable: str) -> list[str]:
    lines = [f"    s = {variable} * {piece.scale} + {piece.offset}", f"    {name} = {piece.coefficients[-1]}"]
    return lines + [f"    {name} = {name} * s + {c}" for c in piece.coefficients[-2::-1]]
