"""Draws mutants: copies of a source file in which one expression or statement is changed."""

import ast
import copy
import random
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

LOGIC = (
    "ikkuna/diagnosis/findings.py",
    "ikkuna/diagnosis/history.py",
    "ikkuna/diagnosis/judge.py",
    "ikkuna/distributed/merge.py",
    "ikkuna/flight_recorder/recorder.py",
    "ikkuna/metrics/bus/delivery.py",
    "ikkuna/numerics/statistics/host.py",
    "ikkuna/numerics/statistics/record.py",
    "ikkuna/observation/rows/recorder.py",
    "ikkuna/observation/rows/rows.py",
    "ikkuna/observation/steps/forwards.py",
    "ikkuna/observation/steps/step_tracker.py",
    "ikkuna/report/difference.py",
    "ikkuna/store/append_file.py",
    "ikkuna/store/event_reader.py",
    "ikkuna/store/writer.py",
    "ikkuna/cli/commands/check.py",
    "ikkuna/cli/program.py",
    "subscribers/ikkuna_subscribers/rules/gradients.py",
    "subscribers/ikkuna_subscribers/rules/loss.py",
)

_OPERATORS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
    ast.And: ast.Or,
    ast.Or: ast.And,
}


@dataclass(frozen=True, slots=True)
class Mutant:
    """A changed file.

    Parameters
    ----------
    file : str
        The path of the file, relative to the root of the project.
    line : int
        The first line of the changed node.
    number : int
        The number of the change among all changes of the file.
    before, after : str
        The changed expression or statement.
    text : str
        The line of the file in which it begins, with a bar before it.
    source : str
        The changed file, without comments.
    lines : range
        The lines whose tests can find the change: those of the innermost function, of the class around it, or all.
    """

    file: str
    line: int
    number: int
    before: str
    after: str
    text: str
    source: str
    lines: range

    @property
    def name(self) -> str:
        """A name that stays the same while the changed line does."""
        return f"{self.file}: {self.before} -> {self.after} in {self.text}"


def _changes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield changed copies of one node."""
    if isinstance(node, ast.Compare):
        for i, operator in enumerate(node.ops):
            yield _changed(node, ops=[*node.ops[:i], _OPERATORS[type(operator)](), *node.ops[i + 1 :]])
    elif isinstance(node, ast.BinOp | ast.BoolOp) and type(node.op) in _OPERATORS and not _is_text(node):
        yield _changed(node, op=_OPERATORS[type(node.op)]())
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
        yield node.operand
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        yield ast.Constant(_other_number(node.value))
    elif isinstance(node, ast.If | ast.IfExp):
        yield _changed(node, test=ast.UnaryOp(ast.Not(), node.test))
    elif isinstance(node, ast.Return) and not isinstance(node.value, ast.Constant | None):
        yield ast.Return(ast.Constant(None))
    elif isinstance(node, ast.AugAssign | ast.Continue | ast.Break) or (
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    ):
        yield ast.Pass()


def _changed(node: ast.AST, **fields: object) -> ast.AST:
    changed = copy.copy(node)
    vars(changed).update(fields)
    return changed


def _other_number(value: float) -> float:
    if isinstance(value, bool):
        return not value
    return value + 1 if value in range(9) else 2 * value


def _is_text(node: ast.AST) -> bool:
    return any(
        isinstance(leaf, ast.JoinedStr | ast.Constant) and isinstance(getattr(leaf, "value", ""), str)
        for leaf in ast.walk(node)
    )


_Place = tuple[ast.AST, ast.AST, str, int | None, range]
_Change = tuple[ast.AST, ast.AST, str, int | None, range, ast.AST]


class _Finder(ast.NodeVisitor):
    """Lists the nodes that can change, each with its parent's field and the lines of its function or class."""

    def __init__(self) -> None:
        self.found: list[_Place] = []
        self._around = range(0)

    def generic_visit(self, node: ast.AST) -> None:
        around = self._around
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            self._around = range(node.lineno, (node.end_lineno or node.lineno) + 1)
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list", "exc", "msg", "type_comment"):
                continue
            for i, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
                if isinstance(child, ast.AST):
                    self.found.append((child, node, name, i, self._around))
                    self.visit(child)
        self._around = around

    def visit_Assign(self, node: ast.Assign) -> None:
        if not any(isinstance(target, ast.Name) and target.id == "__all__" for target in node.targets):
            self.generic_visit(node)


def mutants_of(file: str, text: str, numbers: Collection[int] | None = None) -> Iterator[Mutant]:
    """Yield the mutants of a file, or those with some numbers.

    Annotations, decorators, texts of errors and ``__all__`` are not changed.

    Examples
    --------
    >>> source = "def f(a, b):\\n    return a if a < b else b\\n"
    >>> [(m.before, m.after) for m in mutants_of("f.py", source)]
    [('return a if a < b else b', 'return None'), ('a if a < b else b', 'a if not a < b else b'), ('a < b', 'a <= b')]
    """
    tree, lines = ast.parse(text), text.splitlines()
    for number, (node, parent, name, i, around, changed) in enumerate(_all_changes(tree)):
        if numbers is None or number in numbers:
            before = ast.unparse(node).splitlines()[0]
            _put(parent, name, i, changed)
            source = ast.unparse(ast.fix_missing_locations(tree))
            _put(parent, name, i, node)
            line = getattr(node, "lineno", around.start)
            after = ast.unparse(changed).splitlines()[0]
            column = getattr(node, "col_offset", 0)  # in bytes; these files are ASCII where it matters
            shown = f"{lines[line - 1][:column].lstrip()}|{lines[line - 1][column:]}"
            yield Mutant(file, line, number, before, after, shown, source, around or range(1, len(lines) + 1))


def _all_changes(tree: ast.AST) -> list[_Change]:
    finder = _Finder()
    finder.visit(tree)
    return [(*place, changed) for place in finder.found for changed in _changes(place[0])]


def _put(parent: ast.AST, name: str, i: int | None, node: ast.AST) -> None:
    if i is None:
        setattr(parent, name, node)
    else:
        getattr(parent, name)[i] = node


def draw(root: Path, count: int, seed: int, files: Iterable[str] = LOGIC) -> list[Mutant]:
    """Draw mutants, from each file about as many as it has a share of all.

    Parameters
    ----------
    root : Path
        The root of the project.
    count : int
        The number of mutants.
    seed : int
        The seed of the draw.
    files : iterable of str
        The files.
    """
    texts = {file: (root / file).read_text(encoding="utf-8") for file in files}
    every = [(file, i) for file, text in texts.items() for i in range(len(_all_changes(ast.parse(text))))]
    drawn: dict[str, list[int]] = {}
    for file, i in random.Random(seed).sample(every, min(count, len(every))):
        drawn.setdefault(file, []).append(i)
    return [mutant for file in drawn for mutant in mutants_of(file, texts[file], drawn[file])]
