"""A serving adapter for NVIDIA's Music Flamingo on vLLM, with a plain-transformers fallback.

Nothing heavy is imported here: vLLM imports this package in each of its processes.
"""

__version__ = "0.1.0"
