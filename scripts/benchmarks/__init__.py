"""The ways from a song and prompts to answers that `scripts/bench.py` compares, and its report."""
