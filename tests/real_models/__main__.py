"""``python -m tests.real_models [NAME ...]``: train models whose results are missing or older than the code.

An interrupted run continues where it was.  With names, these models are trained again.
"""

import json
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.real_models.table import MODELS
from tests.real_models.training import check
from tests.trial.__main__ import digest

RESULTS = Path(__file__).with_name("results.json")


def main(names):
    """Train models, and return the exit status: whether one of them failed."""
    torch.set_num_threads(1)
    stored = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    failed, code = 0, digest()
    for name in names or [
        name for name in MODELS if (known := stored.get(name, {})).get("wrong", True) or known.get("code") != code
    ]:
        began = time.process_time()
        wrong = _wrong(name)
        if wrong is not None:
            stored[name] = {
                "class": "" if wrong else _kind(name),
                "wrong": wrong,
                "seconds": round(time.process_time() - began, 1),
                "code": code,
            }
            stored = {each: stored[each] for each in MODELS if each in stored}
            RESULTS.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
        failed += bool(wrong)
        sys.stdout.write(f"{name}: {'not installed' if wrong is None else wrong or 'right'}\n")
        sys.stdout.flush()
    sys.stdout.write(f"{sum(not result['wrong'] for result in stored.values())} of {len(MODELS)} models are right\n")
    return int(failed > 0)


def _kind(name):
    """Return the name of a model's class; graph networks of two equal layers are of the class of these."""
    model = MODELS[name].make()
    return type(getattr(model, "first", model)).__qualname__


def _wrong(name):
    """Train a model; return what is wrong, an empty string if nothing is, or ``None`` if its project is not installed."""
    try:
        check(MODELS[name])
    except pytest.skip.Exception:
        return None
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:500]
    return ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
