"""The base of all reports: their form in notebooks and files."""

from __future__ import annotations

import dataclasses
import html
from typing import TYPE_CHECKING, Any, NoReturn

from torch import nn

#: The reason given to users who write ``model = fuse(model, x)``.
_NO_MODEL = "it is a report, and no model. fuse and fit change the model itself; do not assign to it what they return"


class Report:
    """A dataclass whose ``str()`` is a table. A notebook shows the table, because it asks for ``_repr_html_``."""

    def to_dict(self) -> dict[str, Any]:
        """The report as plain values, for JSON."""
        report: Any = self
        return dataclasses.asdict(report)

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises: a report is not the model."""
        raise TypeError(f"a {type(self).__name__} cannot be called: {_NO_MODEL}")

    if not TYPE_CHECKING:  # to which every attribute would be one that it has

        def __getattr__(self, name: str) -> NoReturn:
            hint = f": {_NO_MODEL}" if name in dir(nn.Module) else ""
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{hint}")
