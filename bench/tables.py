"""The tables of the documents, from result files: text in Markdown, and nothing that was typed."""

import json
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from . import shapes


def committed(results: Path, subject: str) -> list[dict[str, Any]]:
    """The runs of a benchmark that were committed, GPUs first."""
    runs = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(results.glob(f"*/{subject}.json"))]
    runs = [run for run in runs if not run.get("quick")]
    return sorted(runs, key=lambda run: (run["device"]["kind"] != "cuda", run["device"]["slug"]))


def measured_on(run: dict[str, Any]) -> str:
    count = run["threads"]
    threads = f", {count} thread{'s' * (count != 1)}" if run["device"]["kind"] == "cpu" else ""
    return f"{run['device']['name']}{threads}, torch {run['versions']['torch'].split('+')[0]}, {run['date']}:"


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]], *, texts: int = 1) -> str:
    """A table, whose columns but for the first ``texts`` hold numbers."""
    lines = [columns, ["---"] * texts + ["--:"] * (len(columns) - texts), *rows]
    head, rule, *body = (f"| {' | '.join(line)} |" for line in lines)
    return "\n".join((head, rule.replace(" ", ""), *body))


def _tables(results: Path, subject: str, table: Callable[[dict[str, Any]], str], most: int | None = None) -> str:
    """A table for each device with a committed run, or for the first of them."""
    runs = committed(results, subject)
    if not runs:
        return f"No result is committed yet; `python -m bench {subject.replace('_', '-')}` makes one."
    return "\n\n".join(f"{measured_on(run)}\n\n{table(run)}" for run in runs[:most])


# --- cells ------------------------------------------------------------------------------------------------------------


def _variants(row: dict[str, Any], *names: str) -> list[dict[str, Any]]:
    return [row["variants"].get(name, {}) for name in names]


def _mib(variant: dict[str, Any], what: str = "saved_bytes") -> str:
    return f"{variant[what] / 2**20:.1f}" if what in variant else "-"


def _time(variant: dict[str, Any]) -> str:
    if "forward_backward" not in variant:
        return "-"
    milliseconds = variant["forward_backward"]["median_us"] / 1e3
    return f"{milliseconds:.3g} ms" if milliseconds < 999.5 else f"{milliseconds / 1e3:.3g} s"


def _ratio(variant: dict[str, Any], mode: str = "forward_backward") -> str:
    return f"{variant[mode]['ratio']:.2f}x" if mode in variant else "-"


def _speed(variant: dict[str, Any]) -> str:
    return f"{1 / variant['forward_backward']['ratio']:.2f}x" if "forward_backward" in variant else "-"


def _change(variant: dict[str, Any], eager: dict[str, Any], what: str) -> str:
    return f"{100 * (variant[what] - eager[what]) / eager[what]:+.1f} %" if what in variant else "-"


def _by(sizes: Iterable[int]) -> str:
    return " x ".join(map(str, sizes))


# --- layers and blocks ------------------------------------------------------------------------------------------------


def _models(run: dict[str, Any], wanted: Sequence[shapes.Dense | shapes.Conv]) -> Iterator[dict[str, Any]]:
    """The models' layers with the models' activations, in the device's main dtype, and then in the other one."""
    rows = {(row["shape"], row["activation"], row["dtype"]): row for row in run["cases"]}
    for dtype in shapes.DTYPES[run["device"]["kind"]]:
        for shape in wanted:
            if (row := rows.get((shape.name, shape.activation, dtype))) is not None:
                yield row


def _name(row: dict[str, Any]) -> str:
    if "tokens" in row:
        sizes = f"{row['tokens']} x {row['in_features']} to {row['hidden_features']}"
    else:
        sizes = f"{_by(row['input'])} to {row['output'][1]}"
    return f"{row['shape']}, {'gated ' * row.get('gated', False)}{row['activation']}, {row['dtype']} ({sizes})"


