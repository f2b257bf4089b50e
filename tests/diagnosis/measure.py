"""Measures the rules on planted faults and healthy runs.

Command: ``python -m tests.diagnosis.measure tune|report|separate [name …] [--seconds N] [--table FILE]``.

Thresholds are chosen by the runs of ``tune``; the figures in the documentation are those of ``report``.
``separate`` has seeds that were not used while any threshold was chosen.
What the judge of a run receives is stored below ``IKKUNA_DIAGNOSIS_STORE``, so that changed rules can be applied to it again.
"""

import argparse
import copy
import json
import logging
import math
import os
import pickle
import random
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from ikkuna.diagnosis import Finding, Judge, Network, get_rules
from tests.diagnosis.healthy import HEALTHY, OTHERS
from tests.diagnosis.planted import FAULTS
from tests.diagnosis.training import Case, watch

STORE = Path(os.environ.get("IKKUNA_DIAGNOSIS_STORE", Path(tempfile.gettempdir(), "ikkuna_diagnosis")))
SEEDS = {"quick": (0,), "tune": (0, 2), "report": (1, 3), "separate": (5, 7, 9, 11)}


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


def file_of(spec, store=STORE):
    return store / f"{'.'.join(map(str, spec))}.pickle"


def record(spec, store=STORE):
    """Run one case unless it is stored; store everything that its judge received, its modules, and the module with the fault."""
    file = file_of(spec, store)
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
    unfinished.write_bytes(pickle.dumps((calls, exporter._attachment.rules.judge.history.network.modules, hit)))
    unfinished.rename(file)
    return spec, file


GIVEN = ("add", "add_all", "defer", "defer_all", "defer_losses", "add_finding", "finish_step")
"""The methods of the judge that receive values, findings and the ends of steps; most of them call others of them."""


def watch_and_record(calls, model, loss):
    """Return an exporter with rules, whose judge stores its calls."""
    exporter = watch(model, loss)
    judge, running = exporter._attachment.rules.judge, []

    def stored(name):
        method = getattr(judge, name)

        def call(*args):
            is_first, is_read = not running, not isinstance(args[0], str) or args[0] in judge.kinds
            running.append(name)
            try:
                found = method(*args)
            finally:
                running.pop()
            if is_first and is_read:
                calls.append(
                    (name, copy.deepcopy(args) if name != "defer_losses" else (args[0], args[1][:found], args[2]))
                )
            return found

        return call

    for name in GIVEN:
        setattr(judge, name, stored(name))
    return exporter


def replay(spec, file):
    """Judge a stored run; return findings, the step at which each was announced, the module with the fault, and the network."""
    calls, modules, hit = pickle.loads(file.read_bytes())
    judge = Judge(get_rules(), Network(modules))
    announced = {}
    for name, args in calls:
        found = getattr(judge, name)(*args)
        while name == "defer_losses" and 0 < found < len(args[1]):  # other rules may judge at other steps
            args = args[0] + found, args[1][found:], args[2]
            judge.finish_step(args[0] - 1)
            found = judge.defer_losses(*args)
        if name == "finish_step":
            announced |= {finding.rule: args[0] for finding in found}
        elif name == "add_finding" and found is not None:
            announced[found.rule] = args[1]
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


