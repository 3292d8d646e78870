"""Activations printed as Triton device functions.

Idea: the kernels are the same for all activations: they take ``FORWARD`` and ``GRADIENT``, jitted functions of float32
blocks, as compile-time arguments. These are printed here from the torch function that everything else uses, traced to
pointwise operations (``activations/tracing.py``), one line each. The other tensors that the function reads, its
operands, lie in one buffer (``pack``); the printed functions load them, so that all kernels take the same arguments.

Functions that Triton lacks are written in its own operations in ``device.py``. Their polynomials are made when they are
first needed (``fitted.py``).

Cost: one trace and one compilation for each activation, role and dtype. Limits: pointwise functions of the operations
in ``_TEMPLATES``; all others are left to torch operations, and a warning says so.
"""

from __future__ import annotations

import functools
import hashlib
import linecache
import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...activations import Activation
from ...activations.tracing import NotPointwise, Trace, TracedOperation, trace
from . import device, fitted

#: How each operation is written; {0}, {1}, ... are its arguments.
_TEMPLATES = {
    "abs": "tl.abs({0})",
    "add": "{0} + {1}",
    "asinh": "_asinh({0})",
    "atan": "_atan({0}, _ATAN)",
    "bitwise_and": "{0} & {1}",
    "bitwise_left_shift": "{0} << {1}",
    "bitwise_not": "~{0}",
    "bitwise_or": "{0} | {1}",
    "bitwise_right_shift": "{0} >> {1}",
    "bitwise_xor": "{0} ^ {1}",
    "ceil": "tl.ceil({0})",
    "copysign": "_copysign({0}, {1})",
    "cos": "tl.cos({0})",
    "div": "{0} / {1}",
    "eq": "{0} == {1}",
    "erf": "tl.erf({0})",
    "erfc": "_erfc({0}, _ERFC_FAR, _ERFC_NEAR)",
    "exp": "tl.exp({0})",
    "exp2": "tl.exp2({0})",
    "expm1": "_expm1({0})",
    "floor": "tl.floor({0})",
    "ge": "{0} >= {1}",
    "gt": "{0} > {1}",
    "isinf": 'tl.abs({0}) == float("inf")',
    "isnan": "{0} != {0}",
    "le": "{0} <= {1}",
    "log": "tl.log({0})",
    "log10": "tl.log({0}) * 0.4342944819032518",
    "log1p": "_log1p({0})",
    "log2": "tl.log2({0})",
    "lt": "{0} < {1}",
    "maximum": "tl.maximum({0}, {1}, tl.PropagateNan.ALL)",
    "minimum": "tl.minimum({0}, {1}, tl.PropagateNan.ALL)",
    "mul": "{0} * {1}",
    "ne": "{0} != {1}",
    "neg": "{0} * -1.0",  # Triton 3.6 subtracts from 0, whose result at 0 is 0 and not -0
    "pow": "_pow({0}, {1}, _LOG, _EXP2)",
    "reciprocal": "1.0 / {0}",
    "round": "_round({0})",
    "rsqrt": "tl.rsqrt({0})",
    "sigmoid": "tl.sigmoid({0})",
    "sign": "_sign({0})",
    "signbit": "_signbit({0})",
    "sin": "tl.sin({0})",
    "softshrink_backward": "tl.where(tl.abs({1}) <= {2}, 0.0, {0})",
    "sqrt": "tl.sqrt({0})",
    "sub": "{0} - {1}",
    "tanh": "_tanh({0})",
    "where": "tl.where({0}, {1}, {2})",
}

#: Operations that are shorter where the result is rounded to 16 bits.
_COARSE = {
    "erfc_in_bfloat16": "_erfc_coarse({0}, _LOG2_ERFC_BFLOAT16)",
    "erfc_in_float16": "_erfc_coarse({0}, _LOG2_ERFC_FLOAT16)",
    **dict.fromkeys(("tanh_in_bfloat16", "tanh_in_float16"), "_tanh_coarse({0})"),
}

