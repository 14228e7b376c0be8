"""Train the demo checkpoint, from nothing, on two cores: songs by a program, and questions.

    python scripts/train_demo.py OUT_DIR

Ended and started again with the same --work, it goes on where it was.
"""

import argparse
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: its threads shall not spin

import numpy as np
import torch
from demo_training.card import write_card, write_checkpoint
from demo_training.evaluate import ROWS, evaluate
from demo_training.lessons import Scribe
from demo_training.network import SHAPE, build_network
from demo_training.questions import draw_questions
from demo_training.songs import make_song
from demo_training.stages import STAGES, new_trainee, train
from demo_training.tokenizer import build_tokenizer

from adapter.random_model import build_processor


def main() -> int:
    args = parse_arguments()
    torch.set_num_threads(args.threads)
    args.work.mkdir(parents=True, exist_ok=True)
    processor = build_processor(build_tokenizer(), SHAPE)
    scribe = Scribe(processor)
    trainee = new_trainee(build_network(processor.tokenizer, args.seed), scribe, args.seed)
    state = args.work / "state.pt"
    if state.exists():
        trainee.load(state)
    stages = tuple(
        replace(stage, num_steps=max(1, round(stage.num_steps * args.share))) for stage in STAGES
    )
    started = time.monotonic()

    def say(line: str) -> None:
        print(f"{time.monotonic() - started:6.0f} s {line}", flush=True)

    train(trainee, stages, args.seed, state, say)
    accuracies = {}
    for row in ROWS:
        accuracies[row.name] = evaluate(trainee, row, args.songs)
        say(f"fresh songs, {row.name}: {format_accuracies(accuracies[row.name])}")
    card = write_card(
        num_parameters=trainee.model.num_parameters(),
        seed=args.seed,
        training="; ".join(f"{stage.name}, {stage.num_steps} steps" for stage in stages) + ".",
        examples=draw_examples(),
        accuracies=accuracies,
        num_songs=args.songs,
    )
    write_checkpoint(trainee.model, processor, args.directory, card)
    say(f"written to {args.directory}")
    return 0


def draw_examples() -> list[tuple[str, str]]:
    """A question of each kind about one song, with its true answer."""
    rng = np.random.default_rng(0)
    song = make_song(rng, seconds=90, num_parts=5)
    kinds = ("tempo", "key", "second", "part at second", "part begins", "description")
    return [(question.prompt, question.answer) for question in draw_questions(rng, song, kinds)]


def format_accuracies(accuracies: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {share:.1%}" for name, share in accuracies.items())


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path, metavar="OUT_DIR", help="a new or empty directory")
    parser.add_argument(
        "--work", type=Path, default=Path("demo-training"), help="where its state is kept"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--songs", type=int, default=200, help="fresh songs for each row of the evaluation"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--share", type=float, default=1.0, help="the share of all steps to go, for a try"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
