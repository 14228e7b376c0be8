"""One process that compiles grammars, to see whether an engine can.

Run by adapter/grammar_pool.py as `python -m adapter.grammar_worker CHECKPOINT VOCAB_SIZE
MEMORY_BYTES CPU_SECONDS`. A line of JSON on its input is a grammar, the answer a line of JSON:
null, or why not.

Callers write the schemas, and a small one can take hours and gigabytes: here that costs a process
of its own. Beside compiling it follows the grammar for some tokens, which an engine does at every
step of an answer.
"""

import json
import random
import resource
import sys
import time
from typing import Any

from adapter.decoder_worker import allow_cpu_seconds, end_with_the_server, process_bytes
from adapter.grammar_compiler import GrammarCompiler

MAX_COMPILED_BYTES = 64 * 2**20
MAX_STEP_SECONDS = 0.1  # of the processor, on average
NUM_STEPS = 64


def check(compiler: GrammarCompiler, grammar: str) -> str | None:
    """Why an engine should not be given this grammar, or None."""
    try:
        compiled = compiler.compile(grammar)
    except MemoryError:
        return "takes more memory to compile than is allowed"
    except RuntimeError:
        return "cannot be compiled"
    if compiled.memory_size_bytes > MAX_COMPILED_BYTES:
        return "takes more memory than is allowed"
    if step_seconds(compiled) > MAX_STEP_SECONDS:
        return "takes too long to follow"
    return None


def step_seconds(compiled: Any) -> float:
    """The processor's time for a token of an answer, on average."""
    import xgrammar

    rng = random.Random(0)
    matcher = xgrammar.GrammarMatcher(compiled)
    vocab_size = compiled.tokenizer_info.vocab_size
    bitmask = xgrammar.allocate_token_bitmask(1, vocab_size)
    spent = 0.0
    for _ in range(NUM_STEPS):
        started = time.process_time()
        matcher.fill_next_token_bitmask(bitmask)
        spent += time.process_time() - started
        token_id = _draw(bitmask[0].tolist(), vocab_size, rng)
        if token_id is None or not matcher.accept_token(token_id) or matcher.is_terminated():
            matcher.reset()
    return spent / NUM_STEPS


def _draw(words: list[int], vocab_size: int, rng: random.Random) -> int | None:
    """One of the tokens whose bits are set."""
    token_ids = [
        32 * index + bit
        for index, word in enumerate(words)
        if word
        for bit in range(32)
        if word >> bit & 1 and 32 * index + bit < vocab_size
    ]
    return rng.choice(token_ids) if token_ids else None


def restrict(memory_limit_bytes: int) -> None:
    """Lower this process's limits for good: memory beyond what it has now, and files."""
    address_space = process_bytes() + memory_limit_bytes
    resource.setrlimit(resource.RLIMIT_AS, (address_space, address_space))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


def main(arguments: list[str]) -> None:
    checkpoint_path, vocab_size, memory_bytes, cpu_seconds = arguments
    end_with_the_server()
    compiler = GrammarCompiler(checkpoint_path, int(vocab_size), max_threads=1)
    check(compiler, 'root ::= "a"')  # whatever is imported late is there before the limits
    restrict(int(memory_bytes))
    print("ready", flush=True)
    for line in sys.stdin:
        allow_cpu_seconds(int(cpu_seconds))
        print(json.dumps(check(compiler, json.loads(line))), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
