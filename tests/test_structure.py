"""The rules of the house, read from the code: who imports whom, what is public, what nobody does."""

import ast
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CORE = sorted((ROOT / "ikkuna").rglob("*.py"))
METRICS = sorted((ROOT / "subscribers").rglob("*.py"))
PACKAGED = [path for path in (*CORE, *METRICS) if "build" not in path.parts]

# What a part of ikkuna may import of ikkuna; parts point downward only.
LAYERS = {
    "errors": (),
    "failures": (),
    "modules": ("errors",),
    "plugins": ("errors",),
    "numerics": ("errors", "numerics"),
    "arrays": ("errors",),
    "undisturbed": (),
    "probe": ("errors", "modules", "undisturbed", "arrays", "numerics", "probe"),
    "plot": ("errors", "modules", "arrays", "numerics", "probe", "plot"),
    "visualization": ("errors", "failures", "plugins", "numerics", "plot", "visualization"),
    "distributed": ("errors", "numerics", "distributed"),
    "export": (
        "errors",
        "failures",
        "plugins",
        "modules",
        "undisturbed",
        "numerics",
        "distributed",
        "visualization",
        "export",
    ),
}
# What a metric may import of ikkuna: what any third party may.
DOORS = (
    "ikkuna.errors",
    "ikkuna.export.messages",
    "ikkuna.export.preset",
    "ikkuna.export.subscriber",
    "ikkuna.numerics",
    "ikkuna.undisturbed",
    "ikkuna.visualization",
)


def relative(path):
    return path.relative_to(ROOT).as_posix()


def tree(path):
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def imports(path):
    """Yield the full names a file imports, at any depth, with the line."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{relative(path)}:{node.lineno}: imports are absolute"
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def each(paths):
    return pytest.mark.parametrize("path", paths, ids=relative)


@each(CORE)
def test_imports_point_downward(path):
    part = path.relative_to(ROOT / "ikkuna").parts[0].removesuffix(".py")
    if part not in LAYERS:
        return
    allowed = tuple(f"ikkuna.{name}" for name in LAYERS[part])
    for name, line in imports(path):
        if name.startswith("ikkuna."):
            below = any(name == door or name.startswith(f"{door}.") for door in allowed)
            assert below, f"{relative(path)}:{line}: {part} imports {name}"


@each(CORE)
def test_ikkuna_never_names_a_metric(path):
    assert "ikkuna_subscribers" not in path.read_text(encoding="utf-8")


@each(METRICS)
def test_metrics_use_the_doors_of_third_parties_and_never_the_exporter(path):
    for name, line in imports(path):
        if name.split(".")[0] == "ikkuna":
            through_a_door = any(name == door or name.startswith(f"{door}.") for door in DOORS)
            assert through_a_door, f"{relative(path)}:{line}: a metric imports {name}"
        assert not name.endswith("Exporter"), f"{relative(path)}:{line}: a metric imports the exporter"


def public_names(path):
    """Return the public functions and classes a file defines, what it imports from us, and what it assigns."""
    body = tree(path).body
    defined = {node.name for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    ours = (n for n in body if isinstance(n, ast.ImportFrom) and (n.module or "").split(".")[0].startswith("ikkuna"))
    imported = {alias.asname or alias.name for node in ours for alias in node.names}
    assigned = {t.id for node in body for t in _targets(node) if isinstance(t, ast.Name)}
    return [{name for name in names if not name.startswith("_")} for names in (defined, imported, assigned)]


@each(PACKAGED)
def test_all_lists_what_is_public(path):
    defined, imported, assigned = public_names(path)
    name = ".".join(path.relative_to(ROOT / ("subscribers" if path in METRICS else "")).with_suffix("").parts)
    loaded = importlib.import_module(name.removesuffix(".__init__"))
    listed = getattr(loaded, "__all__", [])
    assert len(set(listed)) == len(listed), "a name is listed twice"
    assert all(hasattr(loaded, n) for n in listed)
    public = {n for n in listed if n != "__version__"}
    assert not [n for n in public if n.startswith("_")]
    assert defined <= public, "a public name is not listed"
    if path.name == "__init__.py":
        used_here = {"load_plugin", "plugin_names", "PluginError"}  # by the door to plugins
        assert imported - used_here <= public, "what a package imports from us is not listed"
        own = {n for n in public if not hasattr(loaded, "__getattr__")}  # others come through that door
        assert own <= defined | imported | assigned


RANDOM = {  # draw from a generator that belongs to the user, unless they are given another
    *("rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "normal", "bernoulli"),
    *("multinomial", "poisson", "normal_", "uniform_", "bernoulli_", "random_", "exponential_", "log_normal_"),
    *("manual_seed", "seed", "set_rng_state"),
}
OUTRIGHT = {"add_scalars", "SummaryWriter", "urlretrieve", "set_default_dtype", "set_num_threads", "empty_cache"}
NAMES = {"print", "eval", "exec", "compile", "input"}
CALLS = {"pickle.load", "pickle.loads", "os.system", "warnings.warn", "np.random.seed", "random.seed"}


def dotted(node):
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "…"


def sins(path):
    """Yield what a packaged file does that it must not."""
    for node in ast.walk(tree(path)):
        for target in _targets(node):
            if isinstance(target, ast.Attribute) and target.attr == "data" and dotted(target) != "self.data":
                yield node.lineno, "writes to .data"
        if isinstance(node, ast.ImportFrom | ast.Import):
            yield from ((node.lineno, f"imports {a.name}") for a in node.names if a.name in OUTRIGHT)
        if not isinstance(node, ast.Call):
            continue
        name = dotted(node.func)
        owner, _, verb = name.rpartition(".")
        keywords = {keyword.arg: keyword.value for keyword in node.keywords}
        if name in NAMES or name in CALLS or verb in OUTRIGHT:
            yield node.lineno, f"calls {name}()"
        if verb in RANDOM and _is_global(owner, verb) and "generator" not in keywords:
            yield node.lineno, f"{name}() draws from a generator of the user's"
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
    """Whether a call of this name on this object may reach a global generator: torch's functions and tensors' methods."""
    return owner in ("torch", "np.random", "numpy.random", "random") or (
        verb.endswith("_") and owner != "torch.nn.init"
    )


@each(PACKAGED)
def test_nobody_does_what_is_not_done(path):
    found = [(line, sin) for line, sin in sins(path) if not (path.name == "cli.py" and sin == "calls print()")]
    assert not found, f"{relative(path)}: {found}"


@pytest.mark.parametrize(
    ("code", "sin"),
    {
        "torch.randn(3)": "torch.randn() draws from a generator of the user's",
        "x.uniform_(0, 1)": "x.uniform_() draws from a generator of the user's",
        "np.random.rand(3)": "np.random.rand() draws from a generator of the user's",
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
def test_what_is_not_done_is_found(code, sin, tmp_path):
    (tmp_path / "module.py").write_text(code)
    assert [found for _, found in sins(tmp_path / "module.py")] == [sin]


@pytest.mark.parametrize(
    "code",
    ["torch.randn(3, generator=g)", "model.eval()", "message.data.abs()", "torch.get_rng_state()", "self.data = 1"],
)
def test_what_is_fine_is_not_found(code, tmp_path):
    (tmp_path / "module.py").write_text(code)
    assert not list(sins(tmp_path / "module.py"))
