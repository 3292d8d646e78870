"""``python -m bench readme``: the tables and the picture of the documents, written from the committed results."""

import argparse
import difflib
import re
from pathlib import Path

from . import RESULTS, ROOT
from .overview import picture
from .tables import TABLES

DOCUMENTS = (ROOT / "README.md", ROOT / "bench" / "README.md")
PICTURE = RESULTS / "overview.svg"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if something is out of date")
    parser.add_argument("--documents", type=Path, nargs="+", default=DOCUMENTS, metavar="FILE")
    parser.add_argument("--results", type=Path, default=RESULTS)


def main(options: argparse.Namespace) -> int:
    try:
        wanted = {path: fill(path.read_text(encoding="utf-8"), options.results) for path in options.documents}
    except ValueError as error:
        print(f"bench readme: {error}")
        return 1
    drawn = picture(options.results)
    if drawn is not None:
        wanted[options.results / PICTURE.name] = drawn
    return max([_bring_up_to_date(path, text, options) for path, text in wanted.items()])


def _bring_up_to_date(path: Path, new: str, options: argparse.Namespace) -> int:
    old = path.read_text(encoding="utf-8") if path.exists() else ""
    if new == old:
        print(f"{path} is up to date")
        return 0
    if options.check:
        print(f"{path} differs from {options.results}; run `python -m bench readme` and commit the result:")
        lines = difflib.unified_diff(old.splitlines(), new.splitlines(), path.name, "generated", lineterm="", n=1)
        print("\n".join(lines))
        return 1
    path.write_text(new, encoding="utf-8")
    print(f"wrote {path}")
    return 0


def fill(text: str, results: Path) -> str:
    """Return ``text`` with what stands between each pair of markers replaced by the table of that name."""
    found = re.findall(r"<!-- (/?)bench:(\w+) -->", text)
    names = [name for closing, name in found if not closing]
    if not names or found != [(closing, name) for name in names for closing in ("", "/")]:
        raise ValueError("there must be `<!-- bench:NAME -->`, each with its `<!-- /bench:NAME -->` behind it, once")
    for name in names:
        if name not in TABLES:
            raise ValueError(f"no table is called {name!r}; there are {sorted(TABLES)}")
        start, end = f"<!-- bench:{name} -->", f"<!-- /bench:{name} -->"
        head, rest = text.split(start)
        text = f"{head}{start}\n{TABLES[name](results)}\n{end}{rest.split(end)[1]}"
    return text
