"""Metrics of a real server: what was done is what they say, under all three sets of names."""

from server.metrics_page import wait_for
from server.support import PROMPT


def test_try(idle):
    url = idle.server.endpoints.metrics
    page = wait_for(url, lambda page: "slipstream_running_sequences" in page.names)
    before = page.get("slipstream_requests_total", model="tensorrt_llm_bls")
    idle.stream("tensorrt_llm_bls", text_input=PROMPT, max_tokens=9, stream=True)
    page = wait_for(
        url, lambda page: page.get("slipstream_requests_total", model="tensorrt_llm_bls") > before
    )
    page = wait_for(url, lambda page: page.get("vllm:generation_tokens_total") > 8)
    print(page.text)
