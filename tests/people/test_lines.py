"""Lines that a training prints: lines with a prefix, findings with remedies, reasons of dumps, and three lines at the end."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ikkuna.diagnosis import Finding, Findings

ROOT = Path(__file__).parents[2]
SCRIPT = """
import sys
from ikkuna.cli.commands.demo import train_sample
train_sample("my run", 60, {options})
{more}
"""


def lines_of(tmp_path, options="", more="", **environment):
    inherited = {name: value for name, value in os.environ.items() if name not in ("FORCE_COLOR", "NO_COLOR")}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(options=options, more=more)],
        env={**inherited, "PYTHONPATH": str(ROOT), "TERM": "xterm", **environment},
        capture_output=True, text=True, check=True, cwd=tmp_path,
    )  # fmt: skip
    assert done.stdout == ""
    return done.stderr.splitlines()


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    return lines_of(tmp_path_factory.mktemp("printed"))


def test_every_line_has_the_prefix(printed):
    assert printed
    assert [line for line in printed if not line.startswith("ikkuna: ")] == []


def test_the_last_three_lines_are_steps_findings_and_costs(printed):
    steps, findings, costs = printed[-3:]
    pattern = r"ikkuna: Sequential: 60 steps, loss 1\.\d+ → 1\.\d+ at step 58, in 'my run/run0001'"
    assert re.fullmatch(pattern, steps)  # rules read every second loss
    assert re.fullmatch(r"ikkuna: 1 finding: error dead_units in relu3 \(step \d+\)", findings)
    pattern = r"ikkuna: watching took [\d.]+ ms a step; ikkuna report 'my run/run0001' shows more"
    assert re.fullmatch(pattern, costs)


def test_a_finding_is_printed_with_its_remedy(printed):
    [line] = [line for line in printed if line.startswith("ikkuna: error: dead_units")]
    assert "Try: lower the learning rate" in line


def test_no_finding_is_printed_in_full_twice(printed):
    texts = [line.partition(": ")[2].partition(": ")[2] for line in printed if " at step " in line and "Try: " in line]
    messages = [text.partition(": ")[2] for text in texts]
    assert len(messages) == len(set(messages)) > 0


def test_a_line_about_a_dump_says_why_it_was_written(printed):
    [line] = [line for line in printed if "dumps" in line]
    path = re.search(r"'(.*)'; the reason: \S+", line)[1]
    assert re.search(r"/my run/run0001/dumps/step_\d{6}$", path)


def test_findings_are_coloured_where_a_terminal_shows_it(tmp_path, printed):
    coloured = lines_of(tmp_path, FORCE_COLOR="1")
    assert not any("\x1b" in line for line in printed)
    assert "ikkuna: \x1b[1;31merror\x1b[0m: dead_units" in {line[: line.find(" in relu3")] for line in coloured}


def test_a_terminal_shows_lines_of_its_width():
    reader, writer = os.openpty()
    code = "from ikkuna.support.console import announce; announce(': ' + 'word ' * 60, mark='error', styles=('bold', 'red'))"
    environment = {**os.environ, "COLUMNS": "60", "TERM": "xterm", "NO_COLOR": ""}
    subprocess.run([sys.executable, "-c", code], check=True, stderr=writer, env=environment)
    os.close(writer)
    lines = os.read(reader, 10_000).decode().splitlines()
    os.close(reader)
    assert lines[0].startswith("ikkuna: \x1b[1;31merror\x1b[0m: word")
    assert len(lines) > 4
    assert all(line.startswith(" " * 8) and len(line) <= 60 for line in lines[1:])


def test_with_verbosity_0_nothing_is_printed_and_without_close_the_lines_are_written_at_the_end_of_the_process(
    tmp_path,
):
    more = """
import ikkuna, torch
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
ikkuna.watch(model, run_name="open", rules=None)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.ones(4, 2)).mean().backward()
    optimizer.step()
"""
    first, *_, steps, findings, _ = lines_of(tmp_path, "verbosity=0", more)
    assert first.startswith("ikkuna: the labels cannot be seen")
    assert steps == "ikkuna: Linear: 3 steps, in 'run/open'"
    assert findings == "ikkuna: no findings; no rules"


def test_findings_show_themselves_in_a_notebook():
    found = Findings(
        [Finding("dead<units", "error", "All & more.", "fc1", step=3, advice="lower it", consequences=("x",))],
        judged=["a"], skipped={"b": "too few <steps>"},
    )  # fmt: skip
    shown = found._repr_html_()
    for text in ("dead&lt;units", "All &amp; more.", "fc1", ">3<", "<b>Try:</b> lower it", "too few &lt;steps&gt;"):
        assert text in shown
    assert "<units" not in shown
    assert Findings()._repr_html_() == "<p>no findings; 0 checks judged</p>"


@pytest.mark.parametrize(
    ("before", "line"), [("pass", "ikkuna: 3 values"), ("logging.basicConfig()", "WARNING:ikkuna:3 values")]
)
def test_warnings_have_the_prefix_or_the_format_of_the_user(before, line):
    code = f"import logging; from ikkuna.support.failures import log; {before}; log.warning('%d values', 3)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.splitlines() == [line]


def test_many_rules_that_could_not_judge_are_counted_in_a_terminal_and_named_in_a_notebook():
    skipped = {f"rule{i}": "nothing to judge" for i in range(9)} | {"a": "not measured", "b": "not measured"}
    found = Findings((), ["loss"], skipped)
    assert str(found).splitlines() == [
        "no findings; 1 check judged, 11 could not:",
        "  9 of them: nothing to judge",
        "  a, b: not measured",
    ]
    assert ", ".join(list(skipped)[:9]) + ": nothing to judge" in found._repr_html_().replace("<br>", " ")
