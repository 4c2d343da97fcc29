"""`quantgate evaluate --until-decided` on the embedded checkpoint: as many windows as the limits need, with the figures
that a full run of these has.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import Result
from commands import refused, run, succeeded

from pipeline import artifact, corpus, evaluation, progress, until_decided
from pipeline.checks.verdicts import FAIL, INCONCLUSIVE, PASS
from pipeline.formats.gguf.run import GgufRuntime
from pipeline.metrics.sequential import anytime_interval, order
from pipeline.metrics.stats import mean_interval
from pipeline.models import spec_of
from pipeline.paths import SAMPLE_TEXT
from pipeline.source.checkpoint import Checkpoint
from pipeline.source.tokenizer import Tokenizer
from pipeline.torch_forward import load_reference, reference_meta, write_reference
from pipeline.types import Windows

CONTEXT, HELD = 128, 28
PARAMS = """
checkpoint: tiny
revision: null
corpus: {}
variants:
  q8_0: {format: gguf, scheme: q8_0}
evaluate: {}
benchmark: {}
gate:
  inconclusive: INCONCLUSIVE
  limits:
    default: {max_ln_ppl_ratio: 0.01, max_regression: 0.002}
    q8_0: {max_kld_mean: 0.02, min_same_top: 0.9}
"""


@pytest.fixture(scope="module")
def folder(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Artifacts by scheme, and a cache folder that holds the whole reference."""
    folder = tmp_path_factory.mktemp("until_decided")
    for scheme in ("q8_0", "q4_0"):
        artifact.convert(tiny, "gguf", scheme, folder / scheme)
    return folder


@pytest.fixture(scope="module")
def windows(tiny: Path) -> Windows:
    with Checkpoint(tiny) as checkpoint:
        return corpus.cut("sample", SAMPLE_TEXT, Tokenizer(tiny), spec_of(checkpoint.config), CONTEXT, HELD)


