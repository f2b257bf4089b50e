"""``ikkuna ui``: serves pages about runs to a browser on this machine."""

import argparse

from ikkuna.cli.terminal import Command, Terminal

_LAST_PORT = 65535


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="LOGDIR", nargs="?", default="run", help="a directory of runs (default: run)")
    parser.add_argument(
        "--port", type=int, default=6007, help="the port of the server, 0 for a free one (default: 6007)"
    )
    parser.add_argument("--json", action="store_true", help="write the address as JSON")


def _run(options: argparse.Namespace, terminal: Terminal) -> int:
    from ikkuna.errors import ConfigError
    from ikkuna.report.server import RunServer

    if not 0 <= options.port <= _LAST_PORT:
        raise ConfigError(f"--port needs a number from 0 to {_LAST_PORT}, got {options.port}")
    with RunServer(options.path, options.port) as server:
        if options.json:
            terminal.write_json({"url": server.url, "port": server.server_port})
        else:
            terminal.write(f"Open {server.url}")
            terminal.write(f"From another machine: ssh -L {server.server_port}:127.0.0.1:{server.server_port} HOST")
            terminal.write("Ctrl-C ends the server.")
        terminal.flush()
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return 0
    return 0


command = Command(
    help="show runs in a browser, also while they are written",
    description="Serve a list of runs, pages about them and comparisons on 127.0.0.1. The pages follow a run that is being written.",
    add_arguments=_add_arguments,
    run=_run,
)
