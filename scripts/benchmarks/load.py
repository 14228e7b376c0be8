"""Rising load on /generate_batch, for locust:

    PYTHONPATH=scripts locust -f scripts/benchmarks/load.py --headless --host URL --csv load

Songs are mixed: most requests are about one of a few that are known, some about a new one, of 10 to
60 seconds, with 1 to 13 prompts each. The users, each of whom asks again as soon as it is answered,
are doubled each minute, from 1 to 32. load_stats_history.csv has the throughput and the latency's
percentiles second by second: the server is saturated where twice the users bring no more answers.

LOAD_STEP_SECONDS, LOAD_MAX_USERS and LOAD_SONGS set what stands above; a 503 (the queue is full)
counts as a failure of its own name.
"""

import io
import json
import os
import random
import wave
from typing import Any

import numpy as np
from demo import QUESTIONS
from locust import FastHttpUser, LoadTestShape, constant, task

STEP_SECONDS = float(os.environ.get("LOAD_STEP_SECONDS", "60"))
MAX_USERS = int(os.environ.get("LOAD_MAX_USERS", "32"))
NUM_SONGS = int(os.environ.get("LOAD_SONGS", "8"))
RATE = 16_000  # Hz
SECONDS = (10, 60)
NEW_SONG = 0.2  # of the requests
MAX_NEW_TOKENS = 64


def make_song(seed: int) -> bytes:
    """A chord with a pulse, as 16-bit mono WAV at 16 kHz; each seed has its own."""
    draw = np.random.default_rng(seed)
    at_seconds = np.arange(int(draw.integers(*SECONDS)) * RATE) / RATE
    waves = [np.sin(2 * np.pi * hertz * at_seconds) for hertz in draw.uniform(110, 700, size=4)]
    samples = np.mean(waves, axis=0) * (0.6 + 0.4 * np.sin(2 * np.pi * 2 * at_seconds))
    file = io.BytesIO()
    with wave.open(file, "wb") as song:
        song.setnchannels(1)
        song.setsampwidth(2)
        song.setframerate(RATE)
        song.writeframes((samples * 30_000).astype("<i2").tobytes())
    return file.getvalue()


class Listener(FastHttpUser):
    """Asks a batch, waits for its answers, and asks the next."""

    wait_time = constant(0)
    connection_timeout = network_timeout = 600.0
    songs: tuple[bytes, ...] = tuple(make_song(seed) for seed in range(NUM_SONGS))

    @task
    def ask(self) -> None:
        new = random.random() < NEW_SONG
        song = make_song(random.getrandbits(32)) if new else random.choice(self.songs)
        questions = random.sample(QUESTIONS, random.choice((1, 4, 13)))
        prompts = [{"prompt": one, "max_new_tokens": MAX_NEW_TOKENS} for one in questions]
        name = f"{len(prompts)} prompts, song {'new' if new else 'known'}"
        body, content_type = encode(json.dumps({"prompts": prompts}), song)
        with self.client.post(
            "/generate_batch",
            data=body,  # type: ignore[arg-type]
            headers={"Content-Type": content_type},
            name=name,
            catch_response=True,
        ) as response:
            judge(response)


def encode(request: str, song: bytes) -> tuple[bytes, str]:
    """The request and its song as multipart/form-data; FastHttpUser makes none itself."""
    boundary = b"----load"
    parts = (
        (b'name="request"', b"application/json", request.encode()),
        (b'name="audio"; filename="song.wav"', b"audio/wav", song),
    )
    lines = [
        b"--%b\r\nContent-Disposition: form-data; %b\r\nContent-Type: %b\r\n\r\n%b\r\n"
        % (boundary, name, kind, content)
        for name, kind, content in parts
    ]
    body = b"".join(lines) + b"--%b--\r\n" % boundary
    return body, f"multipart/form-data; boundary={boundary.decode()}"


def judge(response: Any) -> None:
    """A batch is answered where each of its prompts is."""
    if response.status_code != 200:
        response.failure(f"status {response.status_code}")
        return
    errors = [one["error"]["code"] for one in response.json()["answers"] if one["error"]]
    if errors:
        response.failure(f"prompts failed: {errors[0]}")
    else:
        response.success()


class Doubling(LoadTestShape):
    """1, 2, 4, … users, a step each; it ends after the most."""

    def tick(self) -> tuple[int, float] | None:
        run_seconds: float = self.get_run_time()  # type: ignore[no-untyped-call]
        users = 2 ** int(run_seconds / STEP_SECONDS)
        return (users, float(users)) if users <= MAX_USERS else None
