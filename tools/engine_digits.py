"""Whether two machines, or two builds of llama.cpp, compute the same digits: run it on both and compare.

    python -m tools.engine_digits

Converts the embedded checkpoint by several schemes and scores a few windows of its text. Equal lines are equal bytes of
all tensors, and equal logits to the last bit.
"""

from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path

import numpy as np

from pipeline import artifact, corpus
from pipeline.cores import cpu_name
from pipeline.formats.gguf.run import open_runtime
from pipeline.models import spec_of
from pipeline.source.checkpoint import Checkpoint
from pipeline.source.tokenizer import Tokenizer

CHECKPOINT = Path(__file__).parent.parent / "assets" / "qwen3-tiny"
SCHEMES = ("bf16", "q8_0", "q6_k", "q5_k_m", "q5_0", "q4_k_m", "q4_0", "iq4_xs", "q2_k")
WINDOWS, CONTEXT = 3, 512


def main() -> None:
    with Checkpoint(CHECKPOINT) as checkpoint:
        text = corpus.text_path("sample", None)
        windows = corpus.cut("sample", text, Tokenizer(CHECKPOINT), spec_of(checkpoint.config), CONTEXT, WINDOWS)
    with tempfile.TemporaryDirectory() as folder:
        for scheme in SCHEMES:
            out = Path(folder) / scheme
            made = artifact.convert(CHECKPOINT, "gguf", scheme, out)
            runtime = open_runtime(out, made, context=CONTEXT)
            if scheme == SCHEMES[0]:
                print(f"{cpu_name()}: {runtime.engine.version}, {runtime.engine.instruction_set}")
            logits = hashlib.sha256()
            for ids in windows.ids:
                for rows in runtime.score(ids, 0):
                    logits.update(np.ascontiguousarray(rows).data)
            runtime.close()
            print(f"{scheme:8} tensors {made.tensors_sha256[:16]}  logits {logits.hexdigest()[:16]}")


if __name__ == "__main__":
    main()
