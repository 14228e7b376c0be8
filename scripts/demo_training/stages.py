"""The training: its stages, one after the other, and what is kept so that it can go on."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Subset

from demo_training.clock import NUM_CODE_DIMS
from demo_training.handover import hand_over
from demo_training.hearing import EMBEDDINGS_A_SECOND, answer_logits, hear, prefill
from demo_training.lessons import HEADS, IGNORED, Course, Lesson, Lessons, Rows, Scribe
from demo_training.questions import PRESETS

SAVE_SECONDS = 60
PRINT_STEPS = 50
WARM_UP_STEPS = 50
CLIP_NORM = 1.0
NOISE = 0.4  # beside what is heard, whose root mean square is about 1
WEIGHT_DECAY = 0.0  # it would wear out what is held

SECONDS = ("second",) * 10 + ("part at second",) * 4
LOOK_UPS = ("part begins", "part's lead", "part's lead")
WHOLE = ("tempo", "key", "chords", "lead", "instruments", "parts", "description")
SMALL = ("mood", "singer", "maker")
ALL_KINDS = SECONDS + LOOK_UPS + WHOLE + SMALL
MEASURED = ("music_theory", "catalog_metadata", "song_description", "mood_tags")
LATE_KINDS = ALL_KINDS + ("late second",) * 4
ALL_PRESETS = ("music_theory",) * 3 + MEASURED * 3 + tuple(PRESETS)


@dataclass(frozen=True, slots=True)
class Stage:
    """`rates` are AdamW's, from its start to its end along a half cosine. Before one that `speaks`,
    only the encoder and the projector learn, by what HEADS tell of each second; where it is the
    first to speak, the language model is handed what they learned."""

    name: str
    num_steps: int
    rates: tuple[float, float]
    course: Course
    speaks: bool = True
    is_handed: bool = False


STAGES = (  # of several parts: in a song of one, whatever plays anywhere is right at any second
    Stage("hear", 900, (2e-3, 1.2e-3), Course(8, (8, 14), (1, 2)), speaks=False),
    Stage("listen", 1200, (1.2e-3, 1e-3), Course(5, (14, 30), (2, 5)), speaks=False),
    Stage("speak", 800, (1.5e-3, 1.2e-3), Course(6, (8, 20), (2, 4), ALL_KINDS), is_handed=True),
    Stage("window", 900, (1.2e-3, 1e-3), Course(4, (12, 30), (2, 5), ALL_KINDS, ALL_PRESETS, 2)),
    Stage("minute", 800, (1e-3, 7e-4), Course(3, (30, 60), (2, 5), LATE_KINDS, ALL_PRESETS, 2)),
    Stage("song", 900, (7e-4, 3e-5), Course(2, (12, 100), (1, 5), LATE_KINDS, ALL_PRESETS, 3)),
)


@dataclass(slots=True)
class Trainee:
    """The model in training, with the heads that it loses at the end."""

    model: Any
    heads: nn.ModuleDict
    optimizer: torch.optim.Optimizer
    scribe: Scribe
    stage: int = 0
    step: int = 0

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "heads": self.heads.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "stage": self.stage,
            "step": self.step,
        }

    def load(self, path: Path) -> None:
        state = torch.load(path, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.heads.load_state_dict(state["heads"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.stage, self.step = state["stage"], state["step"]


def new_trainee(model: Any, scribe: Scribe, seed: int) -> Trainee:
    torch.manual_seed(seed)
    width = model.config.text_config.hidden_size - NUM_CODE_DIMS
    heads = nn.ModuleDict({name: nn.Linear(width, classes) for name, classes in HEADS.items()})
    weights = [*model.parameters(), *heads.parameters()]
    optimizer = torch.optim.AdamW(weights, betas=(0.9, 0.98), weight_decay=WEIGHT_DECAY)
    return Trainee(model, heads, optimizer, scribe)


def train(
    trainee: Trainee, stages: tuple[Stage, ...], seed: int, path: Path, say: Callable[[str], None]
) -> None:
    """Go through the stages from where the trainee is; its state is kept at `path`."""
    trainee.model.train()
    saved = time.monotonic()
    while trainee.stage < len(stages):
        stage = stages[trainee.stage]
        if stage.is_handed and trainee.step == 0:
            hand_over(trainee.model, trainee.heads, torch.Generator().manual_seed(seed))
        progress = Progress(stage, trainee.step, say)
        for lesson in lessons_of(trainee, stage, seed):
            set_rate(trainee.optimizer, stage, trainee.step)
            torch.manual_seed(hash((seed, trainee.stage, trainee.step)))  # the noise's
            progress.note(*learn(trainee, stage, lesson))
            trainee.step += 1
            if time.monotonic() - saved > SAVE_SECONDS:
                save(trainee, path)
                saved = time.monotonic()
        trainee.stage, trainee.step = trainee.stage + 1, 0
        save(trainee, path)
        save(trainee, path.with_name(f"after-{stage.name}.pt"))


def save(trainee: Trainee, path: Path) -> None:
    """Written beside, then renamed: a kill leaves the old state or the new."""
    fresh = path.with_suffix(".new")
    torch.save(trainee.state(), fresh)
    fresh.replace(path)


def lessons_of(trainee: Trainee, stage: Stage, seed: int) -> Iterator[Lesson]:
    """Those that are left, made one ahead by a process of its own."""
    lessons = Lessons(stage.course, (seed, trainee.stage), stage.num_steps, trainee.scribe)
    left = Subset(lessons, range(trainee.step, stage.num_steps))
    yield from DataLoader(
        left, batch_size=None, num_workers=1, prefetch_factor=4, multiprocessing_context="spawn"
    )


def set_rate(optimizer: torch.optim.Optimizer, stage: Stage, step: int) -> None:
    first, last = stage.rates
    done = step / stage.num_steps
    rate = last + (first - last) * (1 + math.cos(math.pi * done)) / 2
    for group in optimizer.param_groups:
        group["lr"] = rate * min(1.0, (step + 1) / WARM_UP_STEPS)


def learn(trainee: Trainee, stage: Stage, lesson: Lesson) -> tuple[float, Counter[str]]:
    """One step. Returns the loss, and what was right of what was asked, under "NAME right" and
    "NAME asked"."""
    audio = hear(trainee.model, lesson.features, lesson.seconds)
    counts: Counter[str] = Counter()
    loss = heads_loss(trainee.heads, audio, lesson, counts) + loudness_loss(audio)
    if stage.speaks:
        loss = loss + answers_loss(trainee, audio, lesson, counts)
    trainee.optimizer.zero_grad(set_to_none=True)
    loss.backward()  # type: ignore[no-untyped-call]
    weights = [w for group in trainee.optimizer.param_groups for w in group["params"]]
    nn.utils.clip_grad_norm_(weights, CLIP_NORM)
    trainee.optimizer.step()
    return loss.item(), counts


def heads_loss(heads: nn.ModuleDict, audio: Tensor, lesson: Lesson, counts: Counter[str]) -> Tensor:
    """What each embedding, but for its time, tells of its second: who looks there sees a few.

    It tells through noise, so that little room is left in it for what nobody asks.
    """
    heard = audio[..., NUM_CODE_DIMS:]
    heard = heard + NOISE * torch.randn(heard.shape)
    losses = []
    for name, head in heads.items():
        logits = head(heard)
        truths = lesson.truths[name].repeat_interleave(EMBEDDINGS_A_SECOND, dim=1)
        losses.append(cross_entropy(logits.flatten(0, 1), truths.flatten(), ignore_index=IGNORED))
        told = truths != IGNORED
        counts[f"{name} right"] += int((logits.argmax(-1) == truths)[told].sum())
        counts[f"{name} asked"] += int(told.sum())
    return torch.stack([loss for loss in losses if not loss.isnan()]).sum()


def loudness_loss(audio: Tensor) -> Tensor:
    """Keeps what is heard as large as at first, so that the time beside it stays readable."""
    return audio[..., NUM_CODE_DIMS:].square().mean().log().square()


def answers_loss(trainee: Trainee, audio: Tensor, lesson: Lesson, counts: Counter[str]) -> Tensor:
    """Each row counts alike, however long its answer."""
    cache = prefill_song(trainee, audio)
    losses = []
    for rows in lesson.rows:
        logits = answer_logits(trainee.model, cache, rows.token_ids)
        each = cross_entropy(
            logits.flatten(0, 2), rows.labels.flatten(), ignore_index=IGNORED, reduction="none"
        ).view(rows.labels.shape)
        losses.append(each.sum() / (rows.labels != IGNORED).sum())
        counts.update(count_right(logits, rows))
    return torch.stack(losses).sum()


def prefill_song(trainee: Trainee, audio: Tensor) -> Any:
    scribe = trainee.scribe
    ids = (torch.tensor([scribe.before_audio]), torch.tensor([scribe.behind_audio]))
    return prefill(trainee.model, audio, *ids)


def count_right(logits: Tensor, rows: Rows) -> Counter[str]:
    """An answer is right where each of its tokens is the likeliest: greedy decoding gives it."""
    right = ((logits.argmax(-1) == rows.labels) | (rows.labels == IGNORED)).all(-1)
    counts: Counter[str] = Counter()
    for song, kinds in enumerate(rows.kinds):
        for index, kind in enumerate(kinds):
            counts[f"{kind}? right"] += int(right[song, index])
            counts[f"{kind}? asked"] += 1
    return counts


class Progress:
    """A line every PRINT_STEPS steps: the loss, shares of right answers, the time that is left."""

    def __init__(self, stage: Stage, step: int, say: Callable[[str], None]) -> None:
        self._stage, self._step, self._say = stage, step, say
        self._counts: Counter[str] = Counter()
        self._loss, self._steps = 0.0, 0
        self._since = time.monotonic()

    def note(self, loss: float, counts: Counter[str]) -> None:
        self._loss += loss
        self._counts.update(counts)
        self._step += 1
        self._steps += 1
        if self._step % PRINT_STEPS and self._step != self._stage.num_steps:
            return
        step_seconds = (time.monotonic() - self._since) / self._steps
        left = step_seconds * (self._stage.num_steps - self._step)
        self._say(
            f"{self._stage.name} {self._step}/{self._stage.num_steps} "
            f"loss {self._loss / self._steps:.3f} {format_shares(self._counts)} | "
            f"{step_seconds:.2f} s a step, {left:.0f} s left of the stage"
        )
        self._counts.clear()
        self._loss, self._steps = 0.0, 0
        self._since = time.monotonic()


def shares(counts: Mapping[str, float]) -> dict[str, float]:
    """The share of right ones by name."""
    asked = {
        name.removesuffix(" asked"): n for name, n in counts.items() if name.endswith(" asked")
    }
    return {name: counts.get(f"{name} right", 0) / n for name, n in asked.items() if n}


def format_shares(counts: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {share:.0%}" for name, share in shares(counts).items())
