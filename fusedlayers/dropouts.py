"""Dropout that keeps a bit for each element, and none behind an activation that keeps its output."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from .execute import dropped


def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """``F.dropout`` that keeps a bit for each element, and not a number.

    It drops the numbers that ``F.dropout`` would with the same seed, and returns the same values. Behind an activation
    of this package that saved its output (``fusedlayers.gelu``, ``GELU()``, ``bias_act`` without a bias) both become
    one node, which keeps its own output and nothing else; the activation's is freed with its result. That result is
    then no part of the graph: hooks on it prevent this, and hooks that it gets afterwards see nothing. Like every saved
    output the dropout's must not be edited in place.

    Args:
        input: any shape and floating dtype.
        p: the probability with which elements become 0; the others are divided by ``1 - p``.
        training: whether anything is dropped.
        inplace: as for ``F.dropout``, which then computes it.

    Returns:
        a tensor like ``input``; ``input`` itself if nothing is dropped.

    Raises:
        TypeError, ValueError: as ``F.dropout``.

    Saved: the output behind an activation, else a bit for each element. Left to PyTorch, which saves a number for each
    element on CPUs and a byte on GPUs: inputs of less than 512 KiB (on GPUs 128 KiB for each multiprocessor), or with
    gaps in memory, p = 1, and all of it under ``torch.compile``, transforms and CUDA graphs.

    Source: Srivastava et al. 2014, "Dropout".

    >>> import torch, fusedlayers as fl
    >>> sorted(set(fl.dropout(torch.ones(1000), 0.5).tolist()))
    [0.0, 2.0]
    """
    is_ours = training and not inplace and isinstance(p, float) and 0 < p < 1
    return dropped(input, p) if is_ours else F.dropout(input, p, training, inplace)