@pytest.fixture(scope="module")
def whole(folder: Path, tiny: Path) -> Iterator[dict[str, Any]]:
    """A full run of q8_0, which leaves the reference in the cache; in a folder without params.yaml."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        patch.chdir(folder)
        yield json.loads(
            succeeded("evaluate", folder / "q8_0", "--checkpoint", tiny, *SIZE, "--threads", 1, "--json", "-").stdout
        )


SIZE = ("--windows", HELD, "--context", CONTEXT)


def until(place: Path, tiny: Path, *arguments: object) -> tuple[int, dict[str, Any]]:
    """The exit code and the JSON."""
    options = ("--checkpoint", tiny, *SIZE, "--threads", 1, "--json", "-", "--until-decided")
    result = run("evaluate", place, *options, *arguments)
    assert isinstance(result.exception, SystemExit | None), repr(result.exception)
    assert result.stdout, result.stderr
    return result.exit_code, json.loads(result.stdout)


def shown(place: Path, tiny: Path, *arguments: object) -> Result:
    result = run("evaluate", place, "--checkpoint", tiny, *SIZE, "--until-decided", *arguments)
    assert max(len(line) for line in result.stdout.splitlines()) <= 80
    return result


def test_a_clear_pass_stops_early_with_the_figures_of_a_full_run_of_its_windows(
    folder: Path, tiny: Path, windows: Windows, whole: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # each window of the reference is computed anew
    code, found = until(folder / "q8_0", tiny, "--max-ln-ppl-ratio", 0.01)
    assert code == 0
    assert not (tmp_path / "cache" / "quantgate" / "references").exists()
    sequential = found.pop("sequential")
    used = sequential["order"]
    assert sequential["verdict"] == PASS
    assert 10 <= sequential["windows_used"] == len(used) == found["windows"] < HELD
    assert sequential["windows_of_corpus"] == HELD
    with Checkpoint(tiny) as checkpoint:
        source = checkpoint.identity()
        assert used == order(HELD, reference_meta(source, windows)["ids_sha256"])[: len(used)]
        taken = replace(windows, ids=windows.ids[used], span_bytes=windows.span_bytes[used])
        write_reference(checkpoint, source, taken, tmp_path / "reference")
        reference = load_reference(tmp_path / "reference", checkpoint)
    loaded = artifact.load(folder / "q8_0")
    settings = {"threads": 1, "flash_attention": False, "kv_type": "f16"}
    expected, scores = evaluation.evaluate(folder / "q8_0", loaded, taken, reference, settings)
    intervals = ("ppl_interval", "ln_ppl_ratio", "kld_interval", "same_top_interval")
    assert {key: value for key, value in found.items() if key not in intervals} == {
        key: value for key, value in expected.items() if key not in intervals
    }
    assert found["reply"] is not None
    differences = (reference.logprob - scores.logprob).astype(np.float64).mean(axis=1)
    low, high = (getattr(anytime_interval(differences), end) for end in ("low", "high"))
    assert found["ln_ppl_ratio"] == {"value": differences.mean(), "low": low, "high": high}
    assert low < mean_interval(differences).low  # wider than what holds at a stop that was fixed beforehand
    kld = anytime_interval(scores.kld.mean(axis=1, dtype=np.float64))
    assert found["kld_interval"]["mean"] == {"low": kld.low, "high": kld.high}
    assert all(found["kld_interval"][key] == {"low": None, "high": None} for key in ("median", "p99", "p99_9"))
    same = anytime_interval(scores.same_top.mean(axis=1))
    assert found["same_top_interval"] == {"low": same.low, "high": min(1, same.high)}
    loss = anytime_interval(-scores.logprob.mean(axis=1, dtype=np.float64))
    assert found["ppl_interval"] == {"low": np.exp(loss.low), "high": np.exp(loss.high)}
    assert sequential == {
        "verdict": PASS,
        "windows_used": len(used),
        "windows_of_corpus": HELD,
        "checks": {
            "max_ln_ppl_ratio": {"limit": 0.01, **found["ln_ppl_ratio"], "confidence": 0.95, "verdict": PASS},
        },
        "confidence": 0.95,
        "prior": "normal with mean 0 and variance 1, of the figure's distance from a limit in deviations",
        "estimand": "mean over all windows of the corpus",
        "order": used,
    }
    high = found["ln_ppl_ratio"]["high"]
    before = differences[:-1]
    assert anytime_interval(before).high > 0.01 >= high  # it stopped as soon as it could

    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("the whole reference is in the cache")

    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    monkeypatch.setattr(until_decided, "FreshReference", fail)
    assert until(folder / "q8_0", tiny, "--max-ln-ppl-ratio", 0.01) == (0, found | {"sequential": sequential})


def test_a_clear_fail_stops_early(folder: Path, tiny: Path, whole: dict[str, Any]) -> None:
    code, found = until(folder / "q4_0", tiny, "--max-ln-ppl-ratio", 0.01)
    check = found["sequential"]["checks"]["max_ln_ppl_ratio"]
    assert code == 1
    assert found["sequential"]["verdict"] == check["verdict"] == FAIL
    assert check["low"] > 0.01
    assert found["windows"] < HELD


def test_one_broken_limit_of_three_fails_and_each_is_judged(folder: Path, tiny: Path, whole: dict[str, Any]) -> None:
    limits = ("--max-ln-ppl-ratio", 0.5, "--max-kld-mean", 0.05, "--min-same-top", 0.1)
    code, found = until(folder / "q4_0", tiny, *limits)
    checks = found["sequential"]["checks"]
    assert code == 1
    assert {name: (check["limit"], check["verdict"]) for name, check in checks.items()} == {
        "max_ln_ppl_ratio": (0.5, PASS),
        "max_kld_mean": (0.05, FAIL),
        "min_same_top": (0.1, PASS),
    }
    assert checks["max_kld_mean"]["confidence"] == pytest.approx(1 - 0.05 / 3)
    assert checks["min_same_top"]["confidence"] == 0.95
    low, high = (found["kld_interval"]["mean"][end] for end in ("low", "high"))  # at 95 %
    assert checks["max_kld_mean"]["low"] < low < high < checks["max_kld_mean"]["high"]


def test_what_all_windows_leave_open_is_inconclusive(folder: Path, tiny: Path, whole: dict[str, Any]) -> None:
    limit = whole["ln_ppl_ratio"]["value"]
    code, found = until(folder / "q8_0", tiny, "--max-ln-ppl-ratio", limit)
    assert code == 1
    assert found["sequential"]["verdict"] == INCONCLUSIVE
    assert found["sequential"]["windows_used"] == found["windows"] == HELD
    assert sorted(found["sequential"]["order"]) == [*range(HELD)]
    assert found["ln_ppl_ratio"]["value"] == pytest.approx(limit, abs=1e-12)
    assert found["kld"]["max"] == whole["kld"]["max"]
    assert found["identity"]["ids_sha256"] != whole["identity"]["ids_sha256"]  # the windows' order is another


def test_the_limits_of_params_are_those_of_the_variant_over_the_default(
    folder: Path, tiny: Path, whole: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "params.yaml").write_text(PARAMS.replace("INCONCLUSIVE", "fail"))
    code, found = until(folder / "q8_0", tiny)
    assert (code, found["sequential"]["verdict"]) == (0, PASS)
    assert {name: check["limit"] for name, check in found["sequential"]["checks"].items()} == {
        "max_ln_ppl_ratio": 0.01,
        "max_kld_mean": 0.02,
        "min_same_top": 0.9,
    }
    code, found = until(folder / "q4_0", tiny)
    assert (code, found["sequential"]["verdict"]) == (1, FAIL)
    assert found["sequential"]["checks"].keys() == {"max_ln_ppl_ratio"}
    code, found = until(folder / "q4_0", tiny, "--max-kld-mean", 1)  # one given stands alone
    assert (code, found["sequential"]["checks"].keys()) == (0, {"max_kld_mean"})


def test_what_is_undecided_exits_as_params_say_where_the_limit_is_theirs(
    folder: Path, tiny: Path, whole: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    limit = whole["ln_ppl_ratio"]["value"]
    for policy, code in (("fail", 1), ("warn", 0)):
        (tmp_path / "params.yaml").write_text(PARAMS.replace("INCONCLUSIVE", policy).replace("0.01", repr(limit)))
        found = until(folder / "q8_0", tiny)
        assert (found[0], found[1]["sequential"]["verdict"]) == (code, INCONCLUSIVE)
        checks = found[1]["sequential"]["checks"]
        assert [check["verdict"] for check in checks.values()] == [INCONCLUSIVE, PASS, PASS]
    result = shown(folder / "q8_0", tiny, "--max-ln-ppl-ratio", limit)
    assert result.exit_code == 1  # params.yaml says warn, but of its own limits
    assert result.stdout.splitlines()[-1] == f"Undecided after {HELD} of {HELD} windows."


def test_usage_errors_say_how(folder: Path, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    given = ("evaluate", folder / "q8_0", "--checkpoint", tiny)
    without = "--until-decided needs a limit: give --max-ln-ppl-ratio, --max-kld-mean or --min-same-top, or run it in"
    assert without in " ".join(refused(*given, "--until-decided").split())
    (tmp_path / "params.yaml").write_text("checkpoint: a\nvariant: {}\n")
    assert "unknown key 'variant'; did you mean 'variants'?" in refused(*given, "--until-decided")
    start, end = PARAMS.split("    default:")[0].replace("INCONCLUSIVE", "warn"), "    default: {max_regression: 1}\n"
    (tmp_path / "params.yaml").write_text(start + end)
    assert "gate.limits has one for q8_0 or default." in " ".join(refused(*given, "--until-decided").split())
    said = " ".join(refused(*given, "--max-kld-mean", 0.1).split())
    assert "A limit needs --until-decided. A full run is judged by `quantgate gate`" in said
    assert "nan is not a finite number" in refused(*given, "--until-decided", "--max-kld-mean", "nan")
    assert "inf is not a finite number" in refused(*given, "--until-decided", "--max-ln-ppl-ratio", "inf")
    for share in ("1.5", "nan"):
        assert f"{share} is not a share from 0 to 1" in refused(*given, "--until-decided", "--min-same-top", share)


def test_the_table_says_what_was_asked_and_found(
    folder: Path, tiny: Path, whole: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "LINE_EVERY", 0)
    result = shown(folder / "q4_0", tiny, "--max-kld-mean", 0.05, "--min-same-top", 0.1)
    lines = result.stdout.splitlines()
    assert lines[0] == "q4_0 (brackets: 95 % intervals over windows, valid at any stop)"
    assert any(line.startswith("max_kld_mean 0.05  0.1") and line.endswith("at 97.5 %  fail   ") for line in lines)
    assert any(line.startswith("min_same_top 0.1   0.") and line.endswith("]            pass   ") for line in lines)
    used = int(lines[-1].removeprefix("Decided, fail, after ").removesuffix(f" of {HELD} windows."))
    assert 10 <= used < HELD
    said = [line for line in result.stderr.splitlines() if "of at most" in line]
    assert len(said) == used - 1
    assert said[0].startswith(f"scoring q4_0: 1 of at most {HELD} windows; max_kld_mean 0.05: 0.1")
    assert "; min_same_top 0.1: 0." in said[0]


def test_the_bar_of_a_terminal_takes_a_name_as_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    with progress.saying("scoring a[red]b") as say:
        say("3 of at most 9 windows; max_kld_mean 0.1: 0.2 [0.1, 0.3]")
    assert "scoring a[red]b" in capsys.readouterr().err


# What is refused in a full run is refused here


@pytest.mark.parametrize(
    ("rows", "said"), [(0, "logits are uniform"), (-1, "the runtime gave logits of 63 positions, expected 64")]
)
def test_logits_that_cannot_be_true_are_refused(
    rows: int, said: str, folder: Path, tiny: Path, whole: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def score(self: GgufRuntime, ids: np.ndarray, start: int) -> Iterator[np.ndarray]:
        yield np.zeros((len(ids) - start + rows, self.vocab_size), np.float32)

    monkeypatch.setattr(GgufRuntime, "score", score)
    limit = ("--until-decided", "--max-ln-ppl-ratio", 0.01)
    assert said in refused("evaluate", folder / "q8_0", "--checkpoint", tiny, *SIZE, *limit)


def test_another_prompt_is_refused_before_the_long_work(
    folder: Path, tiny: Path, whole: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GgufRuntime, "prompt", lambda self, messages: None)
    monkeypatch.setattr(GgufRuntime, "score", None)
    limit = ("--until-decided", "--max-ln-ppl-ratio", 0.01)
    said = refused("evaluate", folder / "q8_0", "--checkpoint", tiny, *SIZE, *limit)
    assert "the artifact has no chat template, the reference has one" in " ".join(said.split())


def test_the_artifacts_own_runtime_is_asked_about_windows_that_were_used(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    artifact.convert(tiny, "mlx", "int8", tmp_path / "int8")
    code, found = until(tmp_path / "int8", tiny, "--context", 64, "--max-kld-mean", 0.1)
    assert (code, found["sequential"]["verdict"]) == (0, PASS)
    assert (found["parity"]["windows"], found["parity"]["tokens"]) == (2, 62)
    assert found["sequential"]["order"][:2] != [0, 1]  # and so are those of its log-probabilities


# The rule


def values(mean: float, deviation: float, n: int = 24) -> np.ndarray:
    return mean + deviation * np.tile([-1.0, 1.0], n // 2)


@pytest.mark.parametrize("name", ["max_kld_mean", "min_same_top"])
def test_a_pass_is_not_corrected_and_a_fail_shares_its_level(name: str) -> None:
    away = 1 if name.startswith("max_") else -1
    found = values(0.5, 0.1)
    alone, shared = anytime_interval(found, 0.95), anytime_interval(found, 1 - 0.05 / 3)
    half, wide = alone.high - 0.5, shared.high - 0.5
    between = (half + wide) / 2
    for asked in (1, 3):
        within = until_decided.judge(name, 0.5 + away * between, found, asked)
        assert (within.verdict, within.confidence, within.high) == (PASS, 0.95, alone.high)
        assert until_decided.judge(name, 0.5 + away * half * 0.99, found, asked).verdict == INCONCLUSIVE
    assert until_decided.judge(name, 0.5 - away * between, found, 1).verdict == FAIL
    assert until_decided.judge(name, 0.5 - away * half * 0.99, found, 1).verdict == INCONCLUSIVE
    one_of_three = until_decided.judge(name, 0.5 - away * between, found, 3)
    assert (one_of_three.verdict, one_of_three.low) == (INCONCLUSIVE, shared.low)
    assert one_of_three.confidence == pytest.approx(0.98333, abs=1e-5)
    assert until_decided.judge(name, 0.5 - away * wide * 1.01, found, 3).verdict == FAIL


def test_an_interval_ends_where_the_figure_does() -> None:
    assert until_decided.judge("max_kld_mean", 1, values(0.01, 0.1), 1).low == 0
    assert until_decided.judge("min_same_top", 0.5, values(0.99, 0.1), 1).high == 1
    assert until_decided.judge("max_ln_ppl_ratio", 1, values(0.01, 0.1), 1).low < 0


def test_few_windows_bound_nothing() -> None:
    check = until_decided.judge("max_kld_mean", 1, values(0.1, 0.01, 2), 1)
    assert asdict(check) == {
        **{"limit": 1, "value": pytest.approx(0.1), "low": None, "high": None, "confidence": 0.95},
        "verdict": INCONCLUSIVE,
    }


@pytest.mark.parametrize(
    ("verdicts", "expected"),
    [
        ([PASS, PASS], PASS),
        ([PASS, INCONCLUSIVE], INCONCLUSIVE),
        ([PASS, FAIL, INCONCLUSIVE], FAIL),
        ([INCONCLUSIVE], INCONCLUSIVE),
    ],
)
def test_one_fail_fails_and_all_passes_pass(verdicts: list[str], expected: str) -> None:
    assert until_decided.overall(verdicts) == expected
