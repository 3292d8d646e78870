"""The tables of the documents, from result files: text in Markdown, and nothing that was typed."""

import json
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from . import MAIN_FORMAT


class Wanted(NamedTuple):
    """A row of a table: a shape and an activation, in the device's main dtype, or in both of its dtypes."""

    shape: str
    activation: str
    in_both: bool = False


#: What a reader looks for first: their model, by shape and activation. One table a device.
ROWS = (
    Wanted("BERT-base", "gelu"),
    Wanted("BERT-large", "relu"),
    Wanted("ViT-B", "gelu"),
    Wanted("GPT-2 large", "gelu", in_both=True),
    Wanted("LLaMA-7B-like", "silu", in_both=True),
)
CONV_ROWS = (
    Wanted("ResNet-50 3x3", "relu"),
    Wanted("ResNet-50 1x1 stride 2", "relu"),
    Wanted("WaveNet", "tanh"),
    Wanted("ResNet3D-18 3x3x3", "relu"),
    Wanted("MobileNetV2 3x3 depthwise", "relu6"),
    Wanted("ConvNeXt-T 7x7 depthwise", "gelu"),
    Wanted("X3D-M 3x3x3 depthwise", "silu"),
    Wanted("wav2vec 2.0 extractor", "gelu", in_both=True),
    Wanted("MobileNetV3 3x3 depthwise stride 2", "hardswish", in_both=True),
)
MLP_ROWS = (
    Wanted("BERT-base", "gelu", in_both=True),
    Wanted("GPT-2 large", "gelu"),
    Wanted("ViT-B", "gelu"),
    Wanted("LLaMA-7B", "silu"),
    Wanted("Gemma-2B", "gelu"),
    Wanted("T5-base 1.1", "gelu", in_both=True),
)
MAIN_DTYPE = {"cpu": "float32", "cuda": "bfloat16"}
OTHER_DTYPE = {"cpu": "bfloat16", "cuda": "float32"}


def committed(results: Path, subject: str) -> list[dict[str, Any]]:
    """The runs of a benchmark that were committed, GPUs first."""
    runs = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(results.glob(f"*/{subject}.json"))]
    runs = [run for run in runs if not run["quick"]]
    return sorted(runs, key=lambda run: (run["device"]["kind"] != "cuda", run["device"]["slug"]))


def _tables(
    results: Path, subject: str, table: Callable[[dict[str, Any]], str], command: str = "", most: int | None = None
) -> str:
    """A table for each device with a committed run, or for the first of them."""
    runs = committed(results, subject)
    if not runs:
        return f"No result is committed yet; `python -m bench {command or subject}` makes one."
    return "\n\n".join(table(run) for run in runs[:most])


def measured_on(run: dict[str, Any]) -> str:
    count = run["threads"]
    threads = f", {count} thread{'s' * (count != 1)}" if run["device"]["kind"] == "cpu" else ""
    return f"{run['device']['name']}{threads}, torch {run['versions']['torch'].split('+')[0]}, {run['date']}:"


def dense_table(run: dict[str, Any]) -> str:
    """Hidden layers of known models, forward+backward: bytes kept and time, against eager and torch.compile."""
    return _layers_table(run, "Linear + activation (rows)", ROWS, _models(run["cases"]), _dense_sizes)


def _dense_sizes(row: dict[str, Any]) -> str:
    return f"{row['tokens']} x {row['in_features']} to {row['hidden_features']}"


