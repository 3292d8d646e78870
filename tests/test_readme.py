"""What the documents say is run: code, commands, examples. (``test_bench_tables`` holds their tables.)"""

import inspect
import json
import os
import re
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from settings import ROOT

import fusedlayers as fl
from fusedlayers.calls import sizes
from fusedlayers.utils import step

RESULTS = ROOT / "bench" / "results"
ACCURACY = RESULTS / "amd-epyc-avx512-2-threads" / "accuracy.json"
README = (ROOT / "README.md").read_text(encoding="utf-8")
MEASUREMENTS = (ROOT / "bench" / "README.md").read_text(encoding="utf-8")
DOCUMENTS = ("README.md", "examples/README.md", "bench/README.md")
COMMANDS = re.findall(r"^(pip install .*)$", README, re.MULTILINE)


def words(text):
    """Without decimals: how a layer is multiplied, and the peak with it, depends on the processor."""
    return re.sub(r"[+-]?\d+\.\d+", "", text).split()


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # of the compiler
@pytest.mark.parametrize("document", DOCUMENTS[:2])
def test_code_blocks_run_in_order(document, capsys, monkeypatch):
    text = (ROOT / document).read_text(encoding="utf-8")
    # Code, and what it prints where that is shown below it.
    blocks = re.findall(r"^```python\n(.*?)^```(?:\n+```text\n(.*?)^```)?", text, re.DOTALL | re.MULTILINE)
    assert sum(bool(output) for _, output in blocks) == text.count("```text\n")
    monkeypatch.setattr(step, "ROUNDS", 1)  # what is measured is not looked at
    namespace: dict[str, object] = {}
    for number, (block, output) in enumerate(blocks):
        exec(compile(block, f"{document}, block {number}", "exec"), namespace)
        shown = [line.removeprefix("# ") for line in block.splitlines() if line.startswith("# FusedDenseAct(")]
        printed = capsys.readouterr().out
        assert all(line in printed for line in shown)
        assert not output or words(printed) == words(output)
    assert len(blocks) >= 3


