"""``python -m tests.trial [NAME ...]``: run the programs whose results are missing or older than the code, and store them.

An interrupted trial continues where it was.  With names, these programs are run again.
"""

import hashlib
import json
import sys
from pathlib import Path

import torch

from tests.trial.measurement import measure
from tests.trial.programs import PROGRAMS

RESULTS = Path(__file__).with_name("results.json")
ROOT = Path(__file__).parents[2]


def digest():
    """Return a digest of the code that is tried, with that in C++."""
    found = hashlib.sha256()
    for folder in ("ikkuna", "subscribers/ikkuna_subscribers", "tests/trial", "tests/real_models"):
        for path in sorted(path for ending in ("py", "cpp", "h") for path in (ROOT / folder).rglob(f"*.{ending}")):
            found.update(path.read_bytes())
    return found.hexdigest()[:16]


def _say(line):
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main(names):
    """Run programs, and return the exit status: whether anything was wrong."""
    torch.set_num_threads(1)
    code = digest()
    stored = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    wrong = 0
    for name, program in PROGRAMS.items():
        known = stored.get(name, {})
        if (names and name not in names) or (not names and known.get("code") == code):
            continue
        if program.missing:
            _say(f"{name}: not installed: {', '.join(program.missing)}")
            continue
        result = measure(program)
        stored[name] = {"title": program.title, **result.as_json(), "judged": dict(program.judged), "code": code}
        stored = {each: stored[each] for each in PROGRAMS if each in stored}
        RESULTS.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
        wrong += bool(result.wrong)
        _say(
            f"{name}: {result.steps} steps, {result.values} values, {result.cost:.2f} ms of {result.alone:.2f}",
        )
        for line in result.wrong[:10]:
            _say(
                f"    {line[:300]}",
            )
    _say(f"{len(stored)} programs; {wrong} of those that ran now have something wrong")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