def mlp_table(run: dict[str, Any]) -> str:
    """MLP blocks of known models, forward+backward: bytes kept, those at the worst moment, and time, the bare matmuls'
    too."""
    lines = [
        measured_on(run),
        "",
        "| MLP block (rows) | saved MiB: eager | **here** | recomputed | peak MiB: eager | **here** | recomputed "
        "| time: eager | bare matmuls | **here** | recomputed |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    lines += [_mlp_row(row) for row in _wanted(run, MLP_ROWS, _models(run["cases"]))]
    return "\n".join(lines)


def _mlp_row(row: dict[str, Any]) -> str:
    eager, ours, recomputed, bare = (
        row["variants"].get(name, {}) for name in ("eager", "fusedlayers", "recompute", "matmuls")
    )
    gated = "gated " if row["gated"] else ""
    cells = [f"{row['shape']}, {gated}{row['activation']}, {row['dtype']} ({_dense_sizes(row)})"]
    for what in ("saved_bytes", "peak_bytes"):
        cells += [_mib(eager, what), f"**{_mib(ours, what)}**", _mib(recomputed, what)]
    cells += [_time(eager), _ratio(bare), f"**{_ratio(ours)}**", _ratio(recomputed)]
    return f"| {' | '.join(cells)} |"


def conv_table(run: dict[str, Any]) -> str:
    """The same of convolutions, in the device's main memory format where there are two."""
    main = MAIN_FORMAT[run["device"]["kind"]]
    return _layers_table(
        run, f"Convolution + activation ({main})", CONV_ROWS, _models(_in_main_format(run)), _conv_sizes
    )


def _in_main_format(run: dict[str, Any]) -> list[dict[str, Any]]:
    """The cases of a run in the device's main memory format, and those that have no other."""
    formats: dict[str, set[str]] = {}
    for row in run["cases"]:
        formats.setdefault(row["shape"], set()).add(row.get("format", ""))
    main = MAIN_FORMAT[run["device"]["kind"]]
    return [row for row in run["cases"] if row.get("format", "") == main or len(formats[row["shape"]]) == 1]


def _conv_sizes(row: dict[str, Any]) -> str:
    return f"{' x '.join(map(str, row['input']))} to {row['output'][1]}"


Rows = dict[tuple[str, str, str], dict[str, Any]]


def _models(rows: Iterable[dict[str, Any]]) -> Rows:
    """The models' layers, by shape, activation and dtype."""
    return {(row["shape"], row["activation"], row["dtype"]): row for row in rows if row["group"] == "model"}


def _wanted(run: dict[str, Any], wanted: Sequence[Wanted], rows: Rows) -> Iterator[dict[str, Any]]:
    """Those that there are, in the device's main dtype, and then in the other one."""
    kind = run["device"]["kind"]
    keys = [(row.shape, row.activation, MAIN_DTYPE[kind]) for row in wanted]
    keys += [(row.shape, row.activation, OTHER_DTYPE[kind]) for row in wanted if row.in_both]
    return (rows[key] for key in keys if key in rows)


def _layers_table(
    run: dict[str, Any],
    title: str,
    wanted: Sequence[Wanted],
    rows: Rows,
    sizes: Callable[[dict[str, Any]], str],
) -> str:
    lines = [
        measured_on(run),
        "",
        f"| {title} | saved MiB: eager | torch.compile | **here** | time: eager | torch.compile | **here** |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    lines += [_layer_row(row, sizes(row)) for row in _wanted(run, wanted, rows)]
    return "\n".join(lines)


def _layer_row(row: dict[str, Any], sizes: str) -> str:
    eager, compiled, ours = (row["variants"].get(name, {}) for name in ("eager", "compile", "fusedlayers"))
    layer = f"{row['shape']}, {row['activation']}, {row['dtype']} ({sizes})"
    saved = [_mib(variant) for variant in (eager, compiled, ours)]
    times = [_time(eager), _ratio(compiled), _ratio(ours)]
    saved[2], times[2] = f"**{saved[2]}**", f"**{times[2]}**"
    return f"| {layer} | {' | '.join(saved + times)} |"


def _mib(variant: dict[str, Any], what: str = "saved_bytes") -> str:
    return f"{variant[what] / 2**20:.1f}" if what in variant else "-"


def _time(variant: dict[str, Any]) -> str:
    if "forward_backward" not in variant:
        return "-"
    milliseconds = variant["forward_backward"]["median_us"] / 1e3
    return f"{milliseconds:.3g} ms" if milliseconds < 999.5 else f"{milliseconds / 1e3:.3g} s"


def _ratio(variant: dict[str, Any], mode: str = "forward_backward") -> str:
    return f"{variant[mode]['ratio']:.2f}x" if mode in variant else "-"


def custom_table(run: dict[str, Any]) -> str:
    """Activations with trainable parameters in ResNet-18: bytes kept, also as a multiple of ReLU's, and time."""
    rows = {row["activation"]: row["variants"] for row in run["cases"] if row["group"] == "resnet18"}
    batch = next((row["input"][0] for row in run["cases"] if row["group"] == "resnet18"), 0)
    lines = [
        measured_on(run),
        "",
        f"| ResNet-18, float32, {batch} images of 32 x 32 | saved MiB: eager | **here** | of ReLU's: eager | **here** "
        "| time: eager | **here** |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    relu = rows.get("relu", {}).get("eager", {})
    for activation, variants in rows.items():
        eager, ours = variants["eager"], variants["fusedlayers"]
        cells = [
            *(_mib(eager), f"**{_mib(ours)}**"),
            *(_times_saved(eager, relu), f"**{_times_saved(ours, relu)}**"),
            *(_time(eager), f"**{_ratio(ours)}**"),
        ]
        lines.append(f"| {activation} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _times_saved(variant: dict[str, Any], relu: dict[str, Any]) -> str:
    return f"{variant['saved_bytes'] / relu['saved_bytes']:.2f}x" if "saved_bytes" in variant and relu else "-"


def models_table(run: dict[str, Any]) -> str:
    """Whole models: bytes kept, those at the worst moment, and time, before and after ``fuse`` in both of its modes."""
    lines = [
        measured_on(run),
        "",
        "| Model (input) | saved MiB: eager | `exact=True` | **fuse** | peak MiB: eager | `exact=True` | **fuse** "
        "| time: eager | `exact=True` | **fuse** | `torch.compile` |",
        "|---|" + "--:|" * 10,
    ]
    for row in run["cases"]:
        eager, exact, ours, compiled = (
            row["variants"].get(name, {}) for name in ("eager", "exact", "fusedlayers", "compile")
        )
        cells = [f"{model_name(row)}, {row['dtype']} ({' x '.join(map(str, row['input']))})"]
        for what in ("saved_bytes", "peak_bytes"):
            cells += [_mib(eager, what), _change(exact, eager, what), f"**{_change(ours, eager, what)}**"]
        cells += [_time(eager), _ratio(exact), f"**{_ratio(ours)}**", _ratio(compiled)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def saved_table(run: dict[str, Any]) -> str:
    """Whole models: what ``fuse`` leaves of eager's saved bytes and peaks, in both of its modes."""
    dtypes = {"float32": "float32", "bfloat16": "bfloat16", "autocast": "autocast to bfloat16"}
    lines = [
        measured_on(run),
        "",
        f"| Saved MiB: PyTorch, **`fuse`**, `exact=True` where that differs | {' | '.join(dtypes.values())} |",
        "|---|" + "--:|" * len(dtypes),
    ]
    cases = {(row["model"], row["dtype"]): row for row in run["cases"]}
    models = dict.fromkeys(row["model"] for row in run["cases"])
    lines += [f"| {' | '.join([m, *(_saved(cases[m, dtype]) for dtype in dtypes)])} |" for m in models]
    lines += [
        "",
        f"On the host a small linear layer takes {run['linear_over_eager_us']} us more, forward and backward.",
        "",
        "| Peak MiB over parameters and gradients, six layers | PyTorch | **`fuse`** | `exact=True` |",
        "|---|--:|--:|--:|",
    ]
    for row in run["peaks"]:
        eager, ours, exact = (row["peak_bytes"][mode] / 2**20 for mode in ("eager", "fusedlayers", "exact"))
        shares = row["share"]
        cells = [row["id"].replace("/", ", "), f"{eager:.0f}", f"**{ours:.0f}** ({shares['fusedlayers']:.2f}x)"]
        cells.append(f"{exact:.0f} ({shares['exact']:.2f}x)")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _saved(row: dict[str, Any]) -> str:
    before, ours, exact = (row[mode]["hooks"] for mode in ("eager", "fusedlayers", "exact"))
    text = f"{before / 2**20:.1f}, **{ours / 2**20:.1f}** ({round(100 * (ours - before) / before):+d} %)"
    return text if ours == exact else f"{text}, {exact / 2**20:.1f}"


#: One row for each kind of part: the benchmark, what the part is, and whose, as the benchmark calls them.
OVERVIEW = (
    ("dense", "Linear + GELU", "BERT-base", "gelu"),
    ("mlp", "MLP, GELU", "BERT-base", "gelu"),
    ("mlp", "gated MLP, SiLU", "LLaMA-7B", "silu"),
)


def overview_table(results: Path) -> str:
    """A row for each kind of part, with columns for a GPU and for a CPU: of each kind the device with most of the runs,
    the latest of them."""
    devices: dict[str, dict[str, dict[str, Any]]] = {}
    for subject in dict.fromkeys(row[0] for row in OVERVIEW):
        for run in committed(results, subject):
            devices.setdefault(run["device"]["slug"], {})[subject] = run
    best: dict[str, dict[str, dict[str, Any]]] = {}
    for runs in sorted(devices.values(), key=lambda runs: (len(runs), max(run["date"] for run in runs.values()))):
        best[next(iter(runs.values()))["device"]["kind"]] = runs
    if not best:
        return "No result is committed yet; `python -m bench dense` makes one."
    kinds = [kind for kind in ("cuda", "cpu") if kind in best]
    names = {"cuda": "GPU", "cpu": "CPU"}
    measured = [f"{names[kind]}: {_device_of(best[kind])}, {MAIN_DTYPE[kind]}." for kind in kinds]
    note = (
        "Bytes are what the part and the matmul after it save, without the part's input. GPU times are the kernels' "
        "alone."
    )
    lines = [" ".join((*measured, note))]
    columns = [f"{names[kind]}: {whose}" for kind in kinds for whose in ("PyTorch", "**here**")]
    lines += [
        "",
        f"| Saved MiB, time of forward and backward | {' | '.join(columns)} |",
        "|---|" + "--:|" * len(columns),
    ]
    for subject, title, shape, activation in OVERVIEW:
        cells = [cell for kind in kinds for cell in _overview_cells(best[kind], subject, shape, activation)]
        if {*cells} != {"-"}:
            lines.append(f"| {title}: {shape} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _device_of(runs: dict[str, dict[str, Any]]) -> str:
    latest = max(runs.values(), key=lambda run: run["date"])
    dates = sorted({run["date"] for run in runs.values()})
    return measured_on({**latest, "date": " and ".join(dates)}).rstrip(":")


def _overview_cells(runs: dict[str, dict[str, Any]], subject: str, shape: str, activation: str) -> tuple[str, str]:
    if subject not in runs:
        return "-", "-"
    run = runs[subject]
    row = _models(_in_main_format(run)).get((shape, activation, MAIN_DTYPE[run["device"]["kind"]]))
    if row is None:
        return "-", "-"
    eager, ours = (row["variants"].get(name, {}) for name in ("eager", "fusedlayers"))
    return f"{_mib(eager)}, {_time(eager)}", f"**{_mib(ours)}**, **{_ratio(ours)}**"


#: How a document says what a variant of ``bench peers`` is, and what it keeps of the blocks' hidden tensors.
PEERS = {
    "eager": ("PyTorch", "inputs and outputs of operations"),
    "compile": ("`torch.compile`", "what its partitioner picks"),
    "compile, budget": ("`torch.compile`, `activation_memory_budget=0.5`", "the same, with recomputation"),
    "checkpoint": ("`torch.utils.checkpoint`", "nothing, and computes it twice"),
    "optiacts": ("optiacts", "outputs and a bit for each element"),
    "Liger": ("Liger", "gate, up, and their product"),
    "inplace_abn": ("inplace_abn", "outputs, and inverts them"),
    "fusedlayers": ("**`fl.fuse`**", "outputs; the factors of products"),
    "FusedMLP": ("**`FusedMLP`, `FusedGatedMLP`**", "the same"),
    "recompute": ('**the same, `save="recompute"`**', "nothing, and computes it twice, in chunks"),
}


_NOT_HERE, _NOT_INSTALLED = "does not run here", "not installed"


def peers_table(run: dict[str, Any]) -> str:
    """The same blocks by others: bytes kept, those at the worst moment, and time, and the gradient's error where it is
    ten times eager's. Who was measured on none of them is left out."""
    cases = run["cases"]
    titles = [f"{row['id']} ({' x '.join(map(str, row['input']))})" for row in cases]
    dtype = cases[0].get("dtype", MAIN_DTYPE["cpu"])
    of = "" if dtype == MAIN_DTYPE["cpu"] else f" ({dtype})"
    lines = [
        measured_on(run),
        "",
        f"| Saved MiB, peak MiB, time of forward and backward{of} | saves | {' | '.join(titles)} |",
        "|---|---|" + "--:|" * len(cases),
    ]
    for name, (title, keeps) in PEERS.items():
        cells = [_peer(row["variants"], name) for row in cases]
        if not {*cells} <= {"", _NOT_HERE, _NOT_INSTALLED}:
            lines.append(f"| {title} | {keeps} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _peer(variants: dict[str, Any], name: str) -> str:
    eager, variant = variants["eager"], variants.get(name, {})
    if "skipped" in variant:
        return _NOT_INSTALLED
    if "forward_backward" not in variant:
        return _NOT_HERE if variant else ""
    peak = variant["peak_bytes"] / 2**20
    cell = f"{_mib(variant)}, {peak:.0f}, {_time(variant) if name == 'eager' else _ratio(variant)}"
    error = variant["gradient_error"]
    return f"{cell}, dx errs by {error:.0e}" if error > 10 * eager["gradient_error"] else cell


def fit_table(run: dict[str, Any]) -> str:
    """Whole models within budgets: bytes kept and time, by whom."""
    names = [
        name
        for name in ("checkpoint", "fit", "compile", "fit_compiled")
        if any(name in entry["variants"] for row in run["cases"] for entry in row["budgets"])
    ]
    titles = {
        "checkpoint": "checkpoints of blocks",
        "fit": "**`fl.fit`**",
        "compile": "`torch.compile` with that budget",
        "fit_compiled": "**`torch.compile` by `fl.fit_compiled`**",
    }
    columns = [*(titles[name] for name in names), "predicted by `fit`", "duration of `fit`"]
    lines = [
        measured_on(run),
        "",
        f"| Model, eager's saved MiB | budget | {' | '.join(columns)} |",
        "|---|--:|" + "--:|" * len(columns),
    ]
    for row in run["cases"]:
        for entry in row["budgets"]:
            cells = [f"{row['id'].replace('/', ', ')}, {row['saved_bytes'] / 2**20:.1f}", f"{entry['budget']:.1%}"]
            cells += [_within(entry["variants"].get(name, {}), row["saved_bytes"]) for name in names]
            fit = entry["variants"].get("fit", {})
            predicted = took = "-"
            if "predicted_bytes" in fit:
                predicted = f"{fit['predicted_bytes'] / row['saved_bytes']:.1%}, {fit['predicted_ratio']:.2f}x"
            if "planning_s" in fit:
                took = f"{fit['planning_s']:.0f} s, as {steps_of_planning(row, fit):.0f} steps"
            lines.append(f"| {' | '.join(cells)} | {predicted} | {took} |")
    return "\n".join(lines)


def steps_of_planning(row: dict[str, Any], fit: dict[str, Any]) -> float:
    """How many of eager's steps planning took: of the median for all budgets, because a single one may be disturbed."""
    eager = [entry["variants"]["eager"]["forward_backward"]["median_us"] for entry in row["budgets"]]
    return float(fit["planning_s"] * 1e6 / statistics.median(eager))


def _within(variant: dict[str, Any], eager_bytes: int) -> str:
    if "forward_backward" not in variant:
        return "-"
    return f"{variant['saved_bytes'] / eager_bytes:.1%}, {_ratio(variant)}"


#: How a document says what a variant of ``bench containers`` does.
CONTAINERS = {
    "eager": "`nn.Sequential`",
    "checkpoint_sequential-4": "`checkpoint_sequential`, 4 segments",
    "same-memory-4": "**here**, in that memory",
    "checkpoint_sequential-8": "`checkpoint_sequential`, 8 segments",
    "same-memory-8": "**here**, in that memory",
    "checkpoint_sequential-16": "`checkpoint_sequential`, 16 segments",
    "same-memory-16": "**here**, in that memory",
    "sublinear": "**here**, as little as can be",
    "cheap": '**here**, `recompute="cheap"` and a budget of 0.6',
}


def containers_table(run: dict[str, Any]) -> str:
    """ResNet-152 that runs partly twice: its memory and its speed; and networks that are inverted, by depth."""
    by_id = {row["id"]: row for row in run["cases"]}
    lines = [measured_on(run)]
    resnet = by_id.get("resnet152")
    if resnet is not None:
        images = " x ".join(map(str, resnet["input"]))
        lines += [
            "",
            f"| ResNet-152, float32 ({images}) | saved MiB | peak MiB | of eager's | speed |",
            "|---|--:|--:|--:|--:|",
        ]
        eager = resnet["variants"]["eager"]
        for name, title in CONTAINERS.items():
            variant = resnet["variants"].get(name, {})
            if "peak_bytes" in variant:
                of_eager = f"{variant['peak_bytes'] / eager['peak_bytes']:.2f}x"
                cells = [title, _mib(variant), _mib(variant, "peak_bytes"), of_eager, _speed(variant)]
                lines.append(f"| {' | '.join(cells)} |")
    revnets = [row for key, row in by_id.items() if key.startswith("revnet/")]
    if revnets:
        lines += ["", "| RevNet, float32 | saved MiB: eager | **here** | speed |", "|---|--:|--:|--:|"]
        for row in revnets:
            eager, ours = (row["variants"].get(name, {}) for name in ("eager", "invertible"))
            cells = [f"{row['layers']} blocks ({' x '.join(map(str, row['input']))})"]
            cells += [_mib(eager), _mib(ours), _speed(ours)]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


#: Of small calls, the groups of the benchmark that a document shows, and of which size; None: of all.
SMALL_CALLS = {
    "small": None,
    "fused": 131072,
    "folded": 131072,
    "region": None,
    "host": None,
    "host_large": None,
}


def small_calls_table(run: dict[str, Any]) -> str:
    """What a call costs besides arithmetic."""
    lines = [
        measured_on(run),
        "",
        "| Call (elements; of blocks, hidden ones) | with backward: eager | **here** | without: eager | **here** |",
        "|---|--:|--:|--:|--:|",
    ]
    for row in run["cases"]:
        if row["group"] in SMALL_CALLS and SMALL_CALLS[row["group"]] in (None, row["elements"]):
            eager, ours = (row["variants"].get(name, {}) for name in ("eager", "fusedlayers"))
            cells = [f"{row['operation']}, {row['activation']} ({row['elements']})"]
            for mode in ("forward_backward", "no_grad"):
                cells += [_microseconds(eager, mode), f"**{_ratio(ours, mode)}**"]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _microseconds(variant: dict[str, Any], mode: str) -> str:
    return f"{variant[mode]['median_us']:.3g} us" if mode in variant else "-"


def _speed(variant: dict[str, Any]) -> str:
    return f"{1 / variant['forward_backward']['ratio']:.2f}x" if "forward_backward" in variant else "-"


def model_name(row: dict[str, Any]) -> str:
    return row["model"] if row.get("layers") is None else f"{row['model']}, {row['layers']} layers"


def _change(variant: dict[str, Any], eager: dict[str, Any], what: str) -> str:
    return f"{100 * (variant[what] - eager[what]) / eager[what]:+.1f} %" if what in variant else "-"


def accuracy_table(results: Path) -> str:
    """The derivative of a folded activation, from one run: every device computes the same within rounding."""
    paths = sorted(results.glob("*/accuracy.json"))
    if not paths:
        return "No result is committed yet; `python -m bench accuracy` makes one."
    run = json.loads(paths[0].read_text(encoding="utf-8"))
    lines = [
        f"Errors against float64, for {run['count']:,} inputs of unit variance ({run['device']['name']}, torch "
        f"{run['versions']['torch'].split('+')[0]}):",
        "",
        "| | output, rms: eager | **here** "
        "| derivative, relative rms: eager | **here** | derivative, largest: eager | **here** |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for case in run["cases"]:
        if case["activation"] == "gelu":
            cells = [
                f"{case[variant][key]:.1e}"
                for key in ("output_rms", "derivative_rms", "derivative_max")
                for variant in ("eager", "fusedlayers")
            ]
            lines.append(f"| {case['activation']}, {case['dtype']} | {' | '.join(cells)} |")
    return "\n".join(lines)


TABLES: dict[str, Callable[[Path], str]] = {
    "accuracy": accuracy_table,
    "conv": partial(_tables, subject="conv", table=conv_table),
    "containers": partial(_tables, subject="containers", table=containers_table),
    "custom": partial(_tables, subject="custom", table=custom_table),
    "dense": partial(_tables, subject="dense", table=dense_table),
    "fit": partial(_tables, subject="fit", table=fit_table),
    "fit_compiled": partial(_tables, subject="fit_compiled", table=fit_table, command="fit --compile"),
    "host": partial(_tables, subject="host", table=small_calls_table, command="overhead --fake-gpu"),
    "mlp": partial(_tables, subject="mlp", table=mlp_table),
    "models": partial(_tables, subject="models", table=models_table),
    "saved": partial(_tables, subject="saved", table=saved_table),
    "overhead": partial(_tables, subject="overhead", table=small_calls_table),
    "overview": overview_table,
    "peers": partial(_tables, subject="peers", table=peers_table),
    "peers_first": partial(_tables, subject="peers", table=peers_table, most=1),
}
