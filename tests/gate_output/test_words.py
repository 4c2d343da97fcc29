"""Checks and verdicts in words, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from results import (
    BAD_PPL,
    BAD_TOP,
    GONE,
    GOOD,
    GROWN,
    KLD,
    LACKS,
    OPEN,
    OTHER,
    PPL,
    SAME,
    SLOW,
    STRANGE,
    TOP,
    UNKNOWN,
    result,
)

from pipeline.checks.verdicts import FAIL, INCONCLUSIVE, NO_BASELINE, Check
from pipeline.gate_output import words


@pytest.mark.parametrize(
    ("check", "name", "asked", "found", "needed"),
    [  # exp(0.04) - 1 = 4.08 %, exp(0.02) - 1 = 2.02 %, exp(0.08) - 1 = 8.33 %
        (PPL, "perplexity", "at most +4.08 %", "+2.02 % [+1.01, +3.05]", "nothing"),
        (KLD, "KL, nats/token", "at most 0.06", "0.0500 [0.0400, 0.0550]", "nothing"),
        (TOP, "same top-1", "at least 83 %", "90.00 % [88.00, 92.00]", "nothing"),
        (replace(TOP, limit=0.9995), "same top-1", "at least 99.95 %", "90.00 % [88.00, 92.00]", "nothing"),
        (SAME, "baseline", "as accepted", "the same", "nothing"),
        (BAD_PPL, "perplexity", "at most +4.08 %", "+7.25 % [+6.18, +8.33]", "4.25 less"),
        (BAD_TOP, "same top-1", "at least 83 %", "80.00 % [79.00, 81.00]", "4.00 more"),
        (OPEN, "KL, nats/token", "at most 0.06", "0.0500 [0.0400, 0.0700]", "123 windows"),
        (replace(OPEN, windows_needed=None), "KL, nats/token", "at most 0.06", "0.0500 [0.0400, 0.0700]", "see below"),
        (OTHER, "baseline", "as accepted", "changed", "a look"),
        (STRANGE, "baseline", "as accepted", "not comparable", "see below"),
        (UNKNOWN, "baseline", "as accepted", "no baseline", "a baseline"),
        (GONE, "measured", "-", "-", "see below"),
        (LACKS, "KL, nats/token", "at most 0.06", "no number", "see below"),
        (SLOW, "prefill 512 time", "at most +10 %", "+25.0 % [+20.0, +30.0]", "20.0 less"),
        (
            replace(SLOW, verdict=INCONCLUSIVE),
            "prefill 512 time",
            "at most +10 %",
            "+25.0 % [+20.0, +30.0]",
            "steadier times",
        ),
        (
            replace(SLOW, name="max_slowdown", verdict=NO_BASELINE, value=None),
            "time",
            "at most +10 %",
            "-",
            "a baseline",
        ),
        (GROWN, "regression", "at most +0.2 %", "+0.50 % [+0.40, +0.60]", "0.40 less"),
        (replace(PPL, low=None, high=None), "perplexity", "at most +4.08 %", "+2.02 %", "nothing"),
    ],
)
def test_a_check(check: Check, name: str, asked: str, found: str, needed: str) -> None:
    assert (words.named(check), words.asked(check), words.found(check), words.needed(check)) == (
        name,
        asked,
        found,
        needed,
    )


def test_a_perplexity_is_told_in_nats_too() -> None:
    assert words.in_nats(BAD_PPL) == "0.0700 [0.0600, 0.0800] nats/token, limit 0.04"
    assert words.in_nats(GROWN) == "0.0050 [0.0040, 0.0060] nats/token, limit 0.002"
    assert [words.in_nats(check) for check in (KLD, TOP, SLOW, OTHER, LACKS)] == [None] * 5


def test_a_loss_beyond_all_measure_is_told() -> None:
    """A model that says nothing: the exponential of 1000 nats is no float."""
    assert words.found(replace(BAD_PPL, value=1000.0, low=900.0, high=1100.0)).startswith("+100000000.00 %")


def test_checks_are_counted_by_verdict_the_worst_first() -> None:
    checks = (*GOOD, BAD_PPL, BAD_TOP, OPEN, OTHER, STRANGE, UNKNOWN, SLOW)
    assert words.counted(checks) == (
        "2 fail, 1 is changed, 1 is not comparable, 1 is slower, 1 is inconclusive, 1 has no baseline, 4 pass"
    )
    assert words.counted([GONE, OTHER, OTHER, UNKNOWN, UNKNOWN, PPL]) == (
        "1 fails, 2 are changed, 2 have no baseline, 1 passes"
    )


def test_the_nearest_is_the_one_that_takes_most_of_its_limit() -> None:
    """0.03 of 0.04, 0.055 of 0.06, 0.12 of 0.17."""
    assert words.nearest(GOOD) == KLD
    assert words.nearest([PPL, TOP]) == PPL
    assert words.nearest([TOP, SAME]) == TOP
    assert words.nearest([SAME]) is None
    assert words.nearest([replace(PPL, limit=0.0, high=-0.1), KLD]) == replace(PPL, limit=0.0, high=-0.1)


ACCEPT = "`quantgate baseline accept`"
LESS = "take a scheme that loses less, or a limit that you accept (gate.limits in params.yaml)"
MORE = "score about 123 windows (corpus.windows in params.yaml; take a longer text if need be)"
WARN = "or let what is undecided pass (gate.inconclusive: warn)"


@pytest.mark.parametrize(
    ("checks", "inconclusive", "verdict", "steps"),
    [
        (GOOD, "fail", "The gate passes: all 4 checks of 1 variant pass.", []),
        ((PPL,), "fail", "The gate passes: 1 check of 1 variant.", []),
        ((*GOOD, BAD_PPL, BAD_TOP), "fail", "The gate fails: of 6 checks of 2 variants 2 fail, 4 pass.", [LESS]),
        ((OPEN,), "fail", "The gate fails: of 1 check of 1 variant 1 is inconclusive.", [MORE, WARN]),
        (
            (OPEN, PPL),
            "warn",
            "The gate passes, with reservations: of 2 checks of 2 variants 1 is inconclusive, 1 passes.",
            [MORE],
        ),
        (
            (OPEN, GROWN),
            "fail",
            None,
            [f"find what made it lose more than the baseline, or {ACCEPT} where that is meant", MORE],
        ),
        (
            (UNKNOWN,),
            "fail",
            "The gate fails: of 1 check of 1 variant 1 has no baseline.",
            [f"look at the figures, then {ACCEPT} on this machine and commit reports/baseline.json", WARN],
        ),
        (
            (replace(SLOW, name="max_slowdown", verdict=NO_BASELINE), PPL),
            "warn",
            None,
            [
                "look at the figures, then `quantgate baseline accept --speed` on this machine and commit "
                "reports/baseline.json"
            ],
        ),
        ((GONE,), "warn", "The gate fails: of 1 check of 1 variant 1 fails.", ["run `dvc repro`"]),
        ((replace(GONE, reason="look"),), "warn", None, ["do what the reasons say"]),
        (
            (OTHER, STRANGE, SLOW),
            "warn",
            None,
            [
                f"see what changed, and where it is meant {ACCEPT} and commit reports/baseline.json",
                f"measure as the baseline was, or {ACCEPT} and commit reports/baseline.json",
                "time it again on a quiet machine, then look for what slowed it",
            ],
        ),
        (
            (replace(OPEN, windows_needed=None),),
            "warn",
            None,
            ["do what the undecided checks say"],
        ),
        (
            (),
            "warn",
            "The gate fails: there is no variant to check.",
            ["name a variant in params.yaml, then run `dvc repro`"],
        ),
    ],
)
def test_the_verdict_and_what_to_do(
    checks: tuple[Check, ...], inconclusive: str, verdict: str | None, steps: list[str]
) -> None:
    gate = result(*checks, inconclusive=inconclusive)
    assert words.next_steps(gate) == steps
    assert verdict is None or words.verdict(gate) == verdict
    last = words.last_line(gate)
    assert last == words.verdict(gate) + (f" Next: {'; '.join(steps)}." if steps else "")


def test_every_verdict_has_a_step() -> None:
    for check in (GONE, BAD_PPL, OTHER, STRANGE, SLOW, UNKNOWN, replace(OPEN, windows_needed=None)):
        assert words.next_steps(result(check, inconclusive="warn"))


def test_what_a_bracket_is() -> None:
    assert words.brackets(result(*GOOD)) == "Brackets are 95 % intervals over 40 windows of text."
    assert words.brackets(result(PPL, SLOW, replace(KLD, windows=12))) == (
        "Brackets are 95 % intervals over 12 or 40 windows of text; of times from the intervals of both medians."
    )
    assert words.brackets(result(SAME, GONE)) is None


def test_details_are_shown_up_to_a_dozen() -> None:
    lines = tuple(f"tensor {i}" for i in range(15))
    assert words.details(replace(OTHER, details=lines[:12])) == [*lines[:12]]
    assert words.details(replace(OTHER, details=lines)) == [*lines[:12], "… and 3 more in reports/gate.json"]


def test_levels() -> None:
    assert words.level(result(OPEN), OPEN) == "error"
    assert words.level(result(OPEN, inconclusive="warn"), OPEN) == "warning"
    assert words.level(result(OTHER, inconclusive="warn"), OTHER) == "error"
    assert words.outcome(result(*GOOD)) == "notice"
    assert words.outcome(result(OPEN, inconclusive="warn")) == "warning"
    assert words.outcome(result(OPEN)) == words.outcome(result(GONE, inconclusive="warn")) == "error"


def test_what_cannot_be_printed_is_left_out() -> None:
    bad = "\x00a\x1b[31m\x7f\x85\ud800\ufffeb\tc\nd·é😀"
    check = Check(bad, bad, None, None, None, None, FAIL, bad, details=(bad,))
    (clean,) = words.printable(result(check)).checks
    assert clean.variant == clean.name == clean.reason == clean.details[0] == "a[31mb\tc\nd·é😀"
    assert clean.verdict == FAIL
    assert words.printable(result(OPEN)) == result(OPEN)


def test_variants_that_stand_alike_are_told_together() -> None:
    groups = {
        "a": (replace(UNKNOWN, variant="a"), replace(PPL, variant="a")),
        "b": (replace(BAD_PPL, variant="b"),),
        "c": (replace(UNKNOWN, variant="c"), replace(PPL, variant="c", value=0.001)),
        "d": (replace(UNKNOWN, variant="d", reason="another"), replace(PPL, variant="d")),
        "e": (replace(UNKNOWN, variant="e"),),  # without a check that passes
    }
    assert words.alike(groups) == [["a", "c"], ["b"], ["d"], ["e"]]
