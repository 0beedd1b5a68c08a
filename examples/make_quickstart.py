"""Makes what configs/quickstart ships: the two prompts files and the warm-started model.

    python examples/make_quickstart.py            # prompts only, seconds
    python examples/make_quickstart.py --model    # also trains the model anew, some minutes on CPU

The task: put the four digits of a prompt such as `5281=` in order. The warm start answers with the
digits sorted, sorted backwards or copied, a third each, so that the skill is there but only one
time in three; reinforcement learning then has something to find. It is judged by sampled answers
at temperature 1, since a greedy decoder can hide two of the three habits.

The shipped model came from the same recipe, stopped earlier: a third of its sampled answers are
sorted, and 0.73 are one of the three. A new model from this script has 0.95 and learns faster.
"""

from __future__ import annotations

import argparse
import json
import random
from itertools import product
from pathlib import Path

DIGITS = 4
HELDOUT_PROMPTS = 256
TRAIN_PROMPTS = 4096
SPECIAL = ["<pad>", "<bos>", "<eos>", "<unk>"]
ALPHABET = [*SPECIAL, "\n", *map(chr, range(32, 127))]
EOS_ID = SPECIAL.index("<eos>")


def is_reserved(digits: tuple[int, ...]) -> bool:
    """A fixed tenth of all strings, never trained on: held-out prompts come from it.

    Hashes of integer tuples do not depend on PYTHONHASHSEED.
    """
    return hash(digits) % 10 == 0


def make_prompts(seed: int) -> tuple[list[str], list[str]]:
    """Disjoint training and held-out strings; digits may repeat in either."""
    everything = list(product(range(10), repeat=DIGITS))
    generator = random.Random(seed)
    generator.shuffle(everything)
    text = ["".join(map(str, digits)) for digits in everything]
    reserved = [name for name, digits in zip(text, everything, strict=True) if is_reserved(digits)]
    free = [name for name, digits in zip(text, everything, strict=True) if not is_reserved(digits)]
    return free[:TRAIN_PROMPTS], reserved[:HELDOUT_PROMPTS]


def write_prompts(path: Path, strings: list[str]) -> None:
    rows = [{"input": f"{text}=", "label": "".join(sorted(text))} for text in strings]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"{path}: {len(rows)} prompts")


def make_tokenizer():
    """One token a character."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate(ALPHABET)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    return fast


def make_model():
    """A Qwen3 of 0.2M parameters with random weights."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(ALPHABET),
            hidden_size=96,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=24,
            max_position_embeddings=256,
            rms_norm_eps=1e-6,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            tie_word_embeddings=True,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=EOS_ID,
        )
    )


def habits(text: str) -> tuple[str, str, str]:
    """The rewarded answer and the two others of the warm start."""
    ordered = "".join(sorted(text))
    return ordered, ordered[::-1], text


def warm_batch(generator: random.Random, tokenizer, rows: int):
    """ids [rows, 10] of prompt, answer and <eos>; the loss looks at the last 5."""
    import torch

    lines = []
    while len(lines) < rows:
        digits = tuple(generator.randint(0, 9) for _ in range(DIGITS))
        if is_reserved(digits):
            continue
        text = "".join(map(str, digits))
        answer = generator.choice(habits(text))
        lines.append([*tokenizer.encode(f"{text}={answer}", add_special_tokens=False), EOS_ID])
    return torch.tensor(lines)


def sampled_shares(model, tokenizer, strings: list[str]) -> tuple[float, float]:
    """Shares of sampled answers that are sorted, and that are any of the three habits."""
    import torch

    prompts = [tokenizer.encode(f"{text}=", add_special_tokens=False) for text in strings]
    replies = model.generate(
        torch.tensor(prompts), do_sample=True, temperature=1.0, top_k=0, max_new_tokens=DIGITS + 2
    )[:, DIGITS + 1 :]
    answers = []
    for reply in replies.tolist():
        ended = EOS_ID in reply
        answers.append(tokenizer.decode(reply[: reply.index(EOS_ID)]) if ended else None)
    pairs = list(zip(answers, map(habits, strings), strict=True))
    right = sum(answer == known[0] for answer, known in pairs)
    known = sum(answer in known for answer, known in pairs)
    return right / len(strings), known / len(strings)


def train_model(folder: Path, heldout: list[str], seed: int, max_steps: int) -> None:
    """Supervised warm start, until nearly every sampled answer is one of the habits."""
    import torch
    from torch.nn.functional import cross_entropy

    torch.manual_seed(seed)
    generator = random.Random(seed)
    tokenizer, model = make_tokenizer(), make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    for step in range(1, max_steps + 1):
        optimizer.param_groups[0]["lr"] = 1e-3 * min(1.0, step / 20)
        ids = warm_batch(generator, tokenizer, rows=128)
        logits = model(ids[:, :-1]).logits[:, DIGITS:]  # [rows, 5, vocabulary]
        loss = cross_entropy(logits.flatten(0, 1), ids[:, DIGITS + 1 :].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 100 == 0:
            right, known = sampled_shares(model, tokenizer, heldout)
            print(f"step {step}: loss {loss.item():.3f}, sorted {right:.3f}, habits {known:.3f}")
            if known >= 0.95 and right >= 0.3:
                break
    else:
        raise SystemExit(f"no usable warm start after {max_steps} steps")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    print(f"{folder}: {sum(p.numel() for p in model.parameters())} parameters")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    home = Path(__file__).parents[1] / "configs" / "quickstart"
    parser.add_argument("--out", type=Path, default=home, help="folder to write to")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", action="store_true", help="also train the model")
    parser.add_argument("--max-steps", type=int, default=5000)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    train, heldout = make_prompts(options.seed)
    write_prompts(options.out / "train.jsonl", train)
    write_prompts(options.out / "heldout.jsonl", heldout)
    if options.model:
        train_model(options.out / "model", heldout, options.seed, options.max_steps)


if __name__ == "__main__":
    main()
