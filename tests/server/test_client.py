"""The SDK and the client's commands against the real server, every model."""

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap

import pytest
from fixtures.server.support import LONG, PROMPT, TEXT_MODELS
from fixtures.tiers import quick_of
from slipstream_client import (
    AsyncSlipstreamClient,
    Code,
    ContractError,
    RequestTimeoutError,
    SlipstreamClient,
)
from slipstream_client.codec import STREAMED
from slipstream_contract.tensors import LLMAPI
from slipstream_serve.server import repository_root

pytestmark = pytest.mark.triton

DOCUMENT = (repository_root() / "docs" / "clients.md").read_text()
BLOCKS = [
    textwrap.dedent(block).strip()
    for block in re.findall(r"(?:^    .*\n|^\n(?=    ))+", DOCUMENT, re.MULTILINE)
]
CURLS = [
    line
    for block in BLOCKS
    for line in re.findall(r"^curl .*?'$", block, re.M | re.S)
    if LLMAPI.name not in line  # no model of the default repository: tests/server/test_llmapi.py
]
EVERY_TEXT_MODEL = [*TEXT_MODELS, "vllm_model"]
HEALTH_KEYS = {
    "about",
    "model",
    "engine_pid",
    "kv_blocks_free",
    "kv_blocks_total",
    "running",
    "waiting",
    "last_step_age_s",
    "faults",
    "is_draining",
    "replicas",
}


@pytest.fixture
def sdk(idle):
    with SlipstreamClient(idle.address, timeout_s=120.0) as made:
        yield made


def greedy(model: str) -> dict[str, object]:
    """vLLM samples at temperature 1 unless told otherwise."""
    return {"temperature": 0.0} if model == "vllm_model" else {}


def command(client, *arguments: str, **options) -> subprocess.Popen[str]:
    """Run the command; Ctrl-C reaches it even if the shell of the tests ignores SIGINT."""
    port = client.address.rpartition(":")[2]
    return subprocess.Popen(
        [sys.executable, "-m", "slipstream_client.cli", *arguments, "--grpc-port", port],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        **options,
    )


def test_every_model_completes_and_streams_the_same(sdk):
    texts = set()
    for model in EVERY_TEXT_MODEL:
        completion = sdk.complete(PROMPT, model=model, max_tokens=24, **greedy(model))
        chunks = list(sdk.stream(PROMPT, model=model, max_tokens=24, **greedy(model)))
        texts |= {completion.text, "".join(chunk.text for chunk in chunks)}
        assert completion.num_output_tokens == (sum(c.num_output_tokens for c in chunks),)
        assert completion.num_input_tokens == chunks[0].num_input_tokens
    assert len(texts) == 1
    assert texts != {""}


def test_several_sequences_are_told_apart_by_every_model(sdk):
    shared = {"seed": 5, "temperature": 0.8, "top_p": 0.9, "max_tokens": 12}
    texts = {
        model: sdk.complete(PROMPT, model=model, num_return_sequences=3, **shared)
        for model in TEXT_MODELS
    }
    texts["vllm_model"] = sdk.complete(PROMPT, model="vllm_model", n=3, **shared)
    for completion in texts.values():
        assert len(set(completion.texts)) == 3
        assert completion.texts == texts["ensemble"].texts
        assert completion.num_output_tokens == (12, 12, 12)


def test_only_vllm_tells_the_finish_reason(sdk):
    length = sdk.complete(PROMPT, model="vllm_model", max_tokens=3, temperature=0.0)
    assert length.finish_reason == "length"
    stop = sdk.complete(PROMPT, model="vllm_model", max_tokens=200, temperature=0.0, stop=["\n"])
    assert stop.finish_reason == "stop"
    assert sdk.complete(PROMPT, max_tokens=3).finish_reason is None


