"""How long `ikkuna ui` takes for a page and for an enlarged part of a chart, while the run is being written.

A run of a million values is written first; another process then adds a step each 50 ms.
Times are those of the server and of the client by process CPU time, the median of five; new values precede each request.

    OMP_NUM_THREADS=1 python benchmarks/ui.py [--modules 100] [--steps 2000]
"""

import argparse
import http.client
import multiprocessing
import statistics
import tempfile
import time
from pathlib import Path

from synthetic_run import KINDS, values_of_step, write_run

from ikkuna.backends.tensorboard import TensorBoardBackend
from ikkuna.report.server import RunServer
from ikkuna.store.names import Series


def write_on(directory: Path, step: int, modules: int, until: "multiprocessing.synchronize.Event") -> None:
    """Add steps to a run until an event is set."""
    backend = TensorBoardBackend()
    backend.open(directory)
    names = [f"blocks.{i // 4}.{i}" for i in range(modules)]
    while not until.is_set():
        backend.add_scalar(Series("loss"), 1.0, step)
        for kind in KINDS:
            for name in names:
                backend.add_scalar(Series(kind, name), 1.0, step)
        backend.commit(step)
        step += 1
        time.sleep(0.05)
    backend.close()


def seconds(server: RunServer, path: str) -> tuple[float, int]:
    """Return the time and the size of an answer."""
    begin = time.process_time()
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port)
    connection.request("GET", path, headers={"Cookie": f"{server.cookie}={server.token}"})
    answer = connection.getresponse()
    size = len(answer.read())
    assert answer.status == 200, answer.status
    return time.process_time() - begin, size


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--modules", type=int, default=100)
    parser.add_argument("--steps", type=int, default=2000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = write_run(Path(folder) / "run0001", options.modules, options.steps)
        done = multiprocessing.Event()
        writer = multiprocessing.Process(target=write_on, args=(run, options.steps, options.modules, done))
        writer.start()
        print(f"{values_of_step(options.modules) * options.steps:,} values, being written")
        print("| request | CPU s | kB |\n|---|---|---|")
        with RunServer(folder) as server:
            import threading

            threading.Thread(target=server.serve_forever, daemon=True).start()
            first = seconds(server, "/run?name=run0001")
            print(f"| the first page | {first[0]:.2f} | {first[1] / 1e3:.0f} |")
            for title, path in (
                ("the page again", "/run?name=run0001"),
                ("an enlarged part of the loss", "/chart?name=run0001&kind=loss&from=500&to=600"),
                ("the list of runs", "/"),
                ("all layers", "/part?name=run0001&part=layers"),
            ):
                found = []
                for _ in range(5):
                    time.sleep(0.1)
                    found.append(seconds(server, path))
                print(f"| {title} | {statistics.median(each[0] for each in found):.3f} | {found[0][1] / 1e3:.0f} |")
            server.shutdown()
        done.set()
        writer.join()


if __name__ == "__main__":
    main()
