"""Fixtures of all tests: a new bus, a seed, a device, and a check that no exporter is left open."""

import gc
import logging
import os
import signal
import sys

import hypothesis
import pytest
import torch
from torch.optim import optimizer as torch_optimizer
from torch.overrides import TorchFunctionMode

from ikkuna.export.messages import MessageBus
from ikkuna.observation.hooks import optimizers
from tests import simulated_device

hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")


@pytest.fixture
def bus() -> MessageBus:
    return MessageBus("test")


_frozen_modules = 0


@pytest.fixture(autouse=True)
def imported_objects_are_not_searched():
    """Keep the collector, and the search of an exporter for optimizers, from the millions of objects of imported libraries.

    They are set aside again after a test that has imported a library, such as torch's compiler.
    """
    global _frozen_modules
    if (modules := len(sys.modules)) > _frozen_modules + 50:
        gc.collect()
        gc.freeze()
        _frozen_modules = modules


@pytest.fixture(autouse=True)
def leaves_no_exporter_open():
    torch.manual_seed(0)
    yield
    left = [*optimizers.BEFORE_STEP.hooks, *optimizers.AFTER_STEP.hooks]
    optimizers.BEFORE_STEP.hooks = optimizers.AFTER_STEP.hooks = ()
    assert not left, "a test left an exporter open"
    assert len(torch_optimizer._global_optimizer_pre_hooks) <= 1
    assert len(torch_optimizer._global_optimizer_post_hooks) <= 1


def pytest_addoption(parser):
    parser.addoption("--device", default="cpu", help="device of the networks: cpu, sim (simulated accelerator) or cuda")
    parser.addoption("--triton", action="store_true", help="let the simulated accelerator have Triton's interpreter")


def pytest_configure(config):
    """Let Ctrl-C interrupt, and put all tensors that tests make on the device of the option ``--device``.

    Several processes compute with one thread each: OpenMP's threads wait for each other actively, so that twice as many threads as
    cores take four times as long.
    """
    if config.getoption("numprocesses", None):
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # the processes that run tests start later
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as in each process that a shell starts in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)
    name = config.getoption("--device")
    if name == "sim":
        simulated_device.install()
        simulated_device.provide_pinned_memory()
        if config.getoption("--triton"):
            from tests.simulated_device.triton import install_triton

            install_triton()
    if name != "cpu":
        torch.set_default_device(name)
    if name == "cuda":
        NumbersOfTheHost().__enter__()
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False  # as on the host


class NumbersOfTheHost(TorchFunctionMode):
    """Draw numbers with a generator of the host on the host, and move them to the device; CUDA refuses such generators."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        generator = (kwargs or {}).get("generator")
        if generator is None or generator.device.type != "cpu" or "device" in kwargs:
            return func(*args, **(kwargs or {}))
        if args and isinstance(args[0], torch.Tensor):
            return args[0].copy_(func(args[0].cpu(), *args[1:], **kwargs))
        return func(*args, **kwargs, device="cpu").to(torch.get_default_device())


def pytest_ignore_collect(collection_path, config):
    """On another device than the host, import only files with tests for it; others may need the host for their constants."""
    if config.getoption("--device") == "cpu" or collection_path.suffix != ".py":
        return None
    text = collection_path.read_text(encoding="utf-8")
    return None if "mark.devices" in text or "mark.simulated" in text else True


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their markers
def pytest_collection_modifyitems(config, items):
    """On another device than the host, run only tests with the marker ``devices`` or ``simulated``."""
    device = config.getoption("--device")
    for item in items if device != "cpu" else ():
        if (marker := item.get_closest_marker("devices")) is not None and marker.kwargs.get("slow"):
            item.add_marker("slow")

    def runs(item):
        has = item.get_closest_marker
        if has("triton") and not config.getoption("--triton"):
            return False
        if device == "cpu":
            return has("triton") if config.getoption("--triton") else not has("simulated")
        return (device == "sim" and has("simulated")) or (has("devices") and not has("host"))

    chosen = [item for item in items if runs(item)]
    config.hook.pytest_deselected(items=[item for item in items if not runs(item)])
    items[:] = chosen


@pytest.fixture(autouse=True)
def locks_of_logging():
    """Release the locks of `logging` after each test.

    An interrupt between the acquisition of a lock and the ``try`` behind it, in Python itself, leaves it to this thread for ever;
    then each other thread that logs waits in all later tests.
    """
    yield
    handlers = [handler for reference in logging._handlerList if (handler := reference()) is not None]
    for lock in (logging._lock, *(handler.lock for handler in handlers)):
        while lock is not None and lock._is_owned():
            lock.release()
