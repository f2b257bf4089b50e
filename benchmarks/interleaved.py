"""The command line of benchmarks that compare a training step without ikkuna, with it, and with one of its parts."""

import argparse
from collections.abc import Callable, Mapping
from typing import Any

import torch
from overhead import Workload

__all__ = ["main"]

Measure = Callable[..., dict[str, float]]


def main(
    measure: Measure,
    models: Mapping[str, Callable[[], Workload]],
    variants: tuple[str, str],
    options: Mapping[str, tuple[int, str]],
) -> None:
    """Measure each model that the command line names, and print the table.

    Parameters
    ----------
    measure : callable
        Called with a function that returns a workload and with the `options`; returns the mean CPU seconds of a step
        without ikkuna, ``"none"``, and of both variants.
    models : mapping of str to callable
        The workloads.
    variants : tuple of str
        ikkuna without the part and with it, as keys of what `measure` returns.
    options : mapping of str to tuple
        The default value and the description of each integer option.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", nargs="+", default=list(models), choices=list(models))
    for name, (default, text) in options.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default, help=text)
    arguments: dict[str, Any] = vars(parser.parse_args())
    torch.set_num_threads(1)
    without, together = variants
    print(f"| model | step, ms | {without} | {without} and {together} | {together} alone |\n|---|---|---|---|---|")
    for name in arguments.pop("models"):
        torch.manual_seed(0)
        cost = measure(models[name], **arguments)
        none, partial, whole = cost["none"], cost[without], cost[together]
        shares = f"{partial / none - 1:.2%} | {whole / none - 1:.2%} | {(whole - partial) / none:.2%}"
        print(f"| {name} | {none * 1e3:.1f} | {shares} |", flush=True)
