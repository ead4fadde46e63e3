"""The GGUF reader against the `gguf` package, and against files that mean harm."""

from __future__ import annotations

import os
import struct
import time
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest

from edge_llm.errors import InputError, ModelFormatError, ModelNotFoundError, UnsupportedModelError
from edge_llm.export.gguf import MAX_ELEMENTS, read_gguf
from edge_llm.export.gguf_types import TENSOR_TYPES
from tools.tiny_model import write_gguf

U32, F32, BOOL, STRING, ARRAY, U64 = 4, 6, 7, 8, 9, 10
HUGE = 1 << 63


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


def u64(value: int) -> bytes:
    return struct.pack("<Q", value)


def text(value: str | bytes, length: int | None = None) -> bytes:
    data = value if isinstance(value, bytes) else value.encode()
    return u64(len(data) if length is None else length) + data


def key(name: str | bytes, kind: int, payload: bytes) -> bytes:
    return text(name) + u32(kind) + payload


def info(name: str | bytes = "w", dims: tuple[int, ...] = (32,), kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + u32(len(dims)) + b"".join(map(u64, dims)) + u32(kind) + u64(offset)


ARCHITECTURE = key("general.architecture", STRING, text("llama"))


def image(
    keys: tuple[bytes, ...] = (ARCHITECTURE,),
    infos: tuple[bytes, ...] = (),
    data: bytes = b"",
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    key_count: int | None = None,
    tensor_count: int | None = None,
    alignment: int = 32,
) -> bytes:
    """The bytes of a GGUF file whose every field can be wrong."""
    counts = u64(len(infos) if tensor_count is None else tensor_count) + u64(
        len(keys) if key_count is None else key_count
    )
    head = magic + u32(version) + counts + b"".join(keys) + b"".join(infos)
    return head + (bytes(-len(head) % alignment) + data if data else b"")


def one(kind: int, payload: bytes) -> bytes:
    """A file with one more key of that type."""
    return image((ARCHITECTURE, key("k", kind, payload)))


def array(kind: int, count: int, payload: bytes = b"") -> bytes:
    return one(ARRAY, u32(kind) + u64(count) + payload)


def tensors(*infos: bytes, data: int = 128) -> bytes:
    return image(infos=infos, data=bytes(data))


def aligned(kind: int, payload: bytes) -> bytes:
    return image((key("general.alignment", kind, payload),), (info(),), bytes(128))


GOOD = image(
    (
        ARCHITECTURE,
        key("number", U32, u32(7)),
        key("float", F32, struct.pack("<f", 1.5)),
        key("flag", BOOL, b"\1"),
        key("words", ARRAY, u32(STRING) + u64(3) + text("a") + text("") + text("ü")),
        key("numbers", ARRAY, u32(5) + u64(3) + struct.pack("<3i", -1, 0, 1)),
        key("flags", ARRAY, u32(BOOL) + u64(2) + b"\0\1"),
    ),
    (info("a", (32, 2), 3, 0), info("b", (4,), 0, 64), info("c", (2, 3), 1, 96)),
    bytes(range(128)),
)

HOSTILE: dict[str, bytes] = {
    # the head
    "empty": b"",
    "one byte": b"G",
    "magic only": b"GGUF",
    "other magic": b"GGML" + GOOD[4:],
    "zip": b"PK\3\4" + bytes(100),
    "pickle": b"\x80\4\x95" + bytes(100),
    "web page": b"<!DOCTYPE html><html></html>",
    "escape codes for a magic": b"\x1b]0;" + bytes(100),
    "version 0": image(version=0),
    "version 1": image(version=1),
    "version 4": image(version=4),
    "version 2^32 - 1": image(version=2**32 - 1),
    "big endian": b"GGUF" + struct.pack(">IQQ", 3, 0, 0),
    # counts: CVE-2024-23605 (n_kv), and the same for tensors
    "keys: one more than there are": image(key_count=2),
    "keys: cap + 1": image(key_count=(1 << 16) + 1),
    "keys: cap, none there": image((), key_count=1 << 16),
    "keys: 2^31": image(key_count=2**31),
    "keys: overflow of count * size": image(key_count=2**64 // 56 + 1),
    "keys: 2^64 - 1": image(key_count=2**64 - 1),
    "tensors: one more than there are": image(infos=(info(),), tensor_count=2, data=bytes(128)),
    "tensors: cap + 1": image(tensor_count=(1 << 16) + 1),
    "tensors: cap, none there": image(tensor_count=1 << 16),
    "tensors: overflow of count * size": image(tensor_count=2**64 // 400 + 1),
    "tensors: 2^64 - 1": image(tensor_count=2**64 - 1),
    # keys
    "key: length 2^63": image((u64(HUGE) + b"x",)),
    "key: length 2^64 - 1 (wraps with + 1)": image((u64(2**64 - 1) + b"x",)),
    "key: length past the end": image((text("x", 1000),)),
    "key: longer than allowed": image((key(b"x" * 65536, U32, u32(1)),)),
    "key: empty": image((key("", U32, u32(1)),)),
    "key: not UTF-8": image((key(b"\xff\xfe", U32, u32(1)),)),
    "key: twice": image((ARCHITECTURE, ARCHITECTURE)),
    "key: no type": image((text("k"),)),
    # values
    "value: type 13": one(13, bytes(64)),
    "value: type 2^32 - 1": one(2**32 - 1, bytes(64)),
    "value: missing": one(U64, b""),
    "value: cut": one(U64, bytes(7)),
    "boolean 2": one(BOOL, b"\2"),
    "string: length 2^63": one(STRING, u64(HUGE)),
    "string: length 2^64 - 1": one(STRING, u64(2**64 - 1)),
    "string: length 2^32": one(STRING, u64(2**32) + b"abc"),
    "string: one past the end": one(STRING, text("abc", 4)),
    "string: cap + 1": one(STRING, u64((16 << 20) + 1)),
    "string: not UTF-8": one(STRING, text(b"\xc3\x28")),
    "string: a surrogate": one(STRING, text(b"\xed\xa0\x80")),
    "string: overlong": one(STRING, text(b"\xc0\x80")),
    # arrays: CVE-2025-66960, typed-array confusion (llama.cpp #26690), the 43-byte file (#27188)
    "array: 2^63 strings": array(STRING, HUGE),
    "array: 2^64 - 1 bytes": array(0, 2**64 - 1),
    "array: count * size wraps to 8": array(U64, 2**61 + 1, bytes(8)),
    "array: cap + 1": array(0, MAX_ELEMENTS + 1, bytes(64)),
    "array: cap, not there": array(0, MAX_ELEMENTS, bytes(64)),
    "array: caps together": image(
        tuple(key(f"k{i}", ARRAY, u32(0) + u64(MAX_ELEMENTS // 2 + 1) + bytes(8)) for i in range(2))
    ),
    "array: one element short": array(U64, 2, bytes(15)),
    "array: strings one short": array(STRING, 2, text("abc")),
    "array: string length 2^63": array(STRING, 2, text("abc") + u64(HUGE)),
    "array: string past the end": array(STRING, 2, text("abc") + text("abc", 4)),
    "array: string cap + 1": array(STRING, 1, u64((16 << 20) + 1)),
    "array: string not UTF-8": array(STRING, 2, text("abc") + text(b"\xff")),
    "array: of arrays": array(ARRAY, 1, u32(0) + u64(0)),
    "array: of a million arrays": array(ARRAY, 1 << 20, bytes(64)),
    "array: of type 13": array(13, 1, bytes(64)),
    "array: boolean 255": array(BOOL, 2, b"\1\xff"),
    "array: no count": one(ARRAY, u32(0)),
    "array: nothing": one(ARRAY, b""),
    # alignment: CVE-2025-53630 and kin
    "alignment 0": aligned(U32, u32(0)),
    "alignment 1": aligned(U32, u32(1)),
    "alignment 33": aligned(U32, u32(33)),
    "alignment 2^17": aligned(U32, u32(1 << 17)),
    "alignment 2^31": aligned(U32, u32(1 << 31)),
    "alignment 2^63": aligned(U64, u64(HUGE)),
    "alignment -32": aligned(5, struct.pack("<i", -32)),
    "alignment 32.0": aligned(F32, struct.pack("<f", 32)),
    "alignment true": aligned(BOOL, b"\1"),
    "alignment '32'": aligned(STRING, text("32")),
    "alignment [32]": aligned(ARRAY, u32(U32) + u64(1) + u32(32)),
    # tensors: CVE-2026-27940, CVE-2026-33298 (sizes), CVE-2026-7482 (offset and size against the file)
    "tensor: name length 2^63": tensors(u64(HUGE) + b"w"),
    "tensor: name of 65 bytes": tensors(info("w" * 65)),
    "tensor: name empty": tensors(info("")),
    "tensor: name not UTF-8": tensors(info(b"\xff")),
    "tensor: twice": tensors(info(), info(offset=128), data=256),
    "tensor: no dimensions": tensors(info(dims=())),
    "tensor: 5 dimensions": tensors(info(dims=(1,) * 5)),
    "tensor: 2^32 - 1 dimensions": tensors(text("w") + u32(2**32 - 1) + bytes(64)),
    "tensor: dimension 0": tensors(info(dims=(0,))),
    "tensor: rows 0": tensors(info(dims=(32, 0))),
    "tensor: dimension 2^63": tensors(info(dims=(HUGE,))),
    "tensor: dimension 2^64 - 1": tensors(info(dims=(2**64 - 1,))),
    "tensor: product wraps to 0": tensors(info(dims=(2**32, 2**32))),
    "tensor: product wraps to 32": tensors(info(dims=(32, 2**59 + 1))),
    "tensor: bytes wrap": tensors(info(dims=(2**62,))),
    "tensor: four large dimensions": tensors(info(dims=(2**16,) * 4)),
    "tensor: padding wraps": tensors(info(dims=(2**62 - 1,))),
    "tensor: half a block": tensors(info(dims=(16,), kind=2)),
    "tensor: a block over two rows": tensors(info(dims=(16, 2), kind=8)),
    "tensor: a K block short": tensors(info(dims=(32,), kind=12)),
    "tensor: type 4 (removed)": tensors(info(kind=4)),
    "tensor: type 31 (removed)": tensors(info(kind=31)),
    "tensor: type 43": tensors(info(kind=43)),
    "tensor: type 2^31": tensors(info(kind=2**31)),
    "tensor: type 2^32 - 1": tensors(info(kind=2**32 - 1)),
    "tensor: offset not aligned": tensors(info(dims=(4,), offset=8)),
    "tensor: offset at the end": tensors(info(offset=128)),
    "tensor: offset past the end": tensors(info(offset=1 << 20)),
    "tensor: offset 2^63": tensors(info(offset=HUGE)),
    "tensor: offset + size wraps": tensors(info(offset=2**64 - 32)),
    "tensor: one value too long": tensors(info(dims=(33,))),
    "tensor: no data at all": image(infos=(info(),)),
    "tensor: same place": tensors(info("a"), info("b"), data=256),
    "tensor: overlap by a part": tensors(info("a", (24,)), info("b", (8,), offset=64)),
    "tensor: one inside another": tensors(info("a"), info("b", (1,), offset=32)),
    "tensor: info cut": image(infos=(info()[:-1],)),
    "tensor: info cut after the name": image(infos=(text("w"),)),
}


def write(tmp_path: Path, data: bytes) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_file_is_refused_at_once(tmp_path: Path, case: str) -> None:
    path = write(tmp_path, HOSTILE[case])
    tracemalloc.start()
    started = time.process_time()
    try:
        with pytest.raises(ModelFormatError) as caught:
            read_gguf(path)
        seconds = time.process_time() - started
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    message = str(caught.value)
    assert message.isascii()
    assert message.isprintable()
    assert len(message) < 400
    assert peak < 32 << 20
    assert seconds < 2


def test_the_sound_file_of_the_fuzzers_is_read(tmp_path: Path) -> None:
    with read_gguf(write(tmp_path, GOOD)) as file:
        assert file.architecture == "llama"
        assert [*file.metadata] == ["general.architecture", "number", "float", "flag", "words", "numbers", "flags"]
        assert file.metadata["words"] == ["a", "", "ü"]
        assert file.metadata["flag"] is True
        assert file.integers("numbers").tolist() == [-1, 0, 1]
        assert np.asarray(file.metadata["flags"]).tolist() == [False, True]
        assert [(t.name, t.shape, t.type, t.nbytes) for t in file.tensors.values()] == [
            ("a", (2, 32), "Q4_1", 40),
            ("b", (4,), "F32", 16),
            ("c", (3, 2), "F16", 12),
        ]
        assert file.tensor_bytes(file.tensor("b")).tolist() == list(range(64, 80))


@pytest.mark.parametrize(
    "data",
    [
        image(()),
        image(version=2),
        array(STRING, 0),
        array(0, 0),
        one(STRING, text("")),
        image((key("k" * 65535, U32, u32(1)),)),
        tensors(info("w" * 64)),
        tensors(info(dims=(2, 2, 2, 4))),
        tensors(info("b", (8,), offset=96), info("a", (24,), offset=0)),
        tensors(info(dims=(8,)), data=999),
        image(
            (key("general.alignment", U32, u32(8)),),
            (info("a", (2,)), info("b", (2,), offset=8)),
            bytes(16),
            alignment=8,
        ),
        image((key("general.alignment", U32, u32(1 << 16)),), (info(),), bytes(128), alignment=1 << 16),
    ],
)
def test_what_the_format_allows_is_read(tmp_path: Path, data: bytes) -> None:
    with read_gguf(write(tmp_path, data)) as file:
        assert file.size == len(data)
        for tensor in file.tensors.values():
            assert not file.tensor_bytes(tensor).any()


def test_truncated_at_every_length(tmp_path: Path) -> None:
    used = len(GOOD) - (128 - 96 - 12)
    for length in range(len(GOOD)):
        path = write(tmp_path, GOOD[:length])
        if length < used:
            with pytest.raises(ModelFormatError):
                read_gguf(path)
        else:
            assert len(read_gguf(path).tensors) == 3


def test_a_truncated_file_names_both_sizes(tmp_path: Path) -> None:
    end, size = len(GOOD) - 20, len(GOOD) - 24
    with pytest.raises(ModelFormatError, match=f"truncated: tensor 'c' ends at byte {end}, the file has {size} bytes"):
        read_gguf(write(tmp_path, GOOD[:size]))
    with pytest.raises(ModelFormatError, match=r"truncated: .*'number' at byte \d+ needs 4 bytes, 2 are left"):
        read_gguf(write(tmp_path, GOOD[: GOOD.index(b"number") + 6 + 4 + 2]))


def test_mutated_files_give_format_errors_only(tmp_path: Path) -> None:
    random = np.random.Generator(np.random.PCG64(11))
    interesting = [0, 1, 0x7F, 0x80, 0xFF]
    refused: list[str] = []
    for _ in range(4600):  # with the 400 of test_gguf_tokenizer: trust.md F7 at commit size
        data = bytearray(GOOD)
        for _ in range(random.integers(1, 4)):
            at = int(random.integers(0, len(data)))
            match random.integers(0, 4):
                case 0:
                    data[at] = random.choice(interesting)
                case 1:
                    data[at] ^= 1 << random.integers(0, 8)
                case 2:
                    del data[at : at + int(random.integers(1, 9))]
                case 3:
                    data[at:at] = random.bytes(int(random.integers(1, 9)))
        try:
            with read_gguf(write(tmp_path, bytes(data))) as file:
                for tensor in file.tensors.values():
                    file.tensor_bytes(tensor).sum()
        except ModelFormatError as error:
            refused.append(str(error))
    assert len(refused) > 2000
    assert all(message.isprintable() for message in refused)


def test_names_are_escaped_in_messages(tmp_path: Path) -> None:
    name = "\x1b[31m\n\u202e" + "x" * 40
    with pytest.raises(UnsupportedModelError) as caught:
        read_gguf(write(tmp_path, tensors(info(name, kind=99))))
    assert "'\\x1b[31m\\n\\u202e" in str(caught.value)
    assert "type 99" in str(caught.value)


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (image(version=1), "version 1"),
        (tensors(info(kind=31)), "type 31"),
    ],
)
def test_sound_kinds_that_are_not_read_are_named(tmp_path: Path, data: bytes, what: str) -> None:
    with pytest.raises(UnsupportedModelError, match=what) as caught:
        read_gguf(write(tmp_path, data))
    assert caught.value.hint


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    fifo = tmp_path / "pipe.gguf"
    os.mkfifo(fifo)
    for path in (fifo, tmp_path, Path("/dev/zero")):
        with pytest.raises(ModelFormatError, match="not a regular file"):
            read_gguf(path)
    with pytest.raises(ModelNotFoundError):
        read_gguf(tmp_path / "missing.gguf")
    with pytest.raises(InputError):
        read_gguf("a\0b")
    link = tmp_path / "link.gguf"
    link.symlink_to(write(tmp_path, GOOD))
    assert read_gguf(link).architecture == "llama"


def test_views_are_read_only_and_outlive_the_file(tmp_path: Path) -> None:
    with read_gguf(write(tmp_path, GOOD)) as file:
        tensor = file.tensor("a")
        view = file.tensor_bytes(tensor)
    assert view.tolist() == list(range(40))
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 1
    with pytest.raises(ValueError, match="closed"):
        file.tensor_bytes(tensor)
    assert file.metadata["number"] == 7


def test_typed_access_names_the_key(tmp_path: Path) -> None:
    keys = (ARCHITECTURE, key("nan", F32, struct.pack("<f", np.nan)), key("flag", BOOL, b"\1"), key("n", U32, u32(9)))
    with read_gguf(write(tmp_path, image(keys))) as file:
        assert file.integer("n", 0, 9) == 9
        assert file.integer("missing", 0, 9, default=3) == 3
        assert file.number("n") == 9.0
        assert file.flag("missing", default=False) is False
        assert file.text("missing", default="x") == "x"
        for failing in (
            lambda: file.integer("n", 0, 8),
            lambda: file.integer("flag", 0, 8),
            lambda: file.integer("general.architecture", 0, 8),
            lambda: file.number("nan"),
            lambda: file.number("flag"),
            lambda: file.flag("n"),
            lambda: file.text("n"),
            lambda: file.texts("n"),
            lambda: file.integers("n"),
            lambda: file.reals("n"),
            lambda: file.integer("missing", 0, 1),
            lambda: file.text("missing"),
            lambda: file.texts("missing"),
            lambda: file.tensor("missing"),
        ):
            with pytest.raises(ModelFormatError, match=r"'(n|nan|flag|missing|general\.architecture)'"):
                failing()


def test_every_tensor_type_is_known_by_size() -> None:
    sizes = {kind.name: gguf.GGML_QUANT_SIZES[kind] for kind in gguf.GGMLQuantizationType}
    # The package gives Q8_1 two float32 where ggml has had two float16 for long; no file holds it.
    del sizes["Q8_1"]
    ours = {kind.name: (kind.block, kind.nbytes) for kind in TENSOR_TYPES.values()}
    assert sizes.items() <= ours.items()
    assert {kind.name: number for number, kind in TENSOR_TYPES.items()}.items() >= {
        kind.name: int(kind) for kind in gguf.GGMLQuantizationType
    }.items()


def test_agrees_with_the_gguf_package(tmp_path: Path) -> None:
    path = tmp_path / "written.gguf"
    random = np.random.Generator(np.random.PCG64(3))
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_custom_alignment(64)
    scalars = {"uint8": 200, "int8": -100, "uint16": 60000, "int16": -30000, "uint32": 4 << 29, "int32": -(1 << 31)}
    scalars |= {"uint64": 2**64 - 1, "int64": -(2**63)}
    for kind, value in scalars.items():
        getattr(writer, f"add_{kind}")(kind, value)
    writer.add_float32("float32", 0.1)
    writer.add_float64("float64", 0.1)
    writer.add_bool("bool", val=False)
    writer.add_string("string", "naïve 😀 \0 text")
    writer.add_array("strings", ["", "a", "漢字"])
    writer.add_array("integers", [1, -2, 3])
    writer.add_array("floats", [0.5, -1.25])
    written = {
        "f32": (random.standard_normal((3, 5)).astype(np.float32), None),
        "f16": (random.standard_normal((2, 3, 4)).astype(np.float16), None),
        "q4_1": (gguf.quants.quantize(random.standard_normal((4, 64)), gguf.GGMLQuantizationType.Q4_1), "Q4_1"),
        "q6_k": (random.integers(0, 256, (2, 210), np.uint8), "Q6_K"),
    }
    for name, (values, kind) in written.items():
        writer.add_tensor(name, values, raw_dtype=kind and gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    reader = gguf.GGUFReader(path)
    theirs = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    with read_gguf(path) as file:
        ours = {name: np.asarray(v).tolist() if isinstance(v, np.ndarray) else v for name, v in file.metadata.items()}
        assert ours == theirs
        assert [*file.tensors] == [tensor.name for tensor in reader.tensors]
        for tensor in reader.tensors:
            mine = file.tensor(tensor.name)
            assert (mine.type, mine.offset, mine.nbytes) == (
                tensor.tensor_type.name,
                tensor.data_offset,
                tensor.n_bytes,
            )
            assert mine.shape == tuple(int(n) for n in reversed(tensor.shape))
            assert file.tensor_bytes(mine).tobytes() == tensor.data.tobytes() == written[tensor.name][0].tobytes()


def test_our_writer_agrees_with_the_gguf_package(tmp_path: Path) -> None:
    path = tmp_path / "ours.gguf"
    metadata = {
        "general.architecture": "llama",
        "n": 5,
        "big": 2**40,
        "minus": -5,
        "f": 0.25,
        "yes": True,
        "t": "ü",
        "l": ["a", ""],
    }
    write_gguf(path, metadata, {"w": ("F32", (2, 3), np.arange(6, dtype=np.float32).tobytes())})
    reader = gguf.GGUFReader(path)
    assert {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")} == metadata
    assert reader.tensors[0].data.tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.real_model
def test_the_real_model(smollm2_gguf: Path) -> None:
    with read_gguf(smollm2_gguf) as file:
        assert file.architecture == "llama"
        assert file.integer("llama.block_count", 1, 100) == 30
        assert len(file.tensors) == 272
        assert {tensor.type for tensor in file.tensors.values()} == {"F32", "Q4_1", "Q8_0"}
        assert file.tensor("token_embd.weight").shape == (49152, 576)
        assert "output.weight" not in file.tensors
