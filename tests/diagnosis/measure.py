"""Measures the rules on planted faults and healthy runs: ``python -m tests.diagnosis.measure tune|report [name …]``.

Thresholds are chosen by the runs of ``tune``; the figures in the documentation are those of ``report``.
What the judge of a run receives is stored below ``IKKUNA_DIAGNOSIS_STORE``, so that changed rules can be applied to it again.
"""

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
from typing import NamedTuple

import torch

from ikkuna.diagnosis import Finding, Judge, Network, get_rules
from ikkuna.diagnosis.history import TRAINING
from tests.diagnosis.healthy import HEALTHY, OTHERS
from tests.diagnosis.planted import FAULTS
from tests.diagnosis.training import Case, watch

STORE = Path(os.environ.get("IKKUNA_DIAGNOSIS_STORE", Path(tempfile.gettempdir(), "ikkuna_diagnosis")))
SEEDS = {"quick": (0,), "tune": (0, 2), "report": (1, 3)}


class Entry(NamedTuple):
    """One run with a fault.

    ``is_found`` also counts a finding that lists an expected rule among its consequences; ``is_near`` is ``None`` without a module.
    """

    family: str
    seed: int
    is_found: bool
    finding: Finding | None
    findings: list[Finding]
    is_near: bool | None
    announced: int | None


def specs(seeds, names=()):
    """Return (name, family, seed) of every case."""
    found = []
    for seed in seeds:
        found += [(name, family, seed) for name, (_, _, families) in FAULTS.items() for family in families]
        found += [(name, family, seed) for name, (_, families) in HEALTHY.items() for family in families]
        found += [(name, "other", seed) for name in OTHERS]
    return [spec for spec in found if not names or spec[0] in names]


def record(spec, store=STORE):
    """Run one case unless it is stored; store everything that its judge received, its modules, and the module with the fault."""
    file = store / f"{'.'.join(map(str, spec))}.pickle"
    if file.exists():
        return spec, file
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    name, family, seed = spec
    calls = []
    try:
        if family == "other":
            exporter, hit = OTHERS[name](seed, partial(watch_and_record, calls)), None
        else:
            case = Case(family, seed)
            (FAULTS.get(name) or HEALTHY[name])[0](case)
            exporter, hit = case.train(partial(watch_and_record, calls)), case.hit
    finally:
        logging.disable(logging.NOTSET)
    store.mkdir(exist_ok=True)
    unfinished = file.with_suffix(".part")
    unfinished.write_bytes(pickle.dumps((calls, exporter._rules.judge.history.network.modules, hit)))
    unfinished.rename(file)
    return spec, file


def watch_and_record(calls, model, loss):
    """Return an exporter with rules, whose judge stores its calls."""
    exporter = watch(model, loss)
    judge = exporter._rules.judge
    add, add_all, finish = judge.add, judge.add_all, judge.finish_step

    def store_value(*args):
        if args[0] in judge.kinds:
            calls.append(args)
        add(*args)

    def store_values(kind, names, step, values, pass_name=TRAINING):
        if kind in judge.kinds:
            calls.extend((kind, name, step, value, pass_name) for name, value in zip(names, values, strict=True))
        add_all(kind, names, step, values, pass_name)

    def store_end(step):
        calls.append(step)
        return finish(step)

    judge.add, judge.add_all, judge.finish_step = store_value, store_values, store_end
    return exporter


def replay(spec, file):
    """Judge a stored run; return findings, the step at which each was announced, the module with the fault, and the network."""
    calls, modules, hit = pickle.loads(file.read_bytes())
    judge = Judge(get_rules(), Network(modules))
    announced = {}
    for call in calls:
        if isinstance(call, int):
            announced |= {finding.rule: call for finding in judge.finish_step(call)}
        else:
            judge.add(*call)
    return spec, list(judge.findings), announced, hit, judge.history.network


def is_near(network, hit, found):
    """Return whether a finding names the module with the fault, one inside or around it, or one of the next two behind it."""
    return hit.startswith(found) or found.startswith(hit) or 0 <= network.position(found) - network.position(hit) <= 2


def judge(results):
    """Return the entries of each fault, the false alarms, and the number of healthy runs."""
    rows, alarms, healthy = defaultdict(list), [], 0
    for (name, family, seed), findings, announced, hit, network in results:
        if name not in FAULTS:
            healthy += 1
            if loud := [f for f in findings if f.severity != "info"]:
                alarms.append(((name, family, seed), loud))
            continue
        rules = FAULTS[name][1]
        found = any(f.rule in rules or rules.intersection(f.consequences) for f in findings)
        named = next((f for f in findings if f.rule in rules), None)
        near = is_near(network, hit, named.module or "?") if hit and named else None
        step = announced.get(named.rule) if named else None
        rows[name].append(Entry(family, seed, found, named, findings, near, step))
    return rows, alarms, healthy


def say(text):
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main(which, *names):
    todo = specs(SEEDS[which], names)
    with ProcessPoolExecutor(2) as pool:
        stored = list(pool.map(record, todo, chunksize=2))
        results = list(pool.map(replay, *zip(*stored, strict=True), chunksize=20))
    rows, alarms, healthy = judge(results)
    say(
        "| fault | runs | found | as the cause | module | announced at step | other findings |\n|---|---|---|---|---|---|---|"
    )
    for name, entries in sorted(rows.items()):
        near = [e.is_near for e in entries if e.is_near is not None]
        steps = [e.announced for e in entries if e.announced is not None]
        others = Counter(f.rule for e in entries for f in e.findings if f.rule not in FAULTS[name][1])
        module = f"{sum(near)} of {len(near)}" if near else ""
        step = f"{statistics.median(steps):g}" if steps else ""
        other = ", ".join(f"{rule} {count}" for rule, count in others.items())
        found, named = sum(e.is_found for e in entries), sum(e.finding is not None for e in entries)
        say(f"| {name} | {len(entries)} | {found} | {named} | {module} | {step} | {other} |")
    for name, entries in sorted(rows.items()):
        for entry in entries:
            if entry.finding is None:
                found = [(f.rule, f.step, f.consequences) for f in entry.findings]
                say(f"{'folded' if entry.is_found else 'missed'} {name} {entry.family} {entry.seed} {found}")
    entries = [entry for named in rows.values() for entry in named]
    named = [entry.finding for entry in entries if entry.finding]
    near = [entry.is_near for entry in entries if entry.is_near is not None]
    steps = [entry.announced for entry in entries if entry.announced is not None]
    extra = sum(
        f.severity != "info" and f.rule not in FAULTS[n][1] for n, es in rows.items() for e in es for f in e.findings
    )
    say(
        f"runs {len(entries)}, found {sum(e.is_found for e in entries)}, as the cause {len(named)}, other findings {extra}"
    )
    say(f"module {sum(near)} of {len(near)}, announced at step {statistics.median(steps) if steps else '-'}")
    say(f"healthy {healthy}, with a finding {len(alarms)}")
    for spec, loud in alarms:
        say(f"false {spec} {[(f.rule, f.module, f.step, f.value) for f in loud]}")


if __name__ == "__main__":
    main(*sys.argv[1:])
