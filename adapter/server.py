"""uvicorn under `python -m adapter serve`."""

import uvicorn

from adapter.api import create_app
from adapter.settings import Settings


def serve(settings: Settings, *, host: str, port: int) -> int:
    """Serve until a signal; returns the exit code: 1 where the engine failed."""
    app = create_app(settings)
    config = uvicorn.Config(app, host=host, port=port, log_config=None)
    server = uvicorn.Server(config)

    def stop() -> None:
        server.should_exit = True

    app.state.supervisor.on_failure = stop
    server.run()
    return 1 if app.state.supervisor.failure else 0
