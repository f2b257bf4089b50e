"""The structure of the packages, checked on the source: imports, public names, forbidden calls."""

import ast
import importlib
import json
import os
import subprocess
import sys
from collections import defaultdict
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CORE = sorted((ROOT / "ikkuna").rglob("*.py"))
METRICS = sorted((ROOT / "subscribers").rglob("*.py"))
PACKAGED = [path for path in (*CORE, *METRICS) if "build" not in path.parts]

# The rooms of ikkuna, one floor a line: a room imports rooms of the lines before it only.
FLOORS = (
    ("printable", "version"),
    ("errors",),
    ("schedules", "support"),
    ("numerics",),
    ("figures", "store", "distributed"),
    ("backends", "inspect"),
    ("diagnosis",),
    ("metrics", "report"),
    ("observation",),
    ("flight_recorder",),
    ("export",),
    ("integrations", "cli", "testing"),
    # public import names of rooms below
    ("visualization", "reading", "netdict", "plot", "probe", "monitor", "running"),
)
LIVE = ("metrics", "observation", "flight_recorder", "export", "integrations", "backends", "diagnosis")
# What a metric may import of ikkuna: the same as the metrics of other packages.
DOORS = (
    "ikkuna.diagnosis",
    "ikkuna.errors",
    "ikkuna.export.messages",
    "ikkuna.export.subscriber",
    "ikkuna.metrics",
    "ikkuna.numerics",
    "ikkuna.store.values",
    "ikkuna.support.modules",
    "ikkuna.support.undisturbed",
    "ikkuna.visualization",
)


def relative(path):
    return path.relative_to(ROOT).as_posix()


@cache
def tree(path):
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


@pytest.fixture(autouse=True, scope="module")
def trees_are_released():
    yield
    tree.cache_clear()


def imports(path):
    """Yield the full names a file imports, at any depth, with the line."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{relative(path)}:{node.lineno}: imports are absolute"
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def each(paths):
    """Make one test of a check of one file; it names every file for which the check fails."""

    def decorate(check):
        def test():
            failures = []
            for path in paths:
                try:
                    check(path)
                except AssertionError as error:
                    failures.append(f"{relative(path)}: {error}")
            assert paths
            assert not failures, "\n".join(failures)

        test.__name__, test.__doc__ = check.__name__, check.__doc__
        return test

    return decorate


def below(name, parts, package="ikkuna"):
    return any(name == f"{package}.{part}" or name.startswith(f"{package}.{part}.") for part in parts)


@each(CORE)
def test_imports_point_downward(path):
    room = path.relative_to(ROOT / "ikkuna").parts[0].removesuffix(".py")
    if room in ("__init__", "__main__"):
        return
    floor = next(i for i, rooms in enumerate(FLOORS) if room in rooms)
    allowed = {room, *(lower for rooms in FLOORS[:floor] for lower in rooms)}
    for name, line in imports(path):
        if name.startswith("ikkuna."):
            assert name.split(".")[1] in allowed, f"{relative(path)}:{line}: {room} imports {name}"


@each([path for path in CORE if set(path.relative_to(ROOT).parts) & set(LIVE)])
def test_nothing_that_runs_in_training_imports_the_inspection(path):
    for name, line in imports(path):
        assert not name.startswith("ikkuna.inspect"), f"{relative(path)}:{line}: imports {name}"


@each([path for path in CORE if "steps" in path.relative_to(ROOT).parts])
def test_steps_need_no_torch_and_nothing_of_ours_but_stamps_and_errors(path):
    for name, line in imports(path):
        assert name.split(".")[0] not in ("torch", "numpy"), f"{relative(path)}:{line}: imports {name}"
        if name.startswith("ikkuna."):
            allowed = ("errors", "observation.steps", "metrics.messages.stamp")
            assert below(name, allowed), f"{relative(path)}:{line}: imports {name}"


def module_name(path):
    parts = path.relative_to(ROOT / "subscribers" if path in METRICS else ROOT).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


def packages_of(name):
    parts = name.split(".")
    return {".".join(parts[:i]) for i in range(1, len(parts))}


def import_graph(files):
    """Return, for each module, the modules whose code runs when it is imported.

    Imports inside functions and under ``TYPE_CHECKING`` count as well.
    An import of a module first imports the packages around it; those that also contain the importing module have begun already
    and count only if they are named themselves.  If this graph has no circle, the modules can be imported in any order.
    """
    graph = {}
    for importer, path in files.items():
        wanted = {name if name in files else name.rpartition(".")[0] for name, _ in imports(path)}
        wanted = {name for name in wanted if name in files}
        around = {package for name in wanted for package in packages_of(name)}
        graph[importer] = (wanted | (around & files.keys()) - packages_of(importer)) - {importer}
    return graph


def circles(graph):
    """Return the sets of modules that import each other (strongly connected components, by Tarjan's algorithm)."""
    found, order, lowest, stack = [], {}, {}, []

    def visit(node):
        order[node] = lowest[node] = len(order)
        stack.append(node)
        for after in graph[node]:
            if after not in order:
                visit(after)
            if after in stack:
                lowest[node] = min(lowest[node], lowest[after])
        if lowest[node] == order[node]:
            members = frozenset(stack[stack.index(node) :])
            del stack[stack.index(node) :]
            if len(members) > 1:
                found.append(members)

    for node in graph:
        if node not in order:
            visit(node)
    return found


def test_no_modules_import_each_other():
    graph = import_graph({module_name(path): path for path in PACKAGED})
    for members in circles(graph):
        edges = [f"{name} -> {after}" for name in sorted(members) for after in sorted(graph[name] & members)]
        pytest.fail("circle of imports:\n" + "\n".join(edges))


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"a": "import b", "b": "import a"}, {"a", "b"}),
        ({"a": "import b", "b": "from a import x"}, {"a", "b"}),
        ({"a": "import b", "b": "def f():\n    import a"}, {"a", "b"}),
        ({"a": "import b", "b": "if TYPE_CHECKING:\n    import a"}, {"a", "b"}),
        ({"p": "import p.a", "p.a": "", "q": "import q.b", "q.b": "import p.a"}, None),
        # which package is imported first decides whether this works
        ({"p": "import p.a", "p.a": "import q.b", "q": "import q.c", "q.b": "", "q.c": "import p.d", "p.d": ""}, {"p", "p.a", "q", "q.c"}),
        ({"p": "import p.a", "p.a": "import p.b", "p.b": ""}, None),
        ({"p": "import p.a", "p.a": "from p import x"}, {"p", "p.a"}),
    ],
)  # fmt: skip
def test_circles_are_found(files, expected, tmp_path):
    for name, code in files.items():
        (tmp_path / name).write_text(code)
    found = circles(import_graph({name: tmp_path / name for name in files}))
    assert found == ([frozenset(expected)] if expected else [])