def layers_table(run: dict[str, Any], title: str, wanted: Sequence[shapes.Dense | shapes.Conv]) -> str:
    """Layers of known models, forward+backward: bytes kept and time."""
    rows = []
    for row in _models(run, wanted):
        eager, ours = _variants(row, "eager", "fusedlayers")
        rows.append([_name(row), _mib(eager), f"**{_mib(ours)}**", _time(eager), f"**{_ratio(ours)}**"])
    return markdown([title, "saved MiB: eager", "**here**", "time: eager", "**here**"], rows)


def mlp_table(run: dict[str, Any]) -> str:
    """MLP blocks of known models, forward+backward: bytes kept, those at the worst moment, and time."""
    bytes_of = ("saved MiB: eager", "**here**", "recomputed", "peak MiB: eager", "**here**", "recomputed")
    rows = []
    for row in _models(run, shapes.BLOCKS):
        eager, ours, recomputed = _variants(row, "eager", "fusedlayers", "recompute")
        cells = [_name(row)]
        for what in ("saved_bytes", "peak_bytes"):
            cells += [_mib(eager, what), f"**{_mib(ours, what)}**", _mib(recomputed, what)]
        rows.append([*cells, _time(eager), f"**{_ratio(ours)}**", _ratio(recomputed)])
    columns = ["MLP block (rows)", *bytes_of, "time: eager", "**here**", "recomputed"]
    return markdown(columns, rows)


#: Of small calls, the groups of the benchmark that a document shows, and of which size; None: of all.
SMALL_CALLS = {"small": None, "fused": 131072, "folded": 131072, "region": None}


def small_calls_table(run: dict[str, Any]) -> str:
    """What a call costs besides arithmetic."""
    rows = []
    for row in run["cases"]:
        if row["group"] in SMALL_CALLS and SMALL_CALLS[row["group"]] in (None, row["elements"]):
            eager, ours = _variants(row, "eager", "fusedlayers")
            cells = [f"{row['operation']}, {row['activation']} ({row['elements']})"]
            for mode in ("forward_backward", "no_grad"):
                time_us = f"{eager[mode]['median_us']:.3g} us" if mode in eager else "-"
                cells += [time_us, f"**{_ratio(ours, mode)}**"]
            rows.append(cells)
    call = "Call (elements; of blocks, hidden ones)"
    return markdown([call, "with backward: eager", "**here**", "without: eager", "**here**"], rows)


def accuracy_table(run: dict[str, Any]) -> str:
    """The derivative of a folded activation, from one run: every device computes the same within rounding."""
    names = {
        "output_rms": "output, rms",
        "derivative_rms": "derivative, relative rms",
        "derivative_max": "derivative, largest",
    }
    columns, rows = [f"{run['count']:,} inputs"], []
    for name in names.values():
        columns += [f"{name}: eager", "**here**"]
    for case in run["cases"]:
        if case["activation"] == "gelu":
            errors = [f"{case[variant][key]:.1e}" for key in names for variant in ("eager", "fusedlayers")]
            rows.append([f"gelu, {case['dtype']}", *errors])
    return markdown(columns, rows)


# --- whole models -----------------------------------------------------------------------------------------------------


def models_table(run: dict[str, Any]) -> str:
    """Whole models: bytes kept, those at the worst moment, and time, before and after ``fuse``."""
    columns = ["Model (input)"]
    for what in ("saved MiB", "peak MiB", "time"):
        columns += [f"{what}: eager", "**fuse**"]
    rows = []
    for row in run["cases"]:
        eager, ours, compiled = _variants(row, "eager", "fusedlayers", "compile")
        cells = [f"{row['model']}, {row['dtype']} ({_by(row['input'])})"]
        for what in ("saved_bytes", "peak_bytes"):
            cells += [_mib(eager, what), f"**{_change(ours, eager, what)}**"]
        rows.append([*cells, _time(eager), f"**{_ratio(ours)}**", _ratio(compiled)])
    return markdown([*columns, "`torch.compile`"], rows)


