"""Reading GGUF files of others: split sets, hashes of weights, and files that are broken in every way."""

from __future__ import annotations

import hashlib
import random
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType, GGUFValueType
from rewriting import Tensor, rewrite, split, tensors_of, zeros
from support import Shape, write_checkpoint

from pipeline.errors import ArtifactError
from pipeline.formats.gguf import reader
from pipeline.formats.gguf.write import write
from pipeline.source.checkpoint import Checkpoint

ROOT = Path(__file__).parent.parent.parent.parent
UINT16 = GGUFValueType.UINT16


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reader")
    with Checkpoint(write_checkpoint(folder / "source", Shape("qwen3"))) as checkpoint:
        write(checkpoint, "q4_0", folder)
    return folder / "model.gguf"


def tensors_sha256(path: Path) -> str:
    return reader.hashes(reader.read(path).tensors.values()).whole


def said_of(path: Path) -> str:
    with pytest.raises(ArtifactError) as caught:
        reader.read(path)
    return str(caught.value)


# what is read


def test_keys_vocabulary_and_tensors(file: Path) -> None:
    found = reader.read(file)
    assert found.files == (file,)
    assert found.keys["general.architecture"] == "qwen3"
    assert found.keys["general.file_type"] == 2
    assert found.keys["tokenizer.ggml.add_bos_token"] is False
    assert found.keys["qwen3.attention.layer_norm_rms_epsilon"] == pytest.approx(1e-6, rel=1e-6)
    assert "tokenizer.ggml.tokens" not in found.keys  # keys of one value
    assert (len(found.tokens), len(found.kinds)) == (272, 272)
    assert found.tokens[260:264] == ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "[PAD263]"]
    assert found.kinds[259:264] == [1, 3, 3, 3, 5]
    embedding = found.tensors["token_embd.weight"]
    assert (embedding.shape, embedding.encoding.name, embedding.size) == ((272, 64), "Q8_0", 272 * 64 // 32 * 34)
    assert found.tensors["output_norm.weight"].shape == (64,)
    data = file.read_bytes()
    for tensor in tensors_of(file):
        stored = found.tensors[tensor.name]
        assert data[stored.offset : stored.offset + stored.size] == tensor.data.tobytes()


# hashes of tensors


def test_each_tensor_has_its_type_and_the_hash_of_its_bytes(file: Path) -> None:
    read = {tensor.name: f"{tensor.kind.name} {sha256(tensor.data.tobytes())[:16]}" for tensor in tensors_of(file)}
    found = reader.hashes(reader.read(file).tensors.values())
    assert found.each == read
    assert found.each["token_embd.weight"].startswith("Q8_0 ")
    whole = {tensor.name: f"{tensor.kind.name} {sha256(tensor.data.tobytes())}" for tensor in tensors_of(file)}
    assert found.whole == sha256("".join(f"{name} {whole[name]}\n" for name in sorted(whole)).encode())


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def test_the_same_weights_in_another_order_under_other_keys_have_the_same_hash(file: Path, tmp_path: Path) -> None:
    other = rewrite(file, tmp_path / "a.gguf", {"general.name": "another"}, lambda tensors: tensors[::-1])
    assert [tensor.name for tensor in reader.table(other)] == [tensor.name for tensor in reader.table(file)][::-1]
    assert other.read_bytes() != file.read_bytes()
    assert tensors_sha256(other) == tensors_sha256(file)


def flipped(tensors: list[Tensor]) -> list[Tensor]:
    data = tensors[-1].data.copy()
    data.reshape(-1).view("u1")[-1] ^= 1
    return [*tensors[:-1], replace(tensors[-1], data=data)]


def swapped(tensors: list[Tensor]) -> list[Tensor]:
    """Two layers' norms change their names."""
    names = {"blk.0.attn_norm.weight": "blk.1.attn_norm.weight", "blk.1.attn_norm.weight": "blk.0.attn_norm.weight"}
    return [replace(tensor, name=names.get(tensor.name, tensor.name)) for tensor in tensors]


def another_type(tensors: list[Tensor]) -> list[Tensor]:
    """The same bytes: a block of IQ4_NL is as long as one of Q4_0."""
    kinds = {GGMLQuantizationType.Q4_0: GGMLQuantizationType.IQ4_NL}
    return [replace(tensor, kind=kinds.get(tensor.kind, tensor.kind)) for tensor in tensors]


@pytest.mark.parametrize("change", [flipped, swapped, another_type])
def test_other_weights_have_another_hash(
    change: Callable[[list[Tensor]], list[Tensor]], file: Path, tmp_path: Path
) -> None:
    assert tensors_sha256(rewrite(file, tmp_path / "a.gguf", change=change)) != tensors_sha256(file)


def test_tensors_longer_than_a_chunk_are_hashed_whole(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = tensors_sha256(file)
    monkeypatch.setattr("pipeline.files.BLOCK", 1000)
    assert tensors_sha256(file) == whole


# split sets


@pytest.mark.parametrize("given", [0, 1, 2])
def test_a_split_set_is_read_whole_by_any_of_its_parts(given: int, file: Path, tmp_path: Path) -> None:
    parts = split(file, tmp_path)
    found, whole = reader.read(parts[given]), reader.read(file)
    assert found.files == tuple(parts)
    assert found.tokens == whole.tokens
    assert list(found.tensors) == list(whole.tensors)
    assert {tensor.file for tensor in found.tensors.values()} == set(parts)
    assert tensors_sha256(parts[given]) == tensors_sha256(file)


@pytest.mark.parametrize("count", [0, 1])
def test_a_merged_file_is_whole(count: int, file: Path, tmp_path: Path) -> None:
    """llama-gguf-split --merge leaves split.count 0 behind."""
    merged = rewrite(file, tmp_path / "merged.gguf", {"split.no": (0, UINT16), "split.count": (count, UINT16)})
    assert tensors_sha256(merged) == tensors_sha256(file)


def test_one_file_named_as_a_set_of_one(file: Path, tmp_path: Path) -> None:
    (tmp_path / "model-00001-of-00001.gguf").write_bytes(file.read_bytes())
    assert len(reader.read(tmp_path / "model-00001-of-00001.gguf").tensors) == len(reader.read(file).tensors)


def test_an_absent_part_is_named(file: Path, tmp_path: Path) -> None:
    parts = split(file, tmp_path)
    parts[1].unlink()
    assert said_of(parts[0]) == (
        f"{tmp_path}: model-00002-of-00003.gguf is absent. "
        "Give the path of a GGUF file, and keep all parts of a split one in its folder."
    )


def test_of_many_absent_parts_some_are_named(file: Path, tmp_path: Path) -> None:
    (tmp_path / "a-00001-of-00999.gguf").write_bytes(file.read_bytes())
    said = said_of(tmp_path / "a-00001-of-00999.gguf")
    assert "a-00005-of-00999.gguf, a-00006-of-00999.gguf and 993 more is absent" in said


@pytest.mark.parametrize("name", ["a-00001-of-00000.gguf", "a-00000-of-00001.gguf", "a-00003-of-00002.gguf"])
def test_a_part_that_no_set_has_is_refused(name: str, file: Path, tmp_path: Path) -> None:
    for other in (name, "a-00001-of-00001.gguf", "a-00001-of-00002.gguf", "a-00002-of-00002.gguf"):
        (tmp_path / other).write_bytes(file.read_bytes())
    part, count = int(name[2:7]), int(name[11:16])
    assert f"{name}: its name says part {part} of {count}. Give split files the names" in said_of(tmp_path / name)


def test_a_part_under_another_name_is_refused(file: Path, tmp_path: Path) -> None:
    part = split(file, tmp_path)[0].rename(tmp_path / "renamed.gguf")
    assert said_of(part) == (
        f"{part} says it is one of 3 files, by its name of 1. "
        "Give split files the names that llama-gguf-split gave them."
    )


def test_a_wrong_count_is_refused(file: Path, tmp_path: Path) -> None:
    assert "says it is one of 4 files, by its name of 3" in said_of(split(file, tmp_path, count=4)[0])


def test_a_set_with_a_part_of_another_set_is_refused(file: Path, tmp_path: Path) -> None:
    """Fewer tensors than were split, since some are in two parts."""
    parts = split(file, tmp_path)
    parts[2].write_bytes(parts[1].read_bytes())
    n = len(reader.read(file).tensors)
    assert f"{n} tensors were split, its files hold {2 * -(-n // 3)}. Fetch them again." in said_of(parts[0])


# broken files


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "failed to read magic"),
        (b"GG", "failed to read magic"),
        (b"PK\3\4 is a zip file's", "invalid magic characters: 'PK??', expected 'GGUF'"),
        (b"GGUF\1\0\0\0" + bytes(16), "GGUFv1 is no longer supported"),
        (b"GGUF\3\0\0\0" + b"\xff" * 16, "number of tensors is -1"),
        (b"GGUF\3\0\0\0\1" + bytes(15), "failed to read tensor info"),
    ],
)
def test_what_is_no_gguf_is_refused_in_ggmls_words(
    data: bytes, why: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(data)
    first, second, third = said_of(path).splitlines()
    assert first == f"{path} is no GGUF file that ggml can read, or it is cut short."
    assert second.startswith("  ggml: ")
    assert why in second
    assert third == "Fetch it again."
    assert capfd.readouterr() == ("", "")  # ggml would print it as well


def test_a_file_of_keys_alone_is_refused(file: Path, tmp_path: Path) -> None:
    path = rewrite(file, tmp_path / "vocabulary.gguf", change=lambda tensors: [])
    assert "holds no tensors, only keys" in said_of(path)


def test_a_folder_and_nothing_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").mkdir()
    for path in (tmp_path / "a.gguf", tmp_path / "b.gguf"):
        assert said_of(path).startswith(f"{path} is not a file. Give the path of a GGUF file")


def test_a_file_cut_in_its_data_is_refused_with_the_tensor(file: Path, tmp_path: Path) -> None:
    data, last = file.read_bytes(), reader.table(file)[-1]
    end = last.offset + last.size
    path = tmp_path / "a.gguf"
    path.write_bytes(data[: end - 1])
    where = f"{last.name} lies at bytes {last.offset} to {end}, the file has {end - 1}"
    assert said_of(path) == f"{path} is cut short: {where}. Fetch it again."
    path.write_bytes(data[:end])  # what fills up the last block is no one's
    assert tensors_sha256(path) == tensors_sha256(file)


def test_a_file_cut_anywhere_in_its_header_is_refused(file: Path, tmp_path: Path) -> None:
    data, path = file.read_bytes(), tmp_path / "a.gguf"
    for length in range(0, reader.table(file)[0].offset, 97):
        path.write_bytes(data[:length])
        assert "cut short" in said_of(path)


def test_types_that_no_scheme_has_are_read(file: Path, tmp_path: Path) -> None:
    kind = GGMLQuantizationType.MXFP4
    path = rewrite(file, tmp_path / "a.gguf", change=lambda tensors: [*tensors, zeros("extra.weight", (3, 64), kind)])
    extra = reader.read(path).tensors["extra.weight"]
    assert (extra.encoding.name, extra.encoding.block, extra.encoding.block_bytes) == ("MXFP4", 32, 17)
    assert (extra.shape, extra.size) == ((3, 64), 3 * 2 * 17)


MUTATE = """
import sys
from pathlib import Path
from pipeline.errors import ArtifactError
from pipeline.formats.gguf import reader
read = refused = 0
for path in sorted(Path(sys.argv[1]).iterdir()):
    try:
        reader.hashes(reader.read(path).tensors.values())
        read += 1
    except ArtifactError:
        refused += 1
print(read, refused)
"""


def test_a_spoilt_header_never_ends_the_process(file: Path, tmp_path: Path) -> None:
    """ggml asserts abort: of every header with changed bytes, each is read or refused."""
    rng, data, header = random.Random(0), file.read_bytes(), reader.table(file)[0].offset
    for i in range(500):
        spoilt = bytearray(data)
        for _ in range(rng.choice((1, 1, 2, 8))):
            spoilt[rng.randrange(header)] = rng.choice((0, 1, 9, 127, 255, rng.randrange(256)))
        (tmp_path / f"{i}.gguf").write_bytes(spoilt)
    done = subprocess.run(
        [sys.executable, "-c", MUTATE, tmp_path], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    found = re.fullmatch(r"(\d+) (\d+)\n", done.stdout)
    assert found, done.stdout
    read, refused = map(int, found.groups())
    assert read + refused == 500
    assert min(read, refused) > 50  # both kinds were tried
