"""What the operator asked for. What it resolves to on a machine is another object, the `Plan`."""

import msgspec


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`engine` in `tensorrt_llm/1/model.json`; unknown keys are errors. None: chosen at start."""

    checkpoint: str  # a Hugging Face directory; a relative one is relative to the model.json
    model: str = ""  # name shown to users; empty: the checkpoint's folder
    device: str = "auto"  # auto | cpu | cuda
    dtype: str = "auto"  # auto | float32 | float16 | bfloat16
    quantization: str = "none"  # fp8: matrices of the blocks and what they multiply in e4m3
    load_format: str = "safetensors"  # or "random": weights drawn at start, for benchmarks
    kv_cache_dtype: str = "auto"  # auto: dtype, or as the checkpoint says | fp8 | int8 | int4
    kv_cache_tokens: int | None = None
    kv_cache_reuse: bool = True  # what was computed for other requests is not computed again
    kv_cache_host_bytes: int = 0  # pinned; blocks of the cache move there rather than being lost
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_model_len: int | None = None
    # Tokens of a sequence that stay in the cache, the first `sink_tokens` of them for good; with it
    # sequences have no end, and positions are those in the cache. None: all that max_model_len has.
    attention_window: int | None = None
    sink_tokens: int = 0
    block_size: int = 32
    cuda_graphs: bool = True  # replay steps of decodes alone; False: launch every kernel every time
    deterministic: bool = False  # tokens do not depend on other requests, bit for bit; slower
    # New requests queued in the engine, and tokens of their prompts; more are refused, UNAVAILABLE.
    max_waiting: int = 4096
    max_waiting_tokens: int = 2_097_152
    gpu_hour_price: float = 0.0  # in any currency; with it, metrics tell the cost of requests
    request_log: str = ""  # a file that gets a line of JSON for every request taken; empty: none
    stuck_after_s: int = 60  # an engine whose step takes longer is killed, and started again
    # Beside decodes, chunks of longer prompts take no more of a step than the decodes do.
    long_prompt_tokens: int = 1024
