"""The command line: `fleet up | serve | unserve | status | tap | models | pipelines | bus`."""

from __future__ import annotations

import asyncio
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from fleet_cli import bus_commands, serve, tap
from fleet_cli.connect import find_fleet
from fleet_cli.errors import CliError
from fleet_cli.status import read_status, show, show_json
from fleet_cli.up.progress import Progress
from fleet_cli.up.rundir import SPEC_NAME, RunDir
from fleet_cli.up.settings import UpSettings, environment

app = typer.Typer(help="Run and look at a fleet.", no_args_is_help=True, pretty_exceptions_enable=False)
bus_app = typer.Typer(help="The broker.", no_args_is_help=True)
models_app = typer.Typer(help="The small local models.", no_args_is_help=True)
app.add_typer(bus_app, name="bus")
app.add_typer(models_app, name="models")
pipelines_app = typer.Typer(help="Files of pipelines.", no_args_is_help=True)
app.add_typer(pipelines_app, name="pipelines")

#: Columns of a table that is no terminal's.
_PIPED_WIDTH = 200


class Connector(StrEnum):
    """Network stores that `fleet up` can start."""

    REDIS = "redis"
    MOONCAKE = "mooncake"
    YUANRONG = "yuanrong"


RunDirOption = Annotated[
    Path | None, typer.Option("--run-dir", help="Folder of the stack; default FLEET_RUN_DIR or .fleet.")
]


def _settings(run_dir: Path | None) -> UpSettings:
    return UpSettings(run_dir=run_dir) if run_dir else UpSettings()  # type: ignore[call-arg]


@app.command()
def up(
    run_dir: RunDirOption = None,
    connector: Annotated[
        Connector | None, typer.Option(help="Network store for tensors; default FLEET_CONNECTOR or redis.")
    ] = None,
    stop_with_stdin: Annotated[
        bool, typer.Option("--stop-with-stdin", help="Stop when standard input ends: for tests.")
    ] = False,
) -> None:
    """Start a whole fleet on this machine and keep it running until Ctrl-C."""
    from fleet_cli.up.ports import check_free
    from fleet_cli.up.supervisor import Supervisor  # the broker's client is not needed for `models`

    settings = _settings(run_dir)
    if connector is not None:
        settings = settings.model_copy(update={"connector": connector.value})
    folder = RunDir(settings.run_dir)
    progress = Progress(Console())
    with folder.locked():
        for line in folder.clean():
            progress.line(line)
        check_free(settings.http_host, settings.http_port)

        async def run() -> None:
            supervisor = Supervisor(settings, folder, progress, environment(), stops_with_stdin=stop_with_stdin)
            await supervisor.run()

        asyncio.run(run())


@app.command("serve")
def serve_command(
    source: Annotated[str, typer.Argument(metavar="MODEL", help="Local model, folder or Hugging Face id.")] = "",
    name: Annotated[str, typer.Option(help="What clients call it; default: its own name.")] = "",
    replicas: Annotated[list[str] | None, typer.Option(help="Workers of a stage: decode=2.")] = None,
    stage_args: Annotated[
        list[str] | None, typer.Option(help="Engine arguments of a stage: decode='{\"max_model_len\":2048}'.")
    ] = None,
    adapter: Annotated[list[str] | None, typer.Option(help="LoRA adapter: NAME=FOLDER.")] = None,
    lora: Annotated[bool, typer.Option("--lora", help="Leave room for adapters that come later.")] = False,
    on: Annotated[str, typer.Option(help="Give the adapters to this model that is served already.")] = "",
    run_dir: RunDirOption = None,
) -> None:
    """Serve one more model, or LoRA adapters of one, on the fleet that runs."""
    options = serve.ServeOptions(
        name=name,
        replicas=serve.parse_replicas(replicas or []),
        engine_args=serve.parse_stage_args(stage_args or []),
        adapters=serve.parse_adapters(adapter or []),
        takes_adapters=lora,
    )
    if bool(source) == bool(on):
        raise CliError("name a MODEL, or with --on the served model that gets the --adapter")
    if on and not options.adapters:
        raise CliError("--on needs at least one --adapter NAME=FOLDER")
    progress = Progress(Console())
    status = asyncio.run(serve.serve(find_fleet(run_dir), source, options, on, progress.line))
    shown = "".join(f"; adapter {adapter_name}" for adapter_name in status.adapters)
    progress.line(f"{status.model} is ready{shown}")


@app.command("unserve")
def unserve_command(
    name: Annotated[str, typer.Argument(help="A model or an adapter, as clients call it.")],
    run_dir: RunDirOption = None,
) -> None:
    """Take a model or an adapter off: no new requests, those that run end, then nothing of it is left."""
    progress = Progress(Console())
    asyncio.run(serve.unserve(find_fleet(run_dir), name, progress.line))
    progress.line(f"{name} is served no longer")