#: Powers that are shorter otherwise, by the exponent.
_POWERS: dict[Any, str] = {
    -2: "1.0 / ({0} * {0})",
    -1: "1.0 / {0}",
    -0.5: "tl.rsqrt({0})",
    0.5: "tl.sqrt({0})",
    2: "{0} * {0}",
    3: "{0} * {0} * {0}",
}

#: What Triton does with integers as torch does.
_OF_INTEGERS = {
    "abs", "add", "bitwise_and", "bitwise_left_shift", "bitwise_not", "bitwise_or", "bitwise_right_shift",
    "bitwise_xor", "maximum", "minimum", "mul", "neg", "sub", "where",
}  # fmt: skip

_TYPES = {
    torch.float32: "tl.float32",
    torch.float16: "tl.float16",
    torch.bfloat16: "tl.bfloat16",
    torch.int64: "tl.int64",
    torch.int32: "tl.int32",
    torch.int16: "tl.int16",
    torch.int8: "tl.int8",
    torch.uint8: "tl.uint8",
    torch.bool: "tl.int1",
}

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
    return _compile(activation, role, given, dtype, needs)


def coarse(pointwise: Trace, dtype: torch.dtype) -> Trace:
    """The same in operations that are as accurate as results in ``dtype``."""
    if dtype not in (torch.bfloat16, torch.float16):
        return pointwise
    suffix = str(dtype).replace("torch.", "_in_")
    operations = (
        replace(o, op=o.op + suffix) if o.op + suffix in _COARSE and o.dtype is torch.float32 else o
        for o in pointwise.operations
    )
    return replace(pointwise, operations=tuple(operations))


@functools.lru_cache(4096)
def computes(activation: Activation) -> bool:
    """Whether the activation can be printed: of the table all can, of users' functions those of known operations."""
    if not activation.is_traced:
        return True
    try:
        device_function(activation, "forward", given="input", dtype=torch.float32)
        needs = (True,) * len(activation.operand_dims)
        for given in ("input",) if activation.told is None else ("input", "output"):
            device_function(activation, "gradient", given=given, dtype=torch.float32, needs=needs)
    except NotPointwise as reason:
        _log.warning("fusedlayers: %s is left to torch operations on GPUs because %s", activation.name, reason)
        return False
    return True


def source(activation: Activation, role: Role, *, given: str, dtype: torch.dtype, needs: tuple[bool, ...] = ()) -> str:
    """The text of ``device_function``."""
    operands = {f"p{i}": dim is not None for i, dim in enumerate(activation.operand_dims)}
    function: Callable[..., Tensor | tuple[Tensor, ...]]
    if role == "forward":
        inputs = ["z"]
        is_encoded = given == "output" and activation.is_folded
        function = (lambda z: activation.encoded(z, dtype)) if is_encoded else activation.function
    elif given == "output" and not operands:
        inputs = ["dy", "y"]
        function = lambda dy, y: (dy * activation.derivative_given_output(y, dtype),)
    else:
        inputs = ["dy", "z" if given == "input" else "y"]
        function = activation.gradient_function(needs, given)
    name = f"{re.sub('[^A-Za-z0-9_]', '_', activation.name).strip('_')}_{role}"
    traced = trace(function, [*inputs, *operands])
    # Not of a user's function, which may subtract it from a number next to it; nor of a derivative from z, which may be
    # next to 0, where more is asked of it.
    if role == "forward" and activation.definition is not None and not activation.is_traced:
        traced = coarse(traced, dtype)
    return print_function(name, traced, operands, as_tuple=role == "gradient")


def pack(operands: Sequence[Tensor], like: Tensor) -> Tensor:
    """All operands in one float32 buffer: first those with a number for each channel, then single numbers."""
    if not operands:
        return like  # a pointer that is not read
    ordered = sorted(operands, key=lambda p: p.numel() == 1)
    return torch.cat([p.detach().reshape(-1).to(torch.float32) for p in ordered])


