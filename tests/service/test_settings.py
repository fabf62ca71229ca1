"""Options from arguments and ``EYAS_*`` variables: precedence, and refusals that name their source."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from engine.errors import ConfigError
from service.options_table import options_table
from service.settings import SHIPPED_MODEL, Settings, load_settings, name_options

README = Path(__file__).parents[2] / "README.md"


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch):
    for name in [name for name in os.environ if name.startswith("EYAS_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "my-model"
    directory.mkdir()
    (directory / "tokenizer.json").write_text("{}")
    return directory


def refusal(given: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        load_settings(given)
    return str(caught.value)


def test_the_readme_lists_the_options():
    assert f"<!-- options -->\n{options_table()}\n<!-- /options -->" in README.read_text()


def test_defaults():
    settings = Settings()
    assert settings.model == SHIPPED_MODEL
    assert settings.model_name == "eyas-14m"
    assert (settings.num_speculative_tokens, settings.port, settings.max_num_seqs) == (3, 8000, 64)
    assert settings.gpu_memory_utilization == 0.9
    assert settings.engine_options().prefix_cache


def test_arguments_win_over_variables_over_defaults(model: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("EYAS_MODEL", str(model))
    monkeypatch.setenv("EYAS_PORT", "9000")
    monkeypatch.setenv("EYAS_NUM_SPECULATIVE_TOKENS", "5")
    monkeypatch.setenv("EYAS_NO_PREFIX_CACHE", "1")
    monkeypatch.setenv("EYAS_DTYPE", "bfloat16")
    monkeypatch.setenv("EYAS_SEED", "")
    settings = load_settings({"port": 9001})
    assert (settings.port, settings.num_speculative_tokens, settings.seed) == (9001, 5, None)
    options = settings.engine_options()
    assert (options.model, options.dtype, options.prefix_cache) == (str(model), "bfloat16", False)
    assert options.num_speculative_tokens == 5


def test_every_option_can_be_a_variable(model: Path, monkeypatch: pytest.MonkeyPatch):
    values = {
        "model": str(model),
        "tokenizer": str(model),
        "served_model_name": "m",
        "api_key": "k1,k2",
        "schedule": "sync",
        "graphs": "simulate",
        "device": "cpu",
        "attention_backend": "torch_mla",
        "dtype": "float16",
        "kv_cache_dtype": "auto",
        "log_level": "debug",
        "log_format": "json",
        "host": "::",
        "gpu_memory_utilization": "0.9",
        "no_prefix_cache": "true",
        "enforce_eager": "yes",
        "num_speculative_tokens": "1",
        "reasoning_parser": "none",
        "tool_call_parser": "deepseek",
        "otlp_endpoint": "http://localhost:4318",
        "open_metrics": "1",
        "metrics_compat": "vllm",
        "api_key_file": str(model / "tokenizer.json"),
        "audit_rate": "0.25",
        "nan_bundle_dir": str(model),
        **dict.fromkeys(("ssl_certfile", "ssl_keyfile", "ssl_ca_certs"), str(model / "tokenizer.json")),
    }
    for name in Settings.model_fields:
        monkeypatch.setenv(f"EYAS_{name.upper()}", values.get(name, "17"))
    settings = load_settings()
    assert settings.model_fields_set == set(Settings.model_fields)
    assert settings.api_key == ("k1", "k2")
    assert settings.enforce_eager
    assert settings.max_model_len == settings.num_kv_pages == settings.threads == 17


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("EYAS_PORT", "eighty", "EYAS_PORT='eighty'"),
        ("EYAS_PORT", "70000", "EYAS_PORT='70000'"),
        ("EYAS_PORT", "tcp://10.0.0.1:8000", "enableServiceLinks"),
        ("EYAS_SERVICE_HOST", "10.0.0.1", "enableServiceLinks"),
        ("EYAS_PORT_8000_TCP_ADDR", "10.0.0.1", "enableServiceLinks"),
        ("EYAS_SEED", "1.5", "EYAS_SEED='1.5'"),
        ("EYAS_SCHEDULE", "fast", "EYAS_SCHEDULE='fast'"),
        ("EYAS_ENFORCE_EAGER", "perhaps", "EYAS_ENFORCE_EAGER='perhaps'"),
        ("EYAS_DRAIN_TIMEOUT", "nan", "EYAS_DRAIN_TIMEOUT='nan'"),
        ("EYAS_MAX_NUM_SEQ", "3", "did you mean EYAS_MAX_NUM_SEQS?"),
        ("eyas_num_speculative_tokens", "0", "did you mean EYAS_NUM_SPECULATIVE_TOKENS?"),
        ("Eyas_Portt", "1", "Eyas_Portt: no such option; did you mean EYAS_PORT?"),
        ("EYAS_WHATEVER", "3", "EYAS_WHATEVER: no such option"),
    ],
)
def test_bad_variables_are_refused_by_name(name: str, text: str, words: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(name, text)
    assert words in refusal({})


def test_the_engine_gets_its_paths_as_text(model: Path):
    options = load_settings({"model": model, "nan_bundle_dir": model, "audit_rate": 1}).engine_options()
    assert (options.nan_bundle_dir, options.audit_rate) == (str(model), 1.0)
    assert load_settings({"model": model}).engine_options().nan_bundle_dir is None


def test_empty_keys_are_refused_and_keys_are_never_shown(model: Path, monkeypatch: pytest.MonkeyPatch):
    assert "--api-key" in refusal({"api_key": ["good", " "]})
    monkeypatch.setenv("EYAS_API_KEY", "secret,,other")
    message = refusal({})
    assert "EYAS_API_KEY" in message
    assert "secret" not in message
    monkeypatch.delenv("EYAS_API_KEY")
    monkeypatch.setenv("EYAS_API_KEY", " k1, k2 ")
    assert load_settings({"model": model}).api_key == ("k1", "k2")
    monkeypatch.delenv("EYAS_API_KEY")
    settings = load_settings({"api_key": ["secret,with,commas"], "model": model})
    assert settings.api_key == ("secret,with,commas",)
    assert "secret" not in repr(settings)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"port": -1}, "--port=-1"),
        ({"audit_rate": 1.5}, "--audit-rate=1.5"),
        ({"audit_rate": float("nan")}, "--audit-rate=nan"),
        ({"num_speculative_tokens": 9}, "--num-speculative-tokens=9"),
        ({"max_num_seqs": 0}, "--max-num-seqs=0"),
        ({"max_model_len": 1}, "--max-model-len=1"),
        ({"kv_page_size": 0}, "--kv-page-size=0"),
        ({"num_kv_pages": 1}, "--num-kv-pages=1"),
        ({"prefill_chunk_size": 0}, "--prefill-chunk-size=0"),
        ({"threads": 0}, "--threads=0"),
        ({"seed": 2**63}, "--seed=9223372036854775808"),
        ({"kv_cache_dtype": "fp8"}, "--kv-cache-dtype='fp8'"),
        ({"gpu_memory_utilization": 0.0}, "--gpu-memory-utilization=0.0"),
        ({"gpu_memory_utilization": float("nan")}, "--gpu-memory-utilization=nan"),
        ({"gpu_memory_utilization": 0.5, "num_kv_pages": 100}, "together with --num-kv-pages=100"),
    ],
)
def test_impossible_values_are_refused_by_name(given: dict[str, Any], words: str, model: Path):
    assert words in refusal({"model": model, **given})


def test_a_value_of_the_engines_is_named_by_its_variable(model: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("EYAS_AUDIT_RATE", "1.5")
    assert refusal({"model": model}).startswith("EYAS_AUDIT_RATE=1.5: ")
    monkeypatch.setenv("EYAS_AUDIT_RATE", "0")
    monkeypatch.setenv("EYAS_NUM_KV_PAGES", "100")
    message = refusal({"model": model, "gpu_memory_utilization": 0.5})
    assert message.startswith("--gpu-memory-utilization=0.5: ") and "EYAS_NUM_KV_PAGES=100" in message


@pytest.mark.parametrize(
    ("message", "named"),
    [
        ("kv_page_size=0: no", "--kv-page-size=0: no"),
        ("seed=x: not with num_kv_pages=9", "--seed=x: not with --num-kv-pages=9"),
        ("config.json: torch_dtype='x'", "config.json: torch_dtype='x'"),
        ("config.json: model_type='x'", "config.json: model_type='x'"),
        ("bundle.json: options.kv_page_size=0", "bundle.json: options.kv_page_size=0"),
        ("--device=tpu", "--device=tpu"),
    ],
)  # fmt: skip
def test_messages_of_the_engine_name_options_as_they_are_given(message: str, named: str):
    assert name_options(message) == named


def test_options_that_the_command_lacks_stay_the_engines_fields():
    message = "max_model_len=9: not with device='cuda'"
    assert name_options(message, options={"device", "json"}) == "max_model_len=9: not with --device='cuda'"


def test_loading_makes_no_directory(model: Path, tmp_path: Path):
    wanted = tmp_path / "bundles"
    assert load_settings({"model": model, "nan_bundle_dir": wanted}).nan_bundle_dir == wanted
    assert not wanted.exists()


def test_a_hub_id_is_refused_with_the_download_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.chdir(tmp_path)
    message = refusal({"model": "deepseek-ai/DeepSeek-V2-Lite"})
    assert "hf download deepseek-ai/DeepSeek-V2-Lite --local-dir DeepSeek-V2-Lite" in message
    assert "does not exist" in refusal({"model": "/no/such/place"})
    (tmp_path / "x.safetensors").write_text("")
    assert "not a directory" in refusal({"model": "x.safetensors"})


def test_a_model_without_tokenizer_is_refused_naming_the_option(model: Path, tmp_path: Path):
    bare = tmp_path / "bare"
    bare.mkdir()
    assert "--tokenizer" in refusal({"model": bare})
    settings = load_settings({"model": bare, "tokenizer": model})
    assert settings.tokenizer_dir == model
    assert settings.model_name == "bare"


def test_settings_cannot_be_changed():
    settings = Settings()
    with pytest.raises(ValueError, match="frozen"):
        settings.port = 1  # type: ignore[misc]