@app.command()
def status(
    run_dir: RunDirOption = None, as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False
) -> None:
    """Models, workers, pools, routing table, leader."""
    found = asyncio.run(read_status(find_fleet(run_dir)))
    if as_json:
        print(show_json(found))
    else:
        console = Console()
        # Whoever pipes it looks for names: they are cut to fit a terminal only.
        show(found, console if console.is_terminal else Console(width=_PIPED_WIDTH))


@app.command("tap")
def tap_command(
    run_dir: RunDirOption = None,
    stage: Annotated[str, typer.Option(help="Only this stage, like `decode`.")] = "",
    request: Annotated[str, typer.Option(help="Only this request id.")] = "",
    telemetry: Annotated[bool, typer.Option(help="Workers' reports too, once a second each.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document per line.")] = False,
) -> None:
    """Messages as they pass, one per line, until Ctrl-C."""
    console = Console(highlight=False)

    def write(subject: str, message: Any, seen_unix_s: float) -> None:
        if as_json:
            print(tap.json_line(subject, message, seen_unix_s), flush=True)
        else:
            console.print(tap.text_line(subject, message, seen_unix_s), markup=False, soft_wrap=True)

    try:
        asyncio.run(tap.tap(find_fleet(run_dir), tap.Filter(stage, request, telemetry), write))
    except KeyboardInterrupt:
        return


@bus_app.command("apply")
def bus_apply(
    spec: Annotated[Path | None, typer.Option(help="Declared fleet, YAML or JSON; default: the stack's own.")] = None,
    run_dir: RunDirOption = None,
) -> None:
    """Make streams, consumers and buckets what the declared fleet needs."""
    from fleet_common.bus.apply import apply

    declared = bus_commands.read_spec(spec or _settings(run_dir).run_dir / SPEC_NAME)
    changes = asyncio.run(apply(find_fleet(run_dir).bus, declared))
    for change in changes or ["nothing to change"]:
        print(change)


@bus_app.command("config")
def bus_config(
    password_variables: Annotated[
        bool, typer.Option("--password-variables", help="Passwords are variables of the server's environment.")
    ] = False,
    port: int = 4222,
    store_dir: Path = Path("/data"),
) -> None:
    """Print a nats.conf with the fleet's accounts and permissions."""
    if not password_variables:
        raise CliError("only --password-variables is supported: `fleet up` makes its own file with passwords")
    print(bus_commands.config_with_variables(port, store_dir))


@bus_app.command("secrets")
def bus_secrets() -> None:
    """Print new random passwords as an env file."""
    for line in bus_commands.secret_lines():
        print(line)


@models_app.command("list")
def models_list(
    cache: Annotated[Path | None, typer.Option(help="Where prepared models are kept.")] = None,
) -> None:
    """Names of the local models, and where those that are prepared lie."""
    from fleet_models import PREPARE

    folder = cache or _settings(None).model_cache.expanduser()
    for name in sorted(PREPARE):
        path = folder / name
        print(f"{name}\t{path if path.is_dir() else 'not prepared'}")


@models_app.command("prepare")
def models_prepare(
    name: Annotated[str, typer.Argument(help="One of `fleet models list`; default: the model of `fleet up`.")] = "",
    cache: Annotated[Path | None, typer.Option(help="Where prepared models are kept.")] = None,
) -> None:
    """Convert or put together a local model once; prints its folder last."""
    from fleet_models import PREPARE, prepare

    chosen = name or _settings(None).chat_model.partition(",")[0]
    if chosen not in PREPARE:
        raise CliError(f"{chosen} is none of the local models: {', '.join(sorted(PREPARE))}")
    folder = cache or _settings(None).model_cache.expanduser()
    try:
        path = prepare(chosen, folder, lambda line: print(line, flush=True))
    except FileNotFoundError as err:
        raise CliError(str(err)) from err
    print(path)


@pipelines_app.command("check")
def pipelines_check(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Files of pipelines, or folders of them.")],
) -> None:
    """Say what is wrong with files, as FILE:LINE: reason; status 1 when anything is."""
    from fleet_cli.pipelines import check_files

    report = check_files(files)
    for line in report.lines:
        print(line)
    raise typer.Exit(1 if report.has_faults else 0)


@pipelines_app.command("list")
def pipelines_list(
    folder: Annotated[
        Path | None, typer.Argument(help="A folder of pipelines; default FLEET_PIPELINES or those that come along.")
    ] = None,
) -> None:
    """Pipelines of a folder: what they take, what they give, which models they need."""
    from fleet_cli.pipelines import list_folder, pipelines_folder

    chosen = folder or pipelines_folder(_settings(None).pipelines)
    for line in list_folder(chosen) if chosen is not None else []:
        print(line)
