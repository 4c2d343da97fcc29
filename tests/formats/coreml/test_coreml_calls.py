"""Windows, chunks and tokens as the functions of a package take them."""

from __future__ import annotations

import numpy as np
import pytest
from coreml_fakes import SIZES, VOCAB, Toy, expected_reply, prompt, row

from pipeline.errors import MeasurementError
from pipeline.formats.coreml import calls
from pipeline.formats.coreml.calls import Conversation, greedy, score


@pytest.mark.parametrize(("tokens", "start"), [(24, 12), (24, 0), (17, 9), (5, 4)])
def test_rows_of_a_window_are_those_behind_the_start(tokens: int, start: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "ROWS", 5)
    ids, toy = prompt(tokens), Toy()
    found = [*score(toy, SIZES, ids, start)]
    assert all(part.dtype == np.float32 and len(part) <= 5 for part in found)
    expected = np.stack([row(ids[: i + 1]) for i in range(start, tokens)]).astype(np.float32)
    assert np.concatenate(found).tobytes() == expected.tobytes()
    ((function, inputs, state),) = toy.calls
    assert (function, state) == ("score", None)
    assert inputs["input_ids"][0].tolist() == [*ids.tolist(), *[0] * (24 - tokens)]


@pytest.mark.parametrize("tokens", [1, 7, 8, 9, 16, 23])
def test_a_prompt_goes_in_by_chunks_and_tokens_behind_it_one_by_one(tokens: int) -> None:
    ids, toy = prompt(tokens + 3), Toy()
    conversation = Conversation(toy, SIZES)
    found = [conversation.take_in(ids[:tokens]), *(conversation.step(int(token)) for token in ids[tokens:])]
    for i, logits in enumerate(found):
        assert logits.dtype == np.float32
        assert logits.shape == (VOCAB,)
        assert (logits == row(ids[: tokens + i])).all()
    prefills = [inputs for function, inputs, _ in toy.calls if function == "prefill"]
    decodes = [inputs for function, inputs, _ in toy.calls if function == "decode"]
    starts = [*range(0, tokens, 8)]
    assert [inputs["position"].tolist() for inputs in prefills] == [[at] for at in starts]
    assert [inputs["length"].tolist() for inputs in prefills] == [[min(8, tokens - at)] for at in starts]
    assert prefills[-1]["input_ids"][0].tolist() == [*ids[starts[-1] : tokens].tolist(), *[0] * (-tokens % 8)]
    assert [inputs["position"].tolist() for inputs in decodes] == [[tokens + i] for i in range(3)]
    assert len(toy.states) == 1


def test_a_prompt_may_go_on_behind_tokens() -> None:
    ids, toy = prompt(20), Toy()
    conversation = Conversation(toy, SIZES)
    conversation.take_in(ids[:5])
    conversation.step(int(ids[5]))
    assert (conversation.take_in(ids[6:]) == row(ids)).all()


def test_the_reply_is_the_most_likely_and_ends_with_a_stop_token() -> None:
    ids = prompt(11)
    expected = expected_reply(ids, 12)
    assert greedy(Toy(), SIZES, [*ids], 12, ()) == expected
    end = max(set(expected), key=expected.index)  # first comes late
    assert greedy(Toy(), SIZES, [*ids], 12, (end,)) == expected[: expected.index(end) + 1]
    assert greedy(Toy(), SIZES, [*ids], 1, ()) == expected[:1]


def test_each_conversation_has_a_state_of_its_own() -> None:
    toy = Toy()
    for seed in (1, 2):
        greedy(toy, SIZES, [*prompt(9, seed)], 4, ())
    assert len(toy.states) == 2
    assert [state is toy.states[0] for *_, state in toy.calls] == [True] * 5 + [False] * 5


def test_what_fills_the_context_fits() -> None:
    toy = Toy()
    conversation = Conversation(toy, SIZES)
    conversation.take_in(prompt(49))
    conversation.step(1)
    with pytest.raises(MeasurementError, match="a conversation of 51 tokens is longer than the 50 that the package"):
        conversation.step(1)
    assert len(greedy(toy, SIZES, [*prompt(40)], 10, ())) == 10


def test_what_is_too_long_is_refused_before_any_work() -> None:
    toy = Toy()
    with pytest.raises(MeasurementError, match=r"25 tokens is longer than the 24 .* --score-window 25"):
        [*score(toy, SIZES, prompt(25), 12)]
    with pytest.raises(MeasurementError, match=r"51 tokens is longer than the 50 .* --max-context 51"):
        greedy(toy, SIZES, [*prompt(40)], 11, ())
    with pytest.raises(MeasurementError, match="--max-context 51"):
        Conversation(toy, SIZES).take_in(prompt(51))
    with pytest.raises(MeasurementError, match="begins with a token at least: none was given"):
        greedy(toy, SIZES, [], 4, ())
    assert not toy.calls
