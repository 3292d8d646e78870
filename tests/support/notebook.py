"""Run a notebook's cells in order, as Jupyter would, and print what they show: ``python notebook.py FILE``."""

import ast
import html
import json
import re
import sys
from pathlib import Path
from typing import Any


def read(path: Path) -> dict[str, Any]:
    notebook: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return notebook


def run(path: Path) -> None:
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for cell in read(path)["cells"]:
        if cell["cell_type"] != "code":
            continue
        print(f"--- {cell['id']}")
        tree = ast.parse("".join(cell["source"]))
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, f"cell {cell['id']}", "exec"), namespace)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), f"cell {cell['id']}", "eval"), namespace)
            if value is not None:
                print(shown(value))


def shown(value: object) -> str:
    """What Jupyter shows of a value, as text."""
    if not hasattr(value, "_repr_html_"):
        return repr(value)
    return html.unescape(re.sub(r"<(/?)(pre|img)\b[^>]*>", r"<\1\2>", value._repr_html_()))


if __name__ == "__main__":
    run(Path(sys.argv[1]))
