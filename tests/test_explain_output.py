"""What `explain` adds up and warns of, and its JSON, HTML and colours."""

import io
import json
import re
import warnings
from html.parser import HTMLParser
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, PartitionSpec
from rich.console import Console

import namedshard as ns

P = PartitionSpec
ABSTRACT = AbstractMesh((2, 4), ("data", "model"))


def named(dtype: str = "float32", **axes: int) -> hax.NamedArray:
    """An abstract array with these axes."""
    struct = jax.ShapeDtypeStruct(tuple(axes.values()), dtype)
    return hax.NamedArray(struct, tuple(hax.Axis(name, size) for name, size in axes.items()))


# --- totals and lints -------------------------------------------------------------------------------------------------


def test_totals() -> None:
    tree = [named(mlp=8), named(embed=4), np.zeros(3, np.int8), 1, named(mlp=7)]
    totals = ns.explain(tree, {"mlp": "model"}, ABSTRACT).totals
    assert totals.leaves == 4
    assert totals.bytes == 32 + 16 + 3 + 28
    assert totals.bytes_per_device == 8 + 16
    assert totals.bytes_replicated == 16
    assert (totals.left, totals.bytes_left, totals.others, totals.problems) == (1, 3, 1, 1)


class Declared(eqx.Module):
    """A plain array whose axes are declared, possibly wrongly."""

    weight: Any = eqx.field(metadata={"axis_names": ("mlp", "embed")})


@pytest.mark.parametrize(
    ("tree", "mapping", "lints"),
    [
        ([named(mlp=8)], {"mlp": ("data", "model")}, []),
        (
            [named(mlp=8)],
            {"mlp": ("data", "model"), "mpl": "data"},
            [("unmatched key", "mapping key 'mpl' matches no axis (did you mean 'mlp'?)")],
        ),
        (
            [named(mlp=8)],
            {"mlp": ("data", "model"), "batch": "data", "vocab": None},
            [("unmatched key", "mapping keys 'batch', 'vocab' match no axis (the axes are mlp)")],
        ),
        (
            [named(mlp=8)],
            {"mlp": ns.first("pod", ("data", "model"))},
            [
                (
                    "absent mesh axis",
                    "the rule for mlp (first('pod', ('data', 'model'))) names mesh axis 'pod', but the mesh has"
                    " 'data'=2, 'model'=4",
                )
            ],
        ),
        ([named(mlp=8)], {"mlp": "model"}, [("unused mesh axis", "mesh axis 'data'=2 splits no leaf")]),
        (
            [named(mlp=8), *(named(embed=4096, kv=1024) for _ in range(3))],
            {"mlp": ("data", "model")},
            [
                (
                    "large replica",
                    "[1..3] ×3 is left replicated, 16 MiB each: none of embed=4096, kv=1024 is sharded",
                )
            ],
        ),
        (
            [named(mlp=8), jax.ShapeDtypeStruct((4096, 1024), "float32"), named(embed=4096 * 1024 - 1)],
            {"mlp": ("data", "model")},
            [("large replica", "[1] is left replicated, 16 MiB each: (4096, 1024) has no axis names")],
        ),
        (
            [named(mlp=8), Declared(jax.ShapeDtypeStruct((8,), "float32"))],
            {"mlp": ("data", "model")},
            [("names do not fit", "[1].weight: names (mlp, embed) do not fit rank 1; left as it is")],
        ),
    ],
)
def test_lints(tree: Any, mapping: Any, lints: list[tuple[str, str]]) -> None:
    explanation = ns.explain(tree, mapping, ABSTRACT)
    assert [(lint.kind, lint.text) for lint in explanation.lints] == lints
    assert [line[2:] for line in explanation.table(300).splitlines() if line.startswith("! ")] == [t for _, t in lints]


def test_one_device_has_no_replicas_and_no_unused_axes() -> None:
    mesh = AbstractMesh((1, 1), ("data", "model"))
    assert ns.explain([named(embed=4096, kv=1024)], {"embed": "model"}, mesh).lints == ()
    assert ns.explain([named(embed=4096, kv=1024)], {"kv": None}, mesh).lints == ()


def test_replication_by_policy_is_shown_without_a_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        explanation = ns.explain(named(odd=7), {"odd": "model"}, ABSTRACT, indivisible="replicate")
    assert explanation.ok and explanation.plan.leaves[0].spec == P(None)


# --- JSON, HTML, colour -----------------------------------------------------------------------------------------------


