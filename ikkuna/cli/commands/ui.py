"""Show runs in a browser, also while they are written.

Serve a list of runs, pages about them and comparisons on 127.0.0.1. The pages follow a run that is being written.
"""

import argparse

from ikkuna.cli.terminal import Terminal, check_port


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="LOGDIR", nargs="?", default="run", help="a directory of runs (default: run)")
    parser.add_argument(
        "--port", type=int, default=6007, help="the port of the server, 0 for a free one (default: 6007)"
    )


def run(options: argparse.Namespace, terminal: Terminal) -> int:
    from ikkuna.report.server import RunServer

    check_port(options.port)
    with RunServer(options.path, options.port) as server:
        port = server.server_port
        lines = (
            f"Open {server.url}",
            f"From another machine: ssh -L {port}:127.0.0.1:{port} HOST",
            "Ctrl-C ends the server.",
        )
        terminal.answer({"url": server.url, "port": port}, lambda: terminal.write_lines(lines))
        terminal.flush()
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return 0
    return 0
