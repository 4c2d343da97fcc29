"""Heavy packages are imported where they are used; stages show a user's mistake without a traceback."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support import Shape, write_checkpoint

ROOT = Path(__file__).parent.parent
HEAVY = (
    "torch",
    "transformers",
    "llama_cpp",
    "gguf",
    "mlx",
    "mlx_lm",
    "coremltools",
    "matplotlib",
    "jinja2",
    "tokenizers",
    "cpuinfo",
    "huggingface_hub",
    "datasets",
)
STAGES = ("fetch", "corpus", "reference", "imatrix", "convert", "evaluate", "machine", "benchmark", "report", "gate")


def python(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, check=False)


def test_the_command_line_and_stages_import_nothing_heavy() -> None:
    modules = ", ".join(["pipeline.cli", "pipeline.inspection", *(f"stages.{stage}" for stage in STAGES)])
    code = f"import sys, {modules}; print(sorted(set({HEAVY!r}) & set(sys.modules)))"
    done = python("-c", code)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    shutil.copy(ROOT / "params.yaml", tmp_path)
    (tmp_path / "pipeline").symlink_to(ROOT / "pipeline")
    (tmp_path / "stages").symlink_to(ROOT / "stages")
    return tmp_path


@pytest.mark.parametrize(
    ("stage", "arguments", "message"),
    [
        ("fetch", [], "assets/qwen3-tiny is not a folder"),
        ("convert", ["gguf-q4_1"], "no variant 'gguf-q4_1'; did you mean 'gguf-q4_0'?"),
        ("evaluate", ["gguf-q4_0"], "artifacts/corpus/meta.json cannot be read"),
        ("report", [], "artifacts/reference/meta.json cannot be read"),
        ("gate", [], "reports/measurements.json cannot be read"),
    ],
)
def test_a_stage_shows_a_mistake_without_a_traceback(
    stage: str, arguments: list[str], message: str, project: Path
) -> None:
    done = python("-m", f"stages.{stage}", *arguments, cwd=project)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("scheme: q4_0", "scheme: q4_9", "gguf has no scheme 'q4_9'; did you mean 'q4_1'?"),
        ("scheme: q4_0", "scheme: q4_0, types: {attn_v: q9}", "types: attn_v asks for the type 'q9'; known: f32"),
        ("scheme: q4_0", "scheme: q4_0, evaluate: {kv_type: q8_0}", "kv_type q8_0 needs flash attention"),
        ("device: auto", "device: cuda", "device 'cuda' does not exist; known: auto, cpu"),
        (
            *("format: gguf, scheme: q4_0", "format: mlx, scheme: int4, evaluate: {flash_attention: true}"),
            "flash_attention is a setting of GGUF",
        ),
        (
            *("format: gguf, scheme: q4_0", "format: coreml, scheme: int8, score_window: 256"),
            "coreml int8: a window of 512 tokens is longer than the 256 that the package scores at once",
        ),
        ("scheme: q4_0", "path: absent.gguf", "absent.gguf is not a file"),
        ("format: gguf", "format: ggfu", "format 'ggfu' does not exist; did you mean 'gguf'?"),
        ("revision: null", "revision: abc", "revision is 'abc', but assets/qwen3-tiny is a folder: only a Hub id"),
    ],
)
def test_fetch_refuses_what_later_stages_would(old: str, new: str, message: str, project: Path) -> None:
    (project / "assets").symlink_to(ROOT / "assets")
    params = (project / "params.yaml").read_text()
    assert old in params
    (project / "params.yaml").write_text(params.replace(old, new))
    done = python("-m", "stages.fetch", cwd=project)
    assert done.returncode == 2
    assert message in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
    assert not (project / "artifacts").exists()


def test_fetch_refuses_schemes_that_cannot_hold_the_checkpoint(project: Path, tmp_path: Path) -> None:
    """Rows of 96 weights, of which no group of 64 is a part: all variants at once, and before any is made."""
    folder = write_checkpoint(tmp_path / "narrow", Shape(hidden=96, layers=1))
    variants = "{a: {format: mlx, scheme: int4}, b: {format: gguf, scheme: q4_0}, c: {format: mlx, scheme: mixed_2_6}}"
    lines = (project / "params.yaml").read_text().splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("variants:"))
    last = next(i for i, line in enumerate(lines) if i > first and line and line[0] not in " #")
    text = "\n".join([*lines[:first], f"variants: {variants}", *lines[last:]])
    text = text.replace("checkpoint: assets/qwen3-tiny", f"checkpoint: {folder}")
    gate = text.index("gate:")
    limits = "gate: {inconclusive: fail, limits: {default: {max_kld_mean: 1}}}"
    (project / "params.yaml").write_text(text[:gate] + limits)
    done = python("-m", "stages.fetch", cwd=project)
    said = " ".join(done.stderr.split())
    assert done.returncode == 2, said
    assert "variants.a: int4 cannot hold every matrix: - rows of 96 weights" in said
    assert "variants.c: mixed_2_6 cannot hold every matrix" in said
    assert "variants.b" not in said
    assert not (project / "artifacts").exists()


def test_a_stage_leaves_nothing_behind_when_it_fails(project: Path) -> None:
    assert python("-m", "stages.convert", "gguf-q4_0", cwd=project).returncode == 2
    assert [path for path in project.rglob("artifacts/**/*") if path.is_file() or "partial" in path.name] == []