def test_json() -> None:
    tree = {"w": named(vocab=30522, embed=384), "bad": named(mlp=7), "s": jnp.zeros(2, jnp.int8)}
    mapping = {"vocab": ns.first("model", ("data",), None), "mlp": ("data", "model"), "embed": None}
    explanation = ns.explain(tree, mapping, ABSTRACT)
    assert json.loads(explanation.to_json()) == {
        "mesh": {"data": 2, "model": 4},
        "mapping": {"vocab": {"first": ["model", "data", None]}, "mlp": ["data", "model"], "embed": None},
        "indivisible": "error",
        "totals": {
            "leaves": 3,
            "bytes": 30522 * 384 * 4 + 28 + 2,
            "bytes_per_device": 15261 * 384 * 4,
            "bytes_replicated": 0,
            "bytes_in_host_memory": 0,
            "left": 1,
            "bytes_left": 2,
            "others": 0,
            "problems": 1,
        },
        "unmapped_axes": [],
        "lints": [{"kind": "unused mesh axis", "text": "mesh axis 'model'=4 splits no leaf"}],
        "fixes": ['pad the axis to 8, or pass indivisible="replicate"'],
        "leaves": [
            {
                "path": "['bad']",
                "axes": [["mlp", 7]],
                "shape": [7],
                "dtype": "float32",
                "spec": None,
                "memory_kind": None,
                "bytes": 28,
                "bytes_per_device": None,
                "transient_bytes": None,
                "now": "abstract",
                "route": "error",
                "why": [
                    {
                        "axis": "mlp",
                        "size": 7,
                        "rule": ["data", "model"],
                        "won": None,
                        "lost": [{"candidate": ["data", "model"], "reason": "indivisible"}],
                    }
                ],
                "problems": ["axis mlp=7 is not divisible by mesh axes ('data', 'model')=8 (7 = 8*0 + 7)"],
                "note": "",
            },
            {
                "path": "['s']",
                "axes": None,
                "shape": [2],
                "dtype": "int8",
                "spec": None,
                "memory_kind": None,
                "bytes": 2,
                "bytes_per_device": 2,
                "transient_bytes": 0,
                "now": "cpu:0, uncommitted",
                "route": "left",
                "why": [],
                "problems": [],
                "note": "",
            },
            {
                "path": "['w']",
                "axes": [["vocab", 30522], ["embed", 384]],
                "shape": [30522, 384],
                "dtype": "float32",
                "spec": ["data", None],
                "memory_kind": None,
                "bytes": 30522 * 384 * 4,
                "bytes_per_device": 15261 * 384 * 4,
                "transient_bytes": 0,
                "now": "abstract",
                "route": "annotate",
                "why": [
                    {
                        "axis": "vocab",
                        "size": 30522,
                        "rule": {"first": ["model", "data", None]},
                        "won": "data",
                        "lost": [{"candidate": "model", "reason": "indivisible"}],
                    },
                    {"axis": "embed", "size": 384, "rule": None, "won": None, "lost": []},
                ],
                "problems": [],
                "note": "",
            },
        ],
    }


class Cells(HTMLParser):
    """Text by tag, and what is still open."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: dict[str, list[str]] = {"th": [], "td": [], "li": []}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag != "br":
            self.open.append(tag)
        if tag in self.texts:
            self.texts[tag].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in self.texts:
            self.texts[self.open[-1]][-1] += data


def test_html() -> None:
    tree = [named(mlp=8), named(mlp=8), {"<script>": named(vocab=6)}]
    mapping = {"mlp": ("data", "model"), "vocab": ns.first("model", "data"), "<b>": None}
    page = Cells()
    page.feed(ns.explain(tree, mapping, ABSTRACT)._repr_html_())
    assert page.open == []
    assert page.texts["th"] == ["leaf", "axes", "spec", "dtype", "per device", "now", "route", "why"]
    first, second = page.texts["td"][:8], page.texts["td"][8:]
    assert first == ["[0..1] ×2", "mlp=8", "P(('data', 'model'))", "float32", "4 B", "abstract", "annotate", ""]
    assert second == [
        "[2]['<script>']",
        "vocab=6",
        "P('data')",
        "float32",
        "12 B",
        "abstract",
        "annotate",
        "vocab → 'data' by first('model', 'data'): 'model' is indivisible (6 = 4*1 + 2)",
    ]
    assert page.texts["li"] == ["mapping key '<b>' matches no axis (the axes are mlp, vocab)"]


def test_colour_only_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    explanation = ns.explain([named(mlp=7), named(mlp=8)], {"mlp": "model"}, ABSTRACT)
    piped, terminal = io.StringIO(), io.StringIO()
    Console(file=piped, width=120).print(explanation)
    Console(file=terminal, width=120, force_terminal=True, color_system="standard").print(explanation)
    assert "\x1b[31m" in terminal.getvalue()
    assert "\x1b" not in piped.getvalue() + str(explanation)
    plain = [line.rstrip() for line in piped.getvalue().splitlines()]
    assert plain == explanation.table(120).splitlines()
    assert re.sub(r"\x1b\[[0-9;]*m", "", terminal.getvalue()) == piped.getvalue()
