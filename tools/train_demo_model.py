"""Makes the demo model: trains its tokenizer, its weights and its draft from one small text, and writes their folders.

    python tools/train_demo_model.py --corpus tinyshakespeare.txt --out models/demo --draft-out models/demo-draft

A new installation must answer without a download, so the model is small and part of the repository. It must also be
reproducible, so this tool and a seed are all that made it. The corpus is not in the repository: --corpus names it, or
it is corpus/tinyshakespeare.txt in the folder that QUIRE_DATA_DIR names.

The text has a megabyte, which a few million weights soon memorize. So several teachers are trained first, with dropout
and random segmentations. The model then learns from the text and from the teachers' averaged distribution. The draft
learns only from the finished model.
"""

from __future__ import annotations

import argparse
import os
import re
import time
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from demo_cards import draft_card, model_card
from demo_corpus import ChatMaker, PlainRows, Speech, Stream, make_stream, split_corpus, text_of
from demo_export import read_weights, write_card, write_folder
from demo_net import Llama, NetShape, generate
from demo_tokenizer import BOS, EOS, PAD, TURN_END, TURN_START, VOCAB_SIZE, Segmenter, token_id, train_tokenizer
from demo_training import BatchSource, Plan, agreement, fit, generate_rows, position_loss, rows_loss, stream_loss
from tokenizers import Tokenizer

COMPLETION_PROMPTS = ("ROMEO:\n", "KING HENRY VI:\n", "First Citizen:\n")
CHAT_PROMPTS = ("Hello, who are you?", "Write a poem about love and death.", "What is the capital of France?")