def print_function(
    name: str, pointwise: Trace, operands: Mapping[str, bool] = MappingProxyType({}), *, as_tuple: bool = False
) -> str:
    """``pointwise`` as the text of a Triton device function. Those of its inputs that are ``operands`` are loaded: from
    the channel's place where there is a number for each channel, else from the end of the buffer."""
    blocks = [name for name in pointwise.inputs if name not in operands]
    lines = [f"def {name}({', '.join([*blocks, *_POINTERS])}):"]
    used = {*pointwise.outputs, *(a for operation in pointwise.operations for a in operation.arguments)}
    lines += _loads({name: kind for name, kind in operands.items() if name in used}, operands)
    lines += [f"{operation.name} = {_expression(operation)}" for operation in pointwise.operations]
    results = [
        output
        if isinstance(output, str) and output not in operands
        else f"tl.full({blocks[0]}.shape, {_literal(output)}, tl.float32)"
        for output in pointwise.outputs
    ]
    returned = f"({', '.join(results)},)" if as_tuple else results[0]
    return "\n    ".join([*lines, f"return {returned}"]) + "\n"


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


def _expression(operation: TracedOperation) -> str:
    arguments = [_literal(a) for a in operation.arguments]
    if operation.op in ("cast", "bitcast"):
        if operation.dtype not in _TYPES:
            raise NotPointwise(f"{operation.op} to {operation.dtype} has no Triton counterpart here")
        if not isinstance(operation.arguments[0], str):
            return f"tl.full((), {arguments[0]}, {_TYPES[operation.dtype]})"
        bitcast = ", bitcast=True" if operation.op == "bitcast" else ""
        return f"{arguments[0]}.to({_TYPES[operation.dtype]}{bitcast})"
    template = _template(operation)
    if template.startswith("_"):  # their numbers are float32's
        arguments = [
            f"{a}.0" if type(given) is int else a for a, given in zip(arguments, operation.arguments, strict=True)
        ]
    return template.format(*arguments)


def _template(operation: TracedOperation) -> str:
    op, dtype = operation.op, operation.dtype
    template = _TEMPLATES.get(op) or _COARSE.get(op)
    if template is None:
        raise NotPointwise(f"{op} has no Triton counterpart here")
    if op == "pow" and dtype.is_floating_point:
        # As torch computes them.
        template = _POWERS.get(operation.arguments[1], template)
    if dtype is torch.bool:
        return {"add": "{0} | {1}", "mul": "{0} & {1}"}.get(op, template)
    if dtype.is_floating_point:
        return template
    if op not in _OF_INTEGERS:
        raise NotPointwise(f"{op} in {dtype} has no Triton counterpart here")
    return "-{0}" if op == "neg" else template


def _literal(argument: object) -> str:
    is_finite = not isinstance(argument, float) or math.isfinite(argument)
    return str(argument) if is_finite else f'float("{argument}")'


#: One for each activation, as long as a parameter that changes from step to step has not replaced it.
@functools.lru_cache(4096)
def _compile(activation: Activation, role: Role, given: str, dtype: torch.dtype, needs: tuple[bool, ...]) -> Any:
    return compile_function(source(activation, role, given=given, dtype=dtype, needs=needs))


@functools.lru_cache(4096)
def compile_function(text: str) -> Any:
    """``text``, one device function, jitted; dtypes of the same text share it. Triton reads the text of what it
    compiles, through linecache."""
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    filename = f"<fusedlayers generated {digest}>"
    linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
    scope: dict[str, Any] = {"tl": tl, "__name__": __name__}
    exec(compile(text, filename, "exec"), scope)
    scope.update(
        (used, device.FUNCTIONS.get(used) or _fitted(used)) for used in _OWN.findall(text) if used not in scope
    )
    (name,) = (line.split("(")[0].removeprefix("def ") for line in text.splitlines() if line.startswith("def "))
    return triton.jit(scope[name])


#: What printed functions call that is not Triton's.
_OWN = re.compile(r"(?<![\w.])_\w+")


@functools.cache
def _fitted(name: str) -> Any:
    return compile_function(fitted.polynomial_source(name))
