"""The command ``eyas``. Subcommands are imported when called, so that help comes at once."""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import typer
from rich.console import Console

from engine.errors import ConfigError, EngineError
from engine.options import AttentionBackend, Device, Graphs
from service.settings import Settings, load_settings, name_options, option_name

EXIT_REFUSED = 2
"""Wrong options, a damaged checkpoint: what only the caller can mend."""

app = typer.Typer(
    name="eyas",
    help="Serves DeepSeek-style MLA language models with speculative decoding.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
bench_app = typer.Typer(invoke_without_command=True)
app.add_typer(bench_app, name="bench")


def path(text: str) -> Path:
    """What an argument or option names.

    Raises:
        BadParameter: It is empty, which ``Path`` takes for the current directory.
    """
    if not text:
        raise typer.BadParameter("must not be empty")
    return Path(text)


_ENGINE_GROUPS = ("Model", "Engine", "KV cache")
_ENVIRONMENT = (
    "Every option can also be set by a variable, for example EYAS_PORT for --port; the option wins."
)


def names_own_options(command: Callable[..., None]) -> Callable[..., None]:
    """Let the engine's errors name options of ``command``, and as fields those values that it has no option for."""
    options = inspect.signature(command).parameters.keys()

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except EngineError as error:
            error.args = (name_options(str(error), options=options),)
            raise

    return run


def with_settings(*groups: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options of ``groups`` (all if none); it receives them as ``settings``."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = [
            p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != "settings"
        ]

        def run(**arguments: Any) -> None:
            context = arguments.get("context")
            if context is not None and context.invoked_subcommand is not None:
                _refuse_before_subcommand(context)
                return
            given = {
                name: arguments.pop(name)
                for name in list(arguments)
                if name in Settings.model_fields and arguments[name] not in (None, [])
            }
            rest = {parameter.name: arguments[parameter.name] for parameter in own}
            command(settings=load_settings(given), **rest)

        run.__signature__ = inspect.Signature([*own, *_parameters(groups)])  # type: ignore[attr-defined]
        run.__doc__ = f"{command.__doc__}\n\n{_ENVIRONMENT}"
        run.__name__ = command.__name__
        return names_own_options(run)

    return decorate


def _refuse_before_subcommand(context: typer.Context) -> None:
    """A group's own options are for calls without a subcommand."""
    for name in context.params:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise ConfigError(f"{option_name(name)}: not an option of {context.invoked_subcommand}")


def _parameters(groups: tuple[str, ...]) -> list[inspect.Parameter]:
    """One keyword parameter a setting; all default to absent, so that a variable can speak."""
    parameters = []
    hints = get_type_hints(Settings)
    for name, field in Settings.model_fields.items():
        assert isinstance(field.json_schema_extra, dict), f"{name} has no group"
        group = str(field.json_schema_extra["group"])
        if groups and group not in groups:
            continue
        repeated = name == "api_key"
        is_path = Path in (hints[name], *get_args(hints[name]))
        option = typer.Option(
            [] if repeated else None,
            option_name(name),
            help=f"{field.description}{_default_text(field.default)}",
            rich_help_panel=group,
            show_default=False,
            parser=path if is_path else None,
        )
        parameters.append(
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=option,
                annotation=list[str] if repeated else hints[name] | None,
            )
        )
    return parameters


def _default_text(default: Any) -> str:
    if default in (None, False, ()):
        return ""
    shown = f"models/{default.name}" if isinstance(default, Path) else default
    return f" [dim]\\[default: {shown}][/dim]"


@app.command()
@with_settings()
def serve(settings: Settings) -> None:
    """Serve a model over HTTP with an OpenAI-style API."""
    from service.commands.serve import serve as run

    raise typer.Exit(run(settings))


