"""Finds sentences and parameter entries that break the rules of language: ``python -m tests.language PATH …``."""

import ast
import io
import re
import sys
import tokenize
from pathlib import Path

FIRST_WORDS = re.compile(r"(?:Tell|Take|Hear|Note|Say|Look(?! up\b)|Know|Ask)s?\b|(?:Be|Have|Of|What|Who|Whose)\b")
BANNED = re.compile(r"\b(?:nobody|whoever|somebody|is to be had|are to be had|for the hurried)\b", re.IGNORECASE)
SECTION = re.compile(r"^( *)(Parameters|Other Parameters|Attributes)\n\1-{3,}\n", re.MULTILINE)
LOGGING = {"debug", "info", "warning", "error", "exception", "critical", "log", "warn"}

# The grammar of types: "Tensor", "int or list of int, optional", "{'sum', 'mean'}", "Tensor of shape (out, in)" …
_NAME = r"(?:[a-z_]\w*\.)*[A-Z_]\w*"  # a class, with or without its module
_WORDS = (
    r"array|array[_-]like|b?float\d*|bool|bytes|callable|class|collection|complex|context manager|deque|device|dict|dtype|exception|"
    r"frozenset|function|generator|iterable|iterator|layout|list|mapping|memoryview|module|ndarray|number|object|pair|partial|path|"
    r"path-like|range|scalar|sequence|set|slice|str|tensor|triple|tuple|type|u?int\d*"
)
_BUILTIN = rf"(?:[a-z_]\w*\.)*(?:{_WORDS})s?"
_LITERAL = r"(?:them|these|such|\"[^\"]*\"|'[^']*'|``[^`(][^`]*``|-?\d[\w.]*|None|True|False)"
_SUBSCRIPT = r"(?:\[(?:[^\[\]]|\[(?:[^\[\]]|\[[^\[\]]*\])*\])*\])?"
_SHAPE = r"(?: of shape)? ?\([^()]*\)"
_ATOM = (
    rf"(?:(?:an? )?(?:{_NAME}{_SUBSCRIPT}|{_BUILTIN}{_SUBSCRIPT}|{_LITERAL}|\{{[^{{}}]*\}})"
    rf"(?:{_SHAPE})?|\((?:{_NAME}|{_BUILTIN})(?:, (?:{_NAME}|{_BUILTIN}))*,?\))"
)
_TERM = rf"{_ATOM}(?: (?:of|to|yielding|returning) (?:two |three |four |\d+ )?{_ATOM}(?:(?: and|,) {_ATOM})*)*"
TYPE = re.compile(
    rf"~?{_TERM}(?:(?: or |, or |, | \| |; ){_TERM})*(?:,? ?\(?(?:optional|keyword[- ]only|default:? .+)\)?)*"
)


def documented(tree):
    """Yield the line and the text of each docstring."""
    for node in ast.walk(tree):
        is_documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if is_documented and (text := ast.get_docstring(node)) is not None:
            yield node.body[0].lineno, text


def entries(text):
    """Yield line, text and following line of each entry in the sections of parameters and attributes of a docstring."""
    for section in SECTION.finditer(text + "\n"):
        indent = section.group(1)
        first = text.count("\n", 0, section.end())
        lines = text.split("\n")[first:]
        for number, line in enumerate(lines):
            following = lines[number + 1] if number + 1 < len(lines) else ""
            if re.match(rf"{indent}-{{3,}}$", following):
                break
            if line.strip() and line.startswith(indent) and not line[len(indent)].isspace():
                yield first + number, line.strip(), following.strip()


def fault_of_entry(entry, following):
    """Return what is wrong with an entry such as ``x : Tensor``, or ``None``; one without a type needs a reference."""
    name, colon, kind = entry.partition(" : ")
    if not re.fullmatch(r"\*{0,2}\w+(?:, \*{0,2}\w+)*", name.rstrip(" :")):
        return f"not 'name : type': {entry}"
    if not colon:
        return None if name.startswith("*") or following.startswith("See `") else f"no type: {entry}"
    return None if TYPE.fullmatch(kind.strip()) else f"not a type: {entry}"


def faults_of_docstring(text):
    """Yield the line within a docstring, and what is wrong there."""
    summary = text.split("\n")[0]
    if FIRST_WORDS.match(summary):
        yield 0, f"first word: {summary}"
    if len(summary) > 120:
        yield 0, f"summary of {len(summary)} characters: {summary}"
    for line, entry, following in entries(text):
        if fault := fault_of_entry(entry, following):
            yield line, fault


def texts_of_calls(tree):
    """Yield the line and the text of each string that is logged or raised."""
    for node in ast.walk(tree):
        arguments = []
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            arguments = node.exc.args
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in LOGGING:
            arguments = node.args
        for part in (part for argument in arguments for part in ast.walk(argument)):
            if isinstance(part, ast.Constant) and isinstance(part.value, str):
                yield part.lineno, part.value


def offenders(path):
    """Return the lines of a Python file that break the rules, each with what is wrong."""
    source = Path(path).read_text(encoding="utf-8")
    tree = ast.parse(source, str(path))
    docstrings = list(documented(tree))
    found = {(start + line, fault) for start, text in docstrings for line, fault in faults_of_docstring(text)}
    if not BANNED.search(source):  # tokens take most of the time
        return sorted(found)
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = [(token.start[0], token.string) for token in tokens if token.type == tokenize.COMMENT]
    for start, text in (*docstrings, *comments, *texts_of_calls(tree)):
        lines = enumerate(text.split("\n"), start)
        found |= {(line, f"banned word: {part.strip()}") for line, part in lines if BANNED.search(part)}
    return sorted(found)


def main(arguments):
    """Write the offenders of files and folders to the standard output; return how many there are."""
    paths = [p for a in map(Path, arguments) for p in (sorted(a.rglob("*.py")) if a.is_dir() else [a])]
    lines = [f"{path}:{line}: {fault}" for path in paths for line, fault in offenders(path)]
    sys.stdout.write("".join(f"{line}\n" for line in (*lines, f"{len(lines)} offenders")))
    return len(lines)


if __name__ == "__main__":
    sys.exit(min(main(sys.argv[1:]), 1))
