"""``python -m namedshard explain``: arguments, the table, JSON, exit statuses, and that nothing but headers is read."""

import json
import os
import re
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from support import mesh

import namedshard as ns
from namedshard._cli import main

ROOT = Path(__file__).parent.parent
SIZES = {"F32": 4, "BF16": 2, "I64": 8}
TENSORS: dict[str, tuple[str, tuple[int, ...]]] = {
    "embeddings.words.weight": ("F32", (30522, 384)),
    "encoder.layer.0.up.weight": ("BF16", (1536, 384)),
    "encoder.layer.0.up.bias": ("BF16", (1536,)),
    "encoder.layer.1.up.weight": ("BF16", (1536, 384)),
    "encoder.layer.1.up.bias": ("BF16", (1536,)),
    "scale": ("F32", ()),
    "position_ids": ("I64", (1, 512)),
}
RULES = ["--map", "vocab=model|data|none", "mlp=model"]
NAMES = [
    "--axes",
    "*words.weight=vocab,embed",
    "up.weight=mlp embed",
    r"re:encoder\.layer\.\d+\.up\.bias=mlp",
    "scale=",
]


def write(folder: Path, tensors: dict[str, tuple[str, tuple[int, ...]]], name: str = "model.safetensors") -> Path:
    """A file with a header and a hole where the data would be: whoever read it all would read gigabytes of zeros."""
    header: dict[str, Any] = {}
    at = 0
    for tensor, (dtype, shape) in tensors.items():
        size = SIZES[dtype]
        for n in shape:
            size *= n
        header[tensor] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    raw = json.dumps(header).encode()
    path = folder / name
    path.write_bytes(struct.pack("<Q", len(raw)) + raw)
    os.truncate(path, 8 + len(raw) + at)
    return path


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit status, stdout and stderr."""
    try:
        status = main(["explain", *arguments])
    except SystemExit as stop:
        assert isinstance(stop.code, int)
        status = stop.code
    said = capsys.readouterr()
    return status, said.out, said.err


TABLE = """\
leaf                               axes                    spec                        dtype     per device  route
────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────
embeddings.words.weight            vocab=30522, embed=384  P('data', None)             float32     22.4 MiB  read
  vocab → 'data' by first('model', 'data', None): 'model' is indivisible (30522 = 4*7630 + 2)
encoder.layer.{0..1}.up.weight ×2  mlp=1536, embed=384     P('model', None)            bfloat16     288 KiB  read
encoder.layer.{0..1}.up.bias ×2    mlp=1536                P('model')                  bfloat16       768 B  read
scale                              scalar                  P()                         float32          4 B  read
position_ids                       (1, 512)                P(None, ('model', 'data'))  int64          256 B  best effort

all leaves: now in file
7 leaves, 47 MiB; on each of 8 devices 22.9 MiB, of which 4 B replicated
mesh 'data'=2, 'model'=4; no rule for embed
! 1 of 7 tensors match no --axes pattern
"""

TABLE_AT_80 = """\
leaf                        axes                         per device  route
────────────────────────────────────────────────────────────────────────────────
embeddings.words.weight     vocab=30522 → data,            22.4 MiB  read
                              embed=384
  vocab → 'data' by first('model', 'data', None): 'model' is indivisible
    (30522 = 4*7630 + 2)
encoder.layer.{0..1}.up     mlp=1536 → model, embed=384     288 KiB  read
  .weight ×2
encoder.layer.{0..1}.up     mlp=1536 → model                  768 B  read
  .bias ×2
scale                       scalar                              4 B  read
position_ids                (1, 512)                          256 B  best effort

