"""A broken plugin affects no other plugin, and the error names its distribution and the cause.

Distributions are imitated by the ``*.dist-info`` directories that an installer would create; one child process uses all of them.
"""

import re
from pathlib import Path

import pytest

from tests.plugins.children import answer_of

SUBSCRIBERS = "ikkuna.export.subscriber"
BACKENDS = "ikkuna.backends"

GOOD = """
from ikkuna.export.subscriber import Subscriber

class GoodSubscriber(Subscriber):
    fields = ("mean",)
    def __init__(self, kind, **options):
        super().__init__(kind, publishes="good", **options)
    def compute(self, message):
        self.emit(message, message.record.mean)
"""

FAULTS = {  # name of the plugin → its module's code, and what a user reads when asking for it
    "ImportingSubscriber": (
        "import no_such_module",
        r"plugin 'ImportingSubscriber' from distribution importing 1\.0 \(importing:ImportingSubscriber\) could not be imported: "
        "ModuleNotFoundError: No module named 'no_such_module'",
    ),
    "SyntaxSubscriber": ("class :", r"from distribution syntax 1\.0 .* could not be imported: SyntaxError: invalid"),
    "RaisingSubscriber": (
        "raise ValueError('not today')",
        "could not be imported: ValueError: not today",
    ),
    "WarningSubscriber": (
        "import warnings; warnings.warn('old')",
        "could not be imported: UserWarning: old",  # where warnings are errors
    ),
    "ExitingSubscriber": (
        "import sys; sys.exit(3)",
        r"plugin 'ExitingSubscriber' from distribution exiting 1\.0 .* called sys.exit\(3\) while being imported",
    ),
    "MissingSubscriber": (
        "",
        r"from distribution missing 1\.0 .* could not be imported: AttributeError: .*has no attribute 'MissingSubscriber'",
    ),
    "NumberSubscriber": (
        "NumberSubscriber = 5",
        r"from distribution number 1\.0 \(number:NumberSubscriber\) is of type int, expected a subclass of Subscriber",
    ),
    "UnprintableSubscriber": (
        "class Bad:\n    def __repr__(self): raise RuntimeError\nUnprintableSubscriber = Bad()",
        "is of type Bad, expected a subclass of Subscriber",
    ),
    "OtherSubscriber": (
        "class OtherSubscriber: pass",
        "is the class OtherSubscriber, expected a subclass of Subscriber",
    ),
}


def distribution(
    site: Path, name: str, entry_points: str | bytes, module: str | None = None, code: str = "", version: str = "1.0"
) -> None:
    """Create the files that the installation of a distribution creates."""
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_bytes(entry_points.encode() if isinstance(entry_points, str) else entry_points)
    if module is not None:
        (site / f"{module}.py").write_text(code)


def offer(site: Path, plugin: str, code: str, group: str = SUBSCRIBERS, **options: str) -> None:
    """Install a distribution of one plugin, both named after it."""
    module = plugin.removesuffix("Subscriber").lower()
    distribution(site, module, f"[{group}]\n{plugin} = {module}:{plugin}\n", module, code, **options)


ASK = """
import json, logging, sys
import torch  # torch reads entry points itself, and would fail on the damaged ones

sys.path += {paths!r}
logged = []
class Keep(logging.Handler):
    def emit(self, record): logged.append(record.getMessage())
logging.getLogger("ikkuna").addHandler(Keep())

import ikkuna, ikkuna.export, ikkuna.testing
from ikkuna.export import subscriber
from ikkuna.export.messages import MessageBus
loaded = sorted(set(sys.modules) & set({modules!r}))
listed = dir(subscriber)
answers = {{}}
for name in {names!r}:
    try:
        answers[name] = repr(getattr(subscriber, name))
    except BaseException as error:
        answers[name] = f"{{type(error).__name__}}: {{error}}"
bus = MessageBus()
for name in {backends!r}:
    try:
        bus.register_subscriber(subscriber.NormSubscriber("weights", backend=name))
    except Exception as error:
        answers[name] = f"{{type(error).__name__}}: {{error}}"
works = subscriber.NormSubscriber("weights").publishes
left = len(bus.registered)
print(json.dumps(dict(answers=answers, logged=logged, loaded=loaded, listed=listed, works=works, left=left)))
"""


