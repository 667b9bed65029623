"""How the source reads, in numbers: sizes, types, words, and the way of a residual.

  python tests/support/measures.py [FOLDER ...]

The walk needs JAX; the rest is read from the text of the files.
"""

import ast
import io
import re
import statistics
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Measures:
    """Of the files of a package, `__init__` not counted as one.

    Attributes:
      file_lines, function_lines: of each; functions without their docstrings.
      num_parameters: annotated ones.
      num_any: those annotated with `Any` itself.
      words: of docstrings and comments.
    """

    file_lines: tuple[int, ...]
    function_lines: tuple[int, ...]
    num_parameters: int
    num_any: int
    words: tuple[str, ...]

    @property
    def any_share(self) -> float:
        """Part of the annotated parameters that are `Any`."""
        return self.num_any / max(1, self.num_parameters)

    def per_thousand(self, word: str) -> float:
        """Uses of a word in a thousand of docstrings and comments."""
        return 1000 * self.words.count(word) / max(1, len(self.words))

    def __str__(self) -> str:
        files, functions = self.file_lines, self.function_lines
        words = ", ".join(f"{w} {self.per_thousand(w):.1f}" for w in ("what", "of"))
        return (
            f"{len(files)} files, lines median {statistics.median(files):.0f} "
            f"max {max(files)}; {len(functions)} functions, lines median "
            f"{statistics.median(functions):.0f} max {max(functions)}; Any "
            f"{self.num_any}/{self.num_parameters} = {100 * self.any_share:.1f} %; "
            f"words per 1000: {words}"
        )


def measure(folder: Path) -> Measures:
    """The measures of all Python files under a folder."""
    paths = sorted(folder.rglob("*.py"))
    trees = [ast.parse(path.read_text()) for path in paths]
    functions = [n for t in trees for n in ast.walk(t) if isinstance(n, FUNCTIONS)]
    annotations = [a for f in functions for a in _annotations(f)]
    words = " ".join(text for path in paths for text in _prose(path)).lower()
    return Measures(
        file_lines=tuple(
            len(p.read_text().splitlines()) for p in paths if p.name != "__init__.py"
        ),
        function_lines=tuple(map(length, functions)),
        num_parameters=len(annotations),
        num_any=sum(a == "Any" for a in annotations),
        words=tuple(re.findall(r"[a-z']+", words)),
    )


def length(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function without its docstring."""
    docstring = function.body[0]
    lines = (function.end_lineno or 0) - function.lineno + 1
    if ast.get_docstring(function) is not None:
        lines -= (docstring.end_lineno or 0) - docstring.lineno + 1
    return lines


def _annotations(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    arguments = function.args
    named = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
    for argument in (*named, arguments.vararg, arguments.kwarg):
        if argument is not None and argument.annotation is not None:
            yield ast.unparse(argument.annotation)


def _prose(path: Path) -> Iterator[str]:
    """Docstrings and comments of a file."""
    text = path.read_text()
    documented = ast.Module | ast.ClassDef | FUNCTIONS
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, documented):
            yield ast.get_docstring(node) or ""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.string


def walk(*, backward: bool) -> list[str]:
    """Files on the way of one residual: from `compress` to a packed word, or back.

    The frames of this project on the stack when the first word is packed, or unpacked.
    """
    import jax
    import jax.numpy as jnp

    import jaxact
    from jaxact_kernels import words

    seen: list[list[str]] = []
    name = "unpack_slots" if backward else "pack"
    inner = getattr(words, name)

    def spy(*args, **kwargs):
        frame, files = sys._getframe(1), []
        while frame is not None:
            files.append(frame.f_code.co_filename)
            frame = frame.f_back
        files = [words.__file__, *files]
        ours = {"jaxact", "jaxact_kernels"}
        seen.append([f for f in files[::-1] if ours & {*Path(f).parts}])
        return inner(*args, **kwargs)

    layer = jaxact.compress(lambda w, x: jnp.tanh(x @ w), activations="x")
    # What is traced once is not traced again: sizes that no other test has.
    width = 104 if backward else 88
    w, x = jnp.ones((width, width)), jnp.ones((11, width))
    modules = [m for m in list(sys.modules.values()) if hasattr(m, "__dict__")]
    users = [m for m in modules if vars(m).get(name) is inner]
    for module in users:
        setattr(module, name, spy)
    try:
        jax.make_jaxpr(jax.grad(lambda w: layer(w, x).sum()))(w)
    finally:
        for module in users:
            setattr(module, name, inner)
    names = [f[f.rindex("/jaxact") + 1 :] for f in seen[0]]
    return list(dict.fromkeys(names))


def main() -> None:
    """Print the measures of the given folders, and the two walks."""
    default = [ROOT / "jaxact", ROOT / "kernels" / "jaxact_kernels"]
    for folder in list(map(Path, sys.argv[1:])) or default:
        print(f"{folder.name}: {measure(folder)}")
    sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]
    for backward in (False, True):
        files = walk(backward=backward)
        print(f"{'back' if backward else 'forth'}: {len(files)} files")
        print("  " + "\n  ".join(files))


if __name__ == "__main__":
    main()
