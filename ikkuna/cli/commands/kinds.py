"""``ikkuna kinds``: lists the kinds that can be observed, or those that a run has stored."""

import argparse

from ikkuna.cli.terminal import Command, Terminal

__all__ = ["command"]


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_path", metavar="RUN", nargs="?", help="list the kinds of this run")
    parser.add_argument("--json", action="store_true", help="write JSON instead of a table")


def _run(options: argparse.Namespace, terminal: Terminal) -> int:
    header: tuple[str, ...]
    rows: list[tuple[str, ...]]
    if options.run_path is None:
        from ikkuna.metrics.messages.kinds import MODULE_KINDS, NETWORK_KINDS

        header = "kind", "of"
        rows = [*((kind, "each module") for kind in MODULE_KINDS), *((kind, "the network") for kind in NETWORK_KINDS)]
    else:
        header, rows = ("kind", "pass", "series", "values"), _stored(options.run_path)
    if options.json:
        terminal.write_json([dict(zip(header, row, strict=True)) for row in rows])
    else:
        terminal.write_table(header, rows)
    return 0


def _stored(path: str) -> list[tuple[str, ...]]:
    from ikkuna.store import read_run

    run = read_run(path)
    rows: list[tuple[str, ...]] = []
    for pass_name in run.passes():
        for kind in run.kinds(pass_name):
            names = run.names(kind, pass_name)
            count = sum(len(run.series(kind, name, pass_name).steps) for name in names)
            rows.append((kind, pass_name, str(len(names)), str(count)))
    return rows


command = Command(help="list the kinds that can be observed, or those of a run", add_arguments=_add_arguments, run=_run)
