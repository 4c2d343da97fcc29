"""Hub ids: a pinned snapshot with the needed files only, continued where it stopped, and no stale one unseen."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from collections import namedtuple
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from commands import refused, succeeded
from hub_server import COMMIT, OLDER, Hub, files_of, serving, turn_to, write_cache
from huggingface_hub import constants
from support import stored, write_checkpoint

from pipeline import paths
from pipeline.errors import CheckpointError, OutputError, PipelineError
from pipeline.files import write_json
from pipeline.source.hub import fetched_revision, open_checkpoint, reads_as_id

NAME = "some-org/Tiny-1.5B"
CHUNK = 1 << 13
UNNEEDED = {
    "README.md": b"# Tiny",
    ".gitattributes": b"",
    "pytorch_model.bin": b"pickle",
    "original/consolidated.00.pth": b"pickle",
    "onnx/model.onnx": b"onnx",
    "figure.png": b"png",
    "vocab.json": b"{}",
    "merges.txt": b"",
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "Tiny-1.5B")


@pytest.fixture
def files(source: Path) -> dict[str, bytes]:
    """The repository's: a checkpoint and what no conversion needs."""
    return files_of(source) | UNNEEDED | {"generation_config.json": b"{}", "tokenizer_config.json": b"{ }"}


@pytest.fixture
def hub(hub_cache: Path, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A Hub that holds one repository, and is where huggingface_hub looks."""
    with serving(Hub(repos={NAME: {COMMIT: files, OLDER: files | {"config.json": b'{"model_type": "old"}'}}})) as hub:
        turn_to(hub.endpoint, monkeypatch)
        monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", CHUNK)
        monkeypatch.setattr("time.sleep", lambda seconds: None)  # between attempts
        yield hub


def without_network(monkeypatch: pytest.MonkeyPatch) -> None:
    turn_to("http://127.0.0.1:9", monkeypatch)  # discard: nothing listens


def refusal(checkpoint: str, revision: str | None = None, kind: type[PipelineError] = CheckpointError) -> str:
    with pytest.raises(kind) as caught:
        open_checkpoint(checkpoint, revision)
    return str(caught.value)


def storage(cache: Path) -> Path:
    return cache / "models--some-org--Tiny-1.5B"


# What is a folder and what an id


@pytest.mark.parametrize(
    ("text", "is_id"),
    [
        ("org/name", True),
        ("./name", False),
        ("../name", False),
        ("~/name", False),
        ("/name", False),
        ("name", False),
        ("a/b/c", False),
        ("", False),
    ],
)
def test_what_reads_as_an_id(text: str, is_id: bool) -> None:
    assert reads_as_id(text) is is_id
    assert not reads_as_id(Path(text))


def test_a_folder_that_exists_is_a_folder_whatever_its_name(
    source: Path, hub_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_cache(hub_cache, f"{source.parent.name}/Tiny-1.5B", {}, COMMIT)
    monkeypatch.chdir(source.parent.parent)
    with open_checkpoint(f"{source.parent.name}/Tiny-1.5B") as checkpoint:
        assert (checkpoint.name, checkpoint.revision) == ("Tiny-1.5B", None)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("qwen", "qwen is not a folder, nor a Hub id: those are ORG/NAME"),
        ("org/a b", "org/a b is not a folder, nor a Hub id: Repo id must use"),
        ("org/a--b", "nor a Hub id: Cannot have -- or .."),
        ("./absent", "absent is not a folder"),
        ("a/b/c", "a/b/c is not a folder"),
    ],
)
def test_what_is_neither_is_refused(text: str, said: str, hub_cache: Path) -> None:
    assert said in refusal(text)


def test_a_folder_has_no_revision(source: Path) -> None:
    assert "only a Hub id has revisions" in refusal(str(source), "main")


def test_without_the_package_the_extra_is_named(hub_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert "pip install -e '.[hub]'" in refusal(NAME, kind=PipelineError)


# Offline: what the cache holds


def test_a_cached_snapshot_is_used_offline(hub_cache: Path, source: Path) -> None:
    folder = write_cache(hub_cache, NAME, files_of(source), COMMIT)
    with open_checkpoint(NAME) as checkpoint, open_checkpoint(source) as local:
        assert (checkpoint.path, checkpoint.name, checkpoint.revision) == (folder, NAME, COMMIT)
        assert (
            checkpoint.tensor(stored(checkpoint, "model.norm.weight")).tolist()
            == local.tensor(stored(local, "model.norm.weight")).tolist()
        )
        assert checkpoint.identity().files == local.identity().files  # through the links
        assert (checkpoint.identity().name, checkpoint.identity().revision) == (NAME, COMMIT)


def test_a_commit_needs_no_ref_offline(hub_cache: Path, source: Path) -> None:
    write_cache(hub_cache, NAME, files_of(source), COMMIT, ref=None)
    with open_checkpoint(NAME, COMMIT) as checkpoint:
        assert checkpoint.revision == COMMIT


@pytest.mark.parametrize("revision", ["v2", OLDER, "../../refs/v1"])
def test_a_revision_that_is_not_cached_is_refused_offline(revision: str, hub_cache: Path, source: Path) -> None:
    write_cache(hub_cache, NAME, files_of(source), COMMIT)
    said = refusal(NAME, revision)
    assert f"holds no revision {revision} of it; it holds {COMMIT}. Unset HF_HUB_OFFLINE" in said


def test_a_repository_that_is_not_cached_is_refused_offline(hub_cache: Path) -> None:
    said = refusal(NAME)
    assert f"{NAME} is not a folder, and as a Hub id it cannot be fetched: HF_HUB_OFFLINE is set" in said
    assert f"{hub_cache} holds no revision main of it. Unset" in said


def test_an_incomplete_snapshot_is_refused_offline_with_its_absent_files(hub_cache: Path, tmp_path: Path) -> None:
    files = files_of(write_checkpoint(tmp_path / "c", shards=3))
    folder = write_cache(hub_cache, NAME, files, COMMIT)
    (folder / "tokenizer.json").unlink()
    (folder / "model-00002-of-00003.safetensors").resolve().unlink()  # a link to nothing
    said = refusal(NAME)
    assert f"{NAME} at {COMMIT} is incomplete" in said
    assert [line for line in said.splitlines() if line.startswith("  - ")] == [
        "  - tokenizer.json is absent",
        "  - model-00002-of-00003.safetensors is absent",
    ]


def test_a_snapshot_without_weights_is_incomplete_offline(hub_cache: Path, source: Path) -> None:
    write_cache(hub_cache, NAME, files_of(source), COMMIT)
    (storage(hub_cache) / "snapshots" / COMMIT / "model.safetensors").unlink()
    assert "  - model.safetensors is absent" in refusal(NAME)


# From the Hub


def test_only_needed_files_are_asked_for(hub: Hub, hub_cache: Path, source: Path, files: dict[str, bytes]) -> None:
    with open_checkpoint(NAME) as checkpoint:
        assert {file.name for file in checkpoint.path.iterdir()} == hub.files_asked()
        assert checkpoint.identity().files.keys() == hub.files_asked()
        for name in hub.files_asked():
            assert (checkpoint.path / name).is_symlink()
            assert (checkpoint.path / name).read_bytes() == files[name]
    assert hub.files_asked() == {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "vocab.json",
        "merges.txt",
        "model.safetensors",
    }
    assert [path.name for path in storage(hub_cache).rglob("*.incomplete")] == []


def test_the_shards_that_the_index_names(hub: Hub, tmp_path: Path) -> None:
    hub.repos[NAME][COMMIT] = files_of(write_checkpoint(tmp_path / "c", shards=3)) | UNNEEDED
    hub.repos[NAME][COMMIT]["model-00001-of-00009.safetensors"] = b"of another set"
    with open_checkpoint(NAME) as checkpoint:
        assert len(checkpoint.shards) == 3
    assert {name for name in hub.files_asked() if "safetensors" in name} == {
        "model.safetensors.index.json",
        *(f"model-{i:05d}-of-00003.safetensors" for i in (1, 2, 3)),
    }


@pytest.mark.parametrize(("revision", "commit"), [(None, COMMIT), ("main", COMMIT), ("v1", OLDER), (OLDER, OLDER)])
def test_a_revision_is_pinned_to_its_commit(revision: str | None, commit: str, hub: Hub, hub_cache: Path) -> None:
    with open_checkpoint(NAME, revision) as checkpoint:
        assert checkpoint.revision == commit
        assert checkpoint.path.name == commit
        assert checkpoint.config["model_type"] == {COMMIT: "qwen2", OLDER: "old"}[commit]
    assert hub.commits_asked() == {commit}
    refs = {path.name: path.read_text() for path in storage(hub_cache).glob("refs/*")}
    assert refs == ({} if revision == commit else {revision or "main": commit})


def test_a_cached_commit_asks_nothing_and_a_branch_only_where_it_is(hub: Hub) -> None:
    open_checkpoint(NAME)
    hub.asked.clear()
    open_checkpoint(NAME, COMMIT)
    assert hub.asked == []
    open_checkpoint(NAME)
    assert [path for _, path, _ in hub.asked] == [f"/api/models/{NAME}/revision/main"]


def test_a_branch_that_moved_on_is_fetched_again(hub: Hub, hub_cache: Path) -> None:
    open_checkpoint(NAME)
    hub.refs["main"] = OLDER
    with open_checkpoint(NAME) as checkpoint:
        assert checkpoint.revision == OLDER
    assert (storage(hub_cache) / "refs" / "main").read_text() == OLDER


def test_what_was_fetched_is_used_offline(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    online = open_checkpoint(NAME).identity()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.asked.clear()
    assert open_checkpoint(NAME).identity() == online
    assert hub.asked == []


def test_a_file_that_the_listing_knows_may_not_be_absent_offline(
    hub: Hub, hub_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_checkpoint(NAME)
    (storage(hub_cache) / "snapshots" / COMMIT / "generation_config.json").unlink()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "  - generation_config.json is absent" in refusal(NAME)


def test_an_absent_file_is_fetched_anew(hub: Hub, hub_cache: Path) -> None:
    before = open_checkpoint(NAME).identity()
    for name in ("generation_config.json", "model.safetensors"):
        path = storage(hub_cache) / "snapshots" / COMMIT / name
        path.resolve().unlink()
        path.unlink()
    hub.asked.clear()
    assert open_checkpoint(NAME, COMMIT).identity() == before
    assert hub.files_asked() == {"generation_config.json", "vocab.json", "model.safetensors"}  # two of one content


# Downloads that break


def weights_of(hub: Hub) -> bytes:
    return hub.repos[NAME][COMMIT]["model.safetensors"]


@pytest.fixture
def tokenizer_here(hub: Hub, hub_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The small files are there, so that the weights alone are large files to come."""
    weights = hub.repos[NAME][COMMIT].pop("model.safetensors")
    refusal(NAME)
    shutil.rmtree(storage(hub_cache) / "trees")
    monkeypatch.setattr("huggingface_hub._tree_cache._IN_MEMORY_TREE_CACHE", {})
    hub.repos[NAME][COMMIT]["model.safetensors"] = weights
    hub.asked.clear()


@pytest.mark.usefixtures("tokenizer_here")
def test_a_cut_connection_is_continued(hub: Hub, source: Path) -> None:
    cut = 3 * CHUNK + 100
    hub.faults = [cut]
    with open_checkpoint(NAME) as checkpoint:
        assert (checkpoint.path / "model.safetensors").read_bytes() == weights_of(hub)
    assert hub.ranges() == [None, f"bytes={3 * CHUNK}-"]


@pytest.mark.usefixtures("tokenizer_here")
def test_the_next_run_continues_where_a_failed_one_stopped(hub: Hub, hub_cache: Path) -> None:
    hub.faults = [2 * CHUNK, 503]
    assert "answers 503 Service Unavailable. Run this again later" in refusal(NAME)
    (partial,) = storage(hub_cache).rglob("*.incomplete")
    assert partial.read_bytes() == weights_of(hub)[: 2 * CHUNK]
    assert not (storage(hub_cache) / "snapshots" / COMMIT / "model.safetensors").exists()

    hub.asked.clear()
    with open_checkpoint(NAME) as checkpoint:
        assert (checkpoint.path / "model.safetensors").read_bytes() == weights_of(hub)
    assert hub.ranges() == [f"bytes={2 * CHUNK}-"]
    assert not partial.exists()


@pytest.mark.usefixtures("tokenizer_here")
@pytest.mark.parametrize("size", [100, 10**6])
def test_a_part_of_other_bytes_is_not_kept(size: int, hub: Hub, hub_cache: Path) -> None:
    """Fewer than the file has: the hash says so at the end. More: they cannot be its own."""
    blob = storage(hub_cache) / "blobs" / hashlib.sha256(weights_of(hub)).hexdigest()
    partial = blob.with_name(f"{blob.name}.quantgate.incomplete")
    partial.write_bytes(b"x" * size)
    assert size < len(weights_of(hub)) or size == 10**6 > len(weights_of(hub))
    if size == 100:
        assert f"model.safetensors arrived damaged: expected sha256 {blob.name}, found" in refusal(NAME)
    with open_checkpoint(NAME) as checkpoint:
        assert (checkpoint.path / "model.safetensors").read_bytes() == weights_of(hub)
    assert not partial.exists()


def test_progress_counts_bytes_from_where_it_continues(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, float, list[float]]] = []

    @contextmanager
    def recorded(title: str, total: float) -> Iterator[object]:
        seen.append((title, total, []))
        yield seen[-1][2].append

    monkeypatch.setattr("pipeline.source.download.progress", recorded)
    open_checkpoint(NAME)
    ((title, total, steps),) = seen
    assert (title, total) == (f"fetch {NAME}", len(weights_of(hub)))
    assert sum(steps) == total
    assert len(steps) > 5