def test_token_ids(sdk):
    completion = sdk.complete([5, 6, 7], model="tensorrt_llm", max_tokens=6, top_k=1)
    chunks = list(sdk.stream([5, 6, 7], model="tensorrt_llm", max_tokens=6, top_k=1))
    assert completion.token_ids == (tuple(i for chunk in chunks for i in chunk.token_ids),)
    assert len(completion.token_ids[0]) == completion.num_output_tokens[0]


@pytest.mark.parametrize("model", TEXT_MODELS)
def test_sequences(sdk, model):
    parameters = {"max_tokens": 8, "temperature": 1.0, "top_p": 0.95, "seed": 3}
    completion = sdk.complete(PROMPT, model=model, num_return_sequences=3, **parameters)
    assert len(completion.texts) == 3
    chunks = list(sdk.stream(PROMPT, model=model, num_return_sequences=3, **parameters))
    for index, text in enumerate(completion.texts):
        own = (chunk.text for chunk in chunks if chunk.sequence_index == index)
        assert "".join(own) == text


@pytest.mark.parametrize("model", quick_of(STREAMED, ("tensorrt_llm_bls", "tensorrt_llm")))
def test_leaving_a_stream_frees_its_blocks(sdk, idle, model):
    prompt = [5, 6, 7] if model == "tensorrt_llm" else PROMPT
    parameters = {"max_tokens": LONG, "min_tokens": LONG, **greedy(model)}
    with idle.cancelling():
        for chunk in sdk.stream(prompt, model=model, **parameters):
            assert chunk.num_output_tokens
            break


def test_one_cancel_leaves_the_other_stream_alone(sdk):
    expected = sdk.complete(PROMPT, max_tokens=100).text
    kept = sdk.stream(PROMPT, max_tokens=100)
    with sdk.stream(PROMPT, max_tokens=LONG, min_tokens=LONG) as left:
        next(left)
    assert "".join(chunk.text for chunk in kept) == expected


@pytest.mark.parametrize("model", EVERY_TEXT_MODEL)
def test_refusals_are_typed(sdk, model):
    with pytest.raises(ContractError, match="temperature") as caught:
        sdk.complete(PROMPT, model=model, max_tokens=4, temperature=-1.0)
    assert caught.value.code is Code.INVALID_ARGUMENT
    with pytest.raises(ContractError, match="temperature") as caught:
        list(sdk.stream(PROMPT, model=model, max_tokens=4, temperature=-1.0))
    assert caught.value.code is Code.INVALID_ARGUMENT


@pytest.mark.parametrize("model", quick_of(EVERY_TEXT_MODEL, ("ensemble",)))
def test_a_deadline_frees_the_blocks(sdk, idle, model):
    parameters = {"max_tokens": LONG, "min_tokens": LONG, **greedy(model)}
    with idle.cancelling():
        for timeout_s in (
            0.3,
            1.0,
            3.0,
            9.0,
            27.0,
        ):  # a busy machine may not have begun by the first
            stream = sdk.stream(PROMPT, model=model, timeout_s=timeout_s, **parameters)
            chunks: list[object] = []
            with pytest.raises(RequestTimeoutError):
                chunks.extend(stream)
            if chunks:
                break


def test_async_streams_side_by_side(idle, sdk):
    expected = sdk.complete(PROMPT, max_tokens=16).text

    async def main() -> list[str]:
        async with AsyncSlipstreamClient(idle.address, timeout_s=120.0) as client:

            async def one(model: str) -> str:
                chunks = client.stream(PROMPT, model=model, max_tokens=16, **greedy(model))
                return "".join([chunk.text async for chunk in chunks])

            texts = await asyncio.gather(*(one(model) for model in EVERY_TEXT_MODEL * 4))
            async for _ in client.stream(PROMPT, max_tokens=LONG, min_tokens=LONG):
                break
            assert set(await client.health()) == HEALTH_KEYS
            return texts

    with idle.cancelling():
        assert set(asyncio.run(main())) == {expected}


