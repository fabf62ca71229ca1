"""Every option of a server: from the command line, else from an ``EYAS_*`` variable, else its default.

The fields of `Settings` are the only list of options: the command line, the variables, the start-up print and
the table in the README all come from it.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from engine.errors import ConfigError
from engine.logs import LogFormat, LogLevel
from engine.options import AttentionBackend, Device, Dtype, EngineOptions, Graphs, Schedule

ENV_PREFIX = "EYAS_"
SHIPPED_MODEL = Path(__file__).resolve().parent.parent / "models" / "eyas-14m"
"""The model of the repository, served when no other is named."""

MetricsCompat = Literal["none", "vllm"]
ChatParser = Literal["auto", "deepseek", "none"]

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_SERVICE_LINK = re.compile(r"EYAS_(SERVICE_(HOST|PORT(_\w+)?)|PORT_\d+_(TCP|UDP)(_\w+)?)")


def _option(default: Any, group: str, text: str, **constraints: Any) -> Any:
    return Field(default=default, description=text, json_schema_extra={"group": group}, **constraints)


class Settings(BaseSettings):
    """Options of a server, immutable. Each field is an option; `load_settings` checks them together."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, env_ignore_empty=True, frozen=True, extra="forbid", protected_namespaces=()
    )

    model: Path = _option(
        SHIPPED_MODEL, "Model", "Checkpoint directory: config.json, safetensors, tokenizer.json."
    )
    tokenizer: Path | None = _option(
        None, "Model", "Directory with tokenizer.json, where the checkpoint has none."
    )
    served_model_name: str | None = _option(
        None, "Model", "Name of the model in the API. Default: the directory's name.", min_length=1
    )
    dtype: Dtype = _option(
        "auto", "Model", "Type to compute in. auto: float32 on a CPU, the checkpoint's on a GPU."
    )
    max_model_len: int | None = _option(
        None, "Model", "Most tokens of prompt and output. Default: the model's, clamped to the KV pool."
    )

    num_speculative_tokens: int = _option(
        3, "Engine", "Draft tokens in a step (K), 0 to 8; 0 turns speculation off."
    )
    max_num_seqs: int = _option(64, "Engine", "Most requests that run in one step.")
    schedule: Schedule = _option(
        "auto", "Engine", "Read a step's results at once (sync) or while the next one runs (overlap)."
    )
    prefill_chunk_size: int = _option(512, "Engine", "Most prompt tokens prefilled between two decode steps.")
    attention_backend: AttentionBackend = _option("auto", "Engine", "Attention kernels.")
    device: Device = _option("auto", "Engine", "auto: the GPU if there is one.")
    graphs: Graphs = _option(
        "auto",
        "Engine",
        "auto: CUDA graphs on a GPU, none on a CPU. simulate: traces that stand in for them.",
    )
    max_graph_rows: int | None = _option(
        None, "Engine", "Most rows of a captured step; larger batches run eager. Default: --max-num-seqs."
    )
    max_graph_prefill_tokens: int | None = _option(
        None,
        "Engine",
        "Most tokens of a captured prefill, 0 for none. Default: --prefill-chunk-size, at most 512.",
    )
    enforce_eager: bool = _option(False, "Engine", "Capture no graphs, whatever --graphs says.")
    audit_rate: float = _option(
        0.0,
        "Engine",
        "Share of finished greedy requests, 0 to 1, whose output the target scores again when nobody waits.",
    )
    nan_bundle_dir: Path | None = _option(
        None,
        "Engine",
        "Directory, made if need be, for a bundle of each step that tripped the NaN guard, for eyas replay.",
    )
    seed: int | None = _option(None, "Engine", "Makes requests without a seed of their own repeatable.")
    threads: int | None = _option(None, "Engine", "CPU threads of the engine. Default: the libraries'.")

    kv_cache_dtype: str = _option("auto", "KV cache", "Type of the KV pool; only auto, the computing type.")
    kv_page_size: int = _option(64, "KV cache", "Positions in a page of the KV pool.")
    num_kv_pages: int | None = _option(
        None, "KV cache", "Pages in the KV pool. Default: sized from the memory at hand."
    )
    gpu_memory_utilization: float = _option(
        0.9, "KV cache", "Share of the GPU's memory to use; not together with --num-kv-pages."
    )
    no_prefix_cache: bool = _option(False, "KV cache", "Reuse no KV between requests that start alike.")

    host: str = _option("127.0.0.1", "Server", "Address to listen on; 0.0.0.0 for all.")
    port: int = _option(8000, "Server", "Port to listen on; 0 for any free one.", ge=0, le=65535)
    api_key: Annotated[tuple[str, ...], NoDecode] = _option(
        (),
        "Server",
        "Key that clients must send; repeat it for several. The variable takes a comma-separated list, and "
        "hides keys from process listings.",
        repr=False,
    )
    api_key_file: Path | None = _option(
        None, "Server", "File with one key a line, besides those of --api-key."
    )
    metrics_compat: MetricsCompat = _option(
        "none", "Server", "Whose names /metrics shows the standard metrics under too: none or vllm."
    )
    open_metrics: bool = _option(False, "Server", "Let /metrics be read without a key.")
    ssl_certfile: Path | None = _option(None, "Server", "TLS certificate (PEM): serve HTTPS.")
    ssl_keyfile: Path | None = _option(None, "Server", "Private key of the certificate, if in another file.")
    ssl_ca_certs: Path | None = _option(
        None, "Server", "Certificates of authorities (PEM): clients must have a certificate of one of them."
    )
    max_queued_requests: int = _option(
        1024,
        "Server",
        "Most choices (prompts times n) that wait besides the --max-num-seqs that run; above it 429.",
        ge=0,
    )
    request_timeout: float | None = _option(
        None,
        "Server",
        "Seconds that a request may take from its arrival to its end; after it 504 (408 if its body is not there "
        "yet). Default: no limit.",
        gt=0.0,
        allow_inf_nan=False,
    )
    max_body_bytes: int = _option(8 * 2**20, "Server", "Largest request body; above it 413.", ge=1)
    max_total_body_bytes: int = _option(
        64 * 2**20,
        "Server",
        "Most bytes of all bodies over 256 KiB that are received or wait to be decoded, but never less than "
        "--max-body-bytes; above it 429.",
        ge=1,
    )
    drain_timeout: float = _option(
        30.0,
        "Server",
        "Seconds that running requests have to finish after SIGTERM.",
        ge=0.0,
        allow_inf_nan=False,
    )
    engine_timeout: float = _option(
        5.0,
        "Server",
        "Seconds without a sign of life after which the engine is ended; more than its longest iteration.",
        ge=1.0,
        allow_inf_nan=False,
    )
    max_engine_restarts: int = _option(
        3,
        "Server",
        "Most attempts in a row to start the engine again after its death; then exit code 1.",
        ge=0,
    )
    reasoning_parser: ChatParser = _option(
        "auto",
        "Server",
        "Marks of the reasoning in chat answers, told as reasoning_content. auto: <think>, if a token has it.",
    )
    tool_call_parser: ChatParser = _option(
        "auto", "Server", "Marks of tool calls in chat answers. auto: DeepSeek's, if the tokenizer has them."
    )
    otlp_endpoint: str | None = _option(
        None, "Server", "URL of an OpenTelemetry collector (OTLP over HTTP) for traces; needs eyas[otlp]."
    )
    log_level: LogLevel = _option("info", "Server", "Least severe messages to log.")
    log_format: LogFormat = _option("text", "Server", "Log lines for people or as JSON.")

    @field_validator("api_key", mode="before")
    @classmethod
    def _split_keys(cls, value: Any) -> Any:
        return value.split(",") if isinstance(value, str) else value

    @field_validator("api_key")
    @classmethod
    def _strip_keys(cls, keys: tuple[str, ...]) -> tuple[str, ...]:
        keys = tuple(key.strip() for key in keys)  # blanks around a header's value are no part of it
        if not all(keys):
            raise ValueError("a key must not be empty")
        return keys

    def all_api_keys(self) -> tuple[str, ...]:
        """The keys of the options and of the file.

        Raises:
            ConfigError: The file cannot be read or has no key: better no server than one without the lock.
        """
        if self.api_key_file is None:
            return self.api_key
        try:
            lines = self.api_key_file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--api-key-file {self.api_key_file}: {error}") from None
        keys = tuple(line.strip() for line in lines if line.strip())
        if not keys:
            raise ConfigError(f"--api-key-file {self.api_key_file} has no key")
        return (*self.api_key, *keys)

    @property
    def model_name(self) -> str:
        """The model's name in the API."""
        return self.served_model_name or self.model.resolve().name

    @property
    def tokenizer_dir(self) -> Path:
        """The directory that holds ``tokenizer.json``."""
        return self.tokenizer or self.model

    def engine_options(self) -> EngineOptions:
        """The engine's share of the options, not yet validated."""
        shared = set(EngineOptions.__struct_fields__) & set(type(self).model_fields)
        values = {name: getattr(self, name) for name in shared}
        bundles = None if self.nan_bundle_dir is None else str(self.nan_bundle_dir)
        paths = {
            "model": str(self.model),
            "tokenizer": str(self.tokenizer_dir),
            "nan_bundle_dir": bundles,
        }
        return EngineOptions(**{**values, **paths, "prefix_cache": not self.no_prefix_cache})


