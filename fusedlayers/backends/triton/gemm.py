"""Matmuls whose epilogue is the activation, or its derivative: the hidden buffer is written once and not read again.

* ``linear_act``: ``f(x w^T + b)``, the forward pass;
* ``linear_gradient``: the gradient of the pre-activations, ``(dy w) f'``, written over the saved tensors.

Idea: accumulators are float32 and are not rounded before the activation. The grid is persistent: as many programs as
the device has multiprocessors, which take the tiles in turn, in an order in which programs that run at the same time
share their operands in the L2 cache. The gradients of bias and operands are summed for each tile; ``sums.py`` adds
these partial sums in a fixed order. The copy engine fetches blocks of operands where the device has one (tensor
descriptors: Hopper, Blackwell); elsewhere they are loaded through pointers.

Cost: no pass over memory besides the matmul's own, and in float32 a transposed copy of w for backward on Hoppers and
Blackwells. What a gradient's epilogue reads is on its way to the L2 cache during the product. Limits: a vendor's matmul
may be faster by more than the pass costs, so ``dispatch.py`` chooses; rows that are no multiples of 16 bytes are
fetched through pointers, and are slow.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs
from triton.tools.tensor_descriptor import TensorDescriptor

from ...activations import Activation
from ..base import ActivationGradients, GradientRequest
from ..gpu_settings import margin
from .codegen import device_function, pack
from .dispatch import architecture
from .launch import cdiv, on
from .sums import Sum, each


@triton.jit
def _corner(tile, rows, columns, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr):
    """Where a tile begins. Tiles are counted down the rows within a strip of GROUP tiles, strip by strip."""
    tiles_m = tl.cdiv(rows, BLOCK_M)
    tiles_n = tl.cdiv(columns, BLOCK_N)
    strip = tile // (GROUP * tiles_n)
    height = tl.minimum(tiles_m - strip * GROUP, GROUP)
    place = tile % (GROUP * tiles_n)
    return (strip * GROUP + place % height) * BLOCK_M, (place // height) * BLOCK_N


@triton.jit
def _offsets(row, column, rows, columns, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, INDEX: tl.constexpr):
    r = row + tl.arange(0, HEIGHT)[:, None]
    c = column + tl.arange(0, WIDTH)[None, :]
    return r.to(INDEX) * columns + c, (r < rows) & (c < columns)


@triton.jit
def _load(
    matrix, row, column, rows, columns,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, DESCRIBED: tl.constexpr, INDEX: tl.constexpr,
):  # fmt: skip
    """A block of a matrix, with zeros outside of it."""
    if DESCRIBED:
        return matrix.load([row, column])
    else:
        offset, inside = _offsets(row, column, rows, columns, HEIGHT, WIDTH, INDEX)
        return tl.load(matrix + offset, mask=inside, other=0.0)


@triton.jit
def _store(
    matrix, row, column, rows, columns, block,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, DESCRIBED: tl.constexpr, INDEX: tl.constexpr,
):  # fmt: skip
    if DESCRIBED:
        matrix.store([row, column], block.to(matrix.dtype))
    else:
        offset, inside = _offsets(row, column, rows, columns, HEIGHT, WIDTH, INDEX)
        tl.store(matrix + offset, block.to(matrix.dtype.element_ty), mask=inside)


@triton.jit
def _prefetch(
    matrices, row, column, rows, columns, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, INDEX: tl.constexpr
):  # fmt: skip
    """Ask for a block of each matrix, for which nobody waits, to be brought to the L2 cache, by lines of 128 bytes: for
    as many as a block's rows are long, which leaves out the last of those that do not begin at a line."""
    LINE: tl.constexpr = 1024 // matrices[0].dtype.element_ty.primitive_bitwidth
    LINES: tl.constexpr = (WIDTH + LINE - 1) // LINE
    r = tl.minimum(row + tl.arange(0, HEIGHT), rows - 1)[:, None]
    c = tl.minimum(column + LINE * tl.arange(0, LINES), columns - 1)[None, :]
    offset = r.to(INDEX) * columns + c
    for i in tl.static_range(len(matrices)):
        # Assembly must have a result.
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [matrices[i] + offset],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def _multiply(
    a, b, m, n, rows, columns, inner,
    TRANSPOSED: tl.constexpr,  # whether b is (columns, inner), and not (inner, columns)
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr, DESCRIBED: tl.constexpr, INDEX: tl.constexpr,
):  # fmt: skip
    """The tile of ``a b`` that begins at row m and column n."""
    sum_ = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, inner, BLOCK_K):
        left = _load(a, m, k, rows, inner, BLOCK_M, BLOCK_K, DESCRIBED, INDEX)
        if TRANSPOSED:
            right = _load(b, n, k, columns, inner, BLOCK_N, BLOCK_K, DESCRIBED, INDEX).T
        else:
            right = _load(b, k, n, inner, columns, BLOCK_K, BLOCK_N, DESCRIBED, INDEX)
        sum_ = tl.dot(left, right, sum_, input_precision=PRECISION)
    return sum_


