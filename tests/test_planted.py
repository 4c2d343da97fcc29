"""Faults planted one at a time in the product's own code, checkpoint or corpus: the gate names each, better or worse.

A project on the embedded checkpoint is run by the stages themselves and accepted. Each test rebuilds what its fault
touches beside it, and judges that.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import chdir
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
import yaml
from commands import refused, squeezed, succeeded

from pipeline import gate, params, paths
from pipeline.checks import acceptance, baseline, record
from pipeline.checks.differences import WORDS
from pipeline.checks.verdicts import CHANGED, NOT_COMPARABLE, PASS, Check
from pipeline.files import write_json
from pipeline.formats.gguf import architecture, plan, schemes
from pipeline.formats.gguf.run import GgufRuntime
from pipeline.formats.mlx.run import MlxRuntime
from pipeline.report import measurements
from pipeline.source.checkpoint import Checkpoint
from pipeline.source.safetensors import read_header
from pipeline.source.tokenizer import Tokenizer
from pipeline.types import TensorSpec
from stages import convert, corpus, evaluate, fetch, reference

VARIANTS = {
    "q8_0": {"format": "gguf", "scheme": "q8_0"},
    "q4_0": {"format": "gguf", "scheme": "q4_0"},
    "q4_k_m": {"format": "gguf", "scheme": "q4_k_m"},
    "mlx": {"format": "mlx", "scheme": "int8"},
    "coreml": {"format": "coreml", "scheme": "int8"},
}
GGUF = ("q8_0", "q4_0", "q4_k_m")
WINDOWS = 6
NO_TIMES = {
    **{"machine": {}, "power_source": "unknown", "order": "interleaved", "variants": {}},
    "settings": {"prompt_lengths": [], "decode": 64},
}


def run(stage: Any, *arguments: str) -> None:
    """A stage of dvc.yaml, in this process."""
    stage.main.main([*arguments], standalone_mode=False)


def prepared(project: Path, checkpoint: Path) -> Path:
    """A project folder whose params.yaml asks for the variants of a checkpoint."""
    limits = {"max_kld_mean": 9.0, "max_regression": 0.002}
    given = {
        **{"checkpoint": str(checkpoint), "revision": None, "variants": VARIANTS},
        "corpus": {"name": "sample", "path": None, "windows": WINDOWS, "context": 512},
        **{"evaluate": {"threads": 1}, "benchmark": {}, "gate": {"limits": {"default": limits}}},
    }
    project.mkdir(exist_ok=True)
    (project / "params.yaml").write_text(yaml.safe_dump(given, sort_keys=False))
    return project


def scored(names: Any) -> None:
    for name in names:
        run(evaluate, name)


def built(names: Any) -> None:
    for name in names:
        run(convert, name)
    scored(names)


@pytest.fixture(autouse=True, scope="module")
def scored_once() -> Iterator[None]:
    """Without the check of MLX's scores by its own kernels, which are slow on this CPU and change no score."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MlxRuntime, "native", None)
        yield


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Path:
    """A project of which all was built, scored and accepted."""
    project = prepared(tmp_path_factory.mktemp("planted") / "honest", tiny)
    with chdir(project):
        for stage in (fetch, corpus, reference):
            run(stage)
        built(VARIANTS)
        succeeded("baseline", "accept")
    return project


@pytest.fixture
def project(honest: Path, tmp_path: Path) -> Iterator[Path]:
    """A copy of it to work in."""
    shutil.copytree(honest, tmp_path / "project")
    with chdir(tmp_path / "project"):
        yield tmp_path / "project"


def again(*names: str) -> None:
    """The variants made and scored anew, as DVC does it."""
    for name in names:
        shutil.rmtree(paths.variant(name))
    built(names)


def of_other_source(names: Any = GGUF[:1]) -> None:
    """All stages anew, for some of the variants."""
    shutil.rmtree("artifacts")
    for stage in (fetch, corpus, reference):
        run(stage)
    built(names)


def judged(names: Any = VARIANTS) -> dict[str, dict[str, Check]]:
    """The checks of the gate by variant and name, of the variants named."""
    write_json(paths.SPEED, NO_TIMES)
    given = params.load(paths.PARAMS)
    given = replace(given, variants={name: given.variants[name] for name in names})
    write_json(paths.MEASUREMENTS, measurements.gather(names))
    result = gate.of_project(given)
    found: dict[str, dict[str, Check]] = {}
    for check in result.checks:
        found.setdefault(check.variant, {})[check.name] = check
    assert result.passes == all(check.verdict == PASS for check in result.checks)
    return found