def test_no_room_is_said_before_the_weights(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(
        "pipeline.source.download.shutil.disk_usage", lambda folder: usage(10**9, 10**9 - 50_000, 50_000)
    )
    assert "MB are free. Make room, or set HF_HOME" in refusal(NAME, kind=OutputError)
    assert all("GET" != method for method, path, _ in hub.asked if "model.safetensors" in path)


def test_a_cache_that_cannot_be_written(hub: Hub, hub_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub_cache.write_text("a file where a folder must be")
    assert f"{hub_cache} cannot be written: " in refusal(NAME, kind=OutputError)


def test_a_file_too_large_to_continue_is_left_to_the_hubs_own_program(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "MAX_HTTP_DOWNLOAD_SIZE", 1 << 16)
    assert f"`hf download {NAME} --revision {COMMIT}`" in refusal(NAME)


# What the Hub refuses


def test_an_unknown_revision(hub: Hub) -> None:
    assert f"{NAME} has no revision 'v2'. Give a branch, tag or commit of" in refusal(NAME, "v2")
    assert f"{NAME} has no revision '{'ab' * 20}'" in refusal(NAME, "ab" * 20)


def test_an_unknown_repository(hub: Hub) -> None:
    assert f"some-org/Tyni is not a folder, and {hub.endpoint} has no such repository" in refusal("some-org/Tyni")


@pytest.mark.parametrize(
    ("status", "code", "said"),
    [
        (403, "GatedRepo", "is gated: accept its terms at {hub}/{name}, then run `hf auth login` or set HF_TOKEN"),
        (401, "GatedRepo", "is gated: accept its terms at {hub}/{name}, then run `hf auth login` or set HF_TOKEN"),
        (403, "", "{name}: {hub} answers 403 Forbidden. Run `hf auth login` or set HF_TOKEN"),
        (500, "", "{name}: {hub} answers 500 Internal Server Error. Run this again later"),
    ],
)
def test_files_that_the_hub_does_not_give(status: int, code: str, said: str, hub: Hub) -> None:
    hub.closed = (status, code)
    assert said.format(hub=hub.endpoint, name=NAME) in refusal(NAME)


def test_no_network(hub_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_network(monkeypatch)
    said = refusal(NAME)
    assert f"{NAME} is not a folder, and http://127.0.0.1:9 cannot be reached (ConnectError: " in said
    assert "HF_HUB_OFFLINE" not in said


def test_a_cached_branch_is_named_and_not_taken_without_a_network(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    open_checkpoint(NAME)
    without_network(monkeypatch)
    assert f"or set HF_HUB_OFFLINE=1 to take main as the cache holds it, commit {COMMIT}" in refusal(NAME)
    with open_checkpoint(NAME, COMMIT) as checkpoint:  # a whole commit does not age
        assert checkpoint.revision == COMMIT


@pytest.mark.parametrize(
    ("drop", "add", "said"),
    [
        ("model.safetensors", {}, "holds neither model.safetensors nor .* It holds .*, pytorch_model.bin: pickles are"),
        ("config.json", {}, "holds no config.json. Give the repository of the original checkpoint"),
        ("", {"config.json": b'{"quantization_config": {"quant_method": "awq"}}'}, "is already quantized .*awq"),
        (
            "model.safetensors",
            {"model.safetensors.index.json": json.dumps({"weight_map": {"x": "lost.safetensors"}}).encode()},
            "is incomplete: model.safetensors.index.json names lost.safetensors, which is not there",
        ),
        (
            "model.safetensors",
            {"model.safetensors.index.json": json.dumps({"weight_map": {"x": "../../../x"}}).encode()},
            "lies outside the checkpoint folder",
        ),
    ],
)
def test_a_repository_that_no_conversion_reads_is_refused_before_its_weights(
    drop: str, add: dict[str, bytes], said: str, hub: Hub
) -> None:
    hub.repos[NAME][COMMIT] = {k: v for k, v in hub.repos[NAME][COMMIT].items() if k != drop} | add
    with pytest.raises(CheckpointError, match=said):
        open_checkpoint(NAME)
    assert not any(name.endswith((".safetensors", ".bin")) for name in hub.files_asked())


# Commands and stages


def test_commands_take_an_id(hub: Hub, tmp_path: Path) -> None:
    found = json.loads(succeeded("inspect", NAME, "--json", "-").stdout)
    assert (found["checkpoint"], found["problems"]) == (NAME, [])
    succeeded("convert", NAME, "--revision", "main", "--format", "gguf", "--scheme", "q8_0", "--out", tmp_path / "out")
    source = json.loads((tmp_path / "out" / "artifact.json").read_text())["source"]
    assert (source["name"], source["revision"]) == (NAME, COMMIT)


def test_a_command_says_what_is_wrong_with_an_id(hub: Hub) -> None:
    assert "has no revision 'v2'" in " ".join(refused("inspect", NAME, "--revision", "v2").split())


def test_stages_take_the_commit_that_fetch_pinned(
    hub_cache: Path, tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_json(paths.SOURCE, {"name": NAME, "revision": COMMIT, "files": {}})
    assert fetched_revision(NAME) == COMMIT
    with pytest.raises(CheckpointError, match=f"is of {NAME}, params.yaml asks for org/other. Run dvc repro"):
        fetched_revision("org/other")
    write_json(paths.SOURCE, {"name": "Tiny-1.5B", "revision": None, "files": {}})
    assert fetched_revision(os.fspath(source)) is None
    with pytest.raises(CheckpointError, match=r"is of Tiny-1\.5B"):
        fetched_revision(NAME)