_ENGINE_OPTION = re.compile(
    r"(?<![\w.-])("
    + "|".join(sorted({*EngineOptions.__struct_fields__} & {*Settings.model_fields}))
    + ")(?==)"
)


def load_settings(given: Mapping[str, Any] | None = None) -> Settings:
    """Settings from the options ``given`` on the command line and the environment.

    Args:
        given: Values by field name; what is absent comes from the environment.

    Raises:
        ConfigError: A malformed or impossible value, a variable that no option has, a model or tokenizer that
            is not there; the message names the option or variable.
    """
    given = dict(given or {})
    _refuse_unknown_variables(os.environ)
    try:
        settings = Settings(**given)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(item, given) for item in error.errors())) from None
    try:
        settings.engine_options().validate()
    except ConfigError as error:
        raise ConfigError(name_options(str(error), given)) from None
    _check_directories(settings)
    _check_tls(settings)
    settings.all_api_keys()
    return settings


def option_name(field: str) -> str:
    """``--max-num-seqs`` for ``max_num_seqs``."""
    return "--" + field.replace("_", "-")


def _source_name(field: str, given: Mapping[str, Any]) -> str:
    """The option or variable that a value came from."""
    return option_name(field) if field in given else ENV_PREFIX + field.upper()


def name_options(
    message: str, given: Mapping[str, Any] | None = None, options: Collection[str] | None = None
) -> str:
    """An engine's message, which says ``max_num_seqs=0``, in the words of who set it: ``--max-num-seqs=0``.

    Args:
        given: Fields that came from the command line; others are named by their variable. ``None``: all did.
        options: Fields that are options of the command; others stay as the engine names them. ``None``: all are.
    """

    def name(match: re.Match[str]) -> str:
        if options is not None and match[1] not in options:
            return match[1]
        return option_name(match[1]) if given is None else _source_name(match[1], given)

    return _ENGINE_OPTION.sub(name, message)