all leaves: now in file
7 leaves, 47 MiB; on each of 8 devices 22.9 MiB, of which 4 B replicated
mesh 'data'=2, 'model'=4; no rule for embed
! 1 of 7 tensors match no --axes pattern
"""


def test_table(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    path = write(tmp_path, TENSORS)
    arguments = [str(path), "--mesh", "data=2,model=4", *RULES, *NAMES]
    status, out, err = run(capsys, *arguments)
    assert (status, err) == (0, "")
    assert out == TABLE
    status, every, _ = run(capsys, *arguments, "--all")
    assert "encoder.layer.0.up.bias " in every and "encoder.layer.1.up.bias " in every and "×" not in every
    assert every.count("\n") == out.count("\n") + 2
    # A folder stands for the checkpoint in it.
    assert run(capsys, str(tmp_path), *arguments[1:]) == (0, out, "")


def test_table_at_80(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    path = write(tmp_path, TENSORS)
    _, out, _ = run(capsys, str(path), "--mesh", "data=2,model=4", *RULES, *NAMES)
    assert out == TABLE_AT_80


def test_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, TENSORS)
    status, out, err = run(capsys, str(path), "--mesh", "data=2,model=4", *RULES, *NAMES, "--json")
    assert (status, err) == (0, "")
    said = json.loads(out)
    assert said["mesh"] == {"data": 2, "model": 4}
    assert said["mapping"] == {"vocab": {"first": ["model", "data", None]}, "mlp": "model"}
    assert [leaf["path"] for leaf in said["leaves"]] == list(TENSORS)
    assert {leaf["path"]: leaf["spec"] for leaf in said["leaves"]} == {
        "embeddings.words.weight": ["data", None],
        "encoder.layer.0.up.weight": ["model", None],
        "encoder.layer.0.up.bias": ["model"],
        "encoder.layer.1.up.weight": ["model", None],
        "encoder.layer.1.up.bias": ["model"],
        "scale": [],
        "position_ids": [None, ["model", "data"]],
    }
    assert {leaf["route"] for leaf in said["leaves"]} == {"read", "best effort"}
    assert said["totals"]["bytes_per_device"] == 15261 * 384 * 4 + 2 * (384 * 384 * 2 + 384 * 2) + 4 + 256
    assert said["lints"] == [{"kind": "unnamed", "text": "1 of 7 tensors match no --axes pattern"}]


def test_the_total_is_what_each_device_holds_after_loading(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shapes = {"a.w": (16, 8), "a.b": (16,), "odd": (3, 5), "big": (64, 6), "scalar": (), "ids": (1, 512)}
    # JAX holds 64-bit integers that fit in 32 bits.
    values = {name: np.ones(shape, np.int64 if name == "ids" else np.float32) for name, shape in shapes.items()}
    ns.save_safetensors(values, tmp_path / "x.safetensors")
    like = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in values.items()}
    where, axes = mesh((2, 4), "data model"), {"a.w": "mlp embed"}
    tree = ns.load_safetensors(tmp_path / "x.safetensors", like, {"mlp": "model"}, where, axes=axes, narrow="fit")
    arguments = ["--mesh", "data=2,model=4", "--map", "mlp=model", "--axes", "a.w=mlp embed", "--json"]
    _, out, _ = run(capsys, str(tmp_path / "x.safetensors"), *arguments)
    held = sum(x.addressable_shards[0].data.nbytes for x in tree.values())
    assert json.loads(out)["totals"]["bytes_per_device"] == held


@pytest.mark.parametrize(
    ("rule", "spec"),
    [
        ("mlp=model", ["model"]),
        ("mlp=data+model", [["data", "model"]]),
        ("mlp=none", [None]),
        ("mlp=pod|model", ["model"]),
        ("mlp=pod|data+model|none", [["data", "model"]]),
        ("mlp=pod|none", [None]),
    ],
)
def test_rules(tmp_path: Path, capsys: pytest.CaptureFixture[str], rule: str, spec: Any) -> None:
    path = write(tmp_path, {"w": ("F32", (8,))})
    _, out, _ = run(capsys, str(path), "--mesh", "data=2,model=4", "--map", rule, "--axes", "w=mlp", "--json")
    assert json.loads(out)["leaves"][0]["spec"] == spec


def test_first_pattern_wins(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, {"a=b": ("F32", (8,)), "a.c": ("F32", (8,)), "A.c": ("F32", (8,))})
    arguments = ["--axes", "a?b=first", "--axes", "a.*=second", "re:[aA].*=third", "a?b=fourth", "--json"]
    _, out, _ = run(capsys, str(path), "--mesh", "data=2", *arguments)
    assert [leaf["axes"] for leaf in json.loads(out)["leaves"]] == [[["first", 8]], [["second", 8]], [["third", 8]]]


def test_what_cannot_be_placed_is_status_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, TENSORS)
    arguments = [str(path), "--mesh", "data=2,model=4", "--map", "vocab=model", "--axes", "*words.weight=vocab,embed"]
    status, out, err = run(capsys, *arguments)
    assert (status, err) == (1, "")
    assert "axis vocab=30522 is not divisible by mesh axis 'model'=4 (30522 = 4*7630 + 2)" in out
    assert "1 of 7 leaves cannot be placed\nfix: pad the axis to 30524, map vocab to 'data'=2, or pass" in out
    assert run(capsys, *arguments, "--json")[0] == 1
    status, out, _ = run(capsys, *arguments, "--indivisible", "replicate")
    assert status == 0 and "vocab is left whole: 'model' is indivisible (30522 = 4*7630 + 2)" in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--mesh", "data"], "'data' is not a mesh axis and its size: write --mesh data=2,model=4"),
        (["--mesh", "data=2,model=x"], "mesh axis model has size 'x': use a positive number"),
        (["--mesh", "data=0"], "mesh axis data has size '0': use a positive number"),
        (["--mesh", "data=2,data=2"], "mesh axis data is given twice"),
        (["--mesh", "data=2", "--map", "mlp"], "'mlp' is not an axis and its rule: write --map vocab=model"),
        (
            ["--mesh", "data=2", "--map", "mlp=data|"],
            "'mlp=data|' is not a rule: write NAME=model, NAME=data+model, NAME=none or 'NAME=model|data|none'",
        ),
        (["--mesh", "data=2", "--map", "mlp=data", "mlp=none"], "axis mlp is mapped twice"),
        (["--mesh", "data=2", "--map", "mlp=data+data"], "axis 'mlp': mesh axes ('data', 'data') repeat"),
        (["--mesh", "data=2", "--map", "mlp=data+data|none"], "first(...): mesh axes ('data', 'data') repeat"),
        (
            ["--mesh", "data=2", "--axes", "mlp"],
            "'mlp' is not a pattern and axis names: write --axes 'encoder.*.weight=out in'",
        ),
        (
            ["--mesh", "data=2", "--axes", "a=b,b", "re:(=b", "c=(d", "e=f"],
            "axes=: 3 of 4 cannot be read\n"
            "  'a': 'b,b': b is there more than once\n"
            "  're:(': 'b': not a regular expression: missing ), unterminated subpattern at position 0\n"
            "  'c': '(d': parentheses are nested or not closed\n"
            '  fix: name each dimension, as in "mlp embed", "batch ... embed", "_ embed" or "(heads=12 head_size)'
            ' embed"',
        ),
        (
            ["--mesh", "data=2", "--axes", "up.bias=mlp embed", "up.weight=(a=5 b) embed"],
            "4 of 7 leaves named wrongly by axes=\n"
            "  encoder.layer.0.up.weight: (1536, 384): the sizes of (a=5 b) do not multiply to 1536, in"
            " '(a=5 b) embed' of pattern 'up.weight'\n"
            "  encoder.layer.1.up.weight: (1536, 384): the sizes of (a=5 b) do not multiply to 1536, in"
            " '(a=5 b) embed' of pattern 'up.weight'\n"
            "  encoder.layer.0.up.bias: (1536,): the names 'mlp embed' of pattern 'up.bias' do not fit rank 1\n"
            "  encoder.layer.1.up.bias: (1536,): the names 'mlp embed' of pattern 'up.bias' do not fit rank 1\n"
            "  fix: name every dimension (_ for one without a name, ... for several), and put narrower patterns first",
        ),
    ],
)
def test_bad_arguments(tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str) -> None:
    path = write(tmp_path, TENSORS)
    assert run(capsys, str(path), *arguments) == (2, "", f"python -m namedshard explain: error: {said}\n")


def test_bad_checkpoints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    absent = tmp_path / "absent.safetensors"
    for path in (absent, tmp_path):
        status, out, err = run(capsys, str(path), "--mesh", "data=2")
        assert (status, out) == (2, "")
        assert err.startswith("python -m namedshard explain: error: ") and str(path) in err
    page = tmp_path / "model.safetensors"
    page.write_text("<html>not found</html>")
    status, out, err = run(capsys, str(page), "--mesh", "data=2")
    assert (status, out) == (2, "")
    assert "it looks like a web page" in err and str(page) in err


def test_lints(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    path = write(tmp_path, TENSORS)
    patterns = ["embeddings.word.weight=vocab,embed", "*.up.weight=mlp,embed"]
    _, out, _ = run(capsys, str(path), "--mesh", "data=2,model=4", "--map", "mlp=data+model", "--axes", *patterns)
    assert [line for line in out.splitlines() if line.startswith("! ")] == [
        "! 5 of 7 tensors match no --axes pattern",
        "! axes pattern 'embeddings.word.weight' matches no leaf (did you mean 'embeddings.words.weight'?)",
    ]


def test_colour_only_where_it_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    arguments = [str(write(tmp_path, {"w": ("F32", (7,))})), "--mesh", "data=2", "--map", "x=data", "--axes", "w=x"]
    _, plain, _ = run(capsys, *arguments)
    monkeypatch.setenv("FORCE_COLOR", "1")
    _, coloured, _ = run(capsys, *arguments)
    assert "\x1b" not in plain and "\x1b[31m" in coloured
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == plain


def test_sharded_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, {"a": ("F32", (8,))}, "model-00001-of-00002.safetensors")
    write(tmp_path, {"b": ("F32", (8,))}, "model-00002-of-00002.safetensors")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    _, out, _ = run(capsys, str(tmp_path), "--mesh", "data=2", "--map", "x=data", "--axes", "?=x", "--json")
    assert [leaf["spec"] for leaf in json.loads(out)["leaves"]] == [["data"], ["data"]]


def test_no_backend_and_no_data_are_touched(tmp_path: Path) -> None:
    """In a process where JAX can start no backend, on a file of 2 TB that is all hole."""
    path = write(tmp_path, {"w": ("F32", (2**20, 2**19))})
    command = [sys.executable, "-m", "namedshard", "explain", str(path), "--mesh", "data=128,model=128"]
    environment = os.environ | {"JAX_PLATFORMS": "no_such_platform", "PYTHONIOENCODING": "ascii"}
    arguments = ["--axes", "w=rows,columns", "--map", "rows=data", "columns=model|none"]
    done = subprocess.run([*command, *arguments], env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert "1 leaf, 2 TiB; on each of 16384 devices 128 MiB, of which 0 B replicated" in done.stdout
    # No colour where no one looks, and no traceback where a terminal lacks a character.
    assert "\x1b" not in done.stdout and "???" in done.stdout


def test_usage(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, status in (([], 2), (["--help"], 0), (["explain", "--help"], 0), (["explode"], 2)):
        with pytest.raises(SystemExit) as stop:
            main(arguments)
        assert stop.value.code == status
        said = capsys.readouterr()
        assert "usage: python -m namedshard" in (said.err if status else said.out)
    with pytest.raises(SystemExit):
        main(["explain", "--help"])
    told = capsys.readouterr().out
    assert "model|data|none" in told and "(heads=12 head_size) embed" in told
