"""The gate on a terminal, in Markdown, as JUnit XML and for GitHub."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from results import BAD_PPL, BAD_TOP, GONE, GOOD, GROWN, KLD, OPEN, OTHER, PPL, SLOW, TOP, UNKNOWN, many, result

from pipeline.checks.verdicts import FAIL, PASS, Check, Result, failed
from pipeline.gate_output import console, github, junit, markdown, words

Shown = Callable[[Result], list[str]]


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shown:
    monkeypatch.setenv("COLUMNS", "80")

    def show(gate: Result) -> list[str]:
        console.show(gate)
        return [line.rstrip() for line in capsys.readouterr().out.splitlines()]

    return show


# Terminal


def test_what_passes_takes_a_line(shown: Shown) -> None:
    assert shown(result(*GOOD, replace(TOP, variant="other"))) == [
        "Every check of these passes; shown is the one nearest its limit.",
        "variant  checks  check           asked          found",
        "a        4       KL, nats/token  at most 0.06   0.0500 [0.0400, 0.0550]",
        "other    1       same top-1      at least 83 %  90.00 % [88.00, 92.00]",
        "",
        "Brackets are 95 % intervals over 40 windows of text.",
        "The gate passes: all 5 checks of 2 variants pass.",
    ]


def test_what_does_not_pass_is_told_with_its_reason(shown: Shown) -> None:
    assert shown(result(BAD_PPL, BAD_TOP, OPEN, replace(KLD, variant="b"), OTHER)) == [
        "b: 2 fail, 1 is inconclusive, 1 passes",
        "  check           asked            found                    needed",
        "  perplexity      at most +4.08 %  +7.25 % [+6.18, +8.33]   4.25 less",
        "  same top-1      at least 83 %    80.00 % [79.00, 81.00]   4.00 more",
        "  KL, nats/token  at most 0.06     0.0500 [0.0400, 0.0700]  123 windows",
        "  fail b, max_ln_ppl_ratio, min_same_top: the whole 95 % interval is beyond the",
        "  limit (0.0700 [0.0600, 0.0800] nats/token, limit 0.04)",
        "  inconclusive b, max_kld_mean: the limit lies in the interval; about 123",
        "  windows would decide it, 40 were used",
        "",
        "c: 1 is changed",
        "  check     asked        found    needed",
        "  baseline  as accepted  changed  a look",
        "  changed c, baseline: 2 tensors differ",
        "    x: Q8_0, was Q4_0",
        "    y: F32, was F16",
        "",
        "Brackets are 95 % intervals over 40 windows of text.",
        "The gate fails: of 5 checks of 2 variants 2 fail, 1 is changed, 1 is",
        "inconclusive, 1 passes.",
        "Next:",
        "- take a scheme that loses less, or a limit that you accept (gate.limits in",
        "params.yaml).",
        "- see what changed, and where it is meant `quantgate baseline accept` and commit",
        "reports/baseline.json.",
        "- score about 123 windows (corpus.windows in params.yaml; take a longer text if",
        "need be).",
    ]


def test_one_step_is_told_in_the_last_line(shown: Shown) -> None:
    assert shown(result(GONE))[-1] == "Next: run `dvc repro`."


def test_fifteen_variants_fit_80_columns_and_a_screen(shown: Shown) -> None:
    lines = shown(many())
    assert max(map(len, lines)) <= 80
    assert len(lines) <= 66
    assert sum(line.startswith("gguf-q") for line in lines) == 15
    every = " ".join(lines)
    for check in many().checks:
        assert (f" {check.variant}, " in every) == any(
            other.verdict != PASS for other in many().checks if other.variant == check.variant
        )


def test_a_name_that_looks_like_markup_is_shown(shown: Shown) -> None:
    assert "  fail [red]x[/red], measured: [bold]why" in shown(result(failed("[red]x[/red]", "measured", "[bold]why")))


def test_a_terminal_gets_no_control_characters(shown: Shown) -> None:
    text = "\n".join(shown(result(failed("v\x1b[2J", "measured", "why\x07\r"))))
    assert not set(text) & {"\x1b", "\x07", "\r"}


# Markdown


def test_markdown_has_what_does_not_pass_first() -> None:
    text = markdown.text(result(*GOOD, BAD_PPL, OTHER))
    assert text.splitlines() == [
        "## The gate fails: of 6 checks of 3 variants 1 fails, 1 is changed, 4 pass.",
        "",
        "- Take a scheme that loses less, or a limit that you accept (gate.limits in params.yaml).",
        "- See what changed, and where it is meant `quantgate baseline accept` and commit reports/baseline.json.",
        "",
        "| variant | check | verdict | asked | found | why, and what would decide |",
        "|---|---|---|---|---|---|",
        r"| b | max\_ln\_ppl\_ratio | fail | at most \+4.08 % | \+7.25 % \[\+6.18, \+8.33\] | the whole 95 % interval "
        r"is beyond the limit \(0.0700 \[0.0600, 0.0800\] nats/token, limit 0.04\) |",
        "| c | baseline | changed | as accepted | changed | 2 tensors differ |",
        "",
        "**c, baseline**",
        "",
        r"- x: Q8\_0, was Q4\_0",
        "- y: F32, was F16",
        "",
        "<details><summary>4 of 6 checks pass</summary>",
        "",
        "| variant | check | asked | found |",
        "|---|---|---|---|",
        r"| a | max\_ln\_ppl\_ratio | at most \+4.08 % | \+2.02 % \[\+1.01, \+3.05\] |",
        r"| a | max\_kld\_mean | at most 0.06 | 0.0500 \[0.0400, 0.0550\] |",
        r"| a | min\_same\_top | at least 83 % | 90.00 % \[88.00, 92.00\] |",
        "| a | baseline | as accepted | the same |",
        "",
        "</details>",
        "",
        "Brackets are 95 % intervals over 40 windows of text.",
    ]


def test_markdown_of_a_pass_has_no_table_of_what_does_not() -> None:
    text = markdown.text(result(*GOOD))
    assert text.startswith("## The gate passes: all 4 checks of 1 variant pass.\n\n<details>")
    assert "why, and what would decide" not in text


def test_markdown_shows_names_and_reasons_as_they_are() -> None:
    text = markdown.text(result(failed("a|b", "measured", "<img src=x> | `code`\nmore")))
    assert r"| a\|b | measured | fail | \- | \- | \<img src=x\> \| \`code\` more |" in text.splitlines()


# JUnit

ATTRIBUTES = {  # of Jenkins' junit-10.xsd
    "testsuites": {"name", "time", "tests", "failures", "errors", "disabled"},
    "testsuite": {
        *(
            "name",
            "tests",
            "failures",
            "errors",
            "time",
            "disabled",
            "skipped",
            "timestamp",
            "hostname",
            "id",
            "package",
        ),
    },
    "testcase": {"name", "classname", "assertions", "time", "status"},
    "failure": {"type", "message"},
    "skipped": {"type", "message"},
    "system-out": set(),
}
CHILDREN = {
    "testsuites": {"testsuite"},
    "testsuite": {"testcase"},
    "testcase": {"failure", "skipped", "system-out"},
}


def parsed(gate: Result) -> ElementTree.Element:
    """The root, after a look at all elements, attributes and counts."""
    root = ElementTree.fromstring(junit.text(gate))
    assert root.tag == "testsuites"
    for element in root.iter():
        assert {*element.keys()} <= ATTRIBUTES[element.tag], element.tag
        assert {child.tag for child in element} <= CHILDREN.get(element.tag, set())
    for group in (root, *root):
        assert group.get("tests") == str(len([*group.iter("testcase")]))
        assert group.get("failures") == str(len([*group.iter("failure")]))
        assert group.get("errors") == "0"
    for suite in root:
        assert suite.get("skipped") == str(len([*suite.iter("skipped")]))
    assert all(case.get("name") and case.get("classname") for case in root.iter("testcase"))
    return root


def kinds(gate: Result) -> dict[tuple[str, str], list[str]]:
    return {
        (str(case.get("classname")), str(case.get("name"))): [child.tag for child in case if child.tag != "system-out"]
        for case in parsed(gate).iter("testcase")
    }


@pytest.mark.parametrize(("inconclusive", "undecided"), [("fail", "failure"), ("warn", "skipped")])
def test_a_suite_for_each_variant_and_a_case_for_each_check(inconclusive: str, undecided: str) -> None:
    gate = result(*GOOD, BAD_PPL, OPEN, OTHER, UNKNOWN, SLOW, inconclusive=inconclusive)
    assert [suite.get("name") for suite in parsed(gate)] == ["a", "b", "c", "e"]
    assert kinds(gate) == {
        **{("a", check.name): [] for check in GOOD},
        ("b", "max_ln_ppl_ratio"): ["failure"],
        ("b", "max_kld_mean"): [undecided],
        ("c", "baseline"): ["failure"],
        ("e", "baseline"): [undecided],
        ("e", "max_slowdown_prefill_512"): ["failure"],
    }


def test_a_failure_says_why() -> None:
    (failure,) = parsed(result(OTHER)).iter("failure")
    assert (failure.get("type"), failure.get("message")) == ("changed", "changed: 2 tensors differ")
    assert failure.text == (
        "changed: 2 tensors differ\nbaseline: asked as accepted, found changed\nx: Q8_0, was Q4_0\ny: F32, was F16"
    )


def test_what_is_skipped_says_why() -> None:
    (skipped,) = parsed(result(OPEN, inconclusive="warn")).iter("skipped")
    assert skipped.get("message") == f"inconclusive: {OPEN.reason}"


def test_a_pass_says_what_was_found() -> None:
    (said,) = parsed(result(PPL)).iter("system-out")
    assert said.text == (
        "perplexity: asked at most +4.08 %, found +2.02 % [+1.01, +3.05]\n"
        "0.0200 [0.0100, 0.0300] nats/token, limit 0.04"
    )


def test_a_gate_without_checks_is_a_failure() -> None:
    assert kinds(result()) == {("gate", "variants"): ["failure"]}


def test_names_that_xml_has_no_place_for() -> None:
    bad = Check('a\x00<&"\ud800', "x\x0b]]>", None, None, None, None, FAIL, "no\x1b\ufffe\nfile", details=("\x01d",))
    (case,) = parsed(result(bad)).iter("testcase")
    assert (case.get("classname"), case.get("name")) == ('a<&"', "x]]>")
    assert "no\nfile" in str(case[0].text)
    junit.text(result(bad)).encode()  # no half of a surrogate pair is left


def test_fifteen_variants_as_junit() -> None:
    assert len(parsed(many())) == 15


# GitHub


def test_annotations_name_what_does_not_pass_and_the_verdict() -> None:
    gate = result(*GOOD, BAD_PPL, OTHER, inconclusive="warn")
    assert github.commands(gate) == [
        "::error title=b%3A perplexity%3A fail::Asked at most +4.08 %25, found +7.25 %25 [+6.18, +8.33] (0.0700 "
        "[0.0600, 0.0800] nats/token, limit 0.04).%0Athe whole 95 %25 interval is beyond the limit",
        "::error title=c%3A baseline%3A changed::2 tensors differ%0Ax: Q8_0, was Q4_0%0Ay: F32, was F16",
        "::error title=quantgate gate::" + words.last_line(gate).replace("%", "%25"),
    ]


@pytest.mark.parametrize(("inconclusive", "levels"), [("fail", ["error", "error"]), ("warn", ["warning", "warning"])])
def test_what_is_undecided_is_annotated_as_params_say(inconclusive: str, levels: list[str]) -> None:
    commands = github.commands(result(OPEN, inconclusive=inconclusive))
    assert [command.split(" ")[0].strip(":") for command in commands] == levels


def test_a_pass_is_a_notice() -> None:
    assert github.commands(result(*GOOD)) == [
        "::notice title=quantgate gate::The gate passes: all 4 checks of 1 variant pass."
    ]


def test_annotations_are_escaped_as_github_reads_them() -> None:
    """Of a property also what ends it; `%` first, so that no escape is escaped."""
    (command, _) = github.commands(result(failed("a,b:c%d", "max\nkld", "50 %\n: 1,2 %0A")))
    assert command == "::error title=a%2Cb%3Ac%25d%3A max%0Akld%3A fail::50 %25%0A: 1,2 %250A"
    assert github._data("a\r\nb%,:") == "a%0D%0Ab%25,:"
    assert github._property("a\r\nb%,:") == "a%0D%0Ab%25%2C%3A"


@pytest.mark.parametrize(("count", "shown"), [(9, 9), (10, 8), (30, 8)])
def test_no_more_annotations_than_github_shows(count: int, shown: int) -> None:
    """Ten of a level: the last two say how many more there are, and the verdict."""
    gate = result(*(failed(f"v{i}", "measured", "gone") for i in range(count)))
    commands = github.commands(gate)
    assert sum("measured" in command for command in commands) == shown
    assert len(commands) == 10
    if shown < count:
        assert (
            commands[-2]
            == f"::error title={count - shown} more::{count - shown} more checks: see the summary of this job."
        )


def test_warnings_beside_errors_have_room_of_their_own() -> None:
    gate = result(GONE, *(replace(OPEN, variant=f"v{i}") for i in range(10)), inconclusive="warn")
    commands = github.commands(gate)
    assert sum(command.startswith("::warning") for command in commands) == 10
    assert not any(re.search(r"title=\d+ more", command) for command in commands)


def test_the_summary_is_appended(tmp_path: Path) -> None:
    summary = tmp_path / "summary.md"
    summary.write_text("before\n")
    github.append_summary(result(*GOOD, GROWN), {"GITHUB_STEP_SUMMARY": str(summary)})
    assert summary.read_text() == f"before\n{markdown.text(result(*GOOD, GROWN))}\n"
    github.append_summary(result(*GOOD), {})


@pytest.mark.parametrize(("value", "there"), [("true", True), ("false", False), ("", False), (None, False)])
def test_github_is_there_where_it_says_so(value: str | None, there: bool) -> None:
    assert github.is_there({} if value is None else {"GITHUB_ACTIONS": value}) == there
