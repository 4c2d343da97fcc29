"""LanguageModel.swift: it is compiled nowhere here, so what can be read of it is."""

from __future__ import annotations

import re

from pipeline.formats.coreml import swift
from pipeline.formats.coreml.plan import Sizes

SIZES = Sizes(64, 200, 100)


def made(source: str = "Qwen/x", stop_ids: tuple[int, ...] = (262, 260)) -> str:
    return swift.text("int8+chunk=64", source, SIZES, stop_ids)


def test_constants_are_the_packages() -> None:
    constants = dict(re.findall(r"static let (\w+)(?:: [^=]+)? = (.+)", made()))
    assert constants == {"chunk": "64", "maxContext": "200", "stopIDs": "[262, 260]"}
    assert "The int8+chunk=64 package of Qwen/x, by quantgate" in made()
    assert "stopIDs: Set<Int32> = []\n" in made(stop_ids=())


def test_functions_and_their_inputs_are_the_packages() -> None:
    text = made()
    assert re.findall(r'load\("(\w+)"\)', text) == ["prefill", "decode"]
    assert re.findall(r'"(\w+)": Self\.value\(.+ shape: (\[.+\])\)', text) == [
        *(("input_ids", "[1, Self.chunk]"), ("position", "[1]"), ("length", "[1]")),
        *(("input_ids", "[1, 1]"), ("position", "[1]")),
    ]
    assert re.findall(r'featureValue\(for: "(\w+)"\)', text) == ["logits"]


def test_it_is_short_whole_and_nothing_of_it_comes_from_a_name() -> None:
    text = made("a\n} import Evil {\\(x)")
    assert [line for line in text.splitlines() if "Evil" in line] == [
        "// The int8+chunk=64 package of a } import Evil {\\(x), by quantgate: token ids in, token ids out."
    ]
    assert len(text.splitlines()) < 90
    assert max(map(len, text.splitlines())) <= 120
    assert text.endswith("}\n")
    code = re.sub(r"//.*", "", text)
    assert [code.count(c) for c in "{[("] == [code.count(c) for c in "}])"]
    assert "{%" not in text
