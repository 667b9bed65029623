"""Imports run one way: from the front door down to the reading of programs."""

import ast

import pytest

from test_layout import CORE, KERNELS, files

# The rooms of jaxact, from the ground up: each imports from those before it alone.
FLOORS = [
    "_written_as",
    "_jaxpr",
    "_saved",
    "_codec",
    "_residual",
    "_decision",
    "_recompute",
    "_policy",
    "_using",
    "_checkpoint_policies",
    "_read_values",
    "_flat",
    "_arguments",
    "_trace",
    "_plan",
    "_form",
    "_engine",
    "_modules",
    "_typing",
    "_compress",
    "_tabular",
    "_pyplot",
    "_bits",
    "_measure",
    "_memory",
    "_time",
    "_report",
    "_budget",
    "policies",
    "__init__",
]


def modules(folder):
    """The files of a package by the full names of their modules."""
    named = {}
    for path in files(folder):
        parts = (folder.name, *path.relative_to(folder).with_suffix("").parts)
        named[".".join(p for p in parts if p != "__init__")] = path
    return named


def imported(path, known):
    """The modules among `known` that a file imports when it runs."""
    tree = ast.parse(path.read_text())
    skipped = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and id(node) not in skipped:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                name = full if full in known else node.module
                if name in known:
                    yield name


def room(name):
    return (*name.split("."), "__init__")[1]


def test_every_room_has_a_floor():
    assert {room(name) for name in modules(CORE)} == set(FLOORS)


@pytest.mark.parametrize("name", modules(CORE))
def test_imports_run_down(name):
    known = modules(CORE)
    for other in imported(known[name], known):
        if room(other) != room(name):
            assert FLOORS.index(room(other)) < FLOORS.index(room(name)), other


@pytest.mark.parametrize("folder", [CORE, KERNELS], ids=["jaxact", "jaxact_kernels"])
def test_no_circle(folder):
    """Inside rooms too. An import inside a function waits until both sides exist."""
    known = modules(folder)
    graph = {name: set(_at_start(path, known)) for name, path in known.items()}
    while graph:
        free = {name for name, others in graph.items() if not others & graph.keys()}
        assert free, f"a circle among {sorted(graph)}"
        graph = {name: others for name, others in graph.items() if name not in free}


def _at_start(path, known):
    """The modules that a file imports before anything else in it runs."""
    tree = ast.parse(path.read_text())
    top = ast.Module([n for n in tree.body if isinstance(n, ast.ImportFrom)], [])
    for node in top.body:
        for alias in node.names:
            full = f"{node.module}.{alias.name}"
            name = full if full in known else node.module
            # A package's own front door re-exports what is inside it.
            if name in known and not _is_front_of(name, path, known):
                yield name


def _is_front_of(name, path, known):
    front = known[name]
    return front.name == "__init__.py" and front.parent in path.parents
