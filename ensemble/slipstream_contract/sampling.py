"""How to choose tokens: one struct, made from either contract's tensors, for the engine as is."""

import msgspec


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Normalised and validated; the engine trusts it. Defaults mean "no effect".

    Greedy decoding is `temperature == 0`. The engine checks token ids against its vocabulary.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # prompt and output, as transformers and TensorRT-LLM have it
    presence_penalty: float = 0.0  # output only
    frequency_penalty: float = 0.0  # output only
    seed: int | None = None  # None: drawn per request; sequence i of n samples with (seed, i)
    n: int = 1
    end_ids: tuple[int, ...] = ()  # end the sequence and are not part of the output
    stop_token_ids: tuple[int, ...] = ()
    stop_words: tuple[bytes, ...] = ()  # matched on bytes, across token borders
    include_stop: bool = True  # the stop word stays in the output (TensorRT-LLM), or not (vLLM)
    bad_words: tuple[tuple[int, ...], ...] = ()
    bias: tuple[tuple[int, float], ...] = ()  # (token id, added to its logit)
    log_probs: bool = False  # of the sampled tokens
