"""Write a page about one or several runs.

Write one page of HTML about one or several runs. It needs no other file and no network.
"""

import argparse

from ikkuna.cli.terminal import Terminal, add_muted_argument, add_run_argument, chosen_run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_argument(parser, several=True)
    parser.add_argument("-o", "--output", default="report.html", help="the page to write (default: report.html)")
    add_muted_argument(parser)


def run(options: argparse.Namespace, terminal: Terminal) -> int:
    from ikkuna.report import write_report

    path = write_report(
        [chosen_run(path, terminal) for path in options.runs], options.output, terminal.progress, options.muted
    )
    size = path.stat().st_size
    terminal.answer({"path": str(path), "bytes": size}, f"wrote {path} ({size / 1e6:.2f} MB)")
    return 0
