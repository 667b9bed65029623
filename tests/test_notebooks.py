"""The notebooks are in step with their .py files, and run at toy size."""

import os
import re
from pathlib import Path

import pytest

import jaxact
import jaxact_kernels
from support.variants import thorough

jupytext = pytest.importorskip("jupytext")

NOTEBOOKS = Path(__file__).parent.parent / "examples" / "notebooks"
NAMES = sorted(path.stem for path in NOTEBOOKS.glob("*.py"))


def cells(path):
    return [
        (cell.cell_type, cell.source, cell.metadata.get("tags", []))
        for cell in jupytext.read(path).cells
    ]


def outputs(notebook):
    return [o for cell in notebook.cells for o in cell.get("outputs", [])]


def printed(notebook):
    """What the cells wrote, stderr as well."""
    return "".join(o.text for o in outputs(notebook) if o.output_type == "stream")


def html(notebook):
    data = [o.get("data", {}) for o in outputs(notebook)]
    return "".join(d["text/html"] for d in data if "text/html" in d)


def assert_whole(notebook):
    """Every cell ran, without a complaint, and every picture is there."""
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in code)
    found = outputs(notebook)
    assert not [
        o for o in found if o.output_type == "error" or o.get("name") == "stderr"
    ]
    pictures = sum("image/png" in o.get("data", {}) for o in found)
    assert pictures == sum(cell.source.count("plt.show()") for cell in code) >= 2


@thorough
def test_there_are_four():
    assert NAMES == [
        "fine_tune_an_llm",
        "fit_a_model_that_did_not_fit",
        "quickstart",
        "which_bits",
    ]


@thorough
@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_is_in_step_with_its_py(name):
    assert cells(NOTEBOOKS / f"{name}.ipynb") == cells(NOTEBOOKS / f"{name}.py")


@thorough
@pytest.mark.parametrize("name", NAMES)
def test_committed_outputs_are_whole_small_and_of_no_machine(name):
    path = NOTEBOOKS / f"{name}.ipynb"
    assert path.stat().st_size < 400_000
    notebook = jupytext.read(path)
    assert_whole(notebook)
    assert not re.search(
        r"/(home|root|tmp|usr|opt)/", printed(notebook) + html(notebook)
    )


@pytest.fixture
def run(tmp_path):
    """Run a notebook in a fresh kernel; gives it with its outputs."""
    for package in ("ipykernel", "flax", "optax", "sklearn", "matplotlib"):
        pytest.importorskip(package)
    nbclient = pytest.importorskip("nbclient")
    packages = (jaxact.__file__, jaxact_kernels.__file__)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(str(Path(f).parent.parent) for f in packages),
        "JAX_PLATFORMS": "cpu",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",  # compiling takes longer than running
        "MPLBACKEND": "module://matplotlib_inline.backend_inline",
    }

    def run(name, **parameters):
        """`parameters` take the place of assignments in the cell of that tag."""
        notebook = jupytext.read(NOTEBOOKS / f"{name}.py")
        for key, value in parameters.items():
            (cell,) = (
                c for c in notebook.cells if "parameters" in c.metadata.get("tags", [])
            )
            cell.source, count = re.subn(
                rf"^{key} = .*$", f"{key} = {value!r}", cell.source, flags=re.MULTILINE
            )
            assert count == 1
        where = {"metadata": {"path": tmp_path}}
        client = nbclient.NotebookClient(notebook, timeout=600, resources=where)
        client.execute(env=environment)
        assert_whole(notebook)
        return notebook

    return run


@pytest.mark.slow
def test_quickstart(run):
    notebook = run("quickstart")
    text = printed(notebook)
    assert "same output: True" in text
    assert float(re.search(r": ([\d.]+) times less", text)[1]) > 10
    tables = re.findall(r"\(([\d.]+)x smaller\)", html(notebook))
    assert len(tables) == 2 and all(float(ratio) > 3 for ratio in tables)
    one, mean = (
        float(re.search(rf"{what} ([\d.]+)%", text)[1])
        for what in ("one gradient is off by", "the mean of 64 by")
    )
    # Without a bias the mean of 64 is off by an eighth; twice that is far beyond
    # the spread of a norm over 2^18 values.
    assert 1 < mean < one / 4
    losses = re.findall(r"loss ([\d.]+) -> ([\d.]+)", text)
    assert len(losses) == 2
    assert all(float(last) < 0.1 * float(first) for first, last in losses)


@pytest.mark.slow
def test_fit_a_model_that_did_not_fit(run):
    notebook = run("fit_a_model_that_did_not_fit", target=None)
    text = printed(notebook)
    (ratio,) = re.findall(r"\(([\d.]+)x smaller\)", html(notebook))
    assert float(ratio) > 3
    # Of each row: residuals, stored, temp, peak, products, seconds.
    row = r"<tr><td[^>]*>([^<]+)</td>((?:<td>[^<]*</td>){6})"
    rows = re.findall(row, html(notebook))
    products = {name: re.findall(r">(\d+)<", cells)[0] for name, cells in rows}
    assert int(products["jaxact, 4 bits"]) == int(products["uncompressed"]) > 100
    assert int(products["checkpoint"]) > int(products["uncompressed"])
    found = re.findall(r"(\S.*?) +(\d+) samples in ([\d.]+) MiB", text)
    largest = {name: int(batch) for name, batch, _ in found}
    assert all(float(used) <= 32 for *_, used in found)
    assert largest["jaxact, 4 bits"] >= 3 * largest["checkpoint, dots saveable"]
    assert largest["jaxact, 2 bits"] > largest["checkpoint"]
    assert largest["jaxact, 4 bits + checkpoint"] > largest["jaxact, 2 bits"]
    assert "the model above at batch 16, on cpu" in text


@pytest.mark.slow
def test_which_bits(run):
    text = printed(run("which_bits"))
    rows = re.findall(r"(\w+) +([\d.]+) bits: predicted ([\d.]+), ([\d.]+)", text)
    found = {(kind, float(bits)): (float(p), float(m)) for kind, bits, p, m in rows}
    assert len(found) == 4
    predicted, measured = found["allocated", 3]
    assert measured == pytest.approx(predicted, rel=0.2)
    # Where rounding is coarse, cross terms come on top of what is predicted.
    assert found["allocated", 2][1] < 0.75 * found["uniform", 2][1]
    assert 2 < float(re.search(r"e2=0.02 +([\d.]+) bits", text)[1]) < 4


@pytest.mark.slow
def test_fine_tune_an_llm(run):
    """A small decoder takes the pretrained one's place where that is not installed."""
    notebook = run("fine_tune_an_llm")
    text = printed(notebook)
    first, *others = re.findall(r"loss ([\d.]+) -> ([\d.]+)", text)
    assert len(others) == 3 and {start for start, _ in others} == {first[0]}
    assert all(float(last) < float(start) for start, last in [first, *others])
    assert len(re.findall(r"\(([\d.]+)x smaller\)", html(notebook))) == 1