@triton.jit
def _halves(tile):
    """The left and the right half of a tile, which are in registers of the same threads."""
    pairs = tl.reshape(tile, (tile.shape[0], 2, tile.shape[1] // 2))
    return tl.split(tl.permute(pairs, (0, 2, 1)))


@triton.jit
def _strips(tile, CUTS: tl.constexpr):
    """A tile halved along its columns, CUTS times: an epilogue of one strip at a time needs fewer registers, and less
    shared memory."""
    strips = (tile,)
    for _ in tl.static_range(CUTS):
        halves = ()
        for i in tl.static_range(len(strips)):
            halves += _halves(strips[i])
        strips = halves  # type: ignore[assignment]  # tuples of any length
    return strips


@triton.jit(do_not_specialize=["rows"])
def linear_act_kernel(
    x, w, b_ptr, operand_ptr, y,
    rows, columns, inner,
    FORWARD: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, CUTS: tl.constexpr,
    PRECISION: tl.constexpr, DESCRIBED: tl.constexpr, INDEX: tl.constexpr, FLATTEN: tl.constexpr,
):  # fmt: skip
    """y = f(x w^T + b): (rows, inner), (columns, inner), (columns,) -> (rows, columns)."""
    WIDTH: tl.constexpr = BLOCK_N >> CUTS
    tiles = tl.cdiv(rows, BLOCK_M) * tl.cdiv(columns, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=FLATTEN):
        m, n = _corner(tile, rows, columns, BLOCK_M, BLOCK_N, GROUP)
        sum_ = _multiply(x, w, m, n, rows, columns, inner, True, BLOCK_M, BLOCK_N, BLOCK_K, PRECISION, DESCRIBED, INDEX)
        strips = _strips(sum_, CUTS)
        for i in tl.static_range(len(strips)):
            z = strips[i]
            column = n + i * WIDTH
            channel = (column + tl.arange(0, WIDTH))[None, :]
            if HAS_BIAS:
                z += tl.load(b_ptr + channel, mask=channel < columns, other=0.0).to(tl.float32)
            f = FORWARD(z, operand_ptr, channel, columns)
            _store(y, m, column, rows, columns, f, BLOCK_M, WIDTH, DESCRIBED, INDEX)


@triton.jit(do_not_specialize=["rows"])
def linear_gradient_kernel(
    dy, w, saved, up, operand_ptr, hidden, partial_ptr,
    saved_ptr, up_ptr,  # the same as saved and up: a descriptor does not tell where its matrix is
    rows, columns, inner,
    GRADIENT: tl.constexpr, FORWARD: tl.constexpr,
    HAS_UP: tl.constexpr, HAS_HIDDEN: tl.constexpr,
    SUMS: tl.constexpr,  # of which results of GRADIENT
    TRANSPOSED: tl.constexpr,  # whether w is (columns, inner)
    PREFETCH: tl.constexpr,  # whether what the epilogue reads is on its way during the product
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, CUTS: tl.constexpr,
    PRECISION: tl.constexpr, DESCRIBED: tl.constexpr, INDEX: tl.constexpr, FLATTEN: tl.constexpr,
):  # fmt: skip
    """dz = (dy w) f', (rows, inner), (inner, columns) -> (rows, columns), written over the saved tensor: f(z), or z.

    With a gate the hidden activation is f(z) up. Then dz = (dy w) up f', and (dy w) f(z), the gradient of up, is
    written over up. The hidden activation is written too if asked for, and so are the sums down each tile's rows.
    """
    WIDTH: tl.constexpr = BLOCK_N >> CUTS
    tiles = tl.cdiv(rows, BLOCK_M) * tl.cdiv(columns, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=FLATTEN):
        m, n = _corner(tile, rows, columns, BLOCK_M, BLOCK_N, GROUP)
        if PREFETCH:
            _prefetch((saved_ptr, up_ptr) if HAS_UP else (saved_ptr,), m, n, rows, columns, BLOCK_M, BLOCK_N, INDEX)
        sum_ = _multiply(
            dy, w, m, n, rows, columns, inner, TRANSPOSED, BLOCK_M, BLOCK_N, BLOCK_K, PRECISION, DESCRIBED, INDEX
        )
        strips = _strips(sum_, CUTS)
        for i in tl.static_range(len(strips)):
            d = strips[i]
            column = n + i * WIDTH
            channel = (column + tl.arange(0, WIDTH))[None, :]
            kept = _load(saved, m, column, rows, columns, BLOCK_M, WIDTH, DESCRIBED, INDEX).to(tl.float32)
            if HAS_UP:
                f = FORWARD(kept, operand_ptr, channel, columns)
                other = _load(up, m, column, rows, columns, BLOCK_M, WIDTH, DESCRIBED, INDEX).to(tl.float32)
                if HAS_HIDDEN:
                    _store(hidden, m, column, rows, columns, f * other, BLOCK_M, WIDTH, DESCRIBED, INDEX)
                _store(up, m, column, rows, columns, d * f, BLOCK_M, WIDTH, DESCRIBED, INDEX)
                d *= other
            elif HAS_HIDDEN:
                f = FORWARD(kept, operand_ptr, channel, columns)
                _store(hidden, m, column, rows, columns, f, BLOCK_M, WIDTH, DESCRIBED, INDEX)
            products = GRADIENT(d, kept, operand_ptr, channel, columns)
            _store(saved, m, column, rows, columns, products[0], BLOCK_M, WIDTH, DESCRIBED, INDEX)
            # Outside of the matrix the derivative may be infinite; its product with 0 would be NaN.
            row = m + tl.arange(0, BLOCK_M)[:, None]
            for j in tl.static_range(len(SUMS)):
                share = tl.sum(tl.where(row < rows, products[SUMS[j]], 0.0), 0)
                place = (j * tl.cdiv(rows, BLOCK_M) + m // BLOCK_M).to(INDEX) * columns
                within = column + tl.arange(0, WIDTH)
                tl.store(partial_ptr + place + within, share, mask=within < columns)


#: Tiles down the rows in a strip whose operands stay in the L2 cache.
GROUP = 8
#: How float32 is multiplied: on tensor cores, which layers ask for only where PyTorch may (``dispatch.py``). Tests set
#: "ieee", for exact products.
FLOAT32 = "tf32"


class Tiling(NamedTuple):
    """How a product is cut up, and compiled."""

    block_m: int
    block_n: int
    block_k: int
    #: How many times a tile is cut in two for the epilogue; once more where that writes several buffers.
    cuts: int
    warps: int
    stages: int
    #: Programs that fit on a multiprocessor: with two, one multiplies while the other is in its epilogue.
    programs: int = 1
    #: Whether operands are fetched by the copy engine.
    described: bool = False
    #: Whether the first blocks of a tile are fetched in the epilogue of the one before.
    flatten: bool = False
    #: Whether backward multiplies by a transposed copy of w. TF32 products of Hoppers and Blackwells read both matrices
    #: in shared memory along the inner dimension: of w itself each block would pass the registers, and nothing be
    #: fetched meanwhile.
    transposes: bool = False

    def __str__(self) -> str:
        return f"{self.block_m}x{self.block_n}x{self.block_k}, {self.warps} warps"

    def prefetches(self, *, gated: bool) -> bool:
        """Whether what the epilogue reads is on its way during the product, on NVIDIA's GPUs."""
        return not (gated and self.flatten and self.block_n > 128)  # where gelu's would spill registers on sm_90

    def constants(self, described: bool, dtype: torch.dtype, *, several: bool) -> dict[str, Any]:
        """Of both kernels; ``several`` is whether the epilogue writes several buffers."""
        return {
            "BLOCK_M": self.block_m,
            "BLOCK_N": self.block_n,
            "BLOCK_K": self.block_k,
            "GROUP": GROUP,
            "CUTS": self.cuts + several,
            # Of 16-bit operands AMD's compiler takes no other.
            "PRECISION": FLOAT32 if dtype is torch.float32 else "ieee",
            "DESCRIBED": described,
            "INDEX": tl.int32,
            "FLATTEN": self.flatten,
        }

    @property
    def options(self) -> dict[str, Any]:
        """The compiler's; FMAs as in the elementwise kernels."""
        return {"num_warps": self.warps, "num_stages": self.stages, "enable_fp_fusion": True}


#: By architecture (compute capability, or "cdna") and bytes of a number. None spills registers, which tests check.
#: Which is the fastest depends on the sizes, and is measured on request
#: (``tuning.py``).
TILINGS: dict[str, dict[int, tuple[Tiling, ...]]] = {
    "8": {
        2: (Tiling(128, 128, 64, 2, 8, 3), Tiling(128, 128, 32, 2, 8, 4)),
        4: (Tiling(128, 128, 32, 3, 8, 3),),
    },
    "9": {
        2: (
            Tiling(128, 256, 64, 2, 8, 3, described=True, flatten=True),
            # Where one program's epilogue hides behind the other's products, nothing need be fetched in it.
            Tiling(128, 128, 64, 2, 4, 3, programs=2, described=True),
        ),
        4: (Tiling(128, 128, 32, 2, 8, 3, described=True, flatten=True, transposes=True),),
    },
    "10": {
        2: (
            Tiling(128, 256, 64, 2, 8, 3, described=True),
            Tiling(128, 128, 64, 2, 4, 3, programs=2, described=True),
        ),
        4: (Tiling(128, 128, 32, 2, 4, 3, described=True, transposes=True),),
    },
    "cdna": {
        2: (Tiling(128, 128, 64, 2, 8, 2), Tiling(256, 128, 32, 2, 8, 2)),
        4: (Tiling(128, 128, 32, 2, 8, 2),),
    },
}
#: Consumer Blackwells (12) have tensor cores like Ada's.
_LIKE = {"12": "8"}


@functools.cache
def tilings(device: torch.device, itemsize: int) -> dict[str, Tiling]:
    """The tilings for a device, by name; none for GPUs without tensor cores for these types."""
    major = architecture(device)
    return {str(t): t for t in TILINGS.get(_LIKE.get(major, major), {}).get(itemsize, ())}


def linear_act(
    x: Tensor,
    w: Tensor,
    b: Tensor | None,
    activation: Activation,
    operands: Sequence[Tensor],
    *,
    encode: bool,
    tiling: Tiling,
) -> Tensor:
    """``activation(x w^T + b, *operands)``: (rows, in), (out, in), (out,) -> (rows, out), contiguous all."""
    rows, inner = x.shape
    y = x.new_empty(rows, w.shape[0])
    if y.numel() == 0:
        return y
    function = device_function(activation, "forward", given="output" if encode else "input", dtype=y.dtype)
    launch = _Launch(tiling, y, inner, (x, w, y), several=False)
    m, n, k, width = tiling.block_m, tiling.block_n, tiling.block_k, launch.width
    with on(y):
        linear_act_kernel[launch.grid](
            launch.block(x, m, k), launch.block(w, n, k), y if b is None else b.contiguous(), pack(operands, y),
            launch.block(y, m, width),
            rows, w.shape[0], inner, FORWARD=function, HAS_BIAS=b is not None, **launch.options,
        )  # fmt: skip
    return y


def linear_gradient(
    dy: Tensor,
    w: Tensor,
    parts: Sequence[Tensor],
    activation: Activation,
    operands: Sequence[Tensor],
    request: GradientRequest,
    *,
    hidden: bool,
    tiling: Tiling,
) -> ActivationGradients:
    """The gradients of the pre-activations, written over ``parts``: z, or f(z) if that was saved, and of a gated block
    the other factor; (rows, out), (out, hidden), (rows, hidden), contiguous all.
    """
    z, up = parts[0], parts[1] if len(parts) > 1 else None
    rows, columns = z.shape
    inner = w.shape[0]
    several = up is not None or hidden
    function = device_function(activation, "gradient", given=request.saved, dtype=z.dtype, needs=request.needs_operands)
    forward = device_function(activation, "forward", given="input", dtype=z.dtype) if several else None
    made = torch.empty_like(z) if hidden else None
    wanted = [Sum(True, z.dtype)] * request.needs_bias
    wanted += [Sum.of(p) for p, need in zip(operands, request.needs_operands, strict=True) if need]
    first = 0 if request.needs_bias else 1
    partial = z.new_empty((len(wanted), cdiv(rows, tiling.block_m), columns), dtype=torch.float32)
    if z.numel():
        launch = _Launch(tiling, z, inner, (dy, w, *parts), several=several)
        m, n, k, width = tiling.block_m, tiling.block_n, tiling.block_k, launch.width
        block = launch.block(z, m, width)
        w_block = launch.block(w.t().contiguous(), n, k) if tiling.transposes else launch.block(w, k, n)
        with on(z):
            linear_gradient_kernel[launch.grid](
                launch.block(dy, m, k), w_block, block,
                block if up is None else launch.block(up, m, width), pack(operands, z),
                block if made is None else launch.block(made, m, width), partial, z, z if up is None else up,
                rows, columns, inner, GRADIENT=function, FORWARD=forward,
                HAS_UP=up is not None, HAS_HIDDEN=hidden,
                SUMS=tuple(range(first, first + len(wanted))), TRANSPOSED=tiling.transposes,
                PREFETCH=_takes_assembly(z) and tiling.prefetches(gated=up is not None), **launch.options,
            )  # fmt: skip
            found = each(wanted, partial, columns, 1, columns)
    else:
        found = [z.new_zeros(columns if one.by_channel else 1, dtype=one.dtype) for one in wanted]
    for part in parts:
        torch.autograd.graph.increment_version(part)
    sums = iter(found)
    return ActivationGradients(
        made,
        next(sums) if request.needs_bias else None,
        [next(sums) if need else None for need in request.needs_operands],
    )


class _Launch:
    """The launch arguments that both kernels share."""

    def __init__(self, tiling: Tiling, out: Tensor, inner: int, matrices: Sequence[Tensor], *, several: bool) -> None:
        rows, columns = out.shape
        tiles = cdiv(rows, tiling.block_m) * cdiv(columns, tiling.block_n)
        self.grid = (min(tiles, tiling.programs * _processors(out.device)),)
        self.described = tiling.described and all(map(_can_be_described, matrices))
        self.options = tiling.constants(self.described, out.dtype, several=several) | tiling.options
        self.width = tiling.block_n >> self.options["CUTS"]
        # A block may reach past the end by its own rows before it is masked.
        largest = max(matrix.numel() for matrix in matrices) + 256 * max(columns, inner)
        self.options["INDEX"] = tl.int64 if largest >= 2**31 else tl.int32

    def block(self, matrix: Tensor, height: int, width: int) -> Any:
        return TensorDescriptor.from_tensor(matrix, [height, width]) if self.described else matrix


def _can_be_described(matrix: Tensor) -> bool:
    """Whether the copy engine can fetch its rows, which must begin at multiples of 16 bytes."""
    row_bytes = matrix.shape[1] * matrix.element_size()
    return matrix.numel() > 0 and matrix.data_ptr() % 16 == 0 and row_bytes % 16 == 0


def _takes_assembly(tensor: Tensor) -> bool:
    """Whether kernels for its device may hold NVIDIA's assembly."""
    return tensor.is_cuda and not (torch.version.hip or knobs.runtime.interpret)


@functools.cache
def _processors(device: torch.device) -> int:
    """Those that the programs of a matmul fill."""
    count = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
    return max(1, count - margin())
