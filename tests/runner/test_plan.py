"""What a configuration resolves to, and the impossible ones: field, value and limit in one line."""

from pathlib import Path
from shutil import copytree

import pytest
import torch
from fixtures.models.checkpoints import edit_config, make_model, save
from msgspec.structs import replace
from slipstream.config import EngineConfig
from slipstream.core.window import AttentionWindow
from slipstream.errors import ConfigError
from slipstream.kernels.cpu import native
from slipstream.kernels.cpu.native import library
from slipstream.kernels.runtime.registry import KNOWN
from slipstream.runner import plan as plans
from slipstream.runner.memory import num_blocks
from slipstream.runner.plan import ENDLESS, resolve


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(make_model("llama", hidden_size=64), tmp_path_factory.mktemp("plan") / "Tiny-1B")


@pytest.fixture
def own(checkpoint: Path, tmp_path: Path) -> Path:
    """A copy, which a test may change."""
    return copytree(checkpoint, tmp_path / "own")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"block_size": 24}, "block_size = 24"),
        ({"block_size": 4}, "block_size = 4"),
        ({"block_size": 512}, "block_size = 512"),
        ({"max_num_seqs": 0}, "max_num_seqs = 0 is below 1"),
        ({"max_num_batched_tokens": -1}, "max_num_batched_tokens = -1"),
        ({"max_waiting": 0}, "max_waiting = 0"),
        ({"max_waiting_tokens": 0}, "max_waiting_tokens = 0"),
        ({"stuck_after_s": 2}, "stuck_after_s = 2 is below 3"),
        ({"kv_cache_host_bytes": -1}, "kv_cache_host_bytes = -1 is below 0"),
        (
            {"kv_cache_host_bytes": 1000},
            "kv_cache_host_bytes = 1000 is below a block's 65536 bytes",
        ),
        (
            {"kv_cache_host_bytes": 1 << 20, "kv_cache_reuse": False},
            "kv_cache_host_bytes = 1048576 is for cached blocks, which there are only with",
        ),
        (
            {"kv_cache_host_bytes": 1 << 20, "attention_window": 64},
            "kv_cache_host_bytes = 1048576 is for cached blocks, which there are only with",
        ),
        ({"kv_cache_host_bytes": 1 << 60}, "GB of host memory are available"),
        ({"gpu_hour_price": -0.5}, "gpu_hour_price = -0.5 is not a price"),
        ({"gpu_hour_price": float("inf")}, "gpu_hour_price = inf is not a price"),
        ({"request_log": "log.json"}, "request_log = 'log.json' is not an absolute path"),
        ({"request_log": "/"}, "request_log = '/' is a directory, not a file"),
        ({"request_log": "/none/a"}, "request_log = '/none/a': there is no directory /none"),
        ({"model": "a\nb"}, "model = 'a\\nb' is not a name of at most 256 printable characters"),
        ({"model": "a" * 257}, "is not a name of at most 256 printable characters"),
        ({"max_num_seqs": 65_537}, "max_num_seqs = 65537 is above 65536"),
        ({"max_num_batched_tokens": 10**9}, "max_num_batched_tokens = 1000000000 is above"),
        ({"stuck_after_s": 86_401}, "stuck_after_s = 86401 is above 86400"),
        ({"max_waiting": 10**23}, "max_waiting = 100000000000000000000000 is above"),
        ({"suffix_tokens": 2**62 + 1}, "suffix_tokens = 4611686018427387905 is above"),
        ({"kv_events": "tcp://5557"}, "kv_events = 'tcp://5557' is not [tcp://HOST:]PORT[,PORT]"),
        ({"kv_events": "5557,0"}, "kv_events = '5557,0' has the port 0, which is not between 1"),
        ({"kv_events": "65535", "replicas": 2}, "kv_events = '65535' has the port 65535"),
        (
            {"kv_events": "5557,5558", "replicas": 2},
            "kv_events = '5557,5558' has ports that 2 replicas would share",
        ),
        (
            {"kv_events": "5557", "kv_cache_reuse": False},
            "there are only with kv_cache_reuse",
        ),
        ({"kv_events": "5557", "attention_window": 64}, "there are only with kv_cache_reuse"),
        ({"kv_events_topic": "kv@a@b"}, "kv_events_topic = 'kv@a@b' is a topic of no events"),
        ({"max_model_len": 257}, "max_model_len = 257 is above the checkpoint's context of 256"),
        ({"max_model_len": 0}, "max_model_len = 0 is below 1"),
        ({"kv_cache_tokens": 31}, "kv_cache_tokens = 31 is below 32"),
        ({"kv_cache_tokens": 10**12}, "kv_cache_tokens = 1000000000000 takes"),
        ({"device": "tpu"}, "device = 'tpu'"),
        ({"dtype": "int8"}, "dtype = 'int8'"),
        ({"load_format": "gguf"}, "load_format = 'gguf'"),
        ({"sink_tokens": 4}, "sink_tokens = 4 needs an attention_window"),
        ({"attention_window": 0}, "attention_window = 0 is below 1"),
        ({"attention_window": 8, "sink_tokens": -1}, "sink_tokens = -1 is below 0"),
        ({"attention_window": 8, "sink_tokens": 8}, "sink_tokens = 8 leaves nothing of"),
        ({"attention_window": 257}, "attention_window = 257 is above max_model_len = 256"),
        (
            {"attention_window": 64, "max_model_len": 63},
            "attention_window = 64 is above max_model_len = 63",
        ),
    ],
)
def test_impossible(changes: dict[str, object], words: str, checkpoint: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(EngineConfig(checkpoint=str(checkpoint), **changes))
    assert words in str(caught.value)


def test_a_window_of_the_model_excludes_another(tmp_path: Path) -> None:
    save(make_model("mistral", sliding_window=8), tmp_path)
    plan = resolve(EngineConfig(checkpoint=str(tmp_path), device="cpu", max_num_batched_tokens=16))
    assert plan.window == AttentionWindow(8, num_ahead=16)
    assert plan.held_blocks == 2  # of the 8 that the context has
    with pytest.raises(ConfigError, match="MistralForCausalLM has windows of its own"):
        resolve(EngineConfig(checkpoint=str(tmp_path), device="cpu", attention_window=8))


def test_windows_in_some_layers(tmp_path: Path) -> None:
    """Three of four groups of a layer each hold a window."""
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"]
    layers = {"num_hidden_layers": 4, "layer_types": kinds, "sliding_window": 8}
    save(make_model("gemma3", **layers), tmp_path)
    options = {"device": "cpu", "max_num_batched_tokens": 16, "kv_cache_tokens": 640}
    plan = resolve(EngineConfig(checkpoint=str(tmp_path), **options))
    assert plan.window == AttentionWindow(8, 0, 16, False, 4, 1)
    assert plan.block_bytes == 32 * 2 * 2 * 64 * 4
    assert plan.held_blocks == 8 + 3 * 2  # of the 4 * 8 that the context has
    assert num_blocks(plan, 10**9) == 4 * 20
    assert "KV cache of 640 tokens" in plan.banner(80)
    short = resolve(EngineConfig(checkpoint=str(tmp_path), **options, max_model_len=8))
    assert short.window == AttentionWindow(0, 0, 16)  # all of which every layer sees


@pytest.mark.parametrize("name", ["fp8", "int8", "int4"])
def test_endless_on_a_gpu_in_16_bits_only(
    name: str, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plans, "device_of", lambda *_: torch.device("cuda", 0))
    monkeypatch.setattr(plans, "check_gpu", lambda *_: None)
    options = {"checkpoint": str(checkpoint), "dtype": "bfloat16", "attention_window": 64}
    assert resolve(EngineConfig(**options)).window.has_gaps
    words = f"attention_window = 64 needs kv_cache_dtype = 'auto' on a GPU, not '{name}'"
    with pytest.raises(ConfigError, match=words):
        resolve(EngineConfig(kv_cache_dtype=name, **options))


def test_endless_on_a_gpu_with_heads_up_to_128(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    edit_config(own, head_dim=256)
    options = {"checkpoint": str(own), "dtype": "bfloat16", "attention_window": 64}
    assert resolve(EngineConfig(device="cpu", **options)).window.has_gaps
    monkeypatch.setattr(plans, "device_of", lambda *_: torch.device("cuda", 0))
    monkeypatch.setattr(plans, "check_gpu", lambda *_: None)
    words = "attention_window = 64 on a GPU has no kernels for heads of 256 .*head_dim"
    with pytest.raises(ConfigError, match=words):
        resolve(EngineConfig(**options))


def test_endless(checkpoint: Path) -> None:
    config = EngineConfig(
        checkpoint=str(checkpoint), device="cpu", attention_window=128, sink_tokens=4
    )
    plan = resolve(config)
    assert plan.max_model_len == ENDLESS
    assert plan.window == AttentionWindow(128, 4, 2048, has_gaps=True)
    assert plan.table_blocks == plan.held_blocks == 1 + -(-(124 - 1 + 31 + 2048) // 32)
    assert "of any length, the last 128 tokens of them with the first 4," in plan.banner(1000)


def test_defaults_on_a_cpu(checkpoint: Path) -> None:
    plan = resolve(EngineConfig(checkpoint=str(checkpoint), device="cpu"))
    assert plan.device == torch.device("cpu")
    assert plan.dtype == torch.float32
    assert plan.max_model_len == 256
    assert plan.model_name == "Tiny-1B"
    assert not plan.has_tokenizer


def test_as_asked(checkpoint: Path) -> None:
    config = EngineConfig(
        checkpoint=str(checkpoint),
        model="shown",
        device="cpu",
        dtype="bfloat16",
        kv_cache_tokens=1000,
        block_size=16,
    )
    plan = resolve(config)
    assert (plan.block_bytes, plan.dtype) == (16 * 2 * 2 * 2 * 64 * 2, torch.bfloat16)
    banner = plan.banner(62)
    for fact in ("shown", "LlamaForCausalLM", "bfloat16", "992 tokens", "3.9 sequences of 256"):
        assert fact in banner
    assert "host memory" not in banner
    assert "1,600 tokens more in host memory" in plan.banner(62, 100)
    assert "ranks" not in banner
    several = resolve(replace(config, tensor_parallel=2)).banner(62)
    assert ", 2 ranks): " in several
    assert "(0.00 GB on rank 0, 62 blocks" in several
    assert "\n" not in banner


def test_threads_from_the_environment(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(checkpoint=str(checkpoint), device="cpu")
    monkeypatch.setenv("SLIPSTREAM_CPU_THREADS", "3")
    assert resolve(config).num_threads == 3
    assert "CPU, 3 threads" in resolve(config).banner(9)
    monkeypatch.setenv("SLIPSTREAM_CPU_THREADS", "many")
    with pytest.raises(ConfigError, match="SLIPSTREAM_CPU_THREADS = 'many'"):
        resolve(config)


def test_a_small_model_gets_one_thread(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLIPSTREAM_CPU_THREADS", raising=False)
    plan = resolve(EngineConfig(checkpoint=str(own), device="cpu"))
    assert plan.num_threads == 1
    assert "CPU, 1 thread)" in plan.banner(9)
    edit_config(own, hidden_size=1024)
    assert resolve(EngineConfig(checkpoint=str(own), device="cpu")).num_threads is None


def test_gpu_facts(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What would be decided on a GPU with 2 GiB free."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (2 << 30, 80 << 30))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "GPU")
    monkeypatch.setattr("slipstream.runner.devices.find_spec", lambda _: True)
    monkeypatch.setattr("slipstream.runner.plan.target_of", lambda _: KNOWN["sm_90a"])
    edit_config(own, dtype="bfloat16")
    monkeypatch.setattr(native, "built", lambda _: pytest.fail("a GPU needs no kernels of a CPU"))
    library.cache_clear()
    plan = resolve(EngineConfig(checkpoint=str(own)))
    assert plan.device.type == "cuda"
    assert plan.dtype == torch.bfloat16
    many = {"load_format": "random", "kv_cache_tokens": 10_000_000}
    with pytest.raises(ConfigError, match=r"kv_cache_tokens = 10000000 takes .* GB"):
        resolve(EngineConfig(checkpoint=str(own), **many))
    edit_config(own, head_dim=48)
    assert resolve(EngineConfig(checkpoint=str(own))).attention.spec.head_size == 64
    edit_config(own, head_dim=320)
    with pytest.raises(ConfigError, match="64, 80, 96, 128, 256 have kernels"):
        resolve(EngineConfig(checkpoint=str(own)))
    edit_config(own, head_dim=64)
    monkeypatch.setattr("slipstream.runner.devices.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match="pip install"):
        resolve(EngineConfig(checkpoint=str(own)))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    with pytest.raises(ConfigError, match=r"compute capability \(7, 5\)"):
        resolve(EngineConfig(checkpoint=str(own)))
