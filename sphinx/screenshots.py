"""Writes the screenshots for the documentation; needs Chromium and TensorBoard.

    python sphinx/screenshots.py [--log-dir RUNS]

Without ``--log-dir`` it trains networks of 9, 83 and 803 modules in a temporary directory; the first and the last have a dead layer.
"""

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import OrderedDict
from pathlib import Path

import torch
from PIL import Image
from torch import nn

import ikkuna
from ikkuna.report import write_report
from ikkuna.report.server import RunServer

IMAGES = Path(__file__).resolve().parent / "source" / "images"
PORT = 6121
PAGES = {  # file → page, size of the window, width of the picture, height that is cut off above
    "tensorboard_custom_scalars": (f"http://localhost:{PORT}/?darkMode=true#custom_scalars", (1300, 1000), 900, 0),
    "tensorboard_images": (f"http://localhost:{PORT}/?darkMode=false#images", (1300, 1000), 900, 0),
    "report_small": ("modules10", (1200, 1500), 640, 0),
    "report_large": ("modules100", (1200, 2450), 640, 1500),
    "report_1000": ("modules1000", (1200, 2800), 640, 1800),
    "live_page": ("ui", (1200, 420), 640, 0),
}
DARK = ("report_large", "report_1000")


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fc1, self.act, self.fc2 = nn.LayerNorm(16), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the block."""
        return x + self.fc2(self.act(self.fc1(self.norm(x))))


def small() -> nn.Module:
    """Return a network with a dead layer."""
    layers = OrderedDict[str, nn.Module](conv1=nn.Conv2d(1, 8, 3, padding=1), relu1=nn.ReLU(), pool=nn.MaxPool2d(2))
    layers |= {"conv2": nn.Conv2d(8, 16, 3, padding=1), "relu2": nn.ReLU(), "flatten": nn.Flatten()}
    layers |= {"fc1": nn.Linear(256, 64), "relu3": nn.ReLU(), "head": nn.Linear(64, 10)}
    nn.init.constant_(layers["fc1"].get_parameter("bias"), -8.0)
    return nn.Sequential(layers)


def large(count: int = 20) -> nn.Module:
    """Return a network of 3 modules and 4 for each block."""
    blocks = nn.Sequential(*(Block() for _ in range(count)))
    layers = {"flatten": nn.Flatten(), "stem": nn.Linear(64, 16), "blocks": blocks, "head": nn.Linear(16, 10)}
    return nn.Sequential(OrderedDict(layers))


def train(model: nn.Module, name: str, log_dir: Path, steps: int = 400, rate: float = 0.05) -> None:
    """Train a network on random data; layers of the last quarter of a network of many blocks die late."""
    data, labels = torch.randn(64, 1, 8, 8), torch.randint(0, 10, (64,))
    optimizer, loss = torch.optim.SGD(model.parameters(), lr=rate), nn.CrossEntropyLoss()
    with ikkuna.watch(model, loss=loss, log_dir=log_dir, run_name=name, config={"lr": rate}):
        for step in range(steps):
            if step == 3 * steps // 4 and name == "modules1000":
                nn.init.constant_(model.get_parameter("blocks.150.fc1.bias"), -50.0)
            rows = torch.randint(0, 64, (32,))
            optimizer.zero_grad()
            loss(model(data[rows]), labels[rows]).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()


def shoot(page: str, path: Path, window: tuple[int, int], width: int, top: int, is_dark: bool) -> None:
    """Write a screenshot of a page below `top`, with a width in pixels and at most 128 colours."""
    command = ["chromium", "--headless=new", "--no-sandbox", "--hide-scrollbars", "--virtual-time-budget=40000"]
    command += ["--blink-settings=preferredColorScheme=0"] if is_dark else []
    size = f"--window-size={window[0]},{window[1]}"
    subprocess.run([*command, size, f"--screenshot={path}", page], check=True, capture_output=True, timeout=180)
    with Image.open(path) as picture:
        shown = picture.convert("RGB").crop((0, top, picture.width, picture.height))
        small = shown.resize((width, round(width * shown.height / shown.width)), Image.LANCZOS)
        small.quantize(128, Image.Quantize.MAXCOVERAGE).save(path, optimize=True)


def take(log_dir: Path) -> None:
    """Write all screenshots of the runs in a directory, whose pages name the directory alone."""
    os.chdir(log_dir.parent)
    log_dir = Path(log_dir.name)
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(log_dir), "--port", str(PORT)]
    server = subprocess.Popen([*command, "--load_fast=false"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(120):
            time.sleep(1.0)
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://localhost:{PORT}/data/runs") as answer:
                if set(json.load(answer)) >= {run.name for run in log_dir.iterdir()}:
                    break
        time.sleep(10)  # TensorBoard reads the values
        with tempfile.TemporaryDirectory() as directory, RunServer(log_dir) as live:
            threading.Thread(target=live.serve_forever, daemon=True).start()
            for name, (page, window, width, top) in PAGES.items():
                if page == "ui":
                    page = live.url
                elif not page.startswith("http"):
                    page = write_report(log_dir / page, Path(directory, f"{name}.html")).resolve().as_uri()
                shoot(page, IMAGES / f"{name}.png", window, width, top, is_dark=name in DARK)
            live.shutdown()
    finally:
        server.terminate()
        server.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--log-dir", type=Path)
    arguments = parser.parse_args()
    if shutil.which("chromium") is None:
        sys.exit("chromium is not installed")
    if arguments.log_dir is not None:
        take(arguments.log_dir)
        return
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as directory:
        log_dir = Path(directory, "run")
        train(small(), "modules10", log_dir)
        train(large(), "modules100", log_dir)
        train(large(200), "modules1000", log_dir, steps=160, rate=0.001)
        take(log_dir)


if __name__ == "__main__":
    main()
