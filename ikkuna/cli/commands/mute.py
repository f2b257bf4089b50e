"""Leave findings of a rule out while the training runs.

Write into control.json which findings the running training does not report any more. They are still stored.
"""

import argparse

from ikkuna.cli.terminal import Terminal, chosen_run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="RUN", help="the directory of a run that is being written")
    parser.add_argument(
        "names", metavar="RULE[:MODULE]", nargs="*", help="what to mute; without names, list what is muted"
    )
    parser.add_argument("--off", action="store_true", help="report findings of these rules again")


def run(options: argparse.Namespace, terminal: Terminal) -> int:
    import json
    from pathlib import Path

    from ikkuna.diagnosis.stored_findings import read_findings
    from ikkuna.errors import ConfigError, unknown_name
    from ikkuna.store.run_directory import CONTROL_FILE, SamplingRequest
    from ikkuna.support.files import atomic_file

    run = Path(chosen_run(options.path, terminal))
    if not run.is_dir() or (stored := read_findings(run)) is None:
        raise ConfigError(f"'{run}' has no rules: it is not the directory of a run that was trained with them")
    rules = sorted({*stored.judged, *stored.skipped, *(finding.rule for finding in stored)})
    if unknown := [name for name in options.names if name.partition(":")[0] not in rules]:
        raise ConfigError(unknown_name("rule", unknown[0].partition(":")[0], rules))
    path = run / CONTROL_FILE
    try:
        text = path.read_text("utf-8") if path.exists() else "{}"
        muted = set(SamplingRequest.parse(text).mute)
    except ValueError as error:
        raise ConfigError(f"'{path}' is invalid: {error}") from error
    if options.names:
        muted = muted - set(options.names) if options.off else muted | set(options.names)
        with atomic_file(path) as file:
            file.write(json.dumps({**json.loads(text), "mute": sorted(muted)}).encode())
    shown = f"muted in '{run}': {', '.join(sorted(muted)) or 'nothing'}"
    terminal.answer({"run": str(run), "mute": sorted(muted)}, shown)
    return 0
