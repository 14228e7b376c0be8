"""The settings of a server that is fuzzed."""

import json

# vLLM fills its caches over hours; small ones are full after the warm-up, and what still grows
# then is a leak.
SMALL_CACHES = {"mm_processor_cache_gb": 0.05, "num_gpu_blocks_override": 256}


def fuzz_settings(engine: str, *, song_port: int) -> dict[str, str]:
    """Little work for the engine, which is not what is tested; and nothing outside is reached.

    Of all URLs, only those of a host that does not exist and of the song server are fetched.
    """
    return {
        "ADAPTER_ENGINE": engine,
        "ADAPTER_ENGINE_ARGS": json.dumps(SMALL_CACHES),
        "ADAPTER_MAX_NEW_TOKENS": "4",
        "ADAPTER_MAX_PROMPTS": "3",
        "ADAPTER_MAX_MODEL_LEN": "4096",
        "ADAPTER_ALLOW_PRIVATE_AUDIO_URLS": "true",
        "ADAPTER_ALLOWED_AUDIO_HOSTS": f"songs.invalid,127.0.0.1:{song_port}",
        "ADAPTER_USAGE_DB": "",
    }
