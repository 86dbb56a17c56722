"""Define the engine's settings as an operator writes them; `Plan` holds what they resolve to.

The description of each field is the help text of `slipstream compose`.
"""

import re
from typing import Annotated, NamedTuple, Self, get_type_hints

import msgspec
from msgspec import Meta
from slipstream_contract.limits import MAX_DRAFT_TOKENS
from slipstream_contract.log_probs import MODES
from slipstream_runtime.ranks import MAX_RANKS

DTYPES = ("auto", "float32", "float16", "bfloat16")
KV_CACHE_DTYPES = ("auto", "fp8", "int8", "int4")
LOAD_FORMATS = ("safetensors", "random")
BACKEND_MODELS = ("auto", "slipstream", "transformers")
DEVICE_DRAFTERS = ("draft", "medusa", "eagle3")  # that need weights
ON_OFF = ("on", "off")
BLOCK_SIZES = (8, 16, 32, 64, 128, 256)
SPECULATIONS = ("none", "lookup", "suffix", "auto", "forced", "synthetic", *DEVICE_DRAFTERS)
MAX_TARGET_ITL = 60_000  # ms
MAX_REPLICAS = 64
MAX_SEQS = 1 << 16  # max_num_seqs
MAX_STEP_TOKENS = 1 << 22  # max_num_batched_tokens
MIN_STUCK_AFTER_S = 3  # an idle engine turns, and is looked at, once a second
MAX_STUCK_AFTER_S = 86_400  # a day


