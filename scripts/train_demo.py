"""Train the demo checkpoint, from nothing, on two cores: songs by a program, and questions.

    python scripts/train_demo.py OUT_DIR

Ended and started again with the same --work, it goes on where it was.
"""

import argparse
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: its threads shall not spin

import torch
from demo_training.lessons import Scribe
from demo_training.network import SHAPE, build_network
from demo_training.stages import STAGES, new_trainee, train
from demo_training.tokenizer import build_tokenizer

from adapter.demo_model import build_processor


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
    train(
        trainee,
        stages,
        args.seed,
        state,
        lambda line: print(f"{time.monotonic() - started:6.0f} s {line}", flush=True),
    )
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path, metavar="OUT_DIR", help="a new or empty directory")
    parser.add_argument(
        "--work", type=Path, default=Path("demo-training"), help="where its state is kept"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--share", type=float, default=1.0, help="the share of all steps to go, for a try"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
