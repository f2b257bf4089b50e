"""Mutants that no test can tell from the original, each with the reason."""

EQUIVALENT = {
    f"{file}: {change} in {line}": reason
    for file, changes in {
        "subscribers/ikkuna_subscribers/rules/loss.py": (
            (
                "-1 -> 1",
                'before = memory.get("step", |-1)',
                "the first 16 losses have no score, so none of step 0 or 1 is judged",
            ),
            ("1 -> 2", 'before = memory.get("step", -|1)', "no step is below 0"),
            (
                "found[2] > -math.inf -> found[2] >= -math.inf",
                "fresh = [found for found in history.loss_scores if found[0] > before and |found[2] > -math.inf]",
                "both leave NaN out, and a score of -inf is that of a healthy step",
            ),
            (
                "True -> False",
                "losses = dict(zip(curve.steps, curve.values, strict=|True))",
                "a series has as many steps as values",
            ),
            (
                "True -> False",
                "values = list(zip(loss.steps, loss.values, strict=|True))",
                "a series has as many steps as values",
            ),
            (
                "abs(each / ranks - 1) < 0.15 -> abs(each / ranks - 1) <= 0.15",
                "elif is_of_ranks and all(|abs(each / ranks - 1) < 0.15 for each in ratios):",
                "no difference of 1 and a number of float64 is 0.15",
            ),
            (
                "classes.last > 1 -> classes.last >= 1",
                "if mean is None or entropy is None or count is None or classes is None or not |classes.last > 1:",
                "the guess among one class is 0, which is too small as well",
            ),
        ),
        "ikkuna/observation/rows/rows.py": (
            (
                "False -> True",
                "self._is_finite = |False",
                "it is read behind the search for measured rows, which sets it",
            ),
            (
                "False -> True",
                "self._is_pending = |False  # whether `load` has something to complete",
                "nothing is completed, with more checks",
            ),
            ("0 -> 1", "whole = self._parts.get(0) or self.part(|0)", "no part is there, and a new one is empty"),
        ),
        "ikkuna/observation/rows/recorder.py": (
            (
                "return statistics.try_add(row, tensor, task.fields, self._source(task.fields)) -> return None",
                "|return statistics.try_add(row, tensor, task.fields, self._source(task.fields))",
                "the other way measures the same, with more checks",
            ),
        ),
        "subscribers/ikkuna_subscribers/rules/gradients.py": (
            (
                "True -> False",
                "for name, is_unreached in zip(used, flags, strict=|True):",
                "there is a flag for each name",
            ),
            (
                "0.0 -> 1.0",
                'last_name, last = ([each for each in scales if is_of_classes(history, each[0])] or scales or [("", |0.0)])[-1]',
                "without matrices there is no score",
            ),
            (
                "0.0 -> 1.0",
                "largest = max((scale for _, scale in scales), default=|0.0)",
                "without matrices there is no score",
            ),
        ),
        "ikkuna/store/event_reader.py": tuple(
            ("1 -> 2", f"np.array(self._{name}, np.int64).reshape(-|1, {size}),", "any negative size is computed")
            for name, size in (("others", "OTHER_FIELDS"), ("starts", "START_FIELDS"))
        ),
        "ikkuna/observation/steps/counters.py": (
            ("False -> True", "self._is_apart = |False", "it is read behind a forward, which has set it"),
            ("0.0 -> 1.0", "self._ended = |0.0", "it is read behind the end of a step, which has set it"),
            (
                "0.0 -> 1.0",
                "self._spent_before = self._spent_until_end = |0.0",
                "the difference of both is read, which is 0",
            ),
        ),
        "ikkuna/store/writer.py": (
            (
                "now < self._retry_at -> now <= self._retry_at",
                "if |now < self._retry_at:",
                "a time that equals the deadline is a tick of the clock away from it",
            ),
            (
                "now >= self._check_at -> now > self._check_at",
                "return self._check_directory if self._may_check() and |now >= self._check_at else None",
                "a time that equals the deadline is a tick of the clock away from it",
            ),
        ),
        "ikkuna/diagnosis/history.py": (
            (
                "curves.keys() >= set(names) -> curves.keys() > set(names)",
                "if not |curves.keys() >= set(names):",
                "names that are known are inserted again, in the same order",
            ),
        ),
        "ikkuna/numerics/statistics/host.py": (
            ("1 -> 2", "_LONG, _PIECE = |1 << 20, 1 << 10", "pieces of another size have the same sum up to rounding"),
            (
                "not fields <= _COUNTED -> fields <= _COUNTED",
                "if kernels is not None and weight == 1 and |not fields <= _COUNTED and kernels.accepts(x):",
                "both ways count the same elements, and one of them also reads them",
            ),
        ),
        "ikkuna/flight_recorder/recorder.py": (
            (
                "False -> True",
                "self._any_was_bad = |False",
                "the first table takes the long way, whose result is the same",
            ),
            (
                "not self._is_cleaned and log_dir.is_dir() -> not self._is_cleaned or log_dir.is_dir()",
                "if |not self._is_cleaned and log_dir.is_dir():",
                "what is left is removed again, or searched in a directory that does not exist",
            ),
        ),
        "ikkuna/diagnosis/judge.py": (
            (
                "value - value -> value + value",
                "if step < last or |value - value != 0:",
                "values are added at once instead of later, which changes time and no finding",
            ),
            (
                "0 -> 1",
                "if step < last or value - value != |0:",
                "values are added at once instead of later, which changes time and no finding",
            ),
            (
                "self._deferred_rules.update(self._judges.get(kind, ())) -> pass",
                "|self._deferred_rules.update(self._judges.get(kind, ()))",
                "values are added in each step instead of later, which changes time and no finding",
            ),
            (
                "if kind not in self._deferred_kinds: -> if not kind not in self._deferred_kinds:",
                "|if kind not in self._deferred_kinds:",
                "values are added at once instead of later, which changes time and no finding",
            ),
        ),
    }.items()
    for change, line, reason in changes
}
