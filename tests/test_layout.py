"""Who imports whom, what is public, and how long things are."""

import ast
import re
import subprocess
import sys
from importlib import util
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
EXAMPLES = TESTS.parent / "examples"


def package(name):
    """The folder of an installed package, or of the checkout."""
    spec = util.find_spec(name)
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


CORE, KERNELS = package("jaxact"), package("jaxact_kernels")
FLAX = {
    CORE / "_modules" / f"{name}.py"
    for name in (
        "linen",
        "linen_leaks",
        "nnx",
        "nnx_paths",
        "nnx_structure",
        "nnx_subclass",
    )
}


def files(folder):
    return sorted(folder.rglob("*.py"))


SOURCES = files(CORE) + files(KERNELS)
ALL = SOURCES + files(EXAMPLES) + files(TESTS)


def of(path):
    return "/".join(path.parts[-3:])


def imports(path):
    """Full names of the modules a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def within(name, *packages):
    return any(name == p or name.startswith(p + ".") for p in packages)


@pytest.mark.parametrize("path", files(KERNELS), ids=of)
def test_kernels_know_no_training(path):
    forbidden = "jaxact", "flax", "optax", "examples", "tests"
    assert not [name for name in imports(path) if within(name, *forbidden)]


@pytest.mark.parametrize("path", files(CORE), ids=of)
def test_core_knows_no_framework_and_no_tests(path):
    forbidden = ["optax", "examples", "tests", "kernels"]
    if path not in FLAX:
        forbidden.append("flax")
    assert not [name for name in imports(path) if within(name, *forbidden)]


@pytest.mark.parametrize("path", ALL, ids=of)
def test_private_jax_is_touched_in_one_file(path):
    if path != CORE / "_jaxpr" / "compat.py":
        assert not [name for name in imports(path) if within(name, "jax._src")]


@pytest.mark.parametrize("path", files(EXAMPLES), ids=of)
def test_examples_use_public_names_only(path):
    names = [name for name in imports(path) if within(name, "jaxact", "jaxact_kernels")]
    assert not [name for name in names if "._" in name]


@pytest.mark.parametrize("path", ALL, ids=of)
def test_files_and_functions_are_short(path):
    text = path.read_text()
    assert len(text.splitlines()) <= 400, "two ideas: split it"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert length_without_docstring(node) <= 60, node.name


def length_without_docstring(node):
    docstring = node.body[0]
    lines = node.end_lineno - node.lineno + 1
    if ast.get_docstring(node) is not None:
        lines -= docstring.end_lineno - docstring.lineno + 1
    return lines


def test_files_that_are_spoken_of_exist():
    names = {path.name for path in (*ALL, *files(TESTS.parent / "kernels"))}
    for path in ALL:
        for name in re.findall(r"`(?:\w+/)*(\w+\.py)`", path.read_text()):
            assert name in names, f"{of(path)}: {name}"


def test_one_derivative_rule():
    """Measuring is another way to store residuals, not another rule."""
    rules = [path for path in files(CORE) if "custom_vjp(" in path.read_text()]
    assert rules == [CORE / "_engine" / "custom_rule.py"]


def test_public_names():
    """Read from the source, where `X as X` means public."""
    tree = ast.parse((CORE / "__init__.py").read_text())
    imported = [n for n in tree.body if isinstance(n, ast.ImportFrom)]
    public = {alias.asname for node in imported for alias in node.names}
    assert public == {alias.name for node in imported for alias in node.names}
    assert public >= {
        *("compress", "Policy", "Rule", "residuals", "memory", "policies"),
        *("Exact", "Quantize", "Bitmask", "Cast", "Recompute", "Offload"),
        *("PerSample", "DualPrecision", "sensitivity", "allocate", "telemetry"),
    }
    others = [n for n in tree.body if not isinstance(n, ast.ImportFrom | ast.Expr)]
    targets = [ast.unparse(n).partition(" = ")[0] for n in others]
    assert targets == ["__version__"], "the front door re-exports, and nothing else"


def test_importing_jaxact_imports_no_framework():
    code = """
import sys, jaxact
print(*sorted({"flax", "optax", "rich", "matplotlib", "treescope"} & set(sys.modules)))
"""
    path = ":".join(str(p.parent) for p in (CORE, KERNELS))
    ran = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": path, "JAX_PLATFORMS": "cpu"},
    )
    assert ran.stdout.split() == []
