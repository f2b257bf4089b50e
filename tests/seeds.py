"""Seeds that are different in each run of the tests; the name of a failing test holds its seed."""

import os
import random


def drawn(count):
    """Return different seeds, which are the same in all processes of one run of the tests."""
    return random.Random(os.environ.get("PYTEST_XDIST_TESTRUNUID")).sample(range(10**6), count)
