"""The benchmarks that watch a server, on transformers. Loose bounds, so that a machine that is busy
passes and what became worse twofold does not."""

import pytest

from tests.test_bench_serving import run

pytestmark = pytest.mark.soak


def test_the_loop_stays_free_while_four_songs_of_five_minutes_arrive() -> None:
    document = run("loop_hold", "--engine", "transformers", "--seconds", "300")
    assert len(document["answered_after_seconds"]) == 4
    assert 0 < document["longest_health_seconds"] < 0.6
    assert document["longest_hold_seconds"] < 0.3


def test_forty_songs_leave_no_file_and_little_memory() -> None:
    document = run("many_songs", "--engine", "transformers", "--songs", "40")
    assert not any(document["left"].values())
    (total,) = (one for one in document["readings"] if one["name"] == "all together")
    assert total["deviation"] < 0.15
