"""xgrammar's compiler for a checkpoint's vocabulary: the same in a server and in its worker."""

import threading
from typing import Any

MAX_CACHE_BYTES = 128 * 2**20


class GrammarCompiler:
    """Compiles grammars, and keeps the last ones; xgrammar is imported with the first.

    `vocab_size` is the model's number of logits. Any thread may call `compile`.
    """

    def __init__(self, checkpoint_path: str, vocab_size: int, *, max_threads: int = 4) -> None:
        self._checkpoint_path = checkpoint_path
        self._vocab_size = vocab_size
        self._max_threads = max_threads
        self._compiler: Any = None
        self._lock = threading.Lock()

    def compile(self, grammar: str) -> Any:
        """An xgrammar.CompiledGrammar. Raises RuntimeError for what is no grammar."""
        with self._lock:
            self.load()
        return self._compiler.compile_grammar(grammar)

    def load(self) -> None:
        """Read the vocabulary, which takes seconds, where that is not done yet."""
        if self._compiler is not None:
            return
        import xgrammar
        from transformers import AutoTokenizer

        tokenizer: Any = AutoTokenizer.from_pretrained(self._checkpoint_path)
        self._compiler = xgrammar.GrammarCompiler(
            xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=self._vocab_size),
            max_threads=self._max_threads,
            cache_limit_bytes=MAX_CACHE_BYTES,
        )
