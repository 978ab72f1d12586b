"""The ``polar`` command: starts services as processes, and talks to the admin API.

A user's mistake is one line on stderr and exit code 1, never a traceback.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from polar.admin_api import AdminApi, ApiError, find_url
from polar.cli import harness, look, run, tasks, topics
from polar.cli.mistake import UserMistake
from polar.demo.config import DemoError
from polar.settings import SettingsError
from polar.supervisor import ServiceFailed, SupervisorError

_UsageError: Any = typer.BadParameter.__base__
"""typer has a click of its own, and exports only this child."""

app = typer.Typer(
    name="polar",
    help="Train the model behind any agent program. Start with: polar demo",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def _connect(
    context: typer.Context,
    url: Annotated[
        str | None,
        typer.Option(envvar="POLAR_ADMIN_URL", help="The admin API.", show_default="that of the latest run in ./runs"),
    ] = None,
    key: Annotated[str | None, typer.Option(envvar="POLAR_ADMIN_KEY", help="The admin key, if it has one.")] = None,
) -> None:
    context.obj = AdminApi(url or find_url(), key)


app.command("up")(run.up)
app.command("demo")(run.demo)
app.command("status")(look.status)
app.command("sessions")(look.sessions)
app.command("show")(look.show)
app.command("weights")(look.weights)
app.add_typer(tasks.app, name="tasks")
app.add_typer(topics.app, name="topics")
app.add_typer(harness.app, name="harness")


def main(arguments: list[str] | None = None) -> None:
    """Runs the command and exits: 0, 1 for a user's mistake, 130 after Ctrl-C."""
    sys.exit(_exit_code(arguments))


def _exit_code(arguments: list[str] | None) -> int:
    try:
        code = app(args=arguments, standalone_mode=False)
    except _UsageError as error:
        return _say(f"{error.format_message()} (see {error.ctx.command_path if error.ctx else 'polar'} --help)")
    except (UserMistake, ApiError, SettingsError, SupervisorError, DemoError) as error:
        if isinstance(error, ServiceFailed):
            print(error.log_tail, file=sys.stderr)
        return _say(str(error))
    except (typer.Abort, KeyboardInterrupt):
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        return _say(
            f"{error.filename or 'a file of the run'}: {error.strerror or error}: free it, or give another --run-dir"
        )
    return code if isinstance(code, int) else 0


def _say(line: str) -> int:
    text = Text.assemble(("error: ", "bold red"), " ".join(line.split()))
    Console(stderr=True, soft_wrap=True).print(text)
    return 1
