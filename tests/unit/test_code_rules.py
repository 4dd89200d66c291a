"""What no line of the shipped code may do, whoever writes it: run a stranger's bytes, or fetch a stranger's address."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.stack import PROJECT_FOLDER

PACKAGES = ("schemas/inferq_schemas", "producer/inferq", "worker/inferq_worker")
FILES = [path for package in PACKAGES for path in sorted((PROJECT_FOLDER / package).rglob("*.py"))]
UNSAFE_MODULES = {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "yaml", "torch"}
UNSAFE_CALLS = {"eval", "exec", "compile", "__import__"}
NETWORK = {"urllib", "http", "requests", "httpx", "aiohttp", "ftplib", "telnetlib", "xmlrpc", "smtplib"}
ASKS_HTTP = {"management.py", "admin.py", "latencies.py"}
"""The broker's management API, the worker's own port, and the worker that a person names to `inferq whatif`."""


def modules(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
            # Only a bare name is the builtin: `re.compile` is another.
            yield node.func.id if isinstance(node.func, ast.Name) else f".{node.func.attr}", node


def problems(source: str, name: str) -> list[str]:
    tree = ast.parse(source)
    found = [f"imports {one}" for one in modules(tree) if one.partition(".")[0] in UNSAFE_MODULES]
    if name not in ASKS_HTTP:
        asks = (one for one in modules(tree) if one.partition(".")[0] in NETWORK and one != "urllib.parse")
        found += [f"imports {one}" for one in asks]
    for called, node in calls(tree):
        options = {option.arg: ast.unparse(option.value) for option in node.keywords}
        if called in UNSAFE_CALLS or options.get("shell") == "True" or options.get("allow_pickle", "False") != "False":
            found.append(f"calls {ast.unparse(node)[:80]}")
        if called == ".load" and ast.unparse(node.func) in {"np.load", "numpy.load"} and "allow_pickle" not in options:
            found.append(f"calls {ast.unparse(node)[:80]} without allow_pickle=False")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_nothing_is_unpickled_evaluated_or_fetched(path: Path) -> None:
    assert problems(path.read_text(), path.name) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from joblib import load",
        "eval(x)",
        "np.load(f)",
        "np.load(f, allow_pickle=True)",
        "import http",
    ],
)
def test_the_rule_finds_what_it_is_for(source: str) -> None:
    assert problems(source, "x.py")