def changed(name: str) -> Check:
    """What the gate says of the variant that is `changed`; all others are the same."""
    verdicts = {variant: checks["baseline"].verdict for variant, checks in judged().items()}
    assert verdicts == {**dict.fromkeys(VARIANTS, PASS), name: CHANGED}
    return judged()[name]["baseline"]


def not_comparable(names: Any = GGUF[:1]) -> Check:
    checks = judged(names)
    assert [checks[name]["baseline"].verdict for name in names] == [NOT_COMPARABLE for _ in names]
    assert [checks[name]["max_regression"].verdict for name in names] == [NOT_COMPARABLE for _ in names]
    return checks[names[0]]["baseline"]


def growth(name: str) -> float:
    """nats/token over what was accepted."""
    value = judged()[name]["max_regression"].value
    assert value is not None
    return value


# An honest rebuild


def test_an_honest_rebuild_is_the_same_to_the_last_bit(project: Path, tiny: Path) -> None:
    of_other_source(VARIANTS)
    for name, checks in judged().items():
        assert {check.verdict for check in checks.values()} == {PASS}, name
        assert checks["baseline"].reason.endswith("the same loss in 6 windows, to the last bit")
        grown = checks["max_regression"]
        assert (grown.value, grown.low, grown.high) == (0.0, 0.0, 0.0)
    accepted = baseline.load(paths.BASELINE)
    assert accepted is not None
    for change in acceptance.beside(accepted, record.gather(VARIANTS), [*VARIANTS], [*VARIANTS]):
        assert change.what == acceptance.SAME
        assert change.difference is not None
        assert (change.difference.files, change.difference.tensors, change.difference.windows) == ((), (), 0)


# In the product's own code: the same source, other bytes or scores


