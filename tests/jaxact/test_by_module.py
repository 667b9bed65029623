"""Residuals by module: nothing lost, nothing counted twice."""

import json

import jax
import jax.numpy as jnp
import pytest

import jaxact
from jaxact._report.by_module import ModuleRow, module_table

ONES = (1, 4, 2)  # elements, exact and stored bytes of one residual


def table_of(*paths, depth=None):
    return module_table([ModuleRow(path, 1, *ONES) for path in paths], depth)


def test_modules_come_in_order_each_before_what_it_contains():
    paths = "Net/b/inner Net/a Net/b Net/a other/c Net/b/inner Net".split()
    table = table_of(*paths)
    assert [(row.path, row.residuals) for row in table.rows] == [
        ("Net", 1),
        ("Net/b", 1),
        ("Net/b/inner", 2),
        ("Net/a", 2),
        ("other/c", 1),
    ]


@pytest.mark.parametrize(
    "depth, paths",
    [(1, ["Net", "", "x"]), (2, ["Net/a", "Net/b", "", "x"]), (9, None)],
)
def test_depth_gathers_what_lies_deeper(depth, paths):
    given = "Net/a/b/c", "Net/a", "Net/b", "", "x"
    table = table_of(*given, depth=depth)
    full = table_of(*given)
    wanted = [row.path for row in full.rows] if paths is None else paths
    assert [row.path for row in table.rows] == wanted
    assert table.total == full.total == ModuleRow("Total", 5, 5, 20, 10)


@pytest.mark.parametrize("depth", [0, -1, 1.5])
def test_depths_that_there_are_not(depth):
    with pytest.raises(ValueError, match="at least 1"):
        table_of("Net", depth=depth)


def test_sums_are_those_of_the_residual_table():
    def network(ws, x):
        for number, w in enumerate(ws):
            with jax.named_scope(f"layer{number}"):
                x = jnp.tanh(x @ w)
        return x

    policy = jaxact.Policy(bits=2)
    shapes = jax.ShapeDtypeStruct((3, 64, 64), jnp.float32)
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    residuals = jaxact.residuals(network, shapes, x, policy=policy)
    table = residuals.by_path()
    # Each layer's derivative of tanh; of the first two, also the next layer's input.
    layers = [row for row in table.rows if row.path.startswith("layer")]
    assert [(row.path, row.residuals) for row in layers] == [
        ("layer0", 2),
        ("layer1", 2),
        ("layer2", 1),
    ]
    total = table.total
    assert total.residuals == len(residuals.rows)
    assert total.exact_bytes == residuals.exact_bytes
    assert total.stored_bytes == residuals.stored_bytes
    assert total.ratio == residuals.ratio


def test_forms():
    table = table_of("Net/a", "Net/a", "Net/b")
    titles, first, second, summary = str(table).splitlines()
    assert titles.split() == "path residuals exact stored ratio share".split()
    assert first.split() == "Net/a 2 2 (8 B) 4 B 2.0x 66.7 %".split()
    assert second.split() == "Net/b 1 1 (4 B) 2 B 2.0x 33.3 %".split()
    assert summary == "Total residuals: 3, 3 (12 B), stored as 6 B, 2.0x smaller"
    data = json.loads(json.dumps(table.to_dict()))
    assert data["total"]["stored_bytes"] == 6
    assert [row["ratio"] for row in data["rows"]] == [2, 2]


def test_sizes_are_in_the_units_of_the_residual_table():
    x = jax.ShapeDtypeStruct((64, 256), jnp.float32)
    residuals = jaxact.residuals(jnp.sin, x, policy=jaxact.Policy(bits=2))
    _, row, _ = str(residuals.by_path()).splitlines()
    assert "16,384 (64 KiB)" in row and " 4.25 KiB " in row
    assert "64 KiB exact, 4.25 KiB stored" in residuals.summary()


def test_an_empty_table():
    assert str(table_of()).splitlines()[-1].startswith("Total residuals: 0, 0 (0 B)")