def ask(
    sites: list[Path], names: list[str], modules: list[str] | None = None, backends: list[str] | None = None
) -> dict:
    """Load plugins in a child process and return the results."""
    code = ASK.format(paths=list(map(str, sites)), names=names, modules=modules or [], backends=backends or [])
    return answer_of(code, cwd=sites[0].parent)


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """The results of a process in which every fault and one good plugin are installed."""
    site = tmp_path_factory.mktemp("site")
    for plugin, (code, _) in FAULTS.items():
        offer(site, plugin, code)
    offer(site, "GoodSubscriber", GOOD)
    offer(site, "InterruptedSubscriber", "raise KeyboardInterrupt")
    modules = [plugin.removesuffix("Subscriber").lower() for plugin in FAULTS]
    names = [*FAULTS, "GoodSubscriber", "InterruptedSubscriber", "NoSuchSubscriber"]
    return ask([site], names, [*modules, "good", "interrupted"])


@pytest.mark.fault(21, 22, 24)
@pytest.mark.parametrize("plugin", FAULTS)
def test_a_broken_plugin_is_named_with_its_distribution_and_the_cause(seen, plugin):
    answer = seen["answers"][plugin]
    assert answer.startswith("PluginError: ")
    assert re.search(FAULTS[plugin][1], answer), answer


@pytest.mark.fault(21)
def test_other_plugins_are_not_affected(seen):
    assert seen["works"] == ["weights_norm2"]
    assert seen["answers"]["GoodSubscriber"] == "<class 'good.GoodSubscriber'>"


def test_plugins_that_are_not_used_are_not_logged(seen):
    assert seen["logged"] == []


def test_importing_and_listing_load_no_plugin(seen):
    assert seen["loaded"] == []
    assert {"GoodSubscriber", "ImportingSubscriber", "NormSubscriber", "Subscriber"} <= set(seen["listed"])


@pytest.mark.fault(23)
def test_a_keyboard_interrupt_is_not_caught(seen):
    assert seen["answers"]["InterruptedSubscriber"] == "KeyboardInterrupt: "


def test_the_error_about_an_unknown_name_lists_the_known_names(seen):
    assert re.fullmatch(
        r"PluginError: unknown subscriber 'NoSuchSubscriber';.* available: .*'GoodSubscriber', .*'NormSubscriber'.*",
        seen["answers"]["NoSuchSubscriber"],
    )


@pytest.fixture(scope="module")
def crowded(tmp_path_factory):
    """The results of a process in which names are used twice and metadata is damaged."""
    site, elsewhere = tmp_path_factory.mktemp("crowded"), tmp_path_factory.mktemp("elsewhere")
    # one name in two distributions
    distribution(site, "first-twin", f"[{SUBSCRIBERS}]\nTwinSubscriber = first_twin:TwinSubscriber\n")
    distribution(site, "second-twin", f"[{SUBSCRIBERS}]\nTwinSubscriber = second_twin:TwinSubscriber\n", version="2.0")
    distribution(site, "thief", f"[{SUBSCRIBERS}]\nMeanSubscriber = thief:MeanSubscriber\n")
    # names that cannot be imported
    odd = "Not-A-Name = good:GoodSubscriber\n__path__ = good:GoodSubscriber\n2Subscriber = good:GoodSubscriber\n"
    distribution(site, "odd", f"[{SUBSCRIBERS}]\n{odd}EvenSubscriber = good:GoodSubscriber\n", "good", GOOD)
    # damaged metadata
    distribution(
        site, "no-value", f"[console_scripts]\nnonsense\n[{SUBSCRIBERS}]\nLostSubscriber = good:GoodSubscriber\n"
    )
    distribution(site, "latin", b"[console_scripts]\nh\xfcbsch = a:b\n")
    distribution(site, "unrelated", "[console_scripts]\nnonsense\n")
    distribution(site, "nameless", f"[{SUBSCRIBERS}]\nNamelessSubscriber = nowhere:NamelessSubscriber\n")
    (site / "nameless-1.0.dist-info" / "METADATA").unlink()
    # one distribution in two places; the first one counts
    distribution(site, "Seen.Twice", f"[{SUBSCRIBERS}]\nSeenTwiceSubscriber = good:GoodSubscriber\n")
    distribution(elsewhere, "seen-twice", f"[{SUBSCRIBERS}]\nSeenTwiceSubscriber = old:Old\n", version="0.9")
    distribution(site, "malformed", f"[{SUBSCRIBERS}]\nMalformedSubscriber = not a reference\n")
    # backends
    offer(site, "exiting", "import sys; sys.exit('no')", group=BACKENDS)
    offer(site, "wrong", "class wrong: pass", group=BACKENDS)
    names = ["Twin", "Mean", "Even", "Lost", "Nameless", "SeenTwice", "Malformed"]
    return ask([site, elsewhere], [f"{name}Subscriber" for name in names], backends=["exiting", "wrong", "missing"])


