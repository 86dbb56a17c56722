"""The asynchronous client against real gRPC."""

import asyncio
import gc
from collections.abc import Awaitable, Callable

import grpc
import pytest
from fixtures.client.triton import HEALTH
from slipstream_client import AsyncSlipstreamClient, Code, ContractError, RequestTimeoutError
from slipstream_client.aio import AsyncChunkStream
from slipstream_client.failures import error_from_rpc


def run(url: str, body: Callable[[AsyncSlipstreamClient], Awaitable[None]]) -> None:
    async def main() -> None:
        async with AsyncSlipstreamClient(url, timeout_s=120.0) as client:
            await body(client)

    asyncio.run(main())


async def wait_arrived(triton, request_id: str) -> None:
    async with asyncio.timeout(120):
        while request_id not in triton.cancelled:
            await asyncio.sleep(0.01)


async def wait_cancelled(triton, request_id: str) -> None:
    event = triton.cancelled[request_id]
    assert await asyncio.to_thread(event.wait, 120), "the server never heard of the cancel"


def test_streams_and_completions(served):
    async def body(client):
        chunks = [chunk async for chunk in client.stream("say one two", max_tokens=2)]
        assert [chunk.text for chunk in chunks] == ["one ", "two "]
        completions = await asyncio.gather(*(client.complete(f"say {i}") for i in range(20)))
        assert [completion.text for completion in completions] == [f"{i} " for i in range(20)]
        assert await client.health() == HEALTH
        assert await client.is_ready()
        assert not await client.is_ready("nothing")

    run(served[1], body)


def test_break_cancels_on_the_server(served):
    async def body(client):
        async for chunk in client.stream("forever", max_tokens=4, request_id="left"):
            assert chunk.text == "x"
            break
        gc.collect()
        await wait_cancelled(served[0], "left")

    run(served[1], body)


def test_with_block_cancels_on_the_server(served):
    async def body(client):
        async with client.stream("forever", max_tokens=4, request_id="with") as chunks:
            await anext(chunks)
        await wait_cancelled(served[0], "with")
        assert [chunk async for chunk in chunks] == []

    run(served[1], body)


def test_deadlines_that_pass_at_any_moment_are_timeouts(served):
    async def one(client, number: int) -> None:
        timeout_s = 0.0005 * (number % 100)
        with pytest.raises(RequestTimeoutError):
            async for _ in client.stream("forever", max_tokens=4, timeout_s=timeout_s):
                pass

    async def body(client):
        for _ in range(3):
            await asyncio.gather(*(one(client, number) for number in range(100)))

    run(served[1], body)


class Broken(grpc.RpcError):
    def __init__(self, code, details):
        self.code, self.details = lambda: code, lambda: details


def test_a_call_that_ends_while_it_is_read_is_late_only_after_its_deadline():
    broken = Broken(grpc.StatusCode.INTERNAL, "Internal error from Core")
    assert isinstance(error_from_rpc(broken, "here", is_late=True), RequestTimeoutError)
    error = error_from_rpc(broken, "here")
    assert isinstance(error, ContractError)
    assert error.code is Code.INTERNAL


def test_calls_that_the_operator_has_closed_are_no_missing_server():
    said = "This protocol is restricted, expecting header 'triton-grpc-protocol-control'"
    error = error_from_rpc(Broken(grpc.StatusCode.UNAVAILABLE, said), "here")
    assert error.code is Code.UNSUPPORTED
    assert "slipstream serve --model-control explicit" in error.message


def test_a_cancelled_task_cancels_on_the_server(served):
    async def body(client):
        task = asyncio.create_task(client.complete("silent", max_tokens=4, request_id="task"))
        await wait_arrived(served[0], "task")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await wait_cancelled(served[0], "task")

    run(served[1], body)


def test_cancel_in_another_task_ends_the_iteration(served):
    async def body(client):
        chunks = client.stream("silent", max_tokens=4, request_id="other")

        async def cancel():
            await wait_arrived(served[0], "other")
            chunks.cancel()

        cancelling = asyncio.create_task(cancel())
        assert [chunk async for chunk in chunks] == []
        await cancelling
        await wait_cancelled(served[0], "other")

    run(served[1], body)


def test_cancel_of_a_call_that_ends_with_a_status_ends_the_iteration():
    """grpc.aio tells a reader of a cancel by either of two exceptions, whichever comes first."""

    class Call:
        def cancel(self):
            pass

        async def read(self):
            chunks.cancel()
            raise Broken(grpc.StatusCode.CANCELLED, "Locally cancelled by application!")

    chunks = AsyncChunkStream(Call(), "here", "", 0.0)

    async def read():
        return [chunk async for chunk in chunks]

    assert asyncio.run(read()) == []


def test_errors_are_typed(served, free_port, monkeypatch):
    async def body(client):
        with pytest.raises(ContractError) as caught:
            await client.complete(
                "refuse INVALID_ARGUMENT INVALID_ARGUMENT: top_p is 2", max_tokens=1
            )
        assert (caught.value.code, caught.value.message) == (Code.INVALID_ARGUMENT, "top_p is 2")
        monkeypatch.setattr("slipstream_client.aio.ENDS_S", 120.0)
        with pytest.raises(ContractError, match="max_tokens is 0"):
            await client.complete("fail INVALID_ARGUMENT: max_tokens is 0", request_id="bad")
        assert served[0].left == {"bad": False}
        monkeypatch.setattr("slipstream_client.aio.ENDS_S", 0.1)
        with pytest.raises(ContractError, match="no more"):
            await client.complete("stuck UNAVAILABLE: no more", request_id="stuck")
        await wait_cancelled(served[0], "stuck")
        for timeout_s in (0.3, 1.0, 5.0, 25.0):  # a busy machine may not have begun by the first
            with pytest.raises(RequestTimeoutError):
                await client.complete("silent", timeout_s=timeout_s, request_id="late")
            if "late" in served[0].cancelled:
                break
        await wait_cancelled(served[0], "late")

    async def nobody(client):
        with pytest.raises(ContractError, match="no server answers"):
            await client.complete("a")

    run(served[1], body)
    run(f"127.0.0.1:{free_port}", nobody)