def saved_table(run: dict[str, Any]) -> str:
    """Whole models: what ``fuse`` leaves of eager's saved bytes."""
    dtypes = {"float32": "float32", "bfloat16": "bfloat16", "autocast": "autocast to bfloat16"}
    models: dict[str, dict[str, str]] = {}
    for row in run["cases"]:
        before, ours = (row[variant]["hooks"] for variant in ("eager", "fusedlayers"))
        change = f"{round(100 * (ours - before) / before):+d} %"
        models.setdefault(row["model"], {})[row["dtype"]] = f"{before / 2**20:.1f}, **{ours / 2**20:.1f}** ({change})"
    columns = ["Saved MiB: PyTorch, **`fuse`**", *dtypes.values()]
    return markdown(columns, ([model, *(cells[dtype] for dtype in dtypes)] for model, cells in models.items()))


def setups_table(run: dict[str, Any]) -> str:
    """How people train: saved bytes, peak and time after ``fuse``, as shares of PyTorch's, by setup and model."""
    setups: dict[str, dict[str, str]] = {}
    for row in run["cases"]:
        setups.setdefault(row["setup"], {})[row["model"]] = _setup(row)
    models = dict.fromkeys(model for cells in setups.values() for model in cells)
    rows = ([setup, *(cells.get(model, "-") for model in models)] for setup, cells in setups.items())
    return markdown(["Saved, peak, time of PyTorch's", *models], rows)


def _setup(row: dict[str, Any]) -> str:
    eager, ours = _variants(row, "eager", "fusedlayers")
    if "saved_bytes" not in ours:
        return str(row.get("unsuited") or ours.get("error") or "-")
    keys = "saved_bytes", "peak_bytes"
    saved, peak = (f"{ours[key] / eager[key]:.2f}".lstrip("0") if eager[key] else "-" for key in keys)
    return f"**{saved}**, {peak}, {_ratio(ours)}"


#: The README's table: a row for setups that are alike, each with its label and its test.
WORKS_WITH: tuple[dict[str, tuple[str, str]], ...] = (
    {"float32": ("float32", "save_once"), "bfloat16": ("bfloat16", "save_once")},
    {"autocast": ("autocast", "save_once"), "autocast, bfloat16 weights": ("with bfloat16 weights", "save_once")},
    {
        "LoRA on q and v, autocast": ("under autocast LoRA on q and v", "fuse_training"),
        "LoRA on all, autocast": ("on all projections", "fuse_training"),
        "LoRA on q and v, checkpoints, autocast": ("on q and v with checkpoints of all blocks", "fuse_training"),
        "last block trained, autocast": ("only the last block trained", "save_once"),
    },
    {
        "checkpoints of all blocks": ("checkpoints of all blocks", "fuse"),
        "checkpoints of every second block": ("of every second", "fuse"),
        "selective checkpoints": ("selective ones", "save_once"),
    },
    {
        "DDP, autocast": ("DDP, autocast", "save_once_distributed"),
        "FSDP2": ("FSDP2", "save_once_distributed"),
        "EMA copy": ("EMA copy", "fuse"),
    },
    {"save_on_cpu": ("`save_on_cpu` (peak)", "save_once")},
)


def works_with_table(run: dict[str, Any]) -> str:
    """The setups in short: saved bytes after ``fuse``, as shares of PyTorch's; peaks where PyTorch saves none."""
    found = {(row["setup"], row["model"]): _share(row) for row in run["cases"]}
    models = dict.fromkeys(row["model"] for row in run["cases"])
    rows = []
    for setups in WORKS_WITH:
        cells = ["; ".join(f"[{label}](tests/recipes/test_{test}.py)" for label, test in setups.values())]
        for model in models:
            of_model = [found.get((setup, model), "not measured") for setup in setups]
            reasons_once = [cell for i, cell in enumerate(of_model) if cell[-1].isdigit() or cell not in of_model[:i]]
            cells.append("; ".join(reasons_once))
        rows.append(cells)
    return markdown(["Saved bytes, as a share of PyTorch's", *models], rows)


