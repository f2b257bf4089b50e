"""``ikkuna replay``: runs the step of a dump again."""

import argparse

from ikkuna.cli.terminal import Command, Terminal

__all__ = ["command"]


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="DUMP", help="the directory of a dump, such as run/run0001/dumps/step_000123")
    parser.add_argument(
        "--script",
        metavar="MODULE:FUNCTION",
        help="a function that returns (model, loss, optimizer); MODULE may be the path of a script; "
        "without it, the content of the dump is shown",
    )


def _run(options: argparse.Namespace, terminal: Terminal) -> int:
    from ikkuna.diagnosis import read_dump

    dump = read_dump(options.path)
    if options.script is None:
        terminal.write(str(dump))
        return 0
    from ikkuna.export.replay.replay import replay
    from ikkuna.export.replay.script import arguments_of_script

    result = replay(dump, **arguments_of_script(options.script))
    terminal.write(str(result))
    return int(not result.is_reproduced)


command = Command(
    help="run the step of a dump again",
    description="Run the step of a dump again, and compare findings and values. "
    "The exit status is 1 if they differ, and 2 for bad input.",
    add_arguments=_add_arguments,
    run=_run,
)
