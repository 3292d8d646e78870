"""What a call costs, counted in what does not depend on the machine."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import fusedlayers as fl

PACKAGE = str(Path(fl.__file__).parent) + os.sep


def entered(call: Callable[[], object]) -> list[str]:
    """The functions of the package that a call enters, in order; comprehensions and generators are functions too, and
    a generator is entered as often as it is asked for a value."""
    names: list[str] = []

    def note(frame: FrameType, event: str, _argument: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE):
            names.append(f"{Path(code.co_filename).relative_to(PACKAGE)}:{code.co_firstlineno} {code.co_qualname}")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
    return names
