"""What a start costs: `import adapter.api` against `import fastapi`, the server against the engine.

    python -m benchmarks.start                        medians: 5 imports and 3 starts of each

Each in a process of its own, in turn. An import is timed inside its process; a start from the
process's beginning until /health says ok, and for the bare engine until vLLM's AsyncLLM with the
same arguments is there. A table, and as the last line one JSON document, go to stdout. The exit
code is 1 where a limit was passed or torch, vllm or librosa was imported.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.adapter_server import running_server, settings_of
from benchmarks.arguments import make_parser
from benchmarks.report import describe_machine, describe_versions
from benchmarks.vllm_openai import make_engine_args
from benchmarks.workload import make_model, prepare_environment

IMPORT = """\
import json, sys, time
started = time.perf_counter()
import {module}
seconds = time.perf_counter() - started
print(json.dumps([seconds, [name for name in {heavy} if name in sys.modules]]))
"""
HEAVY = ("torch", "vllm", "librosa", "transformers")
BARE_ENGINE = """\
import json, sys
if __name__ == "__main__":
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**json.loads(sys.argv[1])))
    print("ready", flush=True)
    sys.stdin.read()
    llm.shutdown()
"""
IMPORT_LIMIT_SECONDS = 0.3
START_LIMIT_SECONDS = 3.0


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    prepare_environment(demo=not args.model)
    imports = measure_imports(args.imports)
    with tempfile.TemporaryDirectory(prefix="music-flamingo-start-") as name:
        starts = measure_starts(args, Path(name)) if args.starts else {}
    return finish(args, imports, starts)


def measure_imports(count: int) -> dict[str, Any]:
    """Seconds of each, and which of the heavy modules `adapter.api` brought."""
    import_seconds("adapter.api")  # fills the disk's cache
    seconds: dict[str, list[float]] = {"fastapi": [], "adapter.api": []}
    loaded: list[str] = []
    for _ in range(count):
        for module, known in seconds.items():
            took, heavy = import_seconds(module)
            known.append(took)
            loaded = heavy if module == "adapter.api" else loaded
    return {"seconds": seconds, "loaded": loaded}


def import_seconds(module: str) -> tuple[float, list[str]]:
    code = IMPORT.format(module=module, heavy=HEAVY)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    seconds, loaded = json.loads(done.stdout)
    return seconds, loaded


def measure_starts(args: argparse.Namespace, folder: Path) -> dict[str, list[float]]:
    settings = settings_of(args.model or make_model(args.shape, folder), "vllm", args.dtype)
    script = folder / "bare_engine.py"  # a file, for vLLM's processes to import
    script.write_text(BARE_ENGINE, encoding="utf-8")
    command = [sys.executable, str(script), json.dumps(make_engine_args(settings)[0])]
    seconds: dict[str, list[float]] = {"bare engine": [], "server": []}
    for _ in range(args.starts):
        seconds["bare engine"].append(start_bare_engine(command))
        seconds["server"].append(start_server(settings))
    return seconds


def start_bare_engine(command: Sequence[str]) -> float:
    started = time.perf_counter()
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        if not any(line.strip() == b"ready" for line in process.stdout):
            raise RuntimeError("the bare engine did not start; its log is above")
        seconds = time.perf_counter() - started
        process.communicate()
    return seconds


def start_server(settings: dict[str, str]) -> float:
    started = time.perf_counter()
    with running_server(settings):
        return time.perf_counter() - started


def finish(
    args: argparse.Namespace, imports: dict[str, Any], starts: dict[str, list[float]]
) -> int:
    rows = [
        ("import", imports["seconds"], "fastapi", "adapter.api", IMPORT_LIMIT_SECONDS),
        ("start", starts, "bare engine", "server", START_LIMIT_SECONDS),
    ]
    failed = bool(imports["loaded"])
    for what, seconds, base, ours, limit_seconds in rows:
        if not seconds:
            continue
        more = median(seconds[ours]) - median(seconds[base])
        failed |= more > limit_seconds
        print(
            f"{what:<8}{base} {median(seconds[base]):.2f} s, {ours} {median(seconds[ours]):.2f} s: "
            f"{more:+.2f} s (limit {limit_seconds:+.1f})"
        )
    print(f"import adapter.api loads of {', '.join(HEAVY)}: {', '.join(imports['loaded']) or '-'}")
    document = {
        "benchmark": "music-flamingo-adapter start",
        "arguments": vars(args),
        "imports": imports,
        "starts": starts,
        "versions": describe_versions(),
        "machine": describe_machine(),
    }
    print(json.dumps(document))
    return int(failed)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser("start", __doc__)
    add = parser.add_argument
    add("--imports", type=int, default=5, help="of each module (%(default)s)")
    add("--starts", type=int, default=3, help="of each, a minute; 0 for none (%(default)s)")
    return parser.parse_args(argv)


if __name__ == "__main__":
    raise SystemExit(main())
