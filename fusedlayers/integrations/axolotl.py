"""``FusePlugin`` for axolotl, whose configuration has ``plugins: [fusedlayers.integrations.axolotl.FusePlugin]``."""

from __future__ import annotations

from typing import Any

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel

from .transformers import FuseCallback


class FuseArguments(BaseModel):
    """The plugin's keys of the configuration: the options of ``FusedTraining``."""

    fuse_report: bool = False
    fuse_fit_budget: int | float | str | None = None


class FusePlugin(BasePlugin):
    """Fuses the model while axolotl trains it, with ``FuseCallback``."""

    def get_input_args(self) -> str:
        return f"{__name__}.{FuseArguments.__name__}"

    def add_callbacks_post_trainer(self, cfg: Any, trainer: Any) -> list[FuseCallback]:
        given = {name: cfg.get(name) for name in FuseArguments.model_fields}
        options = {name.removeprefix("fuse_"): value for name, value in given.items() if value is not None}
        return [FuseCallback(**options)]
