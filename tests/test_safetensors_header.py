"""The header of a file: everything it can lie about is a named error, and 10,000 mutations do no harm."""

import json
import random
import re
import tracemalloc
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors
from checkpoints import CODES, EVERY_DTYPE, encode, raw, write
from support import nothing_moved

import namedshard as ns
from namedshard._safetensors.header import DTYPES, encode_header, header_length, parse_header

PAYLOAD = np.arange(16, dtype=np.uint8).tobytes()


def parse(data: bytes) -> dict[str, ns.TensorInfo]:
    """Parse a whole file's bytes, as reading one does."""
    length = header_length(data[:8], "f", len(data))
    return parse_header(data[8 : 8 + length], "f", len(data))


def entry(start: int, stop: int, shape: Any = None, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": [(stop - start) // 4] if shape is None else shape, "data_offsets": [start, stop]}


def test_a_header_gives_shapes_dtypes_and_bytes(tmp_path):
    tensors = {"a": np.zeros((2, 3), np.float32), "b": np.zeros((), np.int8), "c": np.zeros((0, 4), np.float16)}
    path = write(tmp_path / "x.safetensors", tensors, {"format": "pt"})
    data = path.stat().st_size - 25
    with nothing_moved():
        found = ns.read_header(path)
    assert found == {
        "a": ns.TensorInfo((2, 3), np.dtype("float32"), str(path), data, data + 24),
        "b": ns.TensorInfo((), np.dtype("int8"), str(path), data + 24, data + 25),
        "c": ns.TensorInfo((0, 4), np.dtype("float16"), str(path), data + 25, data + 25),
    }
    assert found["a"].nbytes == 24


@pytest.mark.parametrize("name", sorted(EVERY_DTYPE))
def test_every_dtype_has_the_librarys_own_name(tmp_path, name):
    path = write(tmp_path / "x.safetensors", {"x": EVERY_DTYPE[name]})
    assert ns.read_header(path)["x"].dtype == EVERY_DTYPE[name].dtype
    with safetensors.safe_open(path, framework="np") as f:
        assert f.get_slice("x").get_dtype() == CODES[name]


@pytest.mark.parametrize(
    ("code", "dtype", "count", "nbytes"),
    [
        ("F4", ml_dtypes.float4_e2m1fn, 6, 3),
        ("F6_E2M3", ml_dtypes.float6_e2m3fn, 4, 3),
        ("F6_E3M2", ml_dtypes.float6_e3m2fn, 8, 6),
    ],
)
def test_packed_dtypes_are_counted_in_bits(code, dtype, count, nbytes):
    info = parse(raw({"x": entry(0, nbytes, [count], code)}, bytes(nbytes)))["x"]
    assert (info.dtype, info.shape, info.nbytes) == (np.dtype(dtype), (count,), nbytes)


def test_encoded_headers_parse_to_the_same_and_begin_tensors_at_multiples_of_eight():
    listed = [("ä", np.dtype("float32"), (3, 5)), ("b", np.dtype(ml_dtypes.bfloat16), (7,)), ("c", np.dtype(bool), ())]
    for extra in ("", "x", "xy", "xyz"):
        head, size = encode_header(listed, {"format": "pt", "note": extra})
        assert len(head) % 8 == 0
        assert size == len(head) + 60 + 14 + 1
        tensors = parse_header(head[8:], "f", size)
        assert json.loads(head[8:])["__metadata__"] == {"format": "pt", "note": extra}
        assert [(n, i.dtype, i.shape) for n, i in tensors.items()] == listed
        assert [(i.start, i.stop) for i in tensors.values()] == [
            (len(head), len(head) + 60),
            (len(head) + 60, len(head) + 74),
            (len(head) + 74, len(head) + 75),
        ]


BAD_FILES = {
    "empty": (
        b"",
        "f is no safetensors file: it has 0 bytes, and its header's length takes 8\n"
        "  fix: fetch the file again: it is empty or was cut off",
    ),
    "seven bytes": (
        b"1234567",
        "f is no safetensors file: it has 7 bytes, and its header's length takes 8\n"
        "  fix: fetch the file again: it is empty or was cut off",
    ),
    "announces more than there is": (
        raw(b"{}", length=2**62),
        "f is no safetensors file, or is cut off: bytes 0 to 8 announce a header of 4611686018427387904 bytes, and"
        " there is room for 2 in a file of 10 bytes\n  fix: fetch the file again",
    ),
    "web page": (
        b"<!DOCTYPE html><html></html>",
        "f is no safetensors file, or is cut off: bytes 0 to 8 announce a header of 5789751444030890300 bytes, and"
        " there is room for 20 in a file of 28 bytes; it looks like a web page\n"
        "  fix: fetch the file itself (`git lfs pull` for a Git LFS pointer)",
    ),
    "git lfs pointer": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 4\n",
        "f is no safetensors file, or is cut off: bytes 0 to 8 announce a header of 2336927755350992246 bytes, and"
        " there is room for 55 in a file of 63 bytes; it looks like a Git LFS pointer\n"
        "  fix: fetch the file itself (`git lfs pull` for a Git LFS pointer)",
    ),
    "not utf-8": (
        raw(b"\xff\xfe"),
        "f: the header is not valid JSON: 'utf-8' codec can't decode byte 0xff in position 0: invalid start byte\n"
        "  fix: fetch the file again",
    ),
    "a list": (raw([]), "f: the header holds a JSON list, not an object\n  fix: fetch the file again"),
    "a name twice": (
        raw(b'{"a":{},"a":{}}'),
        "f: the header is not valid JSON: key 'a' occurs twice\n  fix: fetch the file again",
    ),
    "not a number": (
        raw(b'{"a":NaN}'),
        "f: the header is not valid JSON: NaN is no JSON\n  fix: fetch the file again",
    ),
    "nested": (
        raw(b'{"a":' + b"[" * 200_000),
        "f: the header is not valid JSON: nested too deeply\n  fix: fetch the file again",
    ),
    "overlap": (
        raw({"a": entry(0, 8), "b": entry(0, 8)}, PAYLOAD[:8]),
        "f: the header does not describe the file's 138 bytes\n"
        "  b: begins at byte 130, inside a, which ends at byte 138\n  fix: fetch the file again",
    ),
    "gap": (
        raw({"a": entry(0, 8), "b": entry(12, 16)}, PAYLOAD),
        "f: the header does not describe the file's 148 bytes\n"
        "  b: begins at byte 144, but a ends at byte 140\n  fix: fetch the file again",
    ),
    "trailing bytes": (
        raw({"a": entry(0, 8)}, PAYLOAD),
        "f: the header does not describe the file's 85 bytes\n"
        "  8 bytes follow a, which ends at byte 77 of 85\n  fix: fetch the file again",
    ),
    "cut off": (
        raw({"a": entry(0, 16)}, PAYLOAD[:12]),
        "f: the header does not describe the file's 82 bytes\n"
        "  a: takes bytes 70 to 86, but the file ends at byte 82\n  fix: fetch the file again",
    ),
    "many lies at once": (
        raw(
            {
                "__metadata__": {"n": 1},
                "no object": 3,
                "no fields": {"dtype": "F32"},
                "dtype": entry(0, 4, [1], "F33"),
                "negative": entry(0, 4, [-1]),
                "true": entry(0, 4, [True]),
                "float": entry(0, 4, [1.0]),
                "one offset": {"dtype": "F32", "shape": [1], "data_offsets": [4]},
                "backwards": entry(8, 4, [1]),
                "size": entry(0, 4, [3, 2]),
                "half": entry(0, 4, [3], "F4"),
                "huge": entry(0, 4, [2**62, 2**62]),
            },
            PAYLOAD,
        ),
        "f: the header does not describe the file's 734 bytes\n"
        "  __metadata__: not an object of strings\n"
        "  no object: the entry is 3, not an object\n"
        "  no fields: the entry has no shape and no data_offsets\n"
        "  dtype: dtype 'F33' is not known\n"
        "  negative: shape [-1] is not a list of sizes\n"
        "  true: shape [true] is not a list of sizes\n"
        "  float: shape [1.0] is not a list of sizes\n"
        "  one offset: data_offsets [4] are not a start and a stop\n"
        "  backwards: data_offsets [8, 4] are not a start and a stop\n"
        "  size: F32[3,2] takes 24 bytes, but bytes 0 to 4 are 4\n"
        "  half: F4[3] takes 12/8 bytes, but bytes 0 to 4 are 4\n"
        "  huge: F32[4611686018427387904,4611686018427387904] takes over 9223372036854775808 bytes,"
        " but bytes 0 to 4 are 4\n"
        "  fix: fetch the file again",
    ),
    "a name that is no line": (
        raw({"a\n\x1b[31mb": 1}),
        "f: the header does not describe the file's 29 bytes\n"
        "  'a\\n\\x1b[31mb': the entry is 1, not an object\n  fix: fetch the file again",
    ),
    "a name that is no text": (
        raw(b'{"\\ud800":{}}'),
        "f: the header does not describe the file's 21 bytes\n"
        "  '\\ud800': the name is not valid Unicode\n  fix: fetch the file again",
    ),
}


