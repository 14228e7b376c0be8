"""The checkpoint's directory, and its card: how it was made, and how often it was right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from demo_training.songs import KINDS, TEMPOS
from demo_training.sounds import LEADS

Accuracies = Mapping[str, Mapping[str, float]]  # by row, then by what was asked

CARD = """\
# A demo model that listens

A Music Flamingo of {millions:.2f} million parameters, of the real architecture, trained on songs
that a program made. It shows that a server works: its answers about such songs are true, and a
wrong song, moment or second gives a wrong one. It knows nothing of other music.

## What it hears

Songs of 6 to 100 seconds in 4/4: drums, bass, piano chords and a lead ({leads}).
The tempo is {tempos} beats a minute, the key any major or minor one. The parts ({kinds})
come in this order, each at most once, with a lead of its own, and begin at whole seconds.

## What it answers

Tempo, key, chords, instruments, what plays at second N and in which part that is, when a part
begins, which parts a moment holds, a describing sentence, and the built-in presets. For instance:

{examples}

What nobody can know of such a song it answers in words that are always the same. Other wordings
than those of `scripts/demo_training/questions.py` it may misunderstand; about recordings it is
wrong.

## How it was made

`python scripts/train_demo.py OUT_DIR --seed {seed}`, from nothing, on two cores: {training}

## How often it is right

Greedy answers that are true to the letter, in percent, about {num_songs} fresh songs a column, in
float32:

{table}
"""


def write_checkpoint(model: Any, processor: Any, directory: Path, card: str) -> None:
    """As transformers saves it, with the card as README.md; every file may be read by all."""
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory)
    processor.save_pretrained(directory)
    (directory / "README.md").write_text(card, encoding="utf-8")
    for file in directory.iterdir():
        file.chmod(0o644)  # safetensors' own are for their owner alone


def write_card(
    *,
    num_parameters: int,
    seed: int,
    training: str,
    examples: Sequence[tuple[str, str]],
    accuracies: Accuracies,
    num_songs: int,
) -> str:
    return CARD.format(
        millions=num_parameters / 1e6,
        leads=", ".join(LEADS),
        tempos=", ".join(str(tempo) for tempo in TEMPOS),
        kinds=", ".join(KINDS),
        examples="\n".join(f"* {prompt} {answer}" for prompt, answer in examples),
        seed=seed,
        training=training,
        num_songs=num_songs,
        table=format_table(accuracies),
    )


def format_table(accuracies: Accuracies) -> str:
    """A line for each thing that was asked, a column for each row of songs."""
    asked = list(dict.fromkeys(name for row in accuracies.values() for name in row))
    lines = [["", *accuracies], ["---"] * (len(accuracies) + 1)]
    for name in asked:
        cells = [f"{100 * row[name]:.1f}" if name in row else "" for row in accuracies.values()]
        lines.append([name, *cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
