"""What an importance matrix gains on a real checkpoint, and that its weights are llama_model_quantize's, byte for byte.

    python -m benchmarks.imatrix

SmolLM2-135M as Qwen2. The importance matrix is of 32 windows of 512 tokens of a text made of pieces of english.txt.xz,
which lie at equal distances from its beginning to its end; q4_k_m and iq4_xs with and without it are scored on the
first 40 windows of WikiText-2's test split. Minutes. Exits 1 unless both come nearer to the reference, by the whole
95 % interval of the difference in KL by window, and no tensor differs from llama_model_quantize's.
"""

from __future__ import annotations

import lzma
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.convert import run
from benchmarks.material import TEXT, make_smollm, shared
from pipeline import artifact, calibration, corpus, evaluation, torch_forward
from pipeline.formats.gguf import imatrix, reader
from pipeline.formats.gguf.schemes import SCHEMES
from pipeline.formats.gguf.write import FILE
from pipeline.metrics.pairs import by_window, difference
from pipeline.metrics.stats import mean_interval
from pipeline.models import spec_of
from pipeline.report.text import importance
from pipeline.source.checkpoint import Checkpoint
from pipeline.source.tokenizer import Tokenizer
from pipeline.types import Interval, Options

CALIBRATION = Path("data") / "english.txt.xz"
PIECES, CHARACTERS = 40, 2500
WINDOWS, CONTEXT, SCORED = 32, 512, 40
NAMES = ("q4_k_m", "iq4_xs")
SETTINGS: dict[str, Any] = {"threads": 0, "flash_attention": False, "kv_type": "f16"}

PEER = """
import ctypes, sys
import llama_cpp, numpy as np
from gguf import GGUFReader
class Entry(ctypes.Structure):  # llama_model_imatrix_data
    _fields_ = [("name", ctypes.c_char_p), ("data", ctypes.c_void_p), ("size", ctypes.c_size_t)]
stored = {tensor.name: tensor.data for tensor in GGUFReader(sys.argv[4]).tensors}
given = {}
for name in {name.rsplit(".", 1)[0] for name in stored}:  # load_imatrix of quantize.cpp, of matrices that have tokens
    given[name] = np.ascontiguousarray(stored[name + ".in_sum2"] / stored[name + ".counts"])
entries = (Entry * (len(given) + 1))(*((name.encode(), array.ctypes.data, array.size) for name, array in given.items()))
params = llama_cpp.llama_model_quantize_default_params()
params.ftype, params.nthread = int(sys.argv[3]), 0
params.imatrix = ctypes.cast(entries, type(params.imatrix))
sys.exit(llama_cpp.llama_model_quantize(sys.argv[1].encode(), sys.argv[2].encode(), params))
"""


def pieces(path: Path, out: Path) -> Path:
    """A text of PIECES of a larger one, a paragraph's end behind each."""
    text = lzma.open(path, "rt", encoding="utf-8").read()
    starts = np.linspace(0, len(text) - CHARACTERS, PIECES).astype(int)
    out.write_text("\n\n".join(text[start : start + CHARACTERS] for start in starts), encoding="utf-8")
    return out


def shown(interval: Interval) -> str:
    return f"{interval.value:+.5f} [{interval.low:+.5f}, {interval.high:+.5f}]"


def differing(ours: Path, peer: Path) -> int:
    """Tensors whose type or bytes differ."""
    mine, theirs = (reader.hashes(reader.table(path)).each for path in (ours, peer))
    return sum(mine.get(name) != theirs.get(name) for name in mine.keys() | theirs.keys())


def scored(checkpoint: Checkpoint, text: Path, made: Mapping[str, Path], work: Path) -> dict[str, NDArray[np.float64]]:
    """KL divergence by window of each artifact."""
    tokenizer, spec = Tokenizer(checkpoint.path), spec_of(checkpoint.config, checkpoint.shapes)
    windows = corpus.cut("wikitext-2", text, tokenizer, spec, CONTEXT, SCORED)
    torch_forward.write_reference(checkpoint, checkpoint.identity(), windows, work / "reference")
    reference = torch_forward.load_reference(work / "reference", checkpoint)
    return {
        name: by_window(evaluation.evaluate(place, artifact.load(place), windows, reference, SETTINGS)[1].kld)
        for name, place in made.items()
    }


def main() -> None:
    material = shared()
    if material is None:
        return
    good = True
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        path = make_smollm(material, work / "smollm")
        text, file = pieces(material / CALIBRATION, work / "english.txt"), work / "imatrix.gguf"
        with Checkpoint(path) as checkpoint:
            calibration.make(
                checkpoint,
                text,
                WINDOWS,
                CONTEXT,
                [calibration.Text("file", str(material / TEXT), SCORED, CONTEXT)],
                file,
            )
            artifact.convert(path, "gguf", "bf16", work / "base")
            made, used = {}, None
            for scheme in NAMES:
                plain, imat = f"gguf-{scheme}", f"gguf-{scheme}-imat"
                made[plain], made[imat] = work / plain, work / imat
                artifact.convert(path, "gguf", scheme, made[plain])
                used = artifact.convert(path, "gguf", scheme, made[imat], Options(imatrix=file)).imatrix
                peer, ftype = work / f"peer-{scheme}.gguf", str(SCHEMES[scheme].ftype)
                run([sys.executable, "-c", PEER, str(work / "base" / FILE), str(peer), ftype, str(file)])
                differ, count = differing(made[imat] / FILE, peer), len(reader.table(peer))
                print(f"{imat}: {differ} of {count} tensors differ from llama_model_quantize's", flush=True)
                good &= not differ
            assert used is not None
            print(f"{importance(used, known=True)}; {len(imatrix.read(file).tensors)} in the file")
            klds = scored(checkpoint, material / TEXT, made, work)
    print(f"KL to the reference, nats/token, on {SCORED} windows of {CONTEXT} of WikiText-2; then with less without:")
    for name, kld in klds.items():
        print(f"{name:18} {shown(mean_interval(kld))}")
    for scheme in NAMES:
        without, by_it = klds[f"gguf-{scheme}"], klds[f"gguf-{scheme}-imat"]
        gain, better = difference(by_it, without), np.count_nonzero(by_it < without)
        good &= gain.high < 0
        share = gain.value / float(without.mean())
        print(f"{scheme:18} {shown(gain)}, {share:+.1%}, {better} of {SCORED} windows better")
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
