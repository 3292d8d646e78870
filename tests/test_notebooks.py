"""The notebooks are valid, hold no outputs, and run; what their text promises is what their cells show."""

import os
import re
import subprocess
import sys
from pathlib import Path

import notebook
import pytest
from settings import ROOT

NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_valid_and_hold_no_outputs(path: Path) -> None:
    found = notebook.read(path)
    assert found["nbformat"] == 4 and found["nbformat_minor"] >= 5  # from which on cells have ids
    assert set(found) == {"cells", "metadata", "nbformat", "nbformat_minor"}
    assert set(found["metadata"]) == {"kernelspec", "language_info"}
    for cell in found["cells"]:
        fields = {"cell_type", "id", "metadata", "source"}
        if cell["cell_type"] == "code":
            fields |= {"execution_count", "outputs"}
            assert cell["outputs"] == [] and cell["execution_count"] is None
        assert cell["cell_type"] in ("code", "markdown") and set(cell) == fields and cell["metadata"] == {}
        assert re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", cell["id"])
        assert cell["source"] and all(line.endswith("\n") for line in cell["source"][:-1])
    ids = [cell["id"] for cell in found["cells"]]
    assert len(set(ids)) == len(ids)


def test_my_model() -> None:
    pytest.importorskip("matplotlib")
    # One thread, as conftest.py has it.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "error", notebook.__file__, ROOT / "examples" / "my_model.ipynb"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    cells = dict(part.split("\n", 1) for part in done.stdout.split("--- ")[1:])
    assert all("<pre>" in cells[name] for name in ("before", "fuse", "compare", "fit", "unfuse"))
    assert "<img>" in cells["before"]
    plain, fused, unfused = (
        float(re.findall(r"([\d.]+)   100\.0  saved for backward", cells[name])[0])
        for name in ("before", "compare", "unfuse")
    )
    assert fused < 0.8 * plain and unfused == plain
    assert "this plan, measured" in cells["fit"]
    losses = {name: values for name, *values in map(str.split, cells["train"].splitlines())}
    assert losses["plain"] == losses["fitted"] and float(losses["plain"][-1]) < float(losses["plain"][0])