def figures(results, planned):
    """Return what was measured, as the documentation shows it: counts of each fault, of each rule, and of the healthy runs."""
    rows, alarms, healthy = judge(results)
    entries = [entry for named in rows.values() for entry in named]
    rules = {rule.name: {"runs": 0, "named": 0, "found": 0, "steps": []} for rule in get_rules()}
    for name, named in rows.items():
        for rule in FAULTS[name][1]:
            counts = rules[rule]
            counts["runs"] += len(named)
            counts["found"] += sum(entry.is_found for entry in named)
            own = [entry for entry in named if any(f.rule == rule for f in entry.findings)]
            counts["named"] += len(own)
            counts["steps"] += [e.announced for e in own if e.finding.rule == rule and e.announced is not None]
    for counts in rules.values():
        counts["step"] = middle(counts.pop("steps"))
    loud = Counter(f.rule for _, findings in alarms for f in findings)
    return {
        "runs": len(entries),
        "planned": planned,
        "found": sum(e.is_found for e in entries),
        "named": sum(e.finding is not None for e in entries),
        "near": [e.is_near for e in entries].count(True),
        "with_module": sum(e.is_near is not None for e in entries),
        "step": middle([e.announced for e in entries if e.announced is not None]),
        "others": sum(
            f.severity != "info" and f.rule not in FAULTS[n][1]
            for n, es in rows.items()
            for e in es
            for f in e.findings
        ),
        "healthy": {"runs": healthy, "alarms": len(alarms), "rules": dict(sorted(loud.items()))},
        "faults": {name: of_fault(name, named) for name, named in sorted(rows.items())},
        "rules": dict(sorted(rules.items())),
    }


def of_fault(name, entries):
    """Return the counts of one fault."""
    others = Counter(f.rule for e in entries for f in e.findings if f.rule not in FAULTS[name][1])
    by = Counter(f.rule for e in entries for f in e.findings if f.rule in FAULTS[name][1])
    return {
        "runs": len(entries),
        "found": sum(e.is_found for e in entries),
        "named": sum(e.finding is not None for e in entries),
        "near": [e.is_near for e in entries].count(True),
        "with_module": sum(e.is_near is not None for e in entries),
        "step": middle([e.announced for e in entries if e.announced is not None]),
        "by": dict(sorted(by.items())),
        "others": dict(sorted(others.items())),
        "missed": [f"{e.family} {e.seed}" for e in entries if not e.is_found],
    }


def middle(steps):
    return statistics.median(steps) if steps else None


def say(text):
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def show(found):
    """Print the table of the faults and the sums."""
    say("| fault | runs | found | as the cause | module | announced at step | other findings |")
    say("|---|---|---|---|---|---|---|")
    for name, counts in found["faults"].items():
        module = f"{counts['near']} of {counts['with_module']}" if counts["with_module"] else ""
        others = ", ".join(f"{rule} {count}" for rule, count in counts["others"].items())
        step = "" if counts["step"] is None else f"{counts['step']:g}"
        say(f"| {name} | {counts['runs']} | {counts['found']} | {counts['named']} | {module} | {step} | {others} |")
        for missed in counts["missed"]:
            say(f"missed {name} {missed}")
    say(
        f"runs {found['runs']} (of {found['planned']} with the healthy ones), found {found['found']}, as the cause {found['named']}"
    )
    say(
        f"module {found['near']} of {found['with_module']}, announced at step {found['step']}, other findings {found['others']}"
    )
    say(f"healthy {found['healthy']['runs']}, with a finding {found['healthy']['alarms']}: {found['healthy']['rules']}")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("which", choices=list(SEEDS))
    parser.add_argument("names", nargs="*", help="faults and healthy variations; by default all")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="begin no further run after this time; those stored are judged"
    )
    parser.add_argument("--table", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    todo = specs(SEEDS[arguments.which], arguments.names)
    random.Random(0).shuffle(todo)  # so that a part of the runs is a sample of all
    end = time.monotonic() + arguments.seconds
    with ProcessPoolExecutor(arguments.processes) as pool:
        stored = [pair for pair in pool.map(partial(record_until, end), todo) if pair is not None]
        results = list(pool.map(replay, *zip(*stored, strict=True), chunksize=20))
    found = figures(results, len(todo))
    show(found)
    if arguments.table:
        arguments.table.write_text(json.dumps(found, indent=1) + "\n")


def record_until(end, spec):
    """Return what `record` returns; after the time `end` ``None`` for a case that is not stored."""
    return record(spec) if time.monotonic() < end or file_of(spec).exists() else None


if __name__ == "__main__":
    main()
