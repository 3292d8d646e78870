"""``register`` gives ms-swift's trainers the callback ``fuse``."""

from __future__ import annotations

from typing import Any

from swift.callbacks import callbacks_map

from .transformers import FuseCallback


def register(name: str = "fuse", **options: Any) -> None:
    """Let ``--callbacks fuse`` fuse the model while it is trained.

    A file, say ``plugin.py``, calls it: ``from fusedlayers.integrations.ms_swift import register; register()``. The
    command is ``swift sft --external_plugins plugin.py --callbacks fuse``, or another one that trains.

    Args:
        name: of the callback.
        options: ``report=False``, ``fit_budget=None``, as for ``FusedTraining``.

    Raises:
        TypeError, ValueError: as for ``FuseCallback``.
    """
    FuseCallback(**options)  # which checks them
    callbacks_map[name] = lambda args, trainer: FuseCallback(**options)
