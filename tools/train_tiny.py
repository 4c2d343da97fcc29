"""Train the embedded checkpoint assets/qwen3-tiny: a Qwen3 of 6.8M parameters with its own tokenizer.

    python tools/train_tiny.py CORPUS.txt.xz OUT --minutes 5

Runs on one CUDA device (or, slowly, on the CPU) and writes OUT as a Hugging Face checkpoint: config.json,
model.safetensors (bfloat16), tokenizer.json, tokenizer_config.json with a chat template, generation_config.json. It
prints the validation loss in nats per token. Needs click, numpy, tokenizers, torch and transformers.
"""

from __future__ import annotations

import json
import lzma
import math
import random
import time
from pathlib import Path

import click
import numpy as np
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

VOCABULARY = 8192
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]  # the last ids of the vocabulary
CONTEXT = 1024
BATCH = 64
PEAK_RATE = 3e-3
WARMUP_STEPS = 200
VALIDATION_TOKENS = 200_000

# Qwen2's split: it is what GGUF readers recognise as the pre-tokenizer "qwen2".
QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def train_tokenizer(documents: list[str]) -> Tokenizer:
    """A byte-level BPE of VOCABULARY ids, special tokens last."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN2_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[],
        show_progress=False,
    )
    tokenizer.train_from_iterator((document[:20_000] for document in documents), trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    return tokenizer


def encode(tokenizer: Tokenizer, documents: list[str]) -> np.ndarray:
    """All documents as one run of ids int32 [tokens], each closed by <|endoftext|>."""
    end = tokenizer.token_to_id(SPECIALS[0])
    ids: list[int] = []
    for encoding in tokenizer.encode_batch(documents):
        ids.extend(encoding.ids)
        ids.append(end)
    return np.array(ids, dtype=np.int32)


def model_config(tokenizer: Tokenizer) -> Qwen3Config:
    end, turn_end = tokenizer.token_to_id(SPECIALS[0]), tokenizer.token_to_id(SPECIALS[2])
    return Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=4096,
        rope_theta=1_000_000.0,
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        bos_token_id=end,
        eos_token_id=turn_end,
    )


def learning_rate(step: int, elapsed: float) -> float:
    """Warm-up by steps, constant to half of the time budget, then linear to 2 %."""
    decay = 1.0 if elapsed < 0.5 else max(0.02, (1 - elapsed) / 0.5)
    return PEAK_RATE * min(1.0, (step + 1) / WARMUP_STEPS) * decay


def next_token_loss(model: Qwen3ForCausalLM, ids: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
    """Cross entropy in nats of ids (B, T+1) int64, each position predicting the next."""
    with torch.autocast(ids.device.type, dtype=torch.bfloat16):
        hidden = model.model(ids[:, :-1]).last_hidden_state  # (B, T, C)
        logits = model.lm_head(hidden)  # (B, T, V)
    return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten(), reduction=reduction)


def train(model: Qwen3ForCausalLM, ids: torch.Tensor, seconds: float) -> int:
    """AdamW on random windows of `ids` until `seconds` have passed; returns the number of steps."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        lr=PEAK_RATE,
        betas=(0.9, 0.95),
        fused=ids.is_cuda,
    )
    loss_of = torch.compile(next_token_loss) if ids.is_cuda else next_token_loss
    generator = torch.Generator(device=ids.device).manual_seed(1)
    span = torch.arange(CONTEXT + 1, device=ids.device)
    start, step = time.perf_counter(), 0
    while (elapsed := (time.perf_counter() - start) / seconds) < 1:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, elapsed)
        offsets = torch.randint(0, len(ids) - CONTEXT - 1, (BATCH,), generator=generator, device=ids.device)
        loss = loss_of(model, ids[offsets[:, None] + span])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        if step % 500 == 0:
            rate = step * BATCH * CONTEXT / (time.perf_counter() - start)
            print(f"step {step}  loss {loss.item():.4f}  {rate / 1e6:.2f}M tokens/s", flush=True)
    return step


@torch.no_grad()
def validation_loss(model: Qwen3ForCausalLM, ids: torch.Tensor) -> float:
    """Mean nats per token over consecutive windows of CONTEXT tokens."""
    total, count = 0.0, 0
    for start in range(0, len(ids) - CONTEXT - 1, CONTEXT):
        total += next_token_loss(model, ids[start : start + CONTEXT + 1][None], "sum").item()
        count += CONTEXT
    return total / count


def save(model: Qwen3ForCausalLM, tokenizer: Tokenizer, out: Path) -> None:
    end, turn_end = (tokenizer.token_to_id(SPECIALS[i]) for i in (0, 2))
    model.generation_config = GenerationConfig(bos_token_id=end, eos_token_id=[turn_end, end], pad_token_id=end)
    model.bfloat16().save_pretrained(out)
    tokenizer.save(str(out / "tokenizer.json"))
    settings = {
        "tokenizer_class": "Qwen2Tokenizer",
        "add_bos_token": False,
        "add_prefix_space": False,
        "bos_token": None,
        "eos_token": SPECIALS[2],
        "pad_token": SPECIALS[0],
        "unk_token": None,
        "model_max_length": 4096,
        "chat_template": CHAT_TEMPLATE,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


@click.command()
@click.argument("corpus", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("out", type=click.Path(file_okay=False, path_type=Path))
@click.option("--minutes", default=5.0, show_default=True, help="Training time, after the tokenizer.")
def main(corpus: Path, out: Path, minutes: float) -> None:
    """Train on CORPUS (UTF-8 text, xz, documents parted by a blank line) and write the checkpoint to OUT."""
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    device = "cuda" if torch.cuda.is_available() else "cpu"

    text = lzma.open(corpus, "rt", encoding="utf-8").read()
    documents = text.split("\n\n")
    random.Random(0).shuffle(documents)
    tokenizer = train_tokenizer(documents)
    ids = torch.from_numpy(encode(tokenizer, documents)).long().to(device)
    print(f"{len(ids)} tokens, {len(text) / len(ids):.2f} characters each")

    model = Qwen3ForCausalLM(model_config(tokenizer)).to(device)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f}M parameters on {device}")
    steps = train(model, ids[:-VALIDATION_TOKENS], minutes * 60)
    model.eval()
    loss = validation_loss(model, ids[-VALIDATION_TOKENS:])
    epochs = steps * BATCH * CONTEXT / (len(ids) - VALIDATION_TOKENS)
    print(f"validation {loss:.4f} nats/token, perplexity {math.exp(loss):.2f}, {steps} steps, {epochs:.1f} epochs")
    save(model, tokenizer, out)


if __name__ == "__main__":
    main()