def _share(row: dict[str, Any]) -> str:
    eager, ours = _variants(row, "eager", "fusedlayers")
    if "saved_bytes" not in ours:
        return _setup(row)
    key = "saved_bytes" if eager["saved_bytes"] else "peak_bytes"
    return f"{ours[key] / eager[key]:.2f}".lstrip("0")


#: How a document says what a variant of ``bench peers`` is, and what it keeps of the blocks' hidden tensors.
PEERS = {
    "eager": ("PyTorch", "inputs and outputs of operations"),
    "compile": ("`torch.compile`", "what its partitioner picks"),
    "compile, budget": ("`torch.compile`, `activation_memory_budget=0.5`", "the same, with recomputation"),
    "checkpoint": ("`torch.utils.checkpoint`", "nothing, and computes it twice"),
    "optiacts": ("optiacts", "outputs and a bit for each element"),
    "Liger": ("Liger", "gate, up, and their product"),
    "FusedMLP": ("**`FusedMLP`, `FusedGatedMLP`**", "the same"),
    "recompute": ('**the same, `save="recompute"`**', "nothing, and computes it twice, in chunks"),
}
_NOT_HERE, _NOT_INSTALLED = "does not run here", "not installed"


def peers_table(run: dict[str, Any]) -> str:
    """The same blocks by others: bytes kept, those at the worst moment, and time, and the gradient's error where it is
    ten times eager's. Who was measured on none of them is left out."""
    cases = run["cases"]
    dtype = cases[0].get("dtype", "float32")
    of = "" if dtype == "float32" else f" ({dtype})"
    columns = [f"Saved MiB, peak MiB, time of forward and backward{of}", "saves"]
    columns += [f"{row['id']} ({_by(row['input'])})" for row in cases]
    rows = []
    for name, words in PEERS.items():
        cells = [_peer(row, name) for row in cases]
        if not {*cells} <= {"", _NOT_HERE, _NOT_INSTALLED}:
            rows.append([*words, *cells])
    return markdown(columns, rows, texts=2)


def _peer(row: dict[str, Any], name: str) -> str:
    eager, variant = _variants(row, "eager", name)
    if "skipped" in variant:
        return _NOT_INSTALLED
    if "forward_backward" not in variant:
        return _NOT_HERE if variant else ""
    peak = variant["peak_bytes"] / 2**20
    cell = f"{_mib(variant)}, {peak:.0f}, {_time(variant) if name == 'eager' else _ratio(variant)}"
    error = variant["gradient_error"]
    return f"{cell}, dx errs by {error:.0e}" if error > 10 * eager["gradient_error"] else cell


#: How a document says what a variant of ``bench fit`` is.
FIT = {
    "checkpoint": "checkpoints of blocks",
    "fit": "**`fl.fit`**",
    "compile": "`torch.compile` with that budget",
    "fit_compiled": "**`torch.compile` by `fl.fit_compiled`**",
}


