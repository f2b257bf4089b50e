"""Mutants that no test can tell from the original, each with the reason."""

_ENOUGH = "1e-14 * n < s2 and math.isfinite(s4)"

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
                "bounds.step > last -> bounds.step >= last",
                "if |bounds.step > last:",
                "no sample follows the last one, so that nothing is added",
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
            *(
                ("True -> False", line, "there is an array for each place")
                for line in (
                    "for (holder, key, _), array in zip(group, arrays, strict=|True):",
                    "for (holder, key), row in zip(places, rows, strict=|True):",
                )
            ),
            (
                "raise_users_exception(error) -> pass",
                "|raise_users_exception(error)",
                "the report of the error, which follows, raises it as well",
            ),
            (
                "max(row, other) < len(self.values) -> max(row, other) <= len(self.values)",
                "is_known = |max(row, other) < len(self.values) and self.values[other, _N]",
                "the table has all rows, or none, and one of two rows is not row 0",
            ),
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
            *(
                (f"{change} -> {other}", f"|{change}", "the other way measures the same, with more checks")
                for change, other in (
                    ("if tensor.is_cpu:", "if not tensor.is_cpu:"),
                    (
                        "return kernels.try_add(tensor, task.fields, rows.part(part).host.address(self.index.row(site, path)))",
                        "return None",
                    ),
                    (
                        "return not tensor.is_meta and self._receive_on_device(rows.part(part), site, tensor, path, task)",
                        "return None",
                    ),
                )
            ),
        ),
        "ikkuna/distributed/merge.py": (
            *(
                ("1 -> 2", line, "only the sign of the number is read")
                for line in (
                    "missing, mask = np.full(len(layouts), -|1), np.zeros(len(layouts), bool)",
                    "return -|1, np.empty(0, np.int64), np.empty(0, np.int64)",
                )
            ),
            *(
                (change, line, "pieces of other sizes have the same rows")
                for change, line in (
                    ("1 -> 2", "_AT_ONCE = |1 << 21  # bounds each temporary array to 16 MiB"),
                    ("21 -> 42", "_AT_ONCE = 1 << |21  # bounds each temporary array to 16 MiB"),
                    ("1 -> 2", "step = max(|1, _AT_ONCE // (len(blocks) * width))"),
                    (
                        "_AT_ONCE // (len(blocks) * width) -> _AT_ONCE * (len(blocks) * width)",
                        "step = max(1, |_AT_ONCE // (len(blocks) * width))",
                    ),
                    (
                        "len(table.columns) + sum((bins for _, bins in table.codes)) -> "
                        "len(table.columns) - sum((bins for _, bins in table.codes))",
                        "width = |len(table.columns) + sum(bins for _, bins in table.codes)",
                    ),
                )
            ),
            *(
                ("True -> False", line, "there is one for each rank, and one for each key")
                for line in (
                    "tables = (b.values[i][found] if i >= 0 else missing for b, i, found in zip(blocks, table.table, row, strict=|True))",
                    "for key, total in zip(keys.tolist(), np.where(counts[..., None], dense, 0).sum(0), strict=|True):",
                    "rows = [b.own[i : i + size] if i >= 0 else missing for b, i in zip(blocks, aligned.begin, strict=|True)]",
                )
            ),
        ),
        "ikkuna/numerics/statistics/record.py": tuple(
            (
                change,
                "total := |values[6] + values[7] + values[8] + values[9]",
                "NaN remains NaN, and only NaN is replaced",
            )
            for change in (
                "values[6] + values[7] + values[8] + values[9] -> values[6] + values[7] + values[8] - values[9]",
                "values[6] + values[7] + values[8] -> values[6] + values[7] - values[8]",
                "values[6] + values[7] -> values[6] - values[7]",
            )
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
        "ikkuna/observation/steps/forwards.py": (
            ("False -> True", "self._is_apart = |False", "it is read behind a forward, which has set it"),
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
            (
                "True -> False",
                "return tuple(list(zip(self.steps, self.values, strict=|True))[-number:])",
                "a series has as many steps as values",
            ),
        ),
        "ikkuna/diagnosis/findings.py": (
            *(
                ("24 -> 48", line, "the height of a terminal is not read")
                for line in (
                    "width = max(shutil.get_terminal_size((120, |24)).columns, 40)",
                    "width = max(shutil.get_terminal_size((120, |24)).columns - indent, 40)",
                )
            ),
            (
                "True -> False",
                'return "  ".join((*(cell.ljust(size) for cell, size in zip(cells, widths, strict=|True)), text))',
                "there is a width for each cell",
            ),
        ),
        "ikkuna/numerics/statistics/host.py": (
            *(
                (change, line, "pieces of another size have the same sum up to rounding")
                for change, line in (
                    (
                        "_LONG if fields == _SQUARES else CHUNK -> _LONG if not fields == _SQUARES else CHUNK",
                        "size = |_LONG if fields == _SQUARES else CHUNK  # a single reduction needs no cache",
                    ),
                    (
                        "fields == _SQUARES -> fields != _SQUARES",
                        "size = _LONG if |fields == _SQUARES else CHUNK  # a single reduction needs no cache",
                    ),
                )
            ),
            (
                "len(rows) > 1 -> len(rows) >= 1",
                "return merge_rows(rows) if |len(rows) > 1 else rows[0]",
                "the merge of one row is this row",
            ),
            (
                "flat.numel() > size -> flat.numel() >= size",
                "chunks = flat.split(size) if |flat.numel() > size else (flat,)",
                "a tensor of one chunk is split into itself",
            ),
            (
                "x.dtype == np.float32 -> x.dtype != np.float32",
                "if found is None and |x.dtype == np.float32:",
                "the other way computes the same in float64, with more checks",
            ),
            ("1 -> 2", "_LONG, _PIECE = |1 << 20, 1 << 10", "pieces of another size have the same sum up to rounding"),
            *(
                (
                    "fields <= _COUNTED -> fields < _COUNTED",
                    line,
                    "both ways count the same elements, and one of them also reads them",
                )
                for line in (
                    "is_counted = weight != 1 or |fields <= _COUNTED",
                    "if kernels is not None and not implied_zeros and weight == 1 and not |fields <= _COUNTED:",
                    "if |fields <= _COUNTED:",
                )
            ),
            *(
                (change, line, "pieces of another size have the same sum up to rounding")
                for change, line in (
                    ("20 -> 40", "_LONG, _PIECE = 1 << |20, 1 << 10"),
                    ("1 -> 2", "_LONG, _PIECE = 1 << 20, |1 << 10"),
                    (
                        "flat.split(size) if flat.numel() > size else (flat,) -> "
                        "flat.split(size) if not flat.numel() > size else (flat,)",
                        "chunks = |flat.split(size) if flat.numel() > size else (flat,)",
                    ),
                )
            ),
            ("True -> False", "_EMPTY: _Found = dict(zip(COLUMNS, EMPTY.tolist(), strict=|True))", "both are columns"),
            *(
                (change, line, "the other way computes the same in float64, with more checks")
                for change, line in (
                    (
                        "if found is None and x.dtype == np.float32: -> "
                        "if not (found is None and x.dtype == np.float32):",
                        "|if found is None and x.dtype == np.float32:",
                    ),
                    (
                        "found is None and x.dtype == np.float32 -> found is None or x.dtype == np.float32",
                        "if |found is None and x.dtype == np.float32:",
                    ),
                    ("found is None -> found is not None", "if |found is None and x.dtype == np.float32:"),
                    *(
                        (change, f"return {line}")
                        for change, line in (
                            (
                                "x.dtype == np.float64 or squares > 1e-28 * len(x) or (not x.any()) -> "
                                "x.dtype == np.float64 and squares > 1e-28 * len(x) and (not x.any())",
                                "math.isfinite(squares) and (|x.dtype == np.float64 or squares > 1e-28 * len(x) or not x.any())",
                            ),
                            (
                                "squares > 1e-28 * len(x) -> squares >= 1e-28 * len(x)",
                                "math.isfinite(squares) and (x.dtype == np.float64 or |squares > 1e-28 * len(x) or not x.any())",
                            ),
                            (
                                "1e-28 * len(x) -> 1e-28 / len(x)",
                                "math.isfinite(squares) and (x.dtype == np.float64 or squares > |1e-28 * len(x) or not x.any())",
                            ),
                            (
                                "1e-28 -> 2e-28",
                                "math.isfinite(squares) and (x.dtype == np.float64 or squares > |1e-28 * len(x) or not x.any())",
                            ),
                        )
                    ),
                    *(
                        (change, f"if x.dtype == np.float32 and s2 and not (|{_ENOUGH}):")
                        for change in (
                            "1e-14 * n < s2 -> 1e-14 * n <= s2",
                            "1e-14 * n -> 1e-14 / n",
                            "1e-14 -> 2e-14",
                        )
                    ),
                )
            ),
            (
                "fields & _MOMENTS -> fields | _MOMENTS",
                "if |fields & _MOMENTS and not _add_moments(found, x, squares, fields):",
                "columns that were not requested are arbitrary",
            ),
            *(
                ("0.0 -> 1.0", f"pivot, s1, s2, s3, s4 = 0.0, _sum(x), squares, {rest}", "it is set before it is read")
                for rest in ("|0.0, 0.0", "0.0, |0.0")
            ),
            *(
                (
                    change,
                    f"if {line} or not math.isfinite(squares):",
                    "both pivots are precise enough, and one costs more",
                )
                for change, line in (
                    (
                        "n * (s1 / n) * (s1 / n) > (0.01 if is_high else 0.5) * squares -> "
                        "n * (s1 / n) * (s1 / n) >= (0.01 if is_high else 0.5) * squares",
                        "|n * (s1 / n) * (s1 / n) > (0.01 if is_high else 0.5) * squares",
                    ),
                    ("s1 / n -> s1 * n", "n * (|s1 / n) * (s1 / n) > (0.01 if is_high else 0.5) * squares"),
                    ("s1 / n -> s1 * n", "n * (s1 / n) * (|s1 / n) > (0.01 if is_high else 0.5) * squares"),
                    ("0.01 -> 0.02", "n * (s1 / n) * (s1 / n) > (|0.01 if is_high else 0.5) * squares"),
                )
            ),
            *(
                ("1 -> 2", f"total += float(np.matmul({line}).sum(dtype=np.float64))", "any negative size is computed")
                for line in (
                    "x[:whole].reshape(-|1, 1, _PIECE), right.reshape(-1, _PIECE, 1)",
                    "x[:whole].reshape(-1, 1, _PIECE), right.reshape(-|1, _PIECE, 1)",
                )
            ),
            ("64 -> 128", "_FIRST_CAPACITY = |64", "the table grows to what is needed"),
            (
                "count > len(self.values) -> count >= len(self.values)",
                "if |count > len(self.values):",
                "it has that row",
            ),
            *(
                (change, line, "a view of all elements is read as its copy is")
                for change, line in (
                    ("flat.numel() <= CHUNK -> flat.numel() < CHUNK", "if |flat.numel() <= CHUNK:"),
                    ("if flat.numel() <= CHUNK: -> if not flat.numel() <= CHUNK:", "|if flat.numel() <= CHUNK:"),
                )
            ),
        ),
        "ikkuna/report/difference.py": (
            (
                "1 -> 2",
                "position, natural = order.key(module) if module is not None else (-|1, [])",
                "the network is before all modules, and behind them in the backward pass",
            ),
            (
                "distance > least -> distance >= least",
                "if not (|distance > least).any():",
                "no difference is found either way, because none exceeds what is allowed",
            ),
            *(
                ("True -> False", line, "there is one for each")
                for line in (
                    "for i, (own, rounding) in enumerate(zip(distance.tolist(), least.tolist(), strict=|True)):",
                    "for content, (steps, values) in zip((first, second), chosen, strict=|True):",
                )
            ),
        ),
        "ikkuna/metrics/bus/delivery.py": (
            (
                "not registered.disabled -> registered.disabled",
                "if is_sampled and registered.subscription.modules is None and |not registered.disabled:",
                "the other way selects the same, and nothing is delivered to a disabled subscriber",
            ),
            (
                "Result | Later -> Result & Later",
                "_Early = dict[Registered, Sequence[|Result | Later]]",
                "the type is not read while the program runs",
            ),
        ),
        "ikkuna/flight_recorder/recorder.py": (
            *(
                (change, line, "there are at least as many places as rows, and only those of rows are read")
                for change, line in (
                    ("0 -> 1", "self._was_bad = np.zeros(|0, np.bool_)"),
                    ("count > len(self._is_known) -> count >= len(self._is_known)", "if |count > len(self._is_known):"),
                    (
                        "count - len(self._is_known) -> count + len(self._is_known)",
                        "more = np.zeros(|count - len(self._is_known), np.bool_)",
                    ),
                )
            ),
            (
                "0 -> 1",
                "largest = int(counts.max(initial=|0))",
                "it is only compared with the largest number of 32 bits",
            ),
            (
                "False -> True",
                "self._nonfinite, self._spike, self._has_spiked = NonFiniteTrigger(), SpikeScore(), |False",
                "the first loss has no score, which sets it to false",
            ),
            (
                "1 -> 2",
                "if not self._any_was_bad and not np.count_nonzero(values[:, _NANS : _INFS + |1]):",
                "the next column lets more tables take the long way, whose result is the same",
            ),
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
            ("0 -> 1", "self.since = |0", "it is set with the first bad score, before it is read"),
            (
                "1000 -> 2000",
                "_MOST_DEFERRED = |1000",
                "it bounds memory alone: no finding depends on when values are added",
            ),
            (
                "self._deferred and (self._undecided or step >= self._due_at or self._count_deferred >= _MOST_DEFERRED) -> "
                "self._deferred or (self._undecided or step >= self._due_at or self._count_deferred >= _MOST_DEFERRED)",
                "if |self._deferred and (self._undecided or step >= self._due_at or self._count_deferred >= _MOST_DEFERRED):",
                "values are added at once instead of later, which changes time and no finding",
            ),
            (
                "self._count_deferred >= _MOST_DEFERRED -> self._count_deferred > _MOST_DEFERRED",
                "if self._deferred and (self._undecided or step >= self._due_at or |self._count_deferred >= _MOST_DEFERRED):",
                "it bounds memory alone: no finding depends on when values are added",
            ),
            *(
                (change, line, "values are added at once instead of later, which changes time and no finding")
                for change, line in (
                    (
                        "step < max(self._last_deferred, self._history.step) -> step <= max(self._last_deferred, self._history.step)",
                        "if |step < max(self._last_deferred, self._history.step) or value - value != 0:",
                    ),
                    (
                        "kind not in self._deferred_kinds -> kind in self._deferred_kinds",
                        "if |kind not in self._deferred_kinds:",
                    ),
                    (
                        "self._latest.get(rule, -rule.stride) + rule.stride -> "
                        "self._latest.get(rule, -rule.stride) - rule.stride",
                        "next_ones = [|self._latest.get(rule, -rule.stride) + rule.stride for rule in self._deferred_rules]",
                    ),
                    ("step + 1 -> step - 1", "self._due_at = min(next_ones, default=|step + 1)"),
                )
            ),
            (
                "self._deferred_kinds.add(kind) -> pass",
                "|self._deferred_kinds.add(kind)",
                "the rules of the kind are in the set already",
            ),
            (
                "value - value -> value + value",
                "if step < max(self._last_deferred, self._history.step) or |value - value != 0:",
                "values are added at once instead of later, which changes time and no finding",
            ),
            (
                "0 -> 1",
                "if step < max(self._last_deferred, self._history.step) or value - value != |0:",
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
