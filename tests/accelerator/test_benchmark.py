"""The benchmark of hooks on a device runs without one."""

import re

import pytest

from benchmarks import device


@pytest.mark.parametrize("metrics", device.METRICS)
def test_a_hook_is_timed_on_the_way_of_a_device(monkeypatch, metrics):
    launched, silent = [], device.silent

    def recorded(kernel, *args, **constants):
        launched.append(kernel)
        silent(kernel, *args, **constants)  # which clears the results of a merge

    monkeypatch.setattr(device, "silent", recorded)
    with device.host_as_device():
        line = device.measure(device.METRICS[metrics], layers=3, rounds=1)
    assert launched.count("measure_one") > 200
    numbers = [float(number) for number in re.findall(r"-?\d+\.\d", line)]
    assert len(numbers) == 3
    assert numbers[0] > 0
