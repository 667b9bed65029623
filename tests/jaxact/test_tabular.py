"""Tables read the same wherever they are shown."""

import io

import jax.numpy as jnp
import pytest

import jaxact
from jaxact._tabular import Column, Tabular, bytes_text

X = jnp.ones((64, 256))


class Sizes(Tabular):
    def _table(self):
        columns = [
            Column("path", lambda row: row[0]),
            Column("name", lambda row: ""),
            Column("stored", lambda row: f"{row[1]:,}", is_number=True),
        ]
        return columns, [("Net/<b>", 1024), ("[red]Net/a", 8)]

    def summary(self):
        return "2 rows & more\nnothing matched"


def console_text(value, width=200):
    console = pytest.importorskip("rich.console").Console(
        width=width, file=io.StringIO()
    )
    console.print(value)
    return console.file.getvalue()


def test_text():
    assert str(Sizes()).splitlines() == [
        "path        stored",
        "Net/<b>      1,024",
        "[red]Net/a       8",
        "2 rows & more",
        "nothing matched",
    ]


def test_html_scrolls_and_has_no_colors_of_its_own():
    left = ' style="text-align:left"'
    assert Sizes()._repr_html_() == (
        '<div style="overflow-x:auto">'
        f"<table><tr><th{left}>path</th><th>stored</th></tr>"
        f"<tr><td{left}>Net/&lt;b&gt;</td><td>1,024</td></tr>"
        f"<tr><td{left}>[red]Net/a</td><td>8</td></tr></table></div>"
        "<p>2 rows &amp; more<br>nothing matched</p>"
    )


def test_text_is_broken_into_lines_and_numbers_are_not():
    class Wide(Sizes):
        def _table(self):
            columns, _ = super()._table()
            return columns, [("Network/block_0/attention", 10**9), ("a" * 25, 1)]

    assert Wide().text(width=31).splitlines()[:-2] == [
        "path                     stored",
        "Network/block_0/  1,000,000,000",
        "attention",
        "aaaaaaaaaaaaaaaa              1",
        "aaaaaaaaa",
    ]


def test_rich_takes_nothing_for_markup_and_cuts_nothing():
    text = console_text(Sizes())
    assert "[red]Net/a" in text and "2 rows & more" in text and "name" not in text
    narrow = console_text(Sizes(), width=18)
    assert "…" not in narrow and "1,024" in narrow


def tables():
    layer = jaxact.compress(lambda x: jnp.sin(x) * 2, policy=jaxact.Policy(bits=2))
    residuals = jaxact.residuals(layer, X)
    cost = jaxact.Sensitivity((), 0.0, unmeasured=("b",))
    measured = jaxact.sensitivity(lambda x: layer(x).sum(), X)
    return [
        (residuals, "1 residual: 64 KiB exact, 4.25 KiB stored (15.1x smaller)"),
        (residuals.by_path(), "stored as 4.25 KiB, 15.1x smaller"),
        (cost, "not measured: b"),
        (measured, "1 rows"),
        (jaxact.allocate(measured, bits=3), "3 bits on average"),
        (jaxact.Memory(2**20, 2**21, 0, 0, "cpu"), "peak 3.0 MiB on cpu"),
    ]


@pytest.mark.filterwarnings("ignore:The chararray class:DeprecationWarning")  # its own
def test_treescope():
    """The printed table; in a list, where it is folded, what it sums up to."""
    treescope = pytest.importorskip("treescope")
    for table, brief in tables():
        text = treescope.render_to_text(table)
        for line in str(table).splitlines():
            assert line in text
        assert brief in treescope.render_to_text([table])
        page = treescope.render_to_html(table, compressed=False)
        assert f"&lt;{type(table).__name__}: " in page and brief in page
        # Unlike a dump of fields, which a policy has, and is.
        assert "rows=" not in text
    policy = jaxact.Policy(bits=2, rules=(jaxact.Rule(jaxact.Exact(), name="a"),))
    assert "rules=(" in treescope.render_to_text(policy)


def test_memory_says_its_units():
    memory = jaxact.Memory(2**20, 2**21, 0, 0, "cpu")
    line = "temp 1.0, argument 2.0, output 0.0, alias 0.0, peak 3.0 MiB on cpu"
    assert str(memory) == line
    assert "<td>1.0 MiB</td>" in memory._repr_html_()


@pytest.mark.parametrize("number, text", [
    (0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (4352, "4.25 KiB"),
    (65536, "64 KiB"), (3 * 2**20, "3 MiB"), (2**30 - 2**20, "1023 MiB"),
    (5 * 2**29, "2.5 GiB"), (2**42, "4096 GiB"),
])  # fmt: skip
def test_bytes_are_in_binary_units(number, text):
    assert bytes_text(number) == text
