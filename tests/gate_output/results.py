"""A gate's results made by hand."""

from __future__ import annotations

from dataclasses import replace

from pipeline.checks.verdicts import (
    CHANGED,
    FAIL,
    INCONCLUSIVE,
    NO_BASELINE,
    NOT_COMPARABLE,
    PASS,
    SLOWER,
    Check,
    Result,
    failed,
)

WITHIN, BEYOND = "the whole 95 % interval is within the limit", "the whole 95 % interval is beyond the limit"
PPL = Check("a", "max_ln_ppl_ratio", 0.04, 0.02, 0.01, 0.03, PASS, WITHIN, windows=40)
KLD = Check("a", "max_kld_mean", 0.06, 0.05, 0.04, 0.055, PASS, WITHIN, windows=40)
TOP = Check("a", "min_same_top", 0.83, 0.9, 0.88, 0.92, PASS, WITHIN, windows=40)
SAME = Check("a", "baseline", None, None, None, None, PASS, "its tensors and scores are those accepted")
BAD_PPL = Check("b", "max_ln_ppl_ratio", 0.04, 0.07, 0.06, 0.08, FAIL, BEYOND, None, 1e-6, (), 40)
BAD_TOP = Check("b", "min_same_top", 0.83, 0.8, 0.79, 0.81, FAIL, BEYOND, None, 1e-6, (), 40)
OPEN = Check(
    "b",
    "max_kld_mean",
    0.06,
    0.05,
    0.04,
    0.07,
    INCONCLUSIVE,
    "the limit lies in the interval; about 123 windows would decide it, 40 were used",
    123,
    windows=40,
)
OTHER = Check(
    "c",
    "baseline",
    None,
    None,
    None,
    None,
    CHANGED,
    "2 tensors differ",
    details=("x: Q8_0, was Q4_0", "y: F32, was F16"),
)
GONE = failed("d", "measured", "it was not measured: run dvc repro")
LACKS = Check("d", "max_kld_mean", 0.06, None, None, None, FAIL, "the number is missing: run dvc repro", windows=40)
STRANGE = Check("e", "baseline", None, None, None, None, NOT_COMPARABLE, "its corpus is file, the baseline's sample")
UNKNOWN = Check("e", "baseline", None, None, None, None, NO_BASELINE, "no record of this engine")
SLOW = Check("e", "max_slowdown_prefill_512", 0.1, 0.25, 0.2, 0.3, SLOWER, "the whole interval is beyond the limit")
GROWN = Check("e", "max_regression", 0.002, 0.005, 0.004, 0.006, FAIL, BEYOND, None, 1e-6, (), 40)
GOOD = (PPL, KLD, TOP, SAME)


def result(*checks: Check, inconclusive: str = "fail") -> Result:
    return Result(checks, inconclusive)


def many(variants: int = 15) -> Result:
    """Five checks of each variant; of three variants something does not pass."""
    checks = []
    for i in range(variants):
        name = f"gguf-q{i}_k_m"
        bad = {3: (BAD_PPL, OPEN, BAD_TOP, OTHER, SLOW), 7: (PPL, KLD, TOP, UNKNOWN, SLOW), 9: (PPL, OPEN, TOP, SAME)}
        checks += [
            replace(check, variant=name) for check in bad.get(i, (*GOOD, replace(SLOW, verdict=PASS, high=0.05)))
        ]
    return result(*checks)