@app.command()
@with_settings(*_ENGINE_GROUPS)
def generate(
    settings: Settings,
    context: typer.Context,
    prompt: Annotated[str | None, typer.Argument(help="Text to continue; standard input if absent.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens to generate.")] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, max=2.0, help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(min=1e-9, max=1.0, help="Share of probability to draw from.")] = 1.0,
    stop: Annotated[list[str] | None, typer.Option(help="Text to stop at; can be repeated.")] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="The prompt is a message: use the chat template.")
    ] = False,
    input: Annotated[
        Path | None, typer.Option(help="Requests to answer instead: JSON lines in OpenAI's batch format.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="File for the answers to --input.")] = None,
) -> None:
    """Continue one prompt, or answer a file of requests, without a server.

    Prints the text (a file's answers go to --output), then statistics on standard error.
    """
    if (input is None) != (output is None):
        raise ConfigError("--input and --output need each other")
    if input is not None and output is not None:
        from service.commands.batch import run_batch

        _refuse_beside_input(context)
        run_batch(settings, input, output)
        return
    from service.commands.generate import Sampling, read_prompt, read_stops
    from service.commands.generate import generate as run

    sampling = Sampling(max_tokens, temperature, top_p, read_stops(stop or []))
    run(settings, read_prompt(prompt), sampling, chat=chat)


def _refuse_beside_input(context: typer.Context) -> None:
    for name in ("prompt", "max_tokens", "temperature", "top_p", "stop", "chat"):
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise ConfigError(f"{name}: each request of --input has its own")


@app.command()
def check(
    directory: Annotated[
        Path, typer.Argument(parser=path, help="Checkpoint directory in Hugging Face layout.")
    ],
) -> None:
    """Verify a checkpoint directory and print what it holds, without serving it."""
    from service.commands.check import check as run

    run(directory)


@app.command()
@names_own_options
def replay(
    bundle: Annotated[Path, typer.Argument(parser=path, help="Bundle that --nan-bundle-dir made.")],
    model: Annotated[
        Path | None,
        typer.Option(parser=path, help="Checkpoint directory. Default: the one that the bundle names."),
    ] = None,
    device: Annotated[Device, typer.Option(help="auto: the GPU if there is one.")] = "auto",
    graphs: Annotated[
        Graphs, typer.Option(help="What to capture. auto: a CUDA graph on a GPU, its stand-in on a CPU.")
    ] = "auto",
    force: Annotated[
        bool, typer.Option("--force", help="Run it on a checkpoint that is not the bundle's.")
    ] = False,
    json: Annotated[Path | None, typer.Option(help="Write the report to this file as well.")] = None,
) -> None:
    """Run the step of a NaN bundle again, eager and captured, and print where it goes wrong.

    Exit status: 0 if a flag of the bundle was raised again, 3 if not, 2 for a bundle or checkpoint that cannot
    be used.
    """
    from service.commands.replay import replay as run

    raise typer.Exit(run(bundle, model, device, graphs, force, json))


@bench_app.callback()
@with_settings(*_ENGINE_GROUPS)
def bench(
    settings: Settings,
    context: typer.Context,
    batch_sizes: Annotated[str, typer.Option(help="Requests at once, comma-separated.")] = "1,4,16",
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate for each request.")] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, max=2.0, help="0 is greedy.")] = 0.0,
    rounds: Annotated[int, typer.Option(min=1, help="Measured rounds, after one that is not.")] = 3,
    prompts: Annotated[Path | None, typer.Option(help="Texts, one a line. Default: own source code.")] = None,
    transformers: Annotated[bool, typer.Option(help="Measure Transformers too, where installed.")] = True,
    json: Annotated[Path | None, typer.Option(help="Write the results to this file as well.")] = None,
) -> None:
    """Measure speculative against plain decoding, and against Transformers, in one run."""
    from service.commands.bench import Plan
    from service.commands.bench import bench as run
    from service.commands.lists import read_numbers

    sizes = read_numbers("--batch-sizes", batch_sizes, 1, 4096)
    run(settings, Plan(sizes, max_tokens, temperature, rounds, transformers), prompts, json)


@bench_app.command("gpu")
@names_own_options
def bench_gpu(
    preset: Annotated[
        str | None,
        typer.Option(
            help="Shape for random weights: v2-lite, v3-like or tiny; shipped: the shipped checkpoint. "
            "Default: v2-lite, where no --model is named."
        ),
    ] = None,
    model: Annotated[Path | None, typer.Option(parser=path, help="A checkpoint directory instead.")] = None,
    routing: Annotated[
        str | None,
        typer.Option(help="Of random weights: spread (the default), or concentrated on the same experts."),
    ] = None,
    synthetic_accept_length: Annotated[
        float | None,
        typer.Option(help="Tokens that a step emits on average, whatever the target thinks of the drafts."),
    ] = None,
    batch_sizes: Annotated[str, typer.Option(help="Requests at once, comma-separated.")] = "1,8,32,64",
    prompt_tokens: Annotated[int, typer.Option(min=2, help="Random tokens of each prompt.")] = 512,
    output_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate for each.")] = 256,
    speculative_tokens: Annotated[str, typer.Option(help="Values of K, comma-separated.")] = "3",
    variants: Annotated[str, typer.Option(help="Of sampling: greedy, full, or both.")] = "greedy",
    overhead: Annotated[
        bool, typer.Option("--overhead", help="Measure guard and contract on against off as well.")
    ] = False,
    first_token: Annotated[
        str | None,
        typer.Option(help="Also measure first tokens behind prompts of so many tokens, comma-separated."),
    ] = None,
    save_weights: Annotated[
        Path | None,
        typer.Option(parser=path, help="Write the random weights to this directory as a checkpoint."),
    ] = None,
    device: Annotated[Device, typer.Option(help="auto: the GPU if there is one.")] = "auto",
    graphs: Annotated[Graphs, typer.Option(help="As for eyas serve.")] = "auto",
    attention_backend: Annotated[AttentionBackend, typer.Option(help="As for eyas serve.")] = "auto",
    json: Annotated[Path | None, typer.Option(help="Write the results to this file as well.")] = None,
) -> None:
    """Measure steady decoding beside the least time that reading the weights and the KV takes."""
    from engine.bench_plan import BenchPlan
    from service.commands import bench_gpu as command
    from service.commands.lists import read_numbers

    chosen = command.choose_model(preset, model, routing, save_weights)
    plan = BenchPlan(
        batch_sizes=read_numbers("--batch-sizes", batch_sizes, 1, 4096),
        variants=command.read_variants(variants),
        depths=command.read_depths(speculative_tokens, synthetic_accept_length),
        accept_length=synthetic_accept_length,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        device=device,
        graphs=graphs,
        attention_backend=attention_backend,
        overhead=overhead,
        first_tokens=[] if first_token is None else read_numbers("--first-token", first_token, 2, 1 << 20),
    )
    command.bench_gpu(chosen, plan, json)


def main() -> None:
    """Entry point of the command ``eyas``."""
    # Before torch is imported; the engine process gets the same
    os.environ.setdefault("GOMP_SPINCOUNT", "20000")
    try:
        app()
    except EngineError as error:
        Console(stderr=True).print(
            f"eyas: {error}", style="red", markup=False, highlight=False, soft_wrap=True
        )
        sys.exit(EXIT_REFUSED)


if __name__ == "__main__":
    main()
