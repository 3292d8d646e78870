"""Dropout that keeps a bit for each element."""

from __future__ import annotations

from torch import Tensor, nn

from ..dropouts import dropout
from ..utils.torchscript import refuse_script


class Dropout(nn.Dropout):
    """An ``nn.Dropout`` that keeps a bit for each element, and none behind an activation of this package that keeps its
    output: see ``fusedlayers.dropout``.

    Args:
        p, inplace: as for ``nn.Dropout``.

    >>> import fusedlayers as fl
    >>> fl.Dropout(0.1)
    Dropout(p=0.1, inplace=False)
    """

    __prepare_scriptable__ = refuse_script

    def forward(self, input: Tensor) -> Tensor:
        return dropout(input, self.p, self.training, self.inplace)
