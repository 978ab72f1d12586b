"""``python -m gateway_app.admin``: serves the admin API until SIGTERM. Exits 1 with one line when it cannot."""

from __future__ import annotations

import logging
import socket
import sys

import uvicorn

from gateway_app.admin.app import create_app
from polar.settings import Settings, SettingsError, from_environment

log = logging.getLogger("gateway_app.admin")


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    failures: list[BaseException] = []

    def recorder_died(error: BaseException) -> None:
        failures.append(error)
        server.should_exit = True

    try:
        settings = from_environment()
        app = create_app(settings, on_failure=recorder_died)
        listener = _listen(settings)
    except SettingsError as error:
        log.error("%s", error)
        return 1
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=2, lifespan="on"))
    log.info("listening on %s:%s", settings.admin_host, settings.admin_port)
    server.run(sockets=[listener])
    return 0 if server.started and not failures else 1


def _listen(settings: Settings) -> socket.socket:
    """Raises SettingsError for an address that is taken or not ours."""
    family = socket.AF_INET6 if ":" in settings.admin_host else socket.AF_INET
    try:
        return socket.create_server((settings.admin_host, settings.admin_port), family=family)
    except OSError as error:
        raise SettingsError(
            f"cannot listen on {settings.admin_host}:{settings.admin_port} ({error.strerror}):"
            " stop what uses it, or set POLAR_ADMIN_PORT"
        ) from None


if __name__ == "__main__":
    sys.exit(main())
