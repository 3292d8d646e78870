"""Wrong usage of a command that prints a report: a line on stderr, and exit code 2."""

import contextlib
import re
import sys
from collections.abc import Iterator

#: How the messages of the functions behind the commands begin.
_FUNCTION = re.compile(r"\A(explain|memory_report|fuse): ")


@contextlib.contextmanager
def refusals(command: str, *errors: type[Exception], only_ours: bool = False) -> Iterator[None]:
    """On one of these errors, end as argparse does: the reason goes to stderr, and the exit code is 2.

    ``only_ours``: only where the message begins with the name of a function of this library. All others come from the
    user's code, which runs there too, and keep their traceback.
    """
    try:
        yield
    except errors as error:
        if only_ours and not _FUNCTION.match(str(error)):
            raise
        print(f"fusedlayers {command}: {_FUNCTION.sub('', str(error))}", file=sys.stderr)
        raise SystemExit(2) from error
