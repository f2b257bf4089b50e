"""Print the values of a run's event file with the reader of TensorBoard."""

from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def print_table(log_dir, kinds):
    """Print the last value of each kind for every module of the newest run, and the last values of the network."""
    run = max((path for path in Path(log_dir).iterdir() if path.is_dir()), key=lambda path: path.stat().st_mtime)
    events = EventAccumulator(str(run), size_guidance={"scalars": 0}).Reload()
    last = {tag: events.Scalars(tag)[-1] for tag in events.Tags()["scalars"]}
    modules = sorted({tag.split("/", 1)[1] for tag in last if tag.split("/")[0] in kinds}, key=_natural)
    print(f"\nthe last values in {run}, as TensorBoard reads them:\n")
    print("".join([f"{'module':20}", *(f"{kind:>32}" for kind in kinds)]))
    for module in modules:
        cells = (last.get(f"{kind}/{module}") for kind in kinds)
        print("".join([f"{module:20}", *(f"{cell.value:32.4g}" if cell else " " * 32 for cell in cells)]))
    for tag in sorted(tag for tag in last if tag.startswith("Network/")):
        print(f"{tag.removeprefix('Network/'):20}{last[tag].value:32.4g}   at step {last[tag].step}")
    print(f"\nto see the curves:  tensorboard --logdir {log_dir}")


def _natural(name):
    return [(part.isdigit(), int(part) if part.isdigit() else part) for part in name.split(".")]