def shape_of(hidden: int, layers: int, intermediate: int) -> NetShape:
    """Return a shape with query heads of size 32, and half as many key and value heads."""
    heads = hidden // 32
    return NetShape(VOCAB_SIZE, hidden, layers, heads, heads // 2, 32, intermediate)


def flags() -> argparse.Namespace:
    """Command line of the tool."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, help="text of the plays; default: from QUIRE_DATA_DIR")
    parser.add_argument("--out", type=Path, required=True, help="folder of the model")
    parser.add_argument("--draft-out", type=Path, help="folder of the draft; left out, none is made")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cuda", "cpu"])
    parser.add_argument("--seed", type=int, default=1616)
    parser.add_argument("--steps", type=int, default=700, help="most steps of the model; fewer if it stops improving")
    parser.add_argument("--teachers", type=int, default=3, help="0 trains the model on the text alone")
    parser.add_argument("--teacher-steps", type=int, default=600)
    parser.add_argument("--draft-steps", type=int, default=1200)
    parser.add_argument("--step-tokens", type=int, default=32768)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048, 8192], help="row lengths, shortest first")
    parser.add_argument("--length-shares", type=float, nargs="+", default=[0.7, 0.15, 0.15])
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--intermediate", type=int, default=704)
    parser.add_argument("--teacher-dropout", type=float, default=0.3)
    parser.add_argument("--dropout", type=float, default=0.15)
    parser.add_argument("--bpe-dropout", type=float, default=0.1)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--weight-decay", type=float, default=0.5)
    parser.add_argument("--tolerance", type=float, default=0.08, help="nats of held-out loss to give for later weights")
    parser.add_argument(
        "--generated-share", type=float, default=0.0, help="share of the model's short rows by teachers"
    )
    parser.add_argument("--soft", type=float, default=0.6, help="share of the loss that follows the teachers")
    parser.add_argument("--chat-rows", type=int, default=3072, help="conversations of the shortest row length to make")
    parser.add_argument("--generate-rows", type=int, default=512, help="rows a teacher writes at a time")
    parser.add_argument(
        "--generate-batches", type=int, default=6, help="how many times, for the model and for the draft"
    )
    return parser.parse_args()


def corpus_path(given: Path | None) -> Path:
    """Return the corpus that was named, or the corpus in the data folder."""
    if given is not None:
        return given
    folder = os.environ.get("QUIRE_DATA_DIR")
    if not folder:
        raise SystemExit(
            "no corpus: give --corpus FILE, or set QUIRE_DATA_DIR to a folder with corpus/tinyshakespeare.txt"
        )
    return Path(folder) / "corpus" / "tinyshakespeare.txt"


@dataclass(frozen=True)
class HeldOut:
    """The text that the model never trains on, and the measurements with it."""

    tokenizer: Tokenizer
    validation: Stream
    test: Stream
    both: Stream
    chats: np.ndarray
    window: int
    longest: int

    @property
    def bos(self) -> int:
        """Every window begins with it."""
        return token_id(self.tokenizer, BOS)

    def score(self, net: Llama) -> float:
        """Return the score that chooses a checkpoint: the mean of the losses on plain text and on conversations."""
        net.eval()
        plain = stream_loss(net, self.validation, self.bos, self.window, self.window).mean()
        return float(plain + rows_loss(net, self.chats, token_id(self.tokenizer, PAD))) / 2

    def figures(self, net: Llama) -> dict[str, float]:
        """Losses in nats per token, by name, and bits per byte."""
        found = {
            "validation": float(stream_loss(net, self.validation, self.bos, self.window, self.window).mean()),
            "test": float(stream_loss(net, self.test, self.bos, self.window, self.window).mean()),
            "chat": rows_loss(net, self.chats, token_id(self.tokenizer, PAD)),
        }
        found["bits per byte"] = found["test"] / np.log(2) * len(self.test.tokens) / self.test.text_bytes
        longest = min(self.longest, len(self.both.tokens) // 2)
        stride = longest // 16
        by_position = position_loss(net, self.both, self.bos, longest, stride)
        for low, high in pairwise((0, 1, 2, 4, 8, 16)):
            found[f"positions {low * stride}-{high * stride}"] = float(by_position[low:high].mean())
        return found


def samples(net: Llama, tokenizer: Tokenizer, seed: int) -> list[tuple[str, str, str]]:
    """Return (kind, prompt, answer) of some completions and conversations, sampled at 0.8 and greedily."""
    device = next(net.parameters()).device
    bos, eos, turn_end = (token_id(tokenizer, token) for token in (BOS, EOS, TURN_END))
    found: list[tuple[str, str, str]] = []
    for index, prompt in enumerate((*COMPLETION_PROMPTS, *CHAT_PROMPTS)):
        chat = prompt in CHAT_PROMPTS
        text = f"{TURN_START}user\n{prompt}{TURN_END}\n{TURN_START}assistant\n" if chat else prompt
        ids = [bos, *tokenizer.encode(text, add_special_tokens=False).ids]
        generator = torch.Generator(device).manual_seed(seed + index)
        rows = torch.tensor([ids, ids], device=device)
        answers = generate(net, rows, 160, (0.8, 0.0), generator, stop_ids=(eos, turn_end))[:, len(ids) :].tolist()
        for kind, answer in zip(("temperature 0.8", "greedy"), answers, strict=True):
            stop = next((at for at, token in enumerate(answer) if token in (eos, turn_end)), None)
            ending = "" if stop is None else " <end>"
            found.append((kind, prompt, tokenizer.decode(answer[:stop]) + ending))
    return found


def texture(net: Llama, prompts: BatchSource, tokenizer: Tokenizer, known: set[str], seed: int) -> dict[str, float]:
    """Measure what losses do not show: how many words of text at temperature 0.8 exist, and how soon greedy text
    repeats itself."""
    device = next(net.parameters()).device
    bos, eos, pad = (token_id(tokenizer, token) for token in (BOS, EOS, PAD))
    generator = torch.Generator(device).manual_seed(seed)
    starts = torch.from_numpy(prompts.prompts(64, 24, chat=False)).to(device, torch.long)
    heat = [0.8] * 32 + [0.0] * 32
    rows = generate(net, starts, 200, heat, generator)[:, starts.shape[1] :].tolist()
    words = [word for row in rows[:32] for word in re.findall(r"[a-z']+", tokenizer.decode(row).lower())[1:-1]]
    fresh = []
    for row in rows[32:]:
        runs = [tuple(row[at : at + 8]) for at in range(len(row) - 7) if not {bos, eos, pad} & set(row[at : at + 8])]
        fresh.append(len(set(runs)) / max(1, len(runs)))
    existing = sum(word in known for word in words) / max(1, len(words))
    return {"existing words at 0.8": existing, "greedy runs of 8 that are new": float(np.mean(fresh))}


def print_report(name: str, net: Llama, figures: dict[str, float], shown: list[tuple[str, str, str]]) -> None:
    """Print all figures of the card, for the person who watches the run."""
    print(f"== {name}: {net.shape.parameters} parameters")
    for figure, value in figures.items():
        print(f"   {figure}: {value:.4f}")
    for kind, prompt, answer in shown:
        print(f"-- {kind}: {prompt!r}\n{answer}", flush=True)


def prepare(args: argparse.Namespace, rng: np.random.Generator) -> tuple[Tokenizer, HeldOut, BatchSource, BatchSource]:
    """Return the tokenizer, held-out measures, training rows, and rows of held-out text for prompts."""
    split = split_corpus(corpus_path(args.corpus).read_text(encoding="utf-8"))
    tokenizer = train_tokenizer(text_of(split.train))
    segmenter = Segmenter(tokenizer, args.bpe_dropout, 8, rng)
    pad = token_id(tokenizer, PAD)

    def stream(speeches: list[Speech]) -> Stream:
        return make_stream(speeches, segmenter, noisy=False)

    held_speeches = split.validation + split.test
    held_chats = ChatMaker(split.validation, tokenizer, segmenter, rng)
    shortest = args.lengths[0]
    held_out = HeldOut(
        tokenizer,
        stream(split.validation),
        stream(split.test),
        stream(held_speeches),
        np.stack([held_chats.row(min(513, shortest + 1), noisy=False) for _ in range(32)]),
        window=min(1024, args.lengths[-1]),
        longest=args.lengths[-1],
    )
    streams = [make_stream(split.train, segmenter, noisy=index > 0) for index in range(9)]
    pools = {length: max(4, args.chat_rows * shortest // (2 * length)) for length in args.lengths[1:]}
    chats = ChatMaker(split.train, tokenizer, segmenter, rng)
    source = BatchSource(PlainRows(streams, tokenizer, rng), chats, {shortest: args.chat_rows, **pools}, rng, pad)
    prompts = BatchSource(
        PlainRows([held_out.both], tokenizer, rng),
        ChatMaker(held_speeches, tokenizer, segmenter, rng),
        {shortest: 128},
        rng,
        pad,
    )
    ratio = streams[0].text_bytes / len(streams[0].tokens)
    counts = f"{len(streams[0].tokens)} tokens, {len(streams[1].tokens)} in a noisy segmentation"
    print(f"training text: {counts}, {ratio:.2f} bytes per token")
    return tokenizer, held_out, source, prompts


def main() -> None:
    args = flags()
    began = time.monotonic()
    device = torch.device(args.device)
    rng = np.random.default_rng(args.seed)
    tokenizer, held_out, source, prompts = prepare(args, rng)
    eos = token_id(tokenizer, EOS)
    known = set(re.findall(r"[a-z']+", corpus_path(args.corpus).read_text(encoding="utf-8").lower()))
    print(f"data ready after {time.monotonic() - began:.0f} s", flush=True)
    shape = shape_of(args.hidden, args.layers, args.intermediate)
    base = Plan(
        steps=args.teacher_steps,
        step_tokens=args.step_tokens,
        lengths=tuple(args.lengths),
        length_shares=tuple(args.length_shares),
        learning_rate=args.learning_rate,
        weight_decay=args.weight_decay,
        chat_share=0.5,
        noisy_share=0.5 if args.bpe_dropout else 0.0,
    )

    def fresh(wanted: NetShape, dropout: float, seed: int) -> Llama:
        torch.manual_seed(seed)
        return Llama(wanted, dropout).to(device)

    def written(teachers: list[Llama], temperatures: tuple[float, ...], seed: int) -> np.ndarray:
        rows, batches = args.generate_rows, args.generate_batches
        return generate_rows(teachers, source, args.lengths[0] + 1, rows, batches, temperatures, eos, seed)

    teachers: list[Llama] = []
    for index in range(args.teachers):
        seed = args.seed + 1 + index
        teacher = fresh(shape, args.teacher_dropout, seed)
        fit(f"teacher {index}", teacher, [], source, base, held_out.score, seed)
        teachers.append(teacher)
    plan = replace(base, steps=args.steps, tolerance=args.tolerance, noisy_share=0.0)
    if teachers:
        plan = replace(plan, soft=args.soft, generated_share=args.generated_share)
        if args.generated_share:
            source.generated = written(teachers, (0.8, 1.0), args.seed)
    net = fresh(shape, args.dropout if teachers else args.teacher_dropout, args.seed)
    fit("model", net, teachers, source, plan, held_out.score, args.seed)
    write_folder(args.out, net, tokenizer)
    net = read_weights(args.out, shape, device)
    figures, shown = held_out.figures(net), samples(net, tokenizer, args.seed)
    looks = texture(net, prompts, tokenizer, known, args.seed)
    size = (args.out / "model.safetensors").stat().st_size
    write_card(args.out, model_card(net, figures, looks, shown, size, args))
    print_report("model", net, figures | looks, shown)

    if args.draft_out is not None:
        source.generated = written([net], (0.0, 0.7, 0.8, 1.0), args.seed)
        draft_shape = shape_of(128, 2, 448)
        draft = fresh(draft_shape, 0.0, args.seed)
        plan = replace(
            base, steps=args.draft_steps, noisy_share=0.0, soft=1.0, generated_share=0.7, patience=args.draft_steps
        )
        rows, length = min(64, args.generate_rows), args.lengths[0]
        sets = {
            name: generate_rows([net], prompts, length, rows, 2, (heat,), eos, args.seed)
            for name, heat in (("greedy", 0.0), ("temperature 0.8", 0.8))
        }

        def disagreement(candidate: Llama) -> float:
            candidate.eval()
            return -sum(agreement(candidate, net, part, skip=32).accepted_of_4 for part in sets.values())

        fit("draft", draft, [net], source, plan, disagreement, args.seed)
        write_folder(args.draft_out, draft, tokenizer)
        draft = read_weights(args.draft_out, draft_shape, device)
        found = {name: agreement(draft, net, part, skip=32) for name, part in sets.items()}
        figures = held_out.figures(draft)
        size = (args.draft_out / "model.safetensors").stat().st_size
        write_card(args.draft_out, draft_card(draft, figures, size, found, args))
        print_report("draft", draft, figures, [])
        for name, value in found.items():
            print(f"   {name}: same greedy choice {value.rate:.4f}, accepted of 4 {value.accepted_of_4:.3f}")
    print(f"done in {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
