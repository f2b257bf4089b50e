"""Writes event files of any size, as the backend ``tb`` writes them."""

from pathlib import Path

import numpy as np

from ikkuna.diagnosis import Finding
from ikkuna.diagnosis.stored_findings import event_line, event_text
from ikkuna.reading import StoredHistogram
from ikkuna.store.event_format import float32, histogram_value, scalar_prefix, text_value
from ikkuna.store.event_records import step_record
from ikkuna.store.names import Series, series_tag
from ikkuna.store.values import ModuleEntry, module_table

KINDS = (
    *("weights_norm2", "layer_gradients_norm2", "activations_variance", "weight_updates_weights_ratio"),
    *("activations_sparsity", "weight_gradients_norm2"),
)
NETWORK = ("loss", "train_accuracy", "learning_rate", "weight_gradients_global_norm2")
PARTS = ("norm", "attention.query", "mlp.up", "mlp.activation")


def values_of_step(modules: int) -> int:
    """Return the number of values that `write_run` writes at each step."""
    without_weights = modules // len(PARTS)
    return len(NETWORK) + sum(modules - without_weights * kind.startswith("weight") for kind in KINDS)


def write_run(directory, modules: int, steps: int, kinds=KINDS, histograms: int = 4) -> Path:
    """Write a run with a value of each module and kind at every step, and a finding; every fourth module has no weights."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    names = [f"blocks.{i // 4}.{PARTS[i % 4]}" for i in range(modules)]
    has_weights = np.arange(modules) % len(PARTS) != len(PARTS) - 1
    shapes = ("weight", (64, 64)), ("bias", (64,))
    entries = [
        ModuleEntry(name, "Linear" if has else "GELU", shapes if has else ())
        for name, has in zip(names, has_weights.tolist(), strict=True)
    ]
    stored = np.array([has_weights | (not kind.startswith("weight")) for kind in kinds])
    chosen = [(kinds[i], names[j]) for i, j in np.argwhere(stored).tolist()]
    prefixes = [scalar_prefix(series_tag(Series(kind, name))) for kind, name in chosen]
    network = [scalar_prefix(series_tag(Series(kind))) for kind in NETWORK]
    rng = np.random.default_rng(0)
    level = np.exp(rng.normal(size=(len(kinds), modules)))
    with open(directory / "events.out.tfevents.0000000001.host.1.000", "wb") as file:
        for step in range(steps):
            share = step / steps
            values = level * np.exp(0.1 * rng.normal(size=level.shape) - 2 * share)
            for row, kind in zip(values, kinds, strict=True):
                if kind.endswith("sparsity"):
                    np.clip(row, 0, 1, out=row)
            data = values[stored].astype("<f4").tobytes()
            parts = [prefix + data[4 * i : 4 * i + 4] for i, prefix in enumerate(prefixes)]
            scalars = 2.3 * np.exp(-3 * share) + 0.1 * rng.random(), 1 - np.exp(-4 * share), 1e-3, 1 + rng.random()
            parts += [prefix + float32(value) for prefix, value in zip(network, scalars, strict=True)]
            if step == 0:
                parts.append(text_value("Text/Modules", module_table(entries)))
            if histograms and step % max(1, steps // 100) == 0:
                parts += [_histogram(f"weights/{name}", rng, 1 + share) for name in names[:histograms]]
            file.write(step_record(b"".join(parts), step, 1.7e9 + step))
    found = Finding("dead_units", "warning", "Units are dead.", names[-1], "activations_sparsity", step=steps // 2)
    text = event_text({"event": "opened", "finding": found.as_dict()})
    (directory / "findings.1.jsonl").write_text(event_line(text, steps // 2, 1.7e9), encoding="utf-8")
    return directory


def _histogram(tag: str, rng, scale: float) -> bytes:
    x = rng.normal(size=1000) * scale
    counts, edges = np.histogram(x, 30)
    return histogram_value(tag, StoredHistogram(x.min(), x.max(), 1000.0, x.sum(), (x * x).sum(), edges[1:], counts))