def needs_triton(path):
    return path.as_posix().endswith("device/kernels.py")


IMPORT_EACH = """
import importlib, json, os, sys, traceback
import matplotlib.pyplot, numpy, tensorboardX, torch

def in_child(act):
    reading, writing = os.pipe()
    if not os.fork():
        try:
            found = act()
        except BaseException:
            found = [traceback.format_exc()]
        with open(writing, "w") as pipe:
            json.dump(found, pipe)
        os._exit(0)
    os.close(writing)
    with open(reading) as pipe:
        found = json.load(pipe)
    os.wait()
    return found

def failures(name, tree):
    importlib.import_module(name)
    return [text for inner, below in tree.items() for text in in_child(lambda: failures(f"{name}.{inner}", below))]

trees = json.load(sys.stdin)
found = in_child(lambda: failures("ikkuna", trees["ikkuna"]))
import ikkuna.export  # as the plugins are always loaded after it
found += in_child(lambda: failures("ikkuna_subscribers", trees["ikkuna_subscribers"]))
print("".join(found), "end")
"""


@pytest.mark.slow  # the absence of circles, tested above, implies it
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_each_module_can_be_the_first_that_is_imported():
    """Each module is imported in a process that has imported nothing of ours but the packages around it."""
    trees = {}
    for path in PACKAGED:
        if needs_triton(path) and find_spec("triton") is None:
            continue
        tree = trees
        for part in module_name(path).split("."):
            tree = tree.setdefault(part, {})
    command = [sys.executable, "-c", IMPORT_EACH]
    done = subprocess.run(command, input=json.dumps(trees), capture_output=True, text=True, check=True)
    assert done.stdout == " end\n"