def _explain(item: Mapping[str, Any], given: Mapping[str, Any]) -> str:
    field = str(item["loc"][0])
    name = _source_name(field, given)
    shown = "" if field == "api_key" else f"={item['input']!r}"
    hint = ""
    if field == "port" and str(item["input"]).startswith("tcp://"):
        hint = "; Kubernetes sets it for a Service of this name: use enableServiceLinks: false"
    return f"{name}{shown}: {item['msg']}{hint}"


def _refuse_unknown_variables(environ: Mapping[str, str]) -> None:
    known = {ENV_PREFIX + field.upper() for field in Settings.model_fields}
    for name in environ:
        # pydantic-settings takes any case, so that one of two spellings would win unseen: only upper case may pass
        if not name.upper().startswith(ENV_PREFIX) or name in known:
            continue
        if _SERVICE_LINK.fullmatch(name):
            hint = "Kubernetes sets it for a Service of this name: use enableServiceLinks: false"
        else:
            close = difflib.get_close_matches(name.upper(), known, n=1)
            hint = f"did you mean {close[0]}?" if close else "'eyas serve --help' lists the options"
        raise ConfigError(f"{name}: no such option; {hint}")


def _check_directories(settings: Settings) -> None:
    model = settings.model
    if not model.is_dir():
        problem = "is not a directory" if model.exists() else "does not exist"
        hint = ""
        if not model.exists() and _HUB_ID.fullmatch(str(model)):
            hint = ". To serve a model of the Hugging Face Hub, download it first:\n"
            hint += f"  hf download {model} --local-dir {model.name} && eyas serve --model {model.name}"
        raise ConfigError(f"--model {model} {problem}{hint}")
    directory = settings.tokenizer_dir
    if not (directory / "tokenizer.json").is_file():
        raise ConfigError(
            f"{directory} has no tokenizer.json: name a directory that has one with --tokenizer DIR"
        )


def _check_tls(settings: Settings) -> None:
    for field in ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs"):
        file = getattr(settings, field)
        if file is not None and not file.is_file():
            raise ConfigError(f"{option_name(field)} {file}: no such file")
        if file is not None and settings.ssl_certfile is None:
            raise ConfigError(f"{option_name(field)} needs --ssl-certfile")
