"""Measures the rules on planted faults and healthy runs: ``python -m tests.diagnosis.measure tune|report [name …]``."""

import logging
import os
import pickle
import statistics
import sys
import tempfile
from collections import Counter, defaultdict
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import torch

from ikkuna.diagnosis import Judge, Network, get_rules
from tests.diagnosis.healthy import HEALTHY, OTHERS
from tests.diagnosis.planted import FAULTS
from tests.diagnosis.training import Case, watch

STORE = Path(os.environ.get("IKKUNA_DIAGNOSIS_STORE", Path(tempfile.gettempdir(), "ikkuna_diagnosis")))
SEEDS = {"quick": (0,), "tune": (0, 2), "report": (1, 3)}


def record(spec):
    """Run one case unless it is stored; store everything that its judge received, its modules, and the module with the fault."""
    file = STORE / f"{'.'.join(map(str, spec))}.pickle"
    if file.exists():
        return spec, file
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    name, family, seed = spec
    calls = []
    if family == "other":
        exporter, hit = OTHERS[name](seed, partial(watch_and_record, calls)), None
    else:
        case = Case(family, seed)
        (FAULTS.get(name) or HEALTHY[name])[0](case)
        exporter, hit = case.train(partial(watch_and_record, calls)), case.hit
    data = calls, exporter._rules.judge.history.network.modules, hit
    STORE.mkdir(exist_ok=True)
    partial_file = file.with_suffix(".part")
    partial_file.write_bytes(pickle.dumps(data))
    partial_file.rename(file)
    return spec, file


def watch_and_record(calls, model, loss):
    """Return an exporter with rules, whose judge stores its calls."""
    exporter = watch(model, loss)
    judge = exporter._rules.judge
    add, finish = judge.add, judge.finish_step

    def store_value(*args):
        if args[0] in judge.kinds:
            calls.append(args)
        add(*args)

    def store_end(step):
        calls.append(step)
        return finish(step)

    judge.add, judge.finish_step = store_value, store_end
    return exporter


def replay(spec, file):
    """Return the findings of a stored run."""
    logging.disable(logging.CRITICAL)
    calls, modules, hit = pickle.loads(file.read_bytes())
    judge = Judge(get_rules(), Network(modules))
    for call in calls:
        if isinstance(call, int):
            judge.finish_step(call)
        else:
            judge.add(*call)
    return spec, list(judge.findings), hit, judge.history.network


def specs(seeds, names=()):
    """Yield (name, family, seed) of every case."""
    for seed in seeds:
        for name, (_, _, families) in FAULTS.items():
            yield from ((name, family, seed) for family in families)
        for name, (_, families) in HEALTHY.items():
            yield from ((name, family, seed) for family in families)
        yield from ((name, "other", seed) for name in OTHERS)


def is_near(network, hit, found):
    """Return whether a finding names the module with the fault, one inside or around it, or one of the next two behind it."""
    return hit.startswith(found) or found.startswith(hit) or 0 <= network.position(found) - network.position(hit) <= 2


def is_hit(finding, rules):
    return finding.rule in rules or bool(rules.intersection(finding.consequences))


def judge(results):
    """Return the rows of a table of faults, and the false alarms."""
    rows, alarms, healthy = defaultdict(list), [], 0
    for (name, family, seed), findings, hit, network in results:
        if name in FAULTS:
            rules = FAULTS[name][1]
            found = [f for f in findings if is_hit(f, rules)]
            named = [f for f in found if f.rule in rules]
            near = is_near(network, hit, named[0].module or "?") if hit and named else None
            rows[name].append((family, seed, bool(found), bool(named), named[0] if named else None, findings, near))
            continue
        healthy += 1
        loud = [f for f in findings if f.severity != "info"]
        if loud:
            alarms.append(((name, family, seed), loud))
    return rows, alarms, healthy


def say(text):
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main(which, *names):
    todo = [spec for spec in specs(SEEDS[which]) if not names or spec[0] in names]
    with ProcessPoolExecutor(2) as pool:
        stored = list(pool.map(record, todo, chunksize=2))
        results = list(pool.map(replay, *zip(*stored, strict=True), chunksize=20))
    rows, alarms, healthy = judge(results)
    total, counts = Counter(), Counter()
    say(f"{'fault':34} runs found named module step extra")
    for name, entries in sorted(rows.items()):
        found, named = sum(e[2] for e in entries), sum(e[3] for e in entries)
        places = [e[6] for e in entries if e[6] is not None]
        steps = [e[4].step for e in entries if e[4]]
        extra = Counter(f.rule for e in entries for f in e[5] if f.rule not in FAULTS[name][1])
        place = f"{sum(places)}/{len(places)}" if places else ""
        step = f"{statistics.median(steps):g}" if steps else "-"
        say(f"{name:34} {len(entries):4} {found:5} {named:5} {place:>6} {step:>4} {dict(extra)}")
        total.update(runs=len(entries), found=found, named=named, places=len(places), right=sum(places))
        counts.update(f.rule for e in entries for f in e[5])
    for name, entries in sorted(rows.items()):
        for family, seed, found, named, _, findings, _ in entries:
            if not named:
                rules = [(f.rule, f.step, f.consequences) for f in findings]
                say(f"  {'folded' if found else 'missed'} {name} {family} {seed} {rules}")
    number = max(total["runs"], 1)
    say(f"recall {total['found'] / number:.3f} (as the cause {total['named'] / number:.3f}) of {total['runs']}")
    say(f"module {total['right']}/{total['places']}")
    say(f"healthy {healthy}, with a finding {len(alarms)}")
    for spec, loud in alarms:
        say(f"  false {spec} {[(f.rule, f.module, f.step, f.value) for f in loud]}")


if __name__ == "__main__":
    main(*sys.argv[1:])
