"""What the command line calls ``module:attribute``."""

import importlib
import sys
from pathlib import Path


def import_object(name: str) -> object:
    """The object that ``module:attribute`` names; modules of the working directory are found.

    Raises:
        ValueError: the module has no such attribute; the message lists what it has.
        ImportError: there is no such module.
    """
    module_name, _, attribute = name.partition(":")
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # as `python -m` has it
    found: object = importlib.import_module(module_name)
    for part in attribute.split("."):
        if not hasattr(found, part):
            known = [key for key in dir(found) if not key.startswith("_") and callable(getattr(found, key, None))]
            raise ValueError(f"{module_name!r} has no {attribute!r}; it has: {', '.join(known)}")
        found = getattr(found, part)
    return found