def test_q4_0_built_in_place_of_q8_0(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(schemes.SCHEMES, "q8_0", replace(schemes.SCHEMES["q4_0"], name="q8_0"))
    again("q8_0")
    check = changed("q8_0")
    assert check.reason.startswith("43 of 68 tensors are not those that were accepted. ")
    assert any(line.startswith("blk.0.attn_k.weight: Q8_0 ") and " -> Q4_0 " in line for line in check.details)
    assert check.details[-1] == "… and 38 more tensors"
    assert growth("q8_0") > 0.02


@pytest.mark.parametrize(("layer", "improves"), [(0, True), (2, False)])
def test_the_weights_of_a_layer_times_1_01(
    layer: int, improves: bool, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = Checkpoint.rows

    def scaled(self: Checkpoint, tensor: TensorSpec, start: int, count: int) -> Any:
        found = rows(self, tensor, start, count)
        return found * np.float32(1.01) if tensor.layer == layer else found

    monkeypatch.setattr(Checkpoint, "rows", scaled)
    again("q4_0")
    check = changed("q4_0")
    assert check.reason.startswith("11 of 68 tensors are not those that were accepted. ")
    assert check.details[0].endswith(", other in 6 of 6 windows")
    assert all(line.startswith(f"blk.{layer}.") for line in check.details[2:-1])
    assert (growth("q4_0") < 0) == improves


def test_rope_theta_times_1_01_in_the_header(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = architecture._rope
    monkeypatch.setattr(architecture, "_rope", lambda rope: keys(replace(rope, theta=rope.theta * 1.01)))
    again("q8_0")
    check = changed("q8_0")
    assert check.reason.startswith("the tensors are those that were accepted; a file's header")
    assert check.details[1] == "every tensor is the same: what differs in model.gguf is its header, or no weights"
    assert -0.002 < growth("q8_0") < 0  # better


def test_one_tensor_of_the_policy(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = plan.wanted

    def off_by_one(tensor: TensorSpec, scheme: Any, model: Any, index: int) -> Any:
        is_it = (tensor.role, tensor.layer) == ("attn_v", 5)
        return (scheme.base, "") if is_it else wanted(tensor, scheme, model, index)

    monkeypatch.setattr(plan, "wanted", off_by_one)
    again("q4_k_m")
    check = changed("q4_k_m")
    assert check.reason.startswith("1 of 68 tensors is not the one that was accepted. ")
    assert check.details[-1].startswith("blk.5.attn_v.weight: Q6_K ")
    assert " -> Q4_K " in check.details[-1]


def test_a_token_of_a_window_on_its_way_to_the_engine(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    score = GgufRuntime.score
    windows = iter(range(WINDOWS))

    def other_ids(self: GgufRuntime, ids: Any, start: int) -> Any:
        if next(windows) == 2:
            ids = ids.copy()
            ids[100] = (ids[100] + 1) % 8000
        return score(self, ids, start)

    monkeypatch.setattr(GgufRuntime, "score", other_ids)
    scored(["q8_0"])
    check = changed("q8_0")
    assert check.reason.startswith("the artifact is the one that was accepted, its scores are not")
    assert check.details[0].endswith(", other in 1 of 6 windows")
    assert len(check.details) == 1


# In the checkpoint or the corpus: another source


def edited(tiny: Path, folder: Path, name: str, change: Callable[[Path], object]) -> Path:
    """A copy of the checkpoint with one file changed."""
    copy = shutil.copytree(tiny, folder / "qwen3-tiny")
    change(copy / name)
    return copy


def json_edit(change: Callable[[Any], object]) -> Callable[[Path], object]:
    def edit(path: Path) -> None:
        value = json.loads(path.read_text())
        change(value)
        path.write_text(json.dumps(value, ensure_ascii=False))

    return edit


def scale_a_layer(path: Path) -> None:
    data = bytearray(path.read_bytes())
    for name, stored in read_header(path).items():
        if name.startswith("model.layers.3."):
            assert stored.dtype == "BF16"
            bits = np.frombuffer(data, "<u2", stored.size // 2, stored.offset)
            scaled = ((bits.astype(np.uint32) << 16).view(np.float32) * np.float32(1.01)).view(np.uint32)
            data[stored.offset : stored.offset + stored.size] = ((scaled + 0x8000) >> 16).astype("<u2").tobytes()
    path.write_bytes(data)


def scale_theta(config: Any) -> None:
    config["rope_parameters"]["rope_theta"] *= 1.01


def swap_merges(tokenizer: Any) -> None:
    """The one that joins 'h' and 'e' comes last, so that most words with it are cut otherwise."""
    merges = tokenizer["model"]["merges"]
    assert merges[1] == ["h", "e"]
    merges.append(merges.pop(1))


SOURCES: dict[str, tuple[str, Callable[[Path], object], list[str]]] = {
    "weights": ("model.safetensors", scale_a_layer, ["source"]),
    "rope_theta": ("config.json", json_edit(scale_theta), ["source"]),
    "merge": ("tokenizer.json", json_edit(swap_merges), ["source", "tokenizer_sha256", "ids_sha256"]),
}


@pytest.mark.parametrize("planted", SOURCES)
def test_another_checkpoint(planted: str, project: Path, tiny: Path, tmp_path: Path) -> None:
    file, change, keys = SOURCES[planted]
    prepared(project, edited(tiny, tmp_path, file, change))
    of_other_source()
    check = not_comparable()
    words = ", ".join(WORDS[key] for key in keys)
    assert check.reason.startswith(f"another {words} than was accepted: restore it or, where it is meant, ")
    assert check.details[0] == f"source: {file} of qwen3-tiny: another checkpoint"
    assert [line.partition(":")[0] for line in check.details] == keys


def test_a_token_of_a_window_in_the_corpus(project: Path) -> None:
    ids = np.load(paths.CORPUS / "ids.npy")
    ids[2, 100] = (ids[2, 100] + 1) % 8000
    np.save(paths.CORPUS / "ids.npy", ids)
    shutil.rmtree(paths.REFERENCE)
    run(reference)
    scored(GGUF[:1])
    check = not_comparable()
    assert check.reason.startswith("another sequence of token ids than was accepted: ")
    assert len(check.details) == 1


# Refused before there is a score


def test_a_merge_of_the_tokenizer_in_the_header(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """llama.cpp would read text otherwise."""
    merges = Tokenizer.merges
    assert isinstance(merges, property)
    assert merges.fget is not None
    whole = merges.fget
    monkeypatch.setattr(Tokenizer, "merges", property(lambda self: [*whole(self)[:1], *whole(self)[2:]]))
    with pytest.raises(click.ClickException, match=r"llama\.cpp reads the same text as other tokens"):
        again("q8_0")


def test_a_byte_of_an_artifact(honest: Path, tiny: Path, tmp_path: Path) -> None:
    place = shutil.copytree(honest / paths.variant("q4_0"), tmp_path / "q4_0")
    data = bytearray((place / "model.gguf").read_bytes())
    data[-1000] ^= 1
    (place / "model.gguf").write_bytes(data)
    said = refused("evaluate", place, "--checkpoint", tiny, "--windows", 2)
    assert "model.gguf is not what artifact.json says: expected sha256 " in said
    assert squeezed(said).endswith("Convertagain.")