def test_public_class_names_are_unique():
    places = defaultdict(list)
    for path in PACKAGED:
        for node in tree(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(relative(path))
    shared = {name: files for name, files in places.items() if len(files) > 1}
    assert shared.keys() == {"IkkunaCallback"}  # each trainer has its own
    assert all(path.startswith("ikkuna/integrations/") for path in shared["IkkunaCallback"])


@each(CORE)
def test_ikkuna_never_names_a_metric(path):
    assert "ikkuna_subscribers" not in path.read_text(encoding="utf-8")


@each(METRICS)
def test_metrics_import_only_what_plugins_may_import(path):
    for name, line in imports(path):
        if name.split(".")[0] == "ikkuna":
            through_a_door = any(name == door or name.startswith(f"{door}.") for door in DOORS)
            assert through_a_door, f"{relative(path)}:{line}: a metric imports {name}"
        assert not name.endswith("Exporter"), f"{relative(path)}:{line}: a metric imports the exporter"


def public_names(path):
    """Return the public names that a file defines, imports from ikkuna, and assigns."""
    body = tree(path).body
    defined = {node.name for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    ours = (n for n in body if isinstance(n, ast.ImportFrom) and (n.module or "").split(".")[0].startswith("ikkuna"))
    imported = {alias.asname or alias.name for node in ours for alias in node.names}
    assigned = {t.id for node in body for t in _targets(node) if isinstance(t, ast.Name)}
    return [{name for name in names if not name.startswith("_")} for names in (defined, imported, assigned)]


@each([path for path in PACKAGED if path.name == "__init__.py" or "__all__" in path.read_text(encoding="utf-8")])
def test_all_lists_the_public_names(path):
    """A package lists what it offers, and so does a module of which a public import name is another name.

    In other modules a name that does not begin with an underscore is public, so that a list would say it twice.
    """
    if needs_triton(path) and find_spec("triton") is None:
        return
    defined, imported, assigned = public_names(path)
    loaded = importlib.import_module(module_name(path))
    listed = getattr(loaded, "__all__", [])
    assert len(set(listed)) == len(listed), "a name is listed twice"
    assert all(hasattr(loaded, n) for n in listed)
    public = {n for n in listed if n != "__version__"}
    assert not [n for n in public if n.startswith("_")]
    assert defined <= public, "a public name is not listed"
    if path.name == "__init__.py":
        used_here = {"load_plugin", "plugin_names", "PluginError", "unknown_name"}  # used by __getattr__
        assert imported - used_here <= public, "a name that a package imports from ikkuna is not listed"
        own = {n for n in public if not hasattr(loaded, "__getattr__")}  # the others come from __getattr__
        assert own <= defined | imported | assigned


RANDOM = {  # these draw from a generator of the user, unless another one is passed
    *("rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "normal", "bernoulli"),
    *("multinomial", "poisson", "normal_", "uniform_", "bernoulli_", "random_", "exponential_", "log_normal_"),
    *("manual_seed", "seed", "set_rng_state"),
}
FORBIDDEN = {"add_scalars", "SummaryWriter", "urlretrieve", "set_default_dtype", "set_num_threads", "empty_cache"}
NAMES = {"print", "eval", "exec", "compile", "input"}
CALLS = {"pickle.load", "pickle.loads", "os.system", "warnings.warn", "np.random.seed", "random.seed"}


def dotted(node):
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "…"


def violations(path):
    """Yield the line and the description of each forbidden operation."""
    for node in ast.walk(tree(path)):
        for target in _targets(node):
            if isinstance(target, ast.Attribute) and target.attr == "data" and dotted(target) != "self.data":
                yield node.lineno, "writes to .data"
        if isinstance(node, ast.ImportFrom | ast.Import):
            yield from ((node.lineno, f"imports {a.name}") for a in node.names if a.name in FORBIDDEN)
        if not isinstance(node, ast.Call):
            continue
        name = dotted(node.func)
        owner, _, verb = name.rpartition(".")
        keywords = {keyword.arg: keyword.value for keyword in node.keywords}
        if name in NAMES or name in CALLS or verb in FORBIDDEN:
            yield node.lineno, f"calls {name}()"
        if verb in RANDOM and _is_global(owner, verb) and "generator" not in keywords:
            yield node.lineno, f"{name}() draws from a global generator"
        if owner.endswith(".data") and verb.endswith("_") and not verb.startswith("_"):
            yield node.lineno, f"{name}() writes to .data"
        unsafe = keywords.get("weights_only")
        if isinstance(unsafe, ast.Constant) and unsafe.value is False:
            yield node.lineno, f"{name}() reads a pickle"


def _targets(node):
    if isinstance(node, ast.Assign):
        return node.targets
    return [node.target] if isinstance(node, ast.AugAssign | ast.AnnAssign) else []


def _is_global(owner, verb):
    """Return whether this call may use a global generator, as functions of torch and methods of tensors do."""
    return owner in ("torch", "np.random", "numpy.random", "random") or (
        verb.endswith("_") and owner != "torch.nn.init"
    )


@each(PACKAGED)
def test_packages_make_no_forbidden_calls(path):
    found = list(violations(path))
    assert not found, f"{relative(path)}: {found}"


@pytest.mark.parametrize(
    ("code", "violation"),
    {
        "torch.randn(3)": "torch.randn() draws from a global generator",
        "x.uniform_(0, 1)": "x.uniform_() draws from a global generator",
        "np.random.rand(3)": "np.random.rand() draws from a global generator",
        "parameter.data = x": "writes to .data",
        "parameter.data *= 2": "writes to .data",
        "message.data.mul_(2)": "message.data.mul_() writes to .data",
        "print(1)": "calls print()",
        "eval('1')": "calls eval()",
        "pickle.load(f)": "calls pickle.load()",
        "torch.load(f, weights_only=False)": "torch.load() reads a pickle",
        "writer.add_scalars('a', {})": "calls writer.add_scalars()",
        "from tensorboardX import SummaryWriter": "imports SummaryWriter",
        "from urllib.request import urlretrieve": "imports urlretrieve",
    }.items(),
)
def test_forbidden_calls_are_found(code, violation, tmp_path):
    (tmp_path / "module.py").write_text(code)
    assert [found for _, found in violations(tmp_path / "module.py")] == [violation]


@pytest.mark.parametrize(
    "code",
    ["torch.randn(3, generator=g)", "model.eval()", "message.data.abs()", "torch.get_rng_state()", "self.data = 1"],
)
def test_allowed_calls_are_not_found(code, tmp_path):
    (tmp_path / "module.py").write_text(code)
    assert not list(violations(tmp_path / "module.py"))


@each([path.with_suffix(".pyi") for path in PACKAGED if path.with_suffix(".pyi").exists()])
def test_stubs_declare_the_names_of_their_module(path):
    exports = [
        ast.literal_eval(node.value)
        for file in (path, path.with_suffix(".py"))
        for node in tree(file).body
        if isinstance(node, ast.Assign) and dotted(node.targets[0]) == "__all__"
    ]
    assert len(exports) == 2
    assert exports[0] == exports[1]


FACTORIES = {
    *("arange", "empty", "empty_strided", "eye", "full", "linspace", "logspace", "normal", "ones", "rand"),
    *("randint", "randn", "randperm", "scalar_tensor", "tensor", "zeros"),
}


@each(PACKAGED)
def test_new_tensors_do_not_follow_the_default_device(path):
    """With ``torch.set_default_device("cuda")`` a buffer of the host would be on the device, where the kernels cannot read it."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in FACTORIES:
            is_torch = isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"
            named = any(keyword.arg == "device" for keyword in node.keywords)
            assert named or not is_torch, f"line {node.lineno}: torch.{node.func.attr} without device="


# Calls that raise exceptions of the user's signal handlers, directly or through the error guard.
RAISING = {"raise_users_exception", "report_internal", "_report", "handle"}
WIDE = {"BaseException", "Exception", "RuntimeError", "OSError", "ValueError"}


def wide_handlers(path):
    """Yield the line and the body of each ``except`` clause for a class that a user's signal handler may raise."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.ExceptHandler):
            caught = {part.id for part in ast.walk(node.type) if isinstance(part, ast.Name)} if node.type else WIDE
            if caught & WIDE:
                yield node.lineno, [part for statement in node.body for part in ast.walk(statement)]


ON_THE_TRAINING_THREAD = ("export", "metrics", "observation", "flight_recorder", "backends")
ELSEWHERE = (
    "replay.py",
    "checks.py",
    "dump_reading.py",
    "dump_writing.py",
    "options.py",
)  # at the prompt, or in a thread
TRAINING = [
    path
    for path in CORE
    if path.relative_to(ROOT / "ikkuna").parts[0] in ON_THE_TRAINING_THREAD and path.name not in ELSEWHERE
]


@each(TRAINING)
def test_code_on_the_training_thread_catches_no_exception_of_a_signal_handler(path):
    for line, body in wide_handlers(path):
        called = {ast.unparse(part.func).rpartition(".")[2] for part in body if isinstance(part, ast.Call)}
        raises = any(isinstance(part, ast.Raise) and part.exc is None for part in body)
        assert raises or called & RAISING, f"{relative(path)}:{line} may catch an exception of a signal handler"
    for name, line in imports(path):
        assert name != "contextlib.suppress", f"{relative(path)}:{line}: use ikkuna.support.failures.suppressed"


SWITCHES = {  # of torch, for the whole process or thread
    *(
        "no_grad",
        "enable_grad",
        "inference_mode",
        "set_grad_enabled",
        "_set_grad_enabled",
        "set_autocast_enabled",
        "autocast",
    ),
    *("set_stance", "flags", "sdpa_kernel", "use_deterministic_algorithms", "set_default_device", "set_detect_anomaly"),
}
SWITCHING = {
    "ikkuna/support/undisturbed.py": "the helper; inference mode ends by a function in C++, before which no signal handler runs",
    "ikkuna/support/torch_internals.py": "finds the function that switches autograd",
    **dict.fromkeys(("ikkuna/inspect", "ikkuna/diagnosis/preflight_checks"), "at the prompt"),
    **dict.fromkeys(
        ("ikkuna/export/replay.py", "ikkuna/export/verdict.py", "ikkuna/cli", "ikkuna/testing"), "outside of training"
    ),
    "ikkuna/support/device_thread.py": "a thread of its own, in which no signal handler runs",
    "ikkuna/numerics/statistics/native/hook_functions.py": "at set-up",
    "ikkuna/observation/hooks/context.py": "inference mode, see above",
    "ikkuna/numerics/curvature": "a metric that calls the model inside of `run_undisturbed`, which restores autograd",
    "subscribers/ikkuna_subscribers/hessian.py": "likewise; an interrupt may leave cuDNN off for recurrent layers",
    "subscribers/ikkuna_subscribers/_helpers.py": "an interrupt at its end may leave the compiler off",
    "ikkuna/observation/hooks/in_graph.py": "restored by the end of the step",
}


@each(PACKAGED)
def test_switches_of_torch_are_set_by_one_helper(path):
    """A ``with`` block whose end is a function in Python can be left without that end by an exception of a signal handler."""
    if any(relative(path) == known or relative(path).startswith(f"{known}/") for known in SWITCHING):
        return
    found = [
        (n.lineno, n.func.attr)
        for n in ast.walk(tree(path))
        if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)
        if n.func.attr in SWITCHES
    ]
    assert found == [], relative(path)


def internals_of_torch(path):
    """Return the undocumented names of torch that a file uses, lists of parameters at once (``_foreach_norm``) excepted."""
    found = []
    for node in ast.walk(tree(path)):
        match node:
            case ast.Attribute():
                text = ast.unparse(node)
                names = text.split(".") if text.replace(".", "").replace("_", "").isalnum() else []
            case ast.Call(func=ast.Name(id="getattr"), args=[owner, ast.Constant(value=str(name)), *_]):
                names = [*ast.unparse(owner).split("."), name]
            case ast.Call(func=ast.Name(id="attrgetter" | "methodcaller"), args=[ast.Constant(value=str(name)), *_]):
                names = ["torch", name]
            case ast.Import():
                names = [
                    part
                    for alias in node.names
                    for part in ("torch", *alias.name.split(".")[1:])
                    if alias.name.startswith("torch")
                ]
            case ast.ImportFrom(module=str(module)) if module.split(".")[0] == "torch":
                names = [*module.split("."), *(alias.name for alias in node.names)]
            case _:
                continue
        private = [name for name in names[1:] if name.startswith("_") and not name.startswith(("__", "_foreach_"))]
        if names and names[0] in {"torch", "nn"} and private:
            found.append(f"{path.name}:{node.lineno}: {'.'.join(names)}")
    return found


@each(PACKAGED)
def test_one_file_knows_the_undocumented_names_of_torch(path):
    if path.name != "torch_internals.py":
        assert internals_of_torch(path) == []


@pytest.mark.parametrize(
    "code",
    [
        "torch._C._current_graph_task_id()",
        "from torch._guards import TracingContext",
        "import torch._dynamo",
        "torch.utils._python_dispatch",
        "getattr(torch.autograd.graph, '_engine_run_backward', None)",
        "attrgetter('_optimizer_step_pre_hooks')",
    ],
)
def test_undocumented_names_of_torch_are_found(code, tmp_path):
    (tmp_path / "some.py").write_text(code)
    assert internals_of_torch(tmp_path / "some.py")