def _field(description: str, default: str = "") -> Meta:
    """Describe a field; `default` says in words what None or another special default means."""
    return Meta(description=description, extra={"default": default})


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings `engine` in `tensorrt_llm/1/model.json`; None: chosen at start.

    Unknown keys are errors.
    """

    checkpoint: Annotated[
        str, _field("a Hugging Face directory; a relative one is relative to the model.json")
    ]
    model: Annotated[str, _field("the name that users see", "the checkpoint's own")] = ""
    device: Annotated[str, _field("auto, cpu or cuda")] = "auto"
    dtype: Annotated[
        str,
        _field("of weights and activations", "auto, the checkpoint's; float32 on a CPU"),
    ] = "auto"
    quantization: Annotated[
        str,
        _field(
            "auto: as the checkpoint has them, or int8 on a CPU that is faster with it than "
            "with 16 bits; none: 16 bits, whatever it has; fp8: weights and "
            "activations in e4m3, made from 16 bits at start; a GPU needs compute capability 8.9 "
            "or newer, a CPU computes it slowly; int8, int4: weights rounded at start; "
            "w4a8, w8a8: weights and, where a GPU has GEMMs for it, rows: to e4m3, to int8"
        ),
    ] = "auto"
    backend_model: Annotated[
        str,
        _field(
            "slipstream: a family of its own; transformers: the class that transformers has of the "
            "architecture, with paged attention, slower; auto: that where Slipstream has no family"
        ),
    ] = "slipstream"
    load_format: Annotated[
        str, _field("safetensors, or random: weights sampled at start, for benchmarks")
    ] = "safetensors"
    kv_cache_dtype: Annotated[
        str,
        _field(
            "of the KV cache: in 8 bits at least 1.9 times as many tokens fit as in 16, in 4 "
            "bits 3.6 times",
            "auto, that of the activations, or fp8 where the checkpoint has scales for it",
        ),
    ] = "auto"
    kv_cache_tokens: Annotated[
        int | None, _field("tokens that the KV cache holds", "what memory allows")
    ] = None
    memory_share: Annotated[
        float | None,
        _field(
            "of the device's memory, above 0 to 1, for weights, KV cache and workspace of this "
            "engine; of host memory on a CPU",
            "what is free; beside other engines of the repository, an even part of what their "
            "shares leave",
        ),
    ] = None
    kv_cache_reuse: Annotated[
        bool, _field("prompts that begin alike share what is computed of their beginning")
    ] = True
    kv_cache_host_bytes: Annotated[
        int,
        _field(
            "host memory, page-locked, to which blocks of the KV cache move when they are evicted; "
            "needs the reuse of the cache, and no attention window"
        ),
    ] = 0
    max_num_seqs: Annotated[
        int, _field(f"sequences that generate at the same time, 1 to {MAX_SEQS}")
    ] = 256
    speculation: Annotated[
        str,
        _field(
            "none, or what proposes tokens that one step verifies; tokens stay those without. "
            "lookup: what repeats itself; suffix: the same, and what other outputs said; auto: the "
            "longer match of both; forced: what a guide leaves no choice of, which all others "
            "propose, too; draft (a smaller model), medusa, eagle3: from "
            "draft_checkpoint; synthetic: for load tests, which makes texts meaningless"
        ),
    ] = "none"
    num_draft_tokens: Annotated[
        int,
        _field(f"most tokens of a sequence that a step verifies, 1 to {MAX_DRAFT_TOKENS}"),
    ] = 8
    suffix_tokens: Annotated[
        int,
        _field(
            "tokens of running sequences and of outputs that ended last in which speculation = "
            "suffix or auto looks, some 200 bytes of host memory each"
        ),
    ] = 1 << 20
    synthetic_acceptance: Annotated[
        str,
        _field(
            "for speculation = synthetic: the probability that the first draft of a step counts as "
            "right, the second if the first does, and so on, as 0.8,0.7; the last one is that of "
            "all further drafts",
            "-",
        ),
    ] = ""
    draft_checkpoint: Annotated[
        str,
        _field("the Hugging Face directory that speculation = draft, medusa or eagle3 needs", "-"),
    ] = ""
    medusa_choices: Annotated[
        str, _field("as TensorRT-LLM writes them: {0}, {0, 0}, ...; a chain, no tree", "-")
    ] = ""
    eagle_choices: Annotated[str, _field("the same, for eagle3", "-")] = ""
    max_num_batched_tokens: Annotated[
        int,
        _field(f"tokens of one step, prompts and generated ones together, 1 to {MAX_STEP_TOKENS}"),
    ] = 2048
    max_model_len: Annotated[
        int | None, _field("tokens of prompt and output together", "the checkpoint's context")
    ] = None
    attention_window: Annotated[
        int | None,
        _field(
            "tokens of a sequence that stay in the cache: it may then be of any length; for models "
            "without windows of their own. On a GPU it needs --kv-cache-dtype auto and heads of at "
            "most 128",
            "all that it has",
        ),
    ] = None
    sink_tokens: Annotated[
        int, _field("how many tokens of the attention window are the sequence's first; 4 is usual")
    ] = 0
    block_size: Annotated[
        int, _field(f"tokens in a block of the KV cache, one of {', '.join(map(str, BLOCK_SIZES))}")
    ] = 32
    tensor_parallel: Annotated[
        int,
        _field(
            "ranks, processes on GPUs or cores of this host, over which every matrix is split, 1 "
            f"to {MAX_RANKS}; heads and widths must be multiples of it"
        ),
    ] = 1
    replicas: Annotated[
        int,
        _field(
            "engines that serve this model, each on GPUs of its own (as many as it has ranks), or "
            f"on its part of the cores, 1 to {MAX_REPLICAS}; a request goes where the longest part "
            "of its prompt is cached, unless another is that much less busy"
        ),
    ] = 1
    pipeline_parallel: Annotated[
        int,
        _field(
            "stages of a pipeline, each with a part of the layers; with tensor_parallel each is of "
            f"so many ranks, {MAX_RANKS} in all at most"
        ),
    ] = 1
    cuda_graphs: Annotated[
        bool, _field("replay steps as CUDA graphs; false: launch every kernel every time")
    ] = True
    deterministic: Annotated[
        bool, _field("tokens of a request do not depend on other requests, bit for bit; slower")
    ] = False
    max_waiting: Annotated[
        int, _field("requests that may wait in the engine; more are refused, UNAVAILABLE")
    ] = 4096
    max_waiting_tokens: Annotated[
        int, _field("tokens of the prompts of waiting requests; more are refused, UNAVAILABLE")
    ] = 2_097_152
    gpu_hour_price: Annotated[
        float,
        _field(
            "of an hour of one GPU, in any currency: metrics then report the cost of requests",
            "none",
        ),
    ] = 0.0
    request_log: Annotated[
        str,
        _field(
            "a file, by its absolute path, that gets a line of JSON for every request taken", "none"
        ),
    ] = ""
    stuck_after_s: Annotated[
        int,
        _field(
            "seconds after which a step, or one call in which a rank that starts hangs, counts as "
            "hanging: the engine is killed and started again; "
            f"{MIN_STUCK_AFTER_S} to {MAX_STUCK_AFTER_S}"
        ),
    ] = 60
    logprobs_mode: Annotated[
        str,
        _field(
            "of log probs that vllm_model sends, as vLLM's option of that name: "
            f"{', '.join(MODES)}; a request may choose another"
        ),
    ] = "raw_logprobs"
    thinking_end: Annotated[
        str,
        _field(
            "text that ends the model's thinking, for thinking_token_budget and guides",
            "</think>, where that is a token",
        ),
    ] = ""
    guide_in_thinking: Annotated[
        bool,
        _field(
            "guides hold from the first token on, in thinking too; a request may choose otherwise"
        ),
    ] = False
    logits_processors: Annotated[
        str,
        _field(
            "classes that edit the logits of requests which name them, module:Class[,...], from "
            "the engine's Python path",
            "none",
        ),
    ] = ""
    adapters: Annotated[
        str,
        _field(
            "LoRA adapters that requests may choose by name, PEFT's directories by their absolute "
            "paths: NAME=DIR[,NAME=DIR]",
            "none",
        ),
    ] = ""
    adapter_root: Annotated[
        str,
        _field(
            "the directory, by its absolute path, below which requests may have adapters loaded",
            "none may be",
        ),
    ] = ""
    adapter_dir: Annotated[
        str,
        _field(
            "a directory, by its absolute path, whose sub-directories are adapters by their names: "
            "those that appear, change or vanish are loaded, loaded again and unloaded at run time",
            "none",
        ),
    ] = ""
    adapter_memory: Annotated[
        int | None,
        _field(
            "bytes of the device for adapters: those that requests use are there, all others in "
            "host memory",
            "on a GPU half of what the KV cache leaves free, on a CPU half of what is free",
        ),
    ] = None
    lora_task_bytes: Annotated[
        int,
        _field(
            "bytes of adapters that requests bring (lora_task_id, lora_weights, lora_config); "
            "beyond, the one used longest ago is discarded"
        ),
    ] = 1 << 30
    max_logits_bytes: Annotated[
        int,
        _field(
            "bytes of whole logits, or log probs of the whole vocabulary, that a request may ask "
            "for; more are refused"
        ),
    ] = 1 << 26
    target_itl: Annotated[
        float | None,
        _field(
            "milliseconds that a step with running streams may take: prompts that are not long "
            "get what streams leave of it, or the whole step once they have waited for too long",
            "five times what streams alone take",
        ),
    ] = None
    long_prompt_tokens: Annotated[
        int | None,
        _field(
            "a prompt of more tokens is computed beside running streams in chunks that about "
            "double the time of their step",
            "those that take more than 32 steps of the streams",
        ),
    ] = None

    idle_tuning: Annotated[
        str,
        _field(
            "on: an engine of one GPU measures kernels for its GEMMs while it has no requests, as "
            "slipstream tune does, and goes on with the fastest; not in the deterministic mode, "
            "nor with a memory share; off: it does not"
        ),
    ] = "on"

    prompt_unpacking: Annotated[
        str,
        _field(
            "on: on a GPU, long prompts over a KV cache in fewer bits are attended to in a copy of "
            "16 bits, for which the start takes up to 256 MiB; off: over the cache as it is"
        ),
    ] = "on"

    kv_events: Annotated[
        str,
        _field(
            "where to publish which blocks the KV cache has, as vLLM's events over ZeroMQ, with "
            "the token ids of prompts: [tcp://HOST:]PORT[,PORT], the second port for replays; HOST "
            "is 127.0.0.1 if not given; replica I adds I to both ports",
            "nowhere",
        ),
    ] = ""
    kv_events_topic: Annotated[
        str, _field("of these events; llm-d reads kv@ADDRESS:PORT@MODEL", "kv@HOST@MODEL")
    ] = ""

    @property
    def num_ranks(self) -> int:
        """Processes that hold the model together: of all stages."""
        return self.tensor_parallel * self.pipeline_parallel


class EventPorts(NamedTuple):
    """What `kv_events` says."""

    host: str
    port: int
    replay_port: int  # 0: none
    rank: int  # is added to both

    @classmethod
    def of(cls, text: str) -> Self:
        """Read `[tcp://HOST:]PORT[,PORT][+RANK]`. Raises ValueError with what is wrong."""
        found = re.fullmatch(r"(?:tcp://(\S+):)?(\d{1,5})(?:,(\d{1,5}))?(?:\+(\d{1,2}))?", text)
        if found is None:
            raise ValueError("is not [tcp://HOST:]PORT[,PORT]")
        ports = cls(found[1] or "127.0.0.1", *(int(part or 0) for part in found.groups()[1:]))
        for port in (ports.port, *([ports.replay_port] if found[3] else [])):
            if not 0 < port <= port + ports.rank < 1 << 16:
                raise ValueError(f"has the port {port}, which is not between 1 and 65535")
        return ports


def help_of(name: str) -> str:
    """Return the description of a field of `EngineConfig` and its default, for a command's help."""
    (meta,) = get_type_hints(EngineConfig, include_extras=True)[name].__metadata__
    defaults = {field.name: field.default for field in msgspec.structs.fields(EngineConfig)}
    return f"{meta.description} (default: {meta.extra['default'] or defaults[name]})"
