"""The gate as JUnit XML, which CI systems show as tests: a suite for each variant, a case for each check.

Elements and attributes are those of Jenkins' schema (junit-10.xsd), which GitLab, CircleCI and Azure read as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from xml.etree import ElementTree as xml

from pipeline.checks.verdicts import PASS, Check, Result, failed
from pipeline.gate_output import words

NOTHING = failed("gate", "variants", "there is no variant to check")
"""Of a gate without checks: an empty report would be read as a success."""


def text(result: Result) -> str:
    """A failure for what fails the gate, skipped for what is undecided and only warns. A verdict takes no time: 0."""
    result = words.printable(result)
    checks = result.checks or (NOTHING,)
    root = xml.Element("testsuites", {"name": "quantgate gate", **_counts(result, checks)})
    for variant, of_variant in words.grouped(checks).items():
        skipped = sum(_kind(result, check) == "skipped" for check in of_variant)
        counts = {**_counts(result, of_variant), "skipped": str(skipped)}
        suite = xml.SubElement(root, "testsuite", {"name": variant, **counts})
        for check in of_variant:
            _add(result, suite, check)
    xml.indent(root)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{xml.tostring(root, encoding="unicode")}\n'


def _kind(result: Result, check: Check) -> str | None:
    """The element that says that a case did not pass."""
    if check.verdict == PASS:
        return None
    return "failure" if result.fails(check) else "skipped"


def _counts(result: Result, checks: Sequence[Check]) -> dict[str, str]:
    failures = sum(_kind(result, check) == "failure" for check in checks)
    return {"tests": str(len(checks)), "failures": str(failures), "errors": "0", "time": "0"}


def _add(result: Result, suite: xml.Element, check: Check) -> None:
    case = xml.SubElement(suite, "testcase", {"name": check.name, "classname": check.variant, "time": "0"})
    lines = [f"{words.named(check)}: asked {words.asked(check)}, found {words.found(check)}"]
    lines += filter(None, [words.in_nats(check)])
    kind = _kind(result, check)
    if kind is not None:
        message = f"{check.verdict}: {check.reason}"
        said = xml.SubElement(case, kind, {"message": message})
        if kind == "failure":
            said.set("type", check.verdict)
            said.text = "\n".join([message, *lines, *words.details(check)])
            return
        lines += words.details(check)
    xml.SubElement(case, "system-out").text = "\n".join(lines)