def test_the_readme_is_read_in_two_minutes():
    assert README.count("\n") <= 110


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document):
    path = ROOT / document
    for target in re.findall(r"\]\(([^)]+)\)", path.read_text(encoding="utf-8")):
        file, _, anchor = target.partition("#")
        linked = (path.parent / file).resolve() if file else path
        assert linked.exists(), target
        if anchor:
            titles = re.findall(r"^#+ (.+)$", linked.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in [re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles], target


def test_every_example_is_listed():
    listed = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    names = {path.name for path in (ROOT / "examples").iterdir() if path.suffix in (".py", ".ipynb")}
    assert names and all(f"]({name})" in listed for name in names)


def test_every_name_is_listed():
    listed = (ROOT / "examples" / "README.md").read_text(encoding="utf-8").partition("\n## All names\n")[2]
    names = re.findall(r"`(\w+)`", listed)
    assert sorted(names) == sorted(fl.__all__)


def test_ci_runs_the_readmes_commands():
    assert len(COMMANDS) == 2 and {*COMMANDS} <= {*(ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()}


def block_example_halves_what_is_saved(out):
    buffers = {line.split()[0]: float(line.split()[1]) for line in out.splitlines()}
    assert buffers["eager"] - buffers["function"] == pytest.approx(1, abs=0.01)
    assert buffers["eager"] - buffers["module"] == pytest.approx(1, abs=0.01)


def custom_example_trains_alike_and_keeps_no_more(out):
    rows = [line.replace(" to ", " ").split() for line in out.splitlines()[2:8]]
    assert [row[0] for row in rows[::5]] == ["relu", "fractional"]
    for name, *cells in rows:
        eager_mib, fused_mib, eager_first, eager_last, fused_first, fused_last = map(float, cells)
        assert fused_mib <= eager_mib, name
        assert eager_first == pytest.approx(fused_first, abs=2e-3), name
        # Rounding decides on which side of a jump at zero an input lies: standard deviation 0.017 after twenty steps.
        assert eager_last == pytest.approx(fused_last, abs=0.1 if name.startswith("fractional") else 2e-3), name
        assert eager_last < eager_first, name


def digits_are_told_apart_and_half_is_saved(out):
    rows = dict(line.replace("%", "").split(maxsplit=1) for line in out.splitlines()[1:])
    assert list(rows) == ["PyTorch", "fusedlayers"]
    (eager, _, eager_kib), (fused, _, fused_kib) = (map(float, cells.split()) for cells in rows.values())
    assert min(eager, fused) > 97
    assert 2 * fused_kib == eager_kib


def fused_bert_learns_under_the_trainer(out):
    before, after = map(float, re.search(r"accuracy: ([\d.]+)% before, ([\d.]+)% after", out).groups())
    assert before < 60 and after > 95


def resnets_learn_alike_in_less_memory(out):
    rows = re.findall(r"^(\S.*?)\s{2,}(\d+)\s+[\d.]+\s+([\d.]+) to ([\d.]+)$", out, re.MULTILINE)
    peaks = {name: int(peak) for name, peak, _, _ in rows}
    assert list(peaks) == ["nn.Sequential", "sublinear", "sublinear, cheap"]
    assert peaks["sublinear"] < peaks["sublinear, cheap"] < peaks["nn.Sequential"]
    (_, _, first, last), *others = rows
    assert all(row[2:] == (first, last) for row in others)  # to the last digit


def an_invertible_net_learns_what_a_plain_one_learns(out):
    kept = [tuple(map(float, pair)) for pair in re.findall(r"invertible (\d+)\s+plain (\d+)", out)]
    assert len(kept) == 3 and len({invertible for invertible, _ in kept}) == 1
    assert kept[-1][1] > 10 * kept[0][1]
    (plain, plain_loss), (invertible, loss) = re.findall(r"([\d.]+)%\s+([\d.]+)", out)
    assert float(invertible) == pytest.approx(float(plain), abs=2) and float(plain) > 70
    assert float(loss) == pytest.approx(float(plain_loss), abs=0.05)


def trainers_learn_alike(out):
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", out)]
    assert len(losses) >= 2 and max(losses) < 0.8 and max(losses) - min(losses) < 0.05


def fitted_models_learn_alike_within_budgets(out):
    losses = re.findall(r"losses [a-z ]+: +([\d.]+) to ([\d.]+)", out)
    assert len(losses) == 4
    for as_it_is, within in (losses[:2], losses[2:]):
        assert within == as_it_is  # to the last digit
    assert out.count("this plan, measured") == 2 and out.count("at most") == 2


EXAMPLES = {
    "fit_budget": fitted_models_learn_alike_within_budgets,
    "deep_resnet": resnets_learn_alike_in_less_memory,
    "revnet": an_invertible_net_learns_what_a_plain_one_learns,
    "custom_activation": custom_example_trains_alike_and_keeps_no_more,
    "finetune_bert": fused_bert_learns_under_the_trainer,
    "mlp_block": block_example_halves_what_is_saved,
    "train_digits": digits_are_told_apart_and_half_is_saved,
    "trainers": trainers_learn_alike,
}

#: What needs fewer steps, or smaller images, to show enough.
SHORTER = {
    "deep_resnet": ["--depth", "50", "--images", "4", "--steps", "1"],
    "finetune_bert": ["--steps", "60"],
    "revnet": ["--epochs", "2"],
    "train_digits": ["--epochs", "6"],
    "trainers": ["--epochs", "2"],
}


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.stem)
def test_examples_run(path):
    # One thread, as conftest.py has it: on busy cores two that wait for each other took 168 s where one takes 6.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "error", path, *SHORTER.get(path.stem, [])]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    EXAMPLES[path.stem](done.stdout)


def test_errors_of_derivatives_are_what_was_measured() -> None:
    cases = json.loads(ACCURACY.read_text(encoding="utf-8"))["cases"]
    folded = [c for c in cases if c["dtype"] == "float32" and c["activation"] in ("gelu", "gelu_tanh", "silu", "mish")]
    assert len(folded) == 4
    pattern = r"derivatives of GELU, SiLU and Mish err by (\S+) \(relative rms; by (\S+) at most\), PyTorch's by (\S+);"
    (said,) = re.findall(pattern, README)
    measured = ("fusedlayers", "derivative_rms"), ("fusedlayers", "derivative_max"), ("eager", "derivative_rms")
    largest = [max(case[where][key] for case in folded) for where, key in measured]
    assert [f"{error:.0e}" for error in largest] == [f"{float(text):.0e}" for text in said]


def test_default_activations_are_as_it_says() -> None:
    found: dict[str, set[str]] = {}
    for name in fl.__all__:
        function = getattr(fl, name)
        parameter = inspect.signature(function).parameters.get("activation") if callable(function) else None
        if parameter is not None and isinstance(parameter.default, str) and not name.startswith("Invertible"):
            kind = re.search(r"Conv|conv|[gG]ated", name)
            found.setdefault(kind[0].lower() if kind else "", set()).add(parameter.default)
    said = "The default is GELU, for convolutions ReLU, for gates SiLU."
    assert said in " ".join(README.split())
    assert found == {"": {"gelu"}, "conv": {"relu"}, "gated": {"silu"}}


def test_what_is_small_is_as_it_says() -> None:
    words = " ".join(MEASUREMENTS.split())
    ((mib, kib),) = re.findall(r"and below ([\d.]+) MiB on an H100 \((\d+) KiB for each multiprocessor", words)
    assert float(mib) == int(kib) * 132 / 1024
    (small,) = re.findall(r"results below (\d+) KiB on CPUs", words)
    constants = Path(sizes.__file__).read_text(encoding="utf-8")  # tests change them in the module
    for line in (f"GPU_BYTES = {kib} << 10", f"SMALL_BYTES = {small} << 10"):
        assert f"\n{line}\n" in constants


def test_narrow_layers_take_as_long_as_was_measured() -> None:
    (path,) = RESULTS.glob("*-threads/overhead.json")
    rows = json.loads(path.read_text(encoding="utf-8"))["cases"]
    ratios = [row["variants"]["fusedlayers"]["forward_backward"]["ratio"] for row in rows if row["elements"] >= 1 << 17]
    (said,) = re.findall(r"narrow layers take longer, a CPU up to (\S+)x the time\.", " ".join(MEASUREMENTS.split()))
    assert round(max(ratios), 1) == float(said)


def test_models_save_as_much_less_as_was_measured() -> None:
    runs = [json.loads(path.read_text(encoding="utf-8")) for path in RESULTS.glob("*-threads/models.json")]
    less: dict[str, list[float]] = {"float32": [], "autocast": []}
    times: dict[str, list[float]] = {"float32": [], "autocast": []}
    peaks = []
    for row in (row for run in runs for row in run["cases"]):
        eager, ours = (row["variants"][name] for name in ("eager", "fusedlayers"))
        less[row["dtype"]].append(100 * (1 - ours["saved_bytes"] / eager["saved_bytes"]))
        times[row["dtype"]].append(ours["forward_backward"]["ratio"])
        peaks.append(100 * (1 - ours["peak_bytes"] / eager["peak_bytes"]))
    assert "Twelve models" in README and [len(run["cases"]) for run in runs] == [24, 24]
    words = " ".join(README.split())
    (said,) = re.findall(r"save (\d+) to (\d+) % less in float32, and (\d+) to (\d+) % less under autocast;", words)
    assert [*map(int, said)] == [round(end(found)) for found in less.values() for end in (min, max)]
    (said,) = re.findall(r"peak of a step falls by (\d+) to (\d+) %", words)
    assert [*map(int, said)] == [round(end(peaks)) for end in (min, max)]
    (said,) = re.findall(r"take (\S+) to (\S+) and (\S+) to (\S+) times as long on two machines,", words)
    assert [*map(float, said)] == [round(end(found), 2) for found in times.values() for end in (min, max)]


def test_architectures_are_as_many_as_were_compared() -> None:
    (path,) = RESULTS.glob("*-threads/architectures.json")
    result = json.loads(path.read_text(encoding="utf-8"))
    rows = [row for row in result["cases"] if "same" in row]
    sizes = [[now / before for before, now in row["saved_bytes"].values()] for row in rows]
    assert result["not_run"] == [] and all(all(row["same"].values()) for row in rows) and max(map(max, sizes)) <= 1
    medians = " and ".join(f"{statistics.median(of):.2f}".lstrip("0") for of in zip(*sizes, strict=True))
    said = f"All {len(rows)} architectures of transformers that train at a small size here (of {len(result['cases'])};"
    assert said in README and f"save {medians} of PyTorch's bytes (medians)" in README


def test_fit_takes_as_long_as_was_measured() -> None:
    (path,) = RESULTS.glob("*-threads/fit.json")
    budgets = [
        budget["variants"] for row in json.loads(path.read_text(encoding="utf-8"))["cases"] for budget in row["budgets"]
    ]
    pairs = [[each[name].get("forward_backward") for name in ("fit", "checkpoint")] for each in budgets]
    found = [ours["ratio"] / theirs["ratio"] for ours, theirs in pairs if theirs]
    said = f"{min(found):.2f} to {max(found):.2f} times"
    assert said in README and said in " ".join(MEASUREMENTS.split())


def test_others_were_measured_when_it_says() -> None:
    runs = [json.loads(path.read_text(encoding="utf-8")) for path in RESULTS.glob("*/peers.json")]
    of_kind = {run["device"]["kind"]: run for run in runs}
    words = " ".join(README.split())
    cuda, cpu = of_kind["cuda"], of_kind["cpu"]
    assert f"Liger ({cuda['versions']['liger-kernel']}, measured on {cuda['date']})" in words
    assert f"optiacts (measured on {cpu['date']})" in words
    assert any("forward_backward" in row["variants"]["optiacts"] for row in cpu["cases"])
    assert f"(torch {cuda['versions']['torch'].partition('+')[0]}, {cuda['date']})" in words


def test_edits_that_autograd_does_not_count_go_unnoticed() -> None:
    assert "edits by `.data` or NumPy go unnoticed, and gradients are wrong." in " ".join(README.split())
    gradients = []
    for edit in (lambda y: None, lambda y: y.data.add_(1.0), lambda y: y.detach().numpy().__iadd__(1.0)):
        x = torch.linspace(-3, 3, 1 << 18).requires_grad_()
        y = fl.gelu(x * 1.0)
        edit(y)
        y.sum().backward()
        assert x.grad is not None
        gradients.append(x.grad)
    for wrong in gradients[1:]:
        assert (wrong - gradients[0]).abs().max() > 0.1
