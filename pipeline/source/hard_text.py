"""A text on which tokenizers part: an artifact that carries its own must read it as the checkpoint's does.

It is in Unicode's composed form (NFC). Qwen's tokenizer.json composes a text first and llama.cpp has no such step, so
decomposed text, as an e with its accent behind it, is read otherwise from a GGUF: a limit of that format.
"""

from __future__ import annotations

import unicodedata

from pipeline.source.tokenizer import Tokenizer

SAMPLED = 4096  # tokens of the vocabulary, evenly spaced: all would take seconds

PARTS = (
    "The quick brown fox, in the heath: then THE Heath\u2014and so on.",
    # contractions in either case, with another apostrophe, at the beginning of a word
    "don't I'LL we'Ve he's SHE'S they'd 'twas 'S 're'm'd'LL o'clock it\u2019s 'tis'",
    # white space: runs, before and behind line ends, and what Unicode counts as such
    "a  b   c    d\te\t\tf \t g\r\nh\r\n\r\n\r\ni\n\n\n  j \n k\r l\v\f m   \n",
    " lead and trail  \n\n \n  \t\n\u00a0a\u00a0\u00a0b \u00a0c\u3000d\u3000\u3000e\u2028f\u2029"
    "g\u0085h\u1680i\u2003j\u202fk",
    # digits and other numbers, each of which is split off
    "0123456789 3.14159 1,000,000 2\u00b2\u00b3\u00b9 x\u2070\u2074 \u00bd\u00be1 \u2160\u2163\u217a \u2460\u2473 "
    "\u0661\u0662\u0663 \u0967\u0968 \uff11\uff12 \U0001d7d8 v1.2.3-rc4 0xDEADBEEF 1e-10 7th A4",
    # letters of many scripts, some that have no case, some beyond the basic plane
    "na\u00efve caf\u00e9 \u00dcn\u00efcode \u017fta\u017f stra\u00dfe \u01c5ungla \u02b0a \u00aa\u00ba fianc\u00e9e's",
    "\u0440\u0443\u0441\u0441\u043a\u0438\u0439 \u03b5\u03bb\u03bb\u03b7\u03bd\u03b9\u03ba\u03ac "
    "\u65e5\u672c\u8a9e\u3068\u4e2d\u6587\u3002\u6c49\u5b57\uff0c\u30ab\u30bf\u30ab\u30ca \ud55c\uad6d\uc5b4",
    "\u0627\u0644\u0639\u0631\u0628\u064a\u0629 \u0643\u0650\u062a\u064e\u0627\u0628 "
    "\u05e2\u05d1\u05e8\u05d9\u05ea \u05e9\u05b8\u05dc\u05d5\u05b9\u05dd",
    "\u0939\u093f\u0928\u094d\u0926\u0940 \u0e44\u0e17\u0e22 \u0e20\u0e32\u0e29\u0e32 \u0baf\u0bbe "
    "Ti\u1ebfng Vi\u1ec7t \U00010348\U00010330 \U0001d49c\U0001d4b7 \U00020000\U0002a6d6",
    # marks that compose with nothing
    "q\u0323\u0307 x\u0301\u0302 \u20e0 a\u0488",
    # one of each kind before a contraction, which shows whether it counts as a letter, a number or neither
    "a's 1's \u00b2's \u00bd's \u2163's \u0663's \u00e9's \u65e5's \ud55c's \u0627's \u05d0's \U00010348's \u00aa's "
    "\u02b0's \u01c5's \u00e1\u0302's x\u0301's q\u0323'll \u0915\u093f's _'s \u20ac's \U0001f600's \u200d's \u00ad's "
    "\ue000's \u00a0's",
    # emoji: joined, with skin tones, flags, with a variation selector
    "\U0001f600\U0001f680 \U0001f469\U0001f3fd\u200d\U0001f680 "
    "\U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466 \U0001f1eb\U0001f1f7\U0001f1ef\U0001f1f5 "
    "\u2764\ufe0f 1\ufe0f\u20e3 \u263a",
    # nothing to see: zero width, direction, controls, private, not a character
    "a\u200bb\u200cc\u200dd\u2060e\ufefff\u00adg \u202ert\u202c \u0000 \u0001\u0007\u001b[0m\u001c\u001f\u007f\u0090 "
    "\ue000\uf8ff\U0010fffd \ufffd\ufffd\uffff",
    # punctuation, symbols, code
    "!!!??? ...--- \u00bfqu\u00e9? \u00abmot\u00bb \u201ca\u201d \u20ac5 $x_1 #tag @you a/b\\c ~^`|<>[]{}()*&%+=;:\r\n",
    "def f(x: int) -> str:\n\treturn f\"{x!r}\"  # done\n\n\n    if a&&b||!c{i++;}\n<a href='#'>&amp;</a>\n",
    # almost a special token
    "<|im_end |> <|im_ end|> <|im_end| <im_end> <|IM_END|> <||> <|",
    # words without an end
    "supercalifragilistic" * 60 + " " + "aB" * 600 + " " + "\u6f22" * 300 + " " + "=" * 300 + " " * 300 + "\n" * 50,
)


def hard_text(tokenizer: Tokenizer) -> str:
    """PARTS, each of the checkpoint's added tokens alone, within words and side by side, and the text of some of its
    vocabulary, which would show a merge that is lost.
    """
    added = tokenizer.added_tokens
    written = "".join(f"x{token}y {token} z\n {token}\n\n" for token in added)
    texts = [*PARTS, written, "".join(added), "".join(reversed(added)), *tokenizer.sample(SAMPLED)]
    return unicodedata.normalize("NFC", "\n".join(texts))
