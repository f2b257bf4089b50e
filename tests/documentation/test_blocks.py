"""Every Python block of the documentation runs, the names on its pages exist, and its sentences are plain."""

import ast
import re
import tomllib
from pathlib import Path

import pytest
import torch

import ikkuna
from ikkuna.cli import commands
from ikkuna.cli.program import main
from ikkuna.cli.terminal import command_names
from ikkuna.export import Exporter
from ikkuna.export.messages import get_default_bus
from ikkuna.export.subscriber import GROUP
from ikkuna.support.plugins import plugin_names
from tests.language import BANNED

ROOT = Path(__file__).parents[2]
SITE = ROOT / "sphinx" / "source"
PAGES = [*ROOT.glob("*.md"), *sorted(SITE.rglob("*.rst"))]


def blocks(path):
    """Return (line, code) of each block of Python."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        found = [(m.start(1), m[1]) for m in re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)]
        return [(text.count("\n", 0, start), code) for start, code in found]
    pattern = r"^\.\. code-block:: python\n(?: +:.*\n)*\n((?:(?: {3}.*)?\n)+)"
    found = [(m.start(1), m[1]) for m in re.finditer(pattern, text + "\n", re.MULTILINE)]
    return [(text.count("\n", 0, start), re.sub("^ {3}", "", code, flags=re.MULTILINE)) for start, code in found]


@pytest.fixture
def namespace(tmp_path, monkeypatch):
    """The namespace of a page's blocks, in an empty directory and with a separate default bus; exporters are closed after it."""
    monkeypatch.chdir(tmp_path)
    get_default_bus.cache_clear()
    names = {"__name__": "__main__"}
    yield names
    for exporter in [value for value in names.values() if isinstance(value, Exporter)]:
        exporter.close()
    get_default_bus.cache_clear()


@pytest.mark.parametrize(
    "path", [path for path in PAGES if blocks(path)], ids=lambda path: path.relative_to(ROOT).as_posix()
)
def test_the_blocks_of_a_page_run_one_after_another(path, namespace):
    for line, code in blocks(path):
        exec(compile("\n" * line + code, str(path), "exec"), namespace)  # tracebacks show the line of the page


def test_the_command_of_the_page_is_a_command(tmp_path, monkeypatch, capfd):
    """A module in the folder of the commands is all that a command needs."""
    [code] = [code for _, code in blocks(SITE / "how_to_add.rst") if "argparse" in code]
    (tmp_path / "last.py").write_text(code)
    monkeypatch.setattr(commands, "__path__", [*commands.__path__, str(tmp_path)])
    assert "last" in command_names()
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ikkuna.watch(model, every=1, log_dir=tmp_path / "runs", verbosity=0):
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(torch.ones(1, 2)).sum()
            loss.backward()
            optimizer.step()
    assert main(["last", str(tmp_path / "runs")]) == 0
    assert capfd.readouterr().out == f"step 2: loss {loss.item():.4g}\n"


def test_all_blocks_are_found():
    """Without blocks, every test of blocks would pass."""
    assert len(blocks(ROOT / "README.md")) == 4
    assert len(blocks(SITE / "quick_start.rst")) == 4
    line, code = blocks(SITE / "quick_start.rst")[0]
    assert (SITE / "quick_start.rst").read_text().splitlines()[line].strip() == code.splitlines()[0] == "import torch"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_block_of_python_is_marked_as_python(path):
    text = path.read_text(encoding="utf-8")
    languages = set(re.findall(r"^```(\w+)$|^\.\. (?:code-block|code|sourcecode):: (\w+)", text, re.MULTILINE))
    assert {a or b for a, b in languages} <= {"python", "text", "toml"}


def test_the_quick_start_of_the_readme_writes_a_curve_for_every_layer(tmp_path, namespace):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for _, code in blocks(ROOT / "README.md"):
        exec(code, namespace)
    watched, own = (EventAccumulator(str(run)).Reload() for run in sorted((tmp_path / "run").iterdir()))
    assert sum(tag.startswith("activations_near_zero/") for tag in own.Tags()["scalars"]) == 3
    tags = [tag for tag in watched.Tags()["scalars"] if tag.startswith("layer_gradients_norm2/")]
    assert sorted(tags) == [f"layer_gradients_norm2/{number}" for number in range(3)]
    assert [value.step for value in watched.Scalars(tags[0])] == [0, 10, 20]


def test_the_readme_is_short_and_its_pictures_and_commands_exist():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 125
    commands = set(re.findall(r"^ikkuna (\w+)", text, re.MULTILINE)) | set(re.findall(r"`ikkuna (\w+)", text))
    assert len(commands) > 4
    assert commands <= set(command_names())


def test_the_commands_of_the_readme_are_in_the_makefile():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in ("README.md", "CONTRIBUTING.md"):
        named = set(re.findall(r"`make ([\w-]+)`", (ROOT / page).read_text()))
        assert named
        assert named <= targets


def test_linked_files_exist():
    for page in (*ROOT.glob("*.md"), *ROOT.glob("examples/**/*.md")):
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_tests_that_pages_name_exist():
    named = re.findall(r"``(tests/[\w/]+\.py)(?:::(\w+))?``", "".join(path.read_text() for path in SITE.rglob("*.rst")))
    assert len(named) > 10
    for file, test in named:
        functions = {n.name for n in ast.parse((ROOT / file).read_text()).body if isinstance(n, ast.FunctionDef)}
        assert not test or test in functions, f"{file}::{test}"


def test_the_classes_that_the_overview_names_exist():
    named = set(re.findall(r"``([A-Z][A-Za-z]+)``", (SITE / "how_it_works.rst").read_text()))
    code = "".join(path.read_text() for path in (ROOT / "ikkuna").rglob("*.py"))
    assert len(named) > 5
    assert named <= set(re.findall(r"^class (\w+)", code, re.MULTILINE))


def test_the_table_of_symptoms_names_rules_and_metrics_that_exist():
    text = (SITE / "symptoms.rst").read_text(encoding="utf-8")
    cells = re.findall(r"^ {3}(?:\* -| {2}-) (.+)$", text, re.MULTILINE)
    rows = [cells[i : i + 4] for i in range(0, len(cells), 4)]
    rules = {rule for row in rows for rule in re.findall(r"``(\w+)``", row[2])}
    assert len(rules) > 20
    assert rules <= plugin_names("ikkuna.rules")
    metrics = {metric for row in rows for metric in re.findall(r"\w+Subscriber", row[0])}
    assert len(metrics) > 5
    assert metrics <= plugin_names(GROUP)


def test_the_template_requires_this_version():
    ours, theirs = (tomllib.loads((ROOT / p / "pyproject.toml").read_text()) for p in ("", "examples/plugin"))
    [required] = theirs["project"]["dependencies"]
    assert ours["project"]["version"].startswith(required.removeprefix("ikkuna>="))
    assert theirs["build-system"] == ours["build-system"]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_line_of_prose_holds_one_sentence(path):
    prose = re.sub(r"``.*?``|`.*?`", "x", path.read_text(encoding="utf-8"))
    found = [
        line
        for line in prose.splitlines()
        if re.search(r"[a-z]\. [A-Z]", line) and not line.startswith(("|", "     "))  # cells of tables
    ]
    assert not found


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_pages_are_plain_technical_english(path):
    assert not BANNED.search(path.read_text(encoding="utf-8"))
