"""wikitext-2 from a dataset: joined to the one known text, or refused."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner
from commands import refused, succeeded
from datasets_folder import rows_of, write_dataset
from support import Shape, write_checkpoint

from pipeline import corpus, paths
from pipeline.errors import CorpusError, PipelineError
from pipeline.files import cache_folder, sha256
from pipeline.source import wikitext as module
from pipeline.source.wikitext import SHA256, wikitext_2
from stages import corpus as corpus_stage
from stages import fetch

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of quantgate; that of `datasets` is the test run's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")
    return cache_folder()


@pytest.mark.shared
def test_the_rows_join_to_the_known_text(
    wikitext: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    rows = rows_of(wikitext.read_bytes().decode())
    assert (len(rows), rows.count("")) == (4358, 1467)
    path = wikitext_2(str(write_dataset(tmp_path / "dataset", rows)))
    assert path.read_bytes() == wikitext.read_bytes()
    assert path.is_relative_to(cache_folder())
    assert "".join(capfd.readouterr()) == ""  # no bars, no warnings
    monkeypatch.setitem(sys.modules, "datasets", None)  # once is enough
    assert wikitext_2() == path


def test_another_text_is_refused(tmp_path: Path, empty_cache: Path) -> None:
    dataset = write_dataset(tmp_path / "dataset", ["", " = Robert Boulter = \n", ""])
    found = hashlib.sha256(b" \n = Robert Boulter = \n \n").hexdigest()
    with pytest.raises(CorpusError, match=f"is not the text it was: expected sha256 {SHA256}, found {found}"):
        wikitext_2(str(dataset))
    assert not list(empty_cache.rglob("wikitext*"))


def test_a_cached_text_that_changed_is_refused(empty_cache: Path) -> None:
    path = empty_cache / "corpora" / "wikitext-2.txt"
    path.parent.mkdir(parents=True)
    path.write_text("x")
    with pytest.raises(CorpusError, match=rf"{path} is not WikiText-2's raw test split: expected .* Delete it"):
        wikitext_2()


@pytest.mark.parametrize("dataset", ["Salesforce/wikitext", "/absent/dataset"])
def test_a_dataset_out_of_reach_is_refused(dataset: str) -> None:
    with pytest.raises(CorpusError, match=rf"wikitext-2 cannot be loaded from {dataset}: .*\nRun this again with a"):
        wikitext_2(dataset)


def test_a_dataset_without_the_config_is_refused(tmp_path: Path) -> None:
    dataset = write_dataset(tmp_path / "dataset", ["a"])
    (dataset / "README.md").unlink()
    with pytest.raises(CorpusError, match=r"cannot be loaded from .*wikitext-2-raw-v1"):
        wikitext_2(str(dataset))


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(PipelineError, match=r"wikitext-2 needs datasets .*pip install -e '\.\[hub\]'"):
        wikitext_2()


# As a corpus


@pytest.fixture
def known(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A short text that stands for WikiText-2 and lies in the cache already."""
    path = empty_cache / "corpora" / "wikitext-2.txt"
    path.parent.mkdir(parents=True)
    path.write_text("In the beginning the heath there then held the thin inn. " * 40)
    monkeypatch.setattr(module, "SHA256", sha256(path))
    return path


def test_wikitext_2_is_a_corpus_by_name(known: Path) -> None:
    assert corpus.text_path("wikitext-2", None) == known
    with pytest.raises(CorpusError, match="`sample` and `wikitext-2` take none"):
        corpus.text_path("wikitext-2", known)


def test_stages_and_the_command_line_take_wikitext_2(
    known: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_checkpoint(tmp_path / "source", Shape("qwen3"))
    params = yaml.safe_load((ROOT / "params.yaml").read_text()) | {
        "checkpoint": str(source),
        "corpus": {"name": "wikitext-2", "windows": 4, "context": 64},
    }
    monkeypatch.chdir(tmp_path)
    paths.PARAMS.write_text(yaml.safe_dump(params))
    for stage in (fetch, corpus_stage):
        result = CliRunner().invoke(stage.main, [])
        assert result.exit_code == 0, result.output
    assert json.loads(paths.TEXT.read_text()) == {"name": "wikitext-2", "sha256": sha256(known)}
    assert corpus.load(paths.CORPUS).name == "wikitext-2"
    assert corpus.load(paths.CORPUS).text_sha256 == sha256(known)

    succeeded("convert", source, "--format", "gguf", "--scheme", "q8_0", "--out", "out")
    asked = ("evaluate", "out", "--checkpoint", source, "--windows", 2, "--context", 64, "--json", "-")
    found = json.loads(succeeded(*asked, "--corpus", "wikitext-2").stdout)
    assert (found["identity"]["corpus"], found["identity"]["text_sha256"]) == ("wikitext-2", sha256(known))
    known.unlink()
    assert "wikitext-2 cannot be loaded from Salesforce/wikitext" in refused(*asked, "--corpus", "wikitext-2")
