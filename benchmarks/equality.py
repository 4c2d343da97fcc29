"""Every scheme's tensors against llama_model_quantize's on a real checkpoint: how many differ, and how large both are.

    python -m benchmarks.equality

SmolLM2-135M as Qwen2. tests/formats/gguf/test_oracle.py does the same over a matrix of small shapes, and of mixes.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from benchmarks.convert import PEER, run
from benchmarks.material import make_smollm, shared
from pipeline import artifact
from pipeline.formats.gguf import reader
from pipeline.formats.gguf.schemes import SCHEMES
from pipeline.formats.gguf.write import FILE


def hashes(path: Path) -> dict[str, str]:
    """A hash of each tensor's type and bytes."""
    return reader.hashes(reader.table(path)).each


def main() -> None:
    material = shared()
    if material is None:
        return
    differences = 0
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        checkpoint = make_smollm(material, work / "smollm")
        artifact.convert(checkpoint, "gguf", "bf16", work / "base")
        print("SmolLM2-135M as Qwen2: tensors whose type or bytes are not llama_model_quantize's")
        print(f"{'scheme':8} {'tensors':>8} {'differ':>7} {'ours, bytes':>12} {'peer, bytes':>12}")
        for name, scheme in SCHEMES.items():
            made = artifact.convert(checkpoint, "gguf", name, work / name)
            peer = work / "peer.gguf"
            run([sys.executable, "-c", PEER, str(work / "base" / FILE), str(peer), str(scheme.ftype)])
            ours, theirs = hashes(work / name / FILE), hashes(peer)
            differ = sum(ours.get(tensor) != theirs.get(tensor) for tensor in ours.keys() | theirs.keys())
            differences += differ
            sizes = f"{made.size_bytes:12,} {peer.stat().st_size:12,}"
            print(f"{name:8} {len(ours):8} {differ:7} {sizes}", flush=True)
            (work / name / FILE).unlink()
    sys.exit(1 if differences else 0)


if __name__ == "__main__":
    main()
