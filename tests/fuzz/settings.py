"""The settings of a server that is fuzzed."""


def fuzz_settings(engine: str, *, song_port: int) -> dict[str, str]:
    """Little work for the engine, which is not what is tested; and nothing outside is reached.

    Of all URLs, only those of a host that does not exist and of the song server are fetched.
    """
    return {
        "ADAPTER_ENGINE": engine,
        "ADAPTER_MAX_NEW_TOKENS": "4",
        "ADAPTER_MAX_PROMPTS": "3",
        "ADAPTER_MAX_MODEL_LEN": "4096",
        "ADAPTER_ALLOW_PRIVATE_AUDIO_URLS": "true",
        "ADAPTER_ALLOWED_AUDIO_HOSTS": f"songs.invalid,127.0.0.1:{song_port}",
        "ADAPTER_USAGE_DB": "",
    }
