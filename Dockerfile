# Serves Music Flamingo on one NVIDIA GPU: vLLM's own image plus this package and the audio libraries.
#
#   docker build -t music-flamingo-adapter .
#   docker run --gpus all --shm-size 8g -v hf:/data/hf -e HF_TOKEN -p 8000:8000 music-flamingo-adapter
#
# With a read-only root file system, add: --read-only --tmpfs /tmp
FROM vllm/vllm-openai:v0.32.0

LABEL org.opencontainers.image.title="music-flamingo-adapter" \
      org.opencontainers.image.description="Serves NVIDIA's Music Flamingo on vLLM" \
      org.opencontainers.image.licenses="Apache-2.0"

# --no-deps: the image's torch, vLLM and everything built against them stay as they are.
WORKDIR /opt/music-flamingo-adapter
COPY requirements/image.lock requirements/image.lock
RUN uv pip install --system --no-cache --no-deps --require-hashes -r requirements/image.lock
COPY pyproject.toml README.md LICENSE ./
COPY adapter adapter
RUN uv pip install --system --no-cache --no-deps --no-build-isolation . \
    && install -d -o 2000 -g 0 -m 0775 /data/hf

# Downloads, compiled kernels and the usage log live on the one volume, so that the next start is fast and what was
# used is not forgotten; all else that a library writes goes to /tmp. Numba's cache has a place of its own because librosa fails to import where it finds none.
ENV HOME=/tmp \
    HF_HOME=/data/hf \
    XDG_CACHE_HOME=/data/hf/cache \
    VLLM_CACHE_ROOT=/data/hf/cache/vllm \
    TORCHINDUCTOR_CACHE_DIR=/data/hf/cache/inductor \
    TRITON_CACHE_DIR=/data/hf/cache/triton \
    FLASHINFER_WORKSPACE_BASE=/data/hf/cache \
    NUMBA_CACHE_DIR=/tmp/numba \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    VLLM_NO_USAGE_STATS=1 \
    ADAPTER_ENGINE=vllm \
    ADAPTER_MODEL=nvidia/music-flamingo-2601-hf \
    ADAPTER_USAGE_DB=/data/hf/adapter-usage.sqlite3
VOLUME /data/hf

# Away from the sources: the installed package is the one that runs.
WORKDIR /data
# vLLM's image brings this user (vllm) for running without root.
USER 2000:0
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=30s --timeout=10s --start-period=60s --retries=3 \
    CMD ["python3", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/live', timeout=8)"]

# The base image's entry point is vLLM's own server.
ENTRYPOINT []
CMD ["python3", "-m", "adapter", "serve", "--host", "0.0.0.0", "--port", "8000"]