def fit_table(run: dict[str, Any]) -> str:
    """Whole models within budgets: bytes kept and time, by whom."""
    entries = [(row, entry) for row in run["cases"] for entry in row["budgets"]]
    names = [name for name in FIT if any(name in entry["variants"] for _, entry in entries)]
    columns = [*(FIT[name] for name in names), "predicted by `fit`", "duration of `fit`"]
    rows = []
    for row, entry in entries:
        cells = [f"{row['id'].replace('/', ', ')}, {row['saved_bytes'] / 2**20:.1f}", f"{entry['budget']:.1%}"]
        for variant in _variants(entry, *names):
            is_measured = "forward_backward" in variant
            cells.append(
                f"{variant['saved_bytes'] / row['saved_bytes']:.1%}, {_ratio(variant)}" if is_measured else "-"
            )
        (fit,) = _variants(entry, "fit")
        predicted = took = "-"
        if "predicted_bytes" in fit:
            predicted = f"{fit['predicted_bytes'] / row['saved_bytes']:.1%}, {fit['predicted_ratio']:.2f}x"
        if "planning_s" in fit:
            # Of eager's steps: of the median for all budgets, because a single one may be disturbed.
            eager = [entry["variants"]["eager"]["forward_backward"]["median_us"] for entry in row["budgets"]]
            steps = fit["planning_s"] * 1e6 / statistics.median(eager)
            took = f"{fit['planning_s']:.0f} s, as {steps:.0f} steps"
        rows.append([*cells, predicted, took])
    return markdown(["Model, eager's saved MiB", "budget", *columns], rows)


#: How a document says what a variant of ``bench containers`` does.
CONTAINERS = {"eager": "`nn.Sequential`"}
for _segments in (4, 8, 16):
    CONTAINERS[f"checkpoint_sequential-{_segments}"] = f"`checkpoint_sequential`, {_segments} segments"
    CONTAINERS[f"same-memory-{_segments}"] = "**here**, in that memory"
CONTAINERS["sublinear"] = "**here**, as little as can be"
CONTAINERS["cheap"] = '**here**, `recompute="cheap"` and a budget of 0.6'


def containers_table(run: dict[str, Any]) -> str:
    """ResNet-152 that runs partly twice: its memory and its speed; and networks that are inverted, by depth."""
    by_id = {row["id"]: row for row in run["cases"]}
    resnet, parts = by_id.get("resnet152"), []
    if resnet is not None:
        (eager,), rows = _variants(resnet, "eager"), []
        for name, title in CONTAINERS.items():
            (variant,) = _variants(resnet, name)
            if "peak_bytes" in variant:
                share = f"{variant['peak_bytes'] / eager['peak_bytes']:.2f}x"
                rows.append([title, _mib(variant), _mib(variant, "peak_bytes"), share, _speed(variant)])
        title = f"ResNet-152, float32 ({_by(resnet['input'])})"
        parts.append(markdown([title, "saved MiB", "peak MiB", "of eager's", "speed"], rows))
    rows = []
    for key, row in by_id.items():
        if key.startswith("revnet/"):
            eager, ours = _variants(row, "eager", "invertible")
            rows.append([f"{row['layers']} blocks ({_by(row['input'])})", _mib(eager), _mib(ours), _speed(ours)])
    if rows:
        parts.append(markdown(["RevNet, float32", "saved MiB: eager", "**here**", "speed"], rows))
    return "\n\n".join(parts)


_dense = partial(layers_table, title="Linear + activation (rows)", wanted=shapes.LAYERS)
_conv = partial(layers_table, title="Convolution + activation", wanted=shapes.CONVOLUTIONS)
TABLES: dict[str, Callable[[Path], str]] = {
    "accuracy": partial(_tables, subject="accuracy", table=accuracy_table, most=1),
    "conv": partial(_tables, subject="conv", table=_conv),
    "containers": partial(_tables, subject="containers", table=containers_table),
    "dense": partial(_tables, subject="dense", table=_dense),
    "fit": partial(_tables, subject="fit", table=fit_table),
    "fit_compiled": partial(_tables, subject="fit_compiled", table=fit_table),
    "mlp": partial(_tables, subject="mlp", table=mlp_table),
    "models": partial(_tables, subject="models", table=models_table),
    "setups": partial(_tables, subject="setups", table=setups_table),
    "works_with": partial(_tables, subject="setups", table=works_with_table, most=1),
    "saved": partial(_tables, subject="saved", table=saved_table),
    "overhead": partial(_tables, subject="overhead", table=small_calls_table),
    "peers": partial(_tables, subject="peers", table=peers_table),
}
