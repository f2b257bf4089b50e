"""``ikkuna report``: writes a page about one or several runs."""

import argparse

from ikkuna.cli.runs import add_muted_argument, add_run_argument, chosen_run
from ikkuna.cli.terminal import Command, Terminal


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_argument(parser, several=True)
    parser.add_argument("-o", "--output", default="report.html", help="the page to write (default: report.html)")
    add_muted_argument(parser)
    parser.add_argument("--json", action="store_true", help="write the path and the size of the page as JSON")


def _run(options: argparse.Namespace, terminal: Terminal) -> int:
    from ikkuna.report import write_report

    path = write_report(
        [chosen_run(path, terminal) for path in options.runs], options.output, terminal.progress, options.muted
    )
    size = path.stat().st_size
    if options.json:
        terminal.write_json({"path": str(path), "bytes": size})
    else:
        terminal.write(f"wrote {path} ({size / 1e6:.2f} MB)")
    return 0


command = Command(
    help="write a page about one or several runs",
    description="Write one page of HTML about one or several runs. It needs no other file and no network.",
    add_arguments=_add_arguments,
    run=_run,
)