def test_health(sdk, idle):
    assert set(sdk.health()) == HEALTH_KEYS
    process = command(idle, "health", "--json")
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    report = json.loads(output)
    assert set(report) == HEALTH_KEYS - {"faults"} | {"ok", "token_s"}
    assert report["ok"] is True
    assert report["kv_blocks_free"] == report["kv_blocks_total"]


def test_health_is_bad_while_the_engine_hangs_and_good_after(sdk, idle):
    engine = sdk.health()["engine_pid"]
    os.kill(engine, signal.SIGSTOP)
    try:
        process = command(idle, "health", "--json", "--timeout", "5")
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 1
        report = json.loads(output)
        assert report["ok"] is False
        assert report["error"].startswith("UNAVAILABLE: ")
    finally:
        os.kill(engine, signal.SIGCONT)
    assert command(idle, "health").wait(120) == 0


def test_complete_streams_to_the_terminal(sdk, idle):
    process = command(idle, "complete", PROMPT, "--max-tokens", "24", "--echo")
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert output == PROMPT + sdk.complete(PROMPT, max_tokens=24).text + "\n"


@pytest.mark.rest
def test_complete_reads_a_prompt_and_stops_at_a_word(sdk, idle):
    arguments = ("complete", "-", "--stop-word", "\n", "--max-tokens", "64")
    process = command(idle, *arguments, stdin=subprocess.PIPE)
    output, _ = process.communicate(PROMPT, timeout=120)
    whole = sdk.complete(PROMPT, max_tokens=64).text
    assert output == whole[: whole.index("\n") + 1] + "\n"


@pytest.mark.rest
def test_ctrl_c_on_complete_frees_the_blocks(idle):
    process = command(idle, "complete", PROMPT, "--max-tokens", str(LONG))
    assert process.stdout is not None
    assert process.stdout.read(1)
    idle.wait_running(1)
    with idle.cancelling():
        process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "Traceback" not in errors


def test_a_wrong_parameter_is_one_line(idle):
    process = command(idle, "complete", PROMPT, "--top-p", "1.5")
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 1
    assert errors.startswith("slipstream: INVALID_ARGUMENT: ")
    assert "top_p" in errors
    assert errors.count("\n") == 1


@pytest.mark.rest
def test_chat_in_plain_words(idle):
    process = command(idle, "chat", "--plain", "--max-tokens", "12", stdin=subprocess.PIPE)
    output, errors = process.communicate("def f():\nimport os\n", timeout=120)
    assert process.returncode == 0, errors
    assert output.count("> ") == 3
    assert "User:" not in output


def test_ctrl_c_in_a_chat_cancels_the_answer_alone(idle):
    process = command(idle, "chat", "--max-tokens", str(LONG), stdin=subprocess.PIPE)
    assert process.stdin is not None
    process.stdin.write("import this\n")
    process.stdin.flush()
    idle.wait_running(1)
    with idle.cancelling():
        process.send_signal(signal.SIGINT)
    assert process.poll() is None
    output, errors = process.communicate(timeout=120)  # closes its input: Ctrl-D
    assert process.returncode == 0, errors
    assert output.count("> ") == 2
    assert "no chat template given" in errors


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl")
@pytest.mark.parametrize("line", quick_of(CURLS, CURLS[::3]))
def test_the_curl_lines_of_the_document_answer(idle, line):
    shell = line.replace("localhost:8000", idle.http.removeprefix("http://"))
    done = subprocess.run(
        shell, shell=True, capture_output=True, text=True, timeout=120, check=True
    )
    for event in done.stdout.split("\n\n") if "generate_stream" in line else [done.stdout]:
        answer = json.loads(event.removeprefix("data: ") or '{"text_output": ""}')
        assert {"text_output", "output_ids"} & set(answer), answer


def test_the_document_shows_every_way():
    assert len(CURLS) == 7


def test_the_python_of_the_document_runs(idle, capsys):
    [code] = [block for block in BLOCKS if block.startswith("from slipstream_client import Slip")]
    exec(code.replace("127.0.0.1:8001", idle.address), {})
    assert len(capsys.readouterr().out) > 20