@pytest.mark.fault(25)
def test_two_distributions_with_one_name_are_refused_by_name(crowded):
    message = crowded["answers"]["TwinSubscriber"]
    assert message.startswith("PluginError: several distributions have a plugin 'TwinSubscriber': ")
    assert "first-twin 1.0 (first_twin:TwinSubscriber)" in message
    assert "second-twin 2.0 (second_twin:TwinSubscriber)" in message
    assert message.endswith("; uninstall all but one")


@pytest.mark.fault(25)
def test_the_name_of_a_built_in_plugin_cannot_be_taken(crowded):
    message = crowded["answers"]["MeanSubscriber"]
    assert "thief 1.0 (thief:MeanSubscriber)" in message
    assert re.search(r"ikkuna \S+ \(ikkuna_subscribers.moments:MeanSubscriber\)", message)
    assert crowded["works"] == ["weights_norm2"]


@pytest.mark.fault(26)
@pytest.mark.parametrize("name", ["Not-A-Name", "__path__", "2Subscriber"])
def test_a_name_that_cannot_be_imported_is_ignored_and_logged(crowded, name):
    assert f"the plugin name {name!r} of odd 1.0 is not a public identifier; ignored" in crowded["logged"]
    assert name not in crowded["listed"]
    assert crowded["answers"]["EvenSubscriber"] == "<class 'good.GoodSubscriber'>"


@pytest.mark.fault(27)
def test_malformed_entry_points_are_skipped_and_logged(crowded):
    said = [line for line in crowded["logged"] if line.startswith("the entry points of no-value cannot be read")]
    assert said
    assert said[0].split(", ", 1)[1].startswith("its plugins are ignored: TypeError: ")
    assert "unknown subscriber 'LostSubscriber'" in crowded["answers"]["LostSubscriber"]


@pytest.mark.fault(27)
def test_undecodable_entry_points_of_an_unrelated_package_are_skipped_and_logged(crowded):
    [said] = {line for line in crowded["logged"] if "latin" in line}
    assert said.startswith("the entry points of latin cannot be read, its plugins are ignored: UnicodeDecodeError: ")


def test_malformed_entry_points_of_other_groups_are_not_logged(crowded):
    assert not [line for line in crowded["logged"] if "unrelated" in line]


def test_a_distribution_without_metadata_is_named_by_its_directory(crowded):
    assert (
        "from distribution nameless-1.0.dist-info (nowhere:NamelessSubscriber)"
        in crowded["answers"]["NamelessSubscriber"]
    )


def test_a_distribution_found_twice_counts_where_it_is_found_first(crowded):
    assert crowded["answers"]["SeenTwiceSubscriber"] == "<class 'good.GoodSubscriber'>"


def test_an_entry_point_that_is_no_reference_is_an_error(crowded):
    assert (
        "from distribution malformed 1.0 (not a reference) could not be imported"
        in crowded["answers"]["MalformedSubscriber"]
    )


@pytest.mark.fault(4, 13)
def test_a_broken_backend_is_refused_when_a_subscriber_names_it(crowded):
    refused = crowded["answers"]
    assert "plugin 'exiting' from distribution exiting 1.0 (exiting:exiting) called sys.exit(no)" in refused["exiting"]
    assert "is the class wrong, expected a subclass of Backend" in refused["wrong"]
    assert re.match("ConfigError: unknown backend 'missing'; available: .*jsonl", refused["missing"])
    assert crowded["left"] == 0
