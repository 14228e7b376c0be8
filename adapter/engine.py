"""The engine behind the adapter: the protocol, the choice of engine, and vLLM's."""

from collections.abc import AsyncGenerator, Sequence
from typing import Any, Literal, Protocol

from adapter.request import EngineOutput, EngineRequest

EngineName = Literal["vllm", "transformers"]


class Engine(Protocol):
    """What the adapter asks of an engine.

    `prepare` is the unbilled part (features are made, off the event loop); its result goes to
    `generate` as it is. `generate` is the billed part: it starts at the call's first step and ends
    with the last output. Closing its iterator stops the work within the engine's current step.
    """

    name: EngineName
    continuous: bool  # True: every request is a call of its own and the engine batches them

    async def prepare(self, request: EngineRequest) -> Any:
        """Make what `generate` takes. Raises UnprocessableError where the input is at fault."""

    def generate(self, prepared: Sequence[Any]) -> AsyncGenerator[EngineOutput, None]:
        """Answer the requests of one call, which share their sampling unless there is just one.

        Raises EngineOutOfMemoryError, EngineDeadError, or EngineError for the whole call.
        """

    async def check_health(self) -> None:
        """Raise EngineDeadError where no request can be answered any more."""

    async def shutdown(self) -> None:
        """End the engine and its processes. May be called twice."""