@pytest.mark.parametrize("metadata", [None, {}, {"format": "pt"}])
def test_a_file_may_hold_metadata_only_and_metadata_may_be_null(tmp_path, metadata):
    (tmp_path / "x.safetensors").write_bytes(raw({"__metadata__": metadata}))
    assert ns.read_header(tmp_path) == {}
    assert ns.load_safetensors(tmp_path, {"step": "no array"}) == {"step": "no array"}
    with_one = {"__metadata__": metadata, "a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}
    (tmp_path / "x.safetensors").write_bytes(raw(with_one, b"7"))
    assert list(ns.read_header(tmp_path)) == ["a"]


@pytest.mark.parametrize("metadata", [[], "", 0, False, {"n": None}])
def test_other_metadata_is_refused(tmp_path, metadata):
    (tmp_path / "x.safetensors").write_bytes(raw({"__metadata__": metadata}))
    with pytest.raises(ns.HeaderError, match="__metadata__: not an object of strings"):
        ns.read_header(tmp_path)


@pytest.mark.parametrize("case", BAD_FILES)
def test_a_file_that_lies_is_an_error_with_its_name_and_numbers(tmp_path, case):
    data, expected = BAD_FILES[case]
    with pytest.raises(ns.HeaderError) as error:
        parse(data)
    assert str(error.value) == expected
    path = tmp_path / "x.safetensors"
    path.write_bytes(data)
    like = {"a": np.zeros((4,), np.float32)}
    for call in (lambda: ns.read_header(path), lambda: ns.load_safetensors(path, like)):
        with nothing_moved(), pytest.raises(ns.HeaderError) as error:
            call()
        assert str(error.value) == re.sub(r"^f\b", lambda _: str(path), expected)


GOOD = {
    "a": np.arange(4, dtype=np.float32),
    "b": np.arange(6, dtype=np.int8).reshape(2, 3),
    "c": np.zeros((0, 3), np.float16),
    "d": np.array(True),
}


def mutated(data: bytes, rng: random.Random, most: int = 4) -> bytes:
    """Some changes: bytes, numbers, cuts, insertions, repetitions, fields of the header."""
    out = bytearray(data)
    for _ in range(rng.randint(1, most)):
        kind = rng.randrange(7)
        at = rng.randrange(len(out) + 1)
        if kind == 0 and out:
            out[at % len(out)] = rng.randrange(256)
        elif kind == 1:
            out = out[:at]
        elif kind == 2:
            out[at:at] = rng.randbytes(rng.randint(1, 9))
        elif kind == 3:
            out[:8] = rng.choice([0, 2, 7, 2**31, 2**62, 2**64 - 1, len(out), rng.randrange(400)]).to_bytes(8, "little")
        elif kind == 4:
            out[at:at] = out[max(0, at - rng.randint(1, 60)) : at]
        elif kind == 5 and (spots := [m.start() for m in re.finditer(rb"\d", bytes(out[8:]))]):
            spot = 8 + rng.choice(spots)
            out[spot : spot + 1] = rng.choice(
                [b"-1", b"0", b"9", b"1e9", b"99999999999999999999", b"null", b"[]", b"1.5"]
            )
        elif kind == 6:
            out = bytearray(structural(bytes(out), rng))
    return bytes(out)


def structural(data: bytes, rng: random.Random) -> bytes:
    """A change of the header's fields that leaves it valid JSON."""
    length = int.from_bytes(data[:8], "little")
    try:
        header = json.loads(data[8 : 8 + length])
        name = rng.choice(list(header))
        field = rng.choice(list(header[name]))
    except (ValueError, TypeError, KeyError, IndexError, AttributeError):
        return data
    values: list[Any] = [
        0,
        -1,
        2**63,
        "F32",
        "F64",
        "BOOL",
        [],
        [0, 0],
        [4],
        [2, 2],
        [0, 16],
        [16, 22],
        None,
        {},
        [[1]],
    ]
    change = rng.randrange(4)
    if change == 0:
        header[name][field] = rng.choice(values)
    elif change == 1:
        del header[name][field]
    elif change == 2:
        header[rng.choice(["e", "__metadata__", ""])] = header.pop(name)
    else:
        header["twin"] = header[name]
    return raw(header, data[8 + length :])


def test_many_huge_sizes_are_told_at_once():
    sizes = ",".join(["4611686018427387904"] * 16)
    with pytest.raises(ns.HeaderError) as error:
        parse(raw({"w": entry(0, 4, [2**62] * 50_000)}, PAYLOAD))
    assert f"  w: F32[{sizes},...] takes over {2**63} bytes, but bytes 0 to 4 are 4\n" in str(error.value)
    # However many there are, nothing times anything is nothing.
    assert parse(raw({"w": entry(0, 0, [2**62, 0, 2**62])}))["w"].shape == (2**62, 0, 2**62)


def test_ten_thousand_mutated_headers_give_the_right_tensors_or_a_named_error():
    rng = random.Random(20261130)
    good = encode(GOOD)
    accepted = refused = 0
    tracemalloc.start()
    for _ in range(10_000):
        data = mutated(good, rng)
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        try:
            found = parse(data)
        except ns.HeaderError:
            refused += 1
        else:
            accepted += 1
            covered = sorted((i.start, i.stop) for i in found.values())
            length = int.from_bytes(data[:8], "little")
            assert [start for start, _ in covered] == [8 + length, *(stop for _, stop in covered)][: len(covered)]
            assert (covered[-1][1] if covered else 8 + length) == len(data)
            for info in found.values():
                assert info.dtype in DTYPES.values()
        assert tracemalloc.get_traced_memory()[1] - before < 200_000
    tracemalloc.stop()
    assert accepted > 100
    assert refused > 5_000


def test_mutated_files_load_as_the_file_says_or_fail_before_any_device_work(tmp_path):
    rng = random.Random(7)
    wanted = {**GOOD, "a": np.arange(400, dtype=np.float32)}
    good = encode(wanted)
    path = tmp_path / "x.safetensors"
    loaded = refused = 0
    for _ in range(300):
        data = mutated(good, rng, most=1)
        path.write_bytes(data)
        try:
            tree = ns.load_safetensors(path, wanted, unexpected="ignore")
        except ns.NamedShardError:
            refused += 1
            with nothing_moved(), pytest.raises(ns.NamedShardError):
                ns.load_safetensors(path, wanted, unexpected="ignore")
        else:
            loaded += 1
            for name, info in parse(data).items():
                if name in wanted:
                    expected = np.frombuffer(data[info.start : info.stop], info.dtype).reshape(info.shape)
                    if info.dtype == np.bool_:
                        expected = np.frombuffer(data[info.start : info.stop], np.uint8).reshape(info.shape) != 0
                    np.testing.assert_array_equal(np.asarray(tree[name]), expected.astype(wanted[name].dtype))
    assert loaded > 10
    assert refused > 100
