"""``python -m gateway_app.admin``: serves the admin API until SIGTERM. Exits 1 with one line when it cannot."""

from __future__ import annotations

import asyncio
import logging
import sys

from gateway_app.admin.app import create_app
from gateway_app.serve import ListenError, listen, serve, stop_on_signals
from polar.settings import Settings, SettingsError, from_environment

log = logging.getLogger("admin")


def main() -> int:
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s admin %(levelname)s %(message)s")
    for name, level in (("aiokafka", logging.ERROR), ("uvicorn", logging.CRITICAL)):
        logging.getLogger(name).setLevel(level)
    failures: list[Exception] = []
    try:
        asyncio.run(run(from_environment(), failures))
    except (SettingsError, ListenError) as error:
        failures.append(error)
    except SystemExit:
        # uvicorn's word for a lifespan that failed to start.
        if not failures:
            raise
    for failure in failures:
        log.error("%s", failure)
    return 1 if failures else 0


async def run(settings: Settings, failures: list[Exception]) -> None:
    """Returns after SIGTERM or SIGINT, or when something was put into ``failures``.

    Raises SettingsError or ListenError, and SystemExit when the app's lifespan did not start.
    """
    stop = stop_on_signals()

    def failed(error: Exception) -> None:
        failures.append(error)
        stop.set()

    app = create_app(settings, failed)
    with listen(settings.admin_host, settings.admin_port) as listening:
        log.info("listening at %s:%s", settings.admin_host, settings.admin_port)
        await serve(app, listening, stop)


if __name__ == "__main__":
    sys.exit(main())
