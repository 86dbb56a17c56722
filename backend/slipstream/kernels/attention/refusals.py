"""Reasons for which a backend does not support a spec: field, value and limit; None: it does."""

from slipstream.kernels.attention import rules
from slipstream.kernels.attention.spec import BY_HEAD, CAUSAL, LATENT, PREFIX, AttentionSpec
from slipstream.kernels.cache import kv_format


def no_device(device: str, spec: AttentionSpec) -> str | None:
    """Return why a backend of `device` does not run, or None."""
    return None if spec.device == device else f"device = {spec.device!r} is not {device!r}"


def no_layout(spec: AttentionSpec) -> str | None:
    """Return what no backend supports on any device, or None."""
    if spec.form not in (CAUSAL, LATENT, PREFIX, BY_HEAD):
        return f"{spec.model} needs {spec.form} attention, which no backend has"
    if spec.num_heads % spec.num_kv_heads:
        return (
            f"num_attention_heads = {spec.num_heads} is no multiple of num_key_value_heads = "
            f"{spec.num_kv_heads}"
        )
    if spec.form == LATENT and (spec.streams or any(spec.windows)):
        return f"{spec.model} has latent attention, which is without windows and of an end"
    if spec.form == LATENT and spec.changes:
        return f"{spec.model} has latent attention and {spec.changes[0]}, which no backend has"
    if spec.form == PREFIX and (reason := _no_prefix(spec)) is not None:
        return f"{reason} does not go with {spec.model}, whose tokens of a prompt see each other"
    if spec.skipped_tokens and (reason := _no_skips(spec)) is not None:
        return reason
    if spec.streams and spec.changes:
        return f"attention_window = {spec.stream_window}: {spec.model} has {spec.changes[0]}"
    if spec.streams and any(spec.windows):
        return (
            f"attention_window = {spec.stream_window}: {spec.model} has windows of its own in "
            "config.json"
        )
    if spec.is_chunked and (chunk := max(spec.windows)) % spec.block_size:
        return (
            f"block_size = {spec.block_size} does not divide attention chunks of {chunk} tokens "
            f"({spec.model}, attention_chunk_size)"
        )
    return None


def no_rotation(spec: AttentionSpec, case: rules.Case) -> str | None:
    """Return why decodes are not rotated by their attention kernel, or None."""
    if spec.form == BY_HEAD:
        return "a row is a head's"
    if spec.form == PREFIX or spec.is_chunked:
        return "a row's length is not the position of its token"
    return rules.no_rotation(case)


def _no_prefix(spec: AttentionSpec) -> str | None:
    """Return what does not go with prompts whose tokens see each other, or None."""
    if spec.streams:
        return f"attention_window = {spec.stream_window}"
    if any(spec.windows):
        return f"a window of {max(spec.windows)} tokens in config.json"
    if spec.cache_dtype in kv_format.FORMATS.values():
        return f"kv_cache_dtype = {kv_format.name_of(spec.cache_dtype)!r}"
    if spec.deterministic:
        return "deterministic = True"
    if spec.host_bytes:
        return f"kv_cache_host_bytes = {spec.host_bytes}"
    return spec.changes[0] if spec.changes else None


def _no_skips(spec: AttentionSpec) -> str | None:
    """Return what does not go with heads that skip blocks of tokens, or None."""
    why = f"{spec.model} has heads that skip blocks of {spec.skipped_tokens} tokens"
    if spec.skipped_tokens % spec.block_size:
        return f"block_size = {spec.block_size}: {why}, which blocks of the cache must divide"
    if spec.form not in (CAUSAL, BY_HEAD):
        return f"{why}, and {spec.form} attention, which no backend has"
    if spec.streams:
        return f"attention_window = {spec.stream_window}: {why}"
    if any(spec.windows):
        return f"{why}, and windows, which no backend has"
    return f"{why}, and {spec.changes[0]}, which no backend has" if spec.changes else None


def no_scores(spec: AttentionSpec) -> str | None:
    """Return what kernels do not make of scores, or None: they make one change."""
    if spec.form == LATENT:
        return f"{spec.model} has {LATENT} attention, which is that of `LatentCuda`"
    if len(spec.changes) < 2:
        return None
    both = " and ".join(spec.changes)
    return f"device = 'cuda': {spec.model} has {both}: no kernel has both, device = 'cpu' has"


def no_cache(spec: AttentionSpec) -> str | None:
    """Return what no cache of this format holds, or None."""
    asked = f"kv_cache_dtype = {kv_format.name_of(spec.cache_dtype)!r}"
    is_quantized = spec.cache_dtype in kv_format.FORMATS.values()
    if is_quantized and spec.block_size < kv_format.MIN_BLOCK_SIZE:
        return f"{asked} needs block_size >= {kv_format.MIN_BLOCK_SIZE}, not {spec.block_size}"
    if not kv_format.is_legal(spec.cache_dtype, spec.head_size):
        return (
            f"{asked} needs heads that are equal groups of at most {kv_format.GROUP} numbers, "
            f"and even: config.json has head_dim = {spec.head_size}"
        )
    if spec.host_bytes and (spec.streams or not spec.reuses_blocks):
        return (
            f"kv_cache_host_bytes = {spec.host_bytes} is for cached blocks, which there are only "
            "with kv_cache_reuse and without an attention_window"
        )
    return None


def no_latents(spec: AttentionSpec) -> str | None:
    """Return why no kernel attends over the spec's latents, or None."""
    if reason := rules.no_latents(spec.case(), spec.latent_rank):
        return f"device = 'cuda': {spec.model} has {LATENT} attention: {reason}; 'cpu' takes any"
    return None


def no_heads(spec: AttentionSpec) -> str | None:
    """Return why no kernel has heads of the spec's size, or None."""
    if reason := rules.no_kernel(spec.case()):
        return (
            f"device = 'cuda' with heads of {spec.head_size} (config.json's head_dim): {reason}; "
            "device = 'cpu' takes any"
        )
    return None


def no_stream(spec: AttentionSpec) -> str | None:
    """Return what the streaming kernels do not take: without them decodes would be chunks."""
    asked, case = f"attention_window = {spec.stream_window}", spec.case()
    if not spec.streams or (reason := rules.no_sinks(case)) is None:
        return None
    if case.is_quantized:
        name = kv_format.name_of(spec.cache_dtype)
        return f"{asked} needs kv_cache_dtype = 'auto' on a GPU, not {name!r}"
    return (
        f"{asked} on a GPU has no kernels for heads of {spec.head_size} (config.json's head_dim): "
        f"{reason}; device = 'cpu' takes any"
    )
