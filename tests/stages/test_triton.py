"""Both stages in a real tritonserver, called directly, with a SentencePiece kind of tokenizer."""

import random
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from fixtures.server.support import end
from fixtures.stages.zoo import CORPUS, llama_bpe, save
from slipstream_compose.pbtxt import model_config
from slipstream_contract.stream_state import StreamState
from slipstream_contract.tensors import MODELS
from slipstream_contract.vocab import state_after
from slipstream_contract.words import unpack_word_list
from slipstream_preprocessing.encode import Encoder
from slipstream_runtime.credit import CreditFile
from slipstream_serve.server import server_directory
from slipstream_serve.triton import Endpoints, TritonServer
from tritonclient.utils import InferenceServerException

pytestmark = [
    pytest.mark.triton,
    pytest.mark.skipif(
        not (server_directory() / "bin" / "tritonserver").is_file(), reason="make install first"
    ),
]


class Server:
    """A server that holds nothing but the two stages."""

    def __init__(self, triton: TritonServer, encoder: Encoder) -> None:
        self.triton, self.encoder = triton, encoder
        self.client = grpcclient.InferenceServerClient(triton.endpoints.grpc)

    def call(self, model: str, outputs: Sequence[str] = (), **inputs: Any) -> dict[str, Any]:
        """Return outputs by name; all if none is named. Raises InferenceServerException."""
        tensors = []
        for name, value in inputs.items():
            array = value if isinstance(value, np.ndarray) else np.array(value, dtype=object)
            kind = grpcclient.np_to_triton_dtype(array.dtype) if array.dtype != object else "BYTES"
            tensors.append(grpcclient.InferInput(name, list(array.shape), kind))
            tensors[-1].set_data_from_numpy(array)
        named = [grpcclient.InferRequestedOutput(name) for name in outputs]
        result = self.client.infer(model, tensors, outputs=named or None)
        return {out.name: result.as_numpy(out.name) for out in result.get_response().outputs}

    def encode(self, *texts: str, **more: Any) -> dict[str, Any]:
        queries = [[text.encode()] for text in texts]
        length = np.full((len(texts), 1), 5, np.int32)
        return self.call("preprocessing", QUERY=queries, REQUEST_OUTPUT_LEN=length, **more)

    def decode(self, ids: list[int], state: StreamState | None = None) -> bytes:
        if state is None:
            tokens = np.array([[ids]], np.int32).reshape(1, 1, len(ids))
            length = np.array([[len(ids)]], np.int32)
            outputs = self.call("postprocessing", TOKENS_BATCH=tokens, SEQUENCE_LENGTH=length)
        else:
            outputs = self.call(
                "postprocessing", STREAM_STATE=np.array([state.pack(ids)], np.int64)
            )
        assert outputs["OUTPUT"].shape == (1,)
        text: bytes = outputs["OUTPUT"][0]
        return text


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    base = tmp_path_factory.mktemp("stages")
    directory = save(llama_bpe(), base / "checkpoint")
    for name in ("preprocessing", "postprocessing"):
        version = base / "repository" / name / "1"
        version.mkdir(parents=True)
        parameters = {"tokenizer_dir": "../../../checkpoint"}
        (version.parent / "config.pbtxt").write_text(model_config(MODELS[name], parameters))
    triton = TritonServer(base / "repository", Endpoints.free(), base / "log")
    try:
        triton.start()
        triton.wait_ready(240)
        yield Server(triton, Encoder.load(directory))
    finally:
        end(triton)


def test_prompts_and_words(server: Server) -> None:
    encoder = server.encoder
    texts = ["the quick brown fox", "a\0b 🦊", *CORPUS]
    outputs = server.encode(
        *texts,
        STOP_WORDS_DICT=[[b"\n", b"fox"]] * len(texts),
        BAD_WORDS_DICT=[["été".encode(), b""]] * len(texts),
        EMBEDDING_BIAS_WORDS=[[b"fox"]] * len(texts),
        EMBEDDING_BIAS_WEIGHTS=np.full((len(texts), 1), 2.5, np.float32),
    )
    lengths = outputs["REQUEST_INPUT_LEN"].reshape(-1).tolist()
    rows = outputs["INPUT_ID"].tolist()
    assert [row[:n] for row, n in zip(rows, lengths, strict=True)] == list(
        map(encoder.encode, texts)
    )
    for row in range(len(texts)):
        stop, bad = outputs["STOP_WORDS_IDS"][row], outputs["BAD_WORDS_IDS"][row]
        assert unpack_word_list(stop) == encoder.words(["\n", "fox"])
        assert unpack_word_list(bad) == encoder.bad_words(["été"])
    [fox] = encoder.bias_words(["fox"])
    assert set(np.flatnonzero(outputs["EMBEDDING_BIAS"][0])) == set(fox)
    assert outputs["OUT_END_ID"].tolist() == [[encoder.end_ids[0]]] * len(texts)


def test_a_client_has_lists_of_no_words_and_a_step_has_none(server: Server) -> None:
    """As the speculative client of NVIDIA's reads them; a step does not ask for every output."""
    nothing = {"STOP_WORDS_DICT": [[b""]], "DECODER_QUERY": [[b""]]}
    outputs = server.encode("fox", **nothing)
    for name in ("STOP_WORDS_IDS", "BAD_WORDS_IDS"):
        assert unpack_word_list(outputs[name].astype(np.int32)[0]) == []
    assert outputs["EMBEDDING_BIAS"].shape == (1, 0)
    lists = ["STOP_WORDS_IDS", "BAD_WORDS_IDS", "EMBEDDING_BIAS"]
    asked = server.encode("fox", outputs=["REQUEST_OUTPUT_LEN", *lists], **nothing)
    assert set(asked) == {"REQUEST_OUTPUT_LEN"}


def test_errors_have_their_status_and_the_server_serves_on(server: Server) -> None:
    for text, message in ((b"", "text_input is empty"), (b"a\xff", "not valid UTF-8 at byte 1")):
        with pytest.raises(InferenceServerException, match=f"^.*INVALID_ARGUMENT: .*{message}"):
            server.call("preprocessing", QUERY=[[text]], REQUEST_OUTPUT_LEN=np.int32([[1]]))
    with pytest.raises(InferenceServerException) as raised:
        server.decode([-1])
    assert raised.value.status() == "StatusCode.INVALID_ARGUMENT"
    assert server.decode(server.encoder.encode("fox")) == b"fox"


def test_a_stream_cut_anywhere_equals_the_one_shot_decode(server: Server) -> None:
    credits_file = CreditFile(server.triton.runtime.credits)
    vocab, choose = server.encoder.vocab, random.Random(1)
    texts = [*CORPUS, "日本🦊é 한국어"]
    for slot, text in enumerate(texts):
        ids = server.encoder.encode(text)
        parts, state = [], StreamState(slot, 100 * slot + 1, is_last=False)
        while ids or not state.is_last:
            size = choose.randint(0, 4)
            chunk, ids = ids[:size], ids[size:]
            state = state._replace(is_last=not ids)
            credits_file.expect(slot, state.number)
            parts.append(server.decode(chunk, state))
            begin = time.monotonic()  # it comes when the answer is on its way
            while not credits_file.is_acknowledged(slot, state.number):
                assert time.monotonic() - begin < 30
                time.sleep(0.001)
            if state.is_last:
                break
            state = state_after(vocab, chunk, state)
        assert b"".join(parts).decode() == text
        assert server.decode(server.encoder.encode(text)).decode() == text
    assert all(not credits_file.is_cancelled(slot, state.number) for slot in range(len(texts)))
