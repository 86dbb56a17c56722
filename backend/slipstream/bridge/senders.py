"""Build and send responses, in threads of their own."""

import logging
import threading
import time
from queue import SimpleQueue

from slipstream_contract.errors import Code, ContractError

from slipstream import wire
from slipstream.bridge.cores import num_senders, stay_together
from slipstream.bridge.streams import Call, Calls, Stream

_log = logging.getLogger(__name__)


class Senders:
    """The threads that send what streams have pending.

    Sending blocks for a round trip to the server, so several threads share one queue. What a client
    waits for most, a stream's first and last response, has a queue and a thread of its own.
    """

    def __init__(self) -> None:
        self.calls: Calls | None = None
        self._shared: SimpleQueue[Stream | None] = SimpleQueue()
        self._fast: SimpleQueue[Stream | None] = SimpleQueue()
        queues = [self._shared] * num_senders() + [self._fast]
        self._threads = [
            threading.Thread(target=self._run, args=(each,), name=f"sender-{index}", daemon=True)
            for index, each in enumerate(queues)
        ]
        self._queues = queues
        for thread in self._threads:
            thread.start()

    def hand_over(self, stream: Stream) -> None:
        """Queue a stream to be sent; the caller must have taken it (see `Stream.put`)."""
        is_urgent, credit = stream.is_urgent, stream.credit
        if credit is None or credit.enter(is_urgent):
            (self._fast if is_urgent else self._shared).put(stream)

    def close(self) -> None:
        """End the threads after all that was handed over before."""
        for each in self._queues:
            each.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self, streams: SimpleQueue[Stream | None]) -> None:
        stay_together()
        while (stream := streams.get()) is not None:
            try:
                self._send(stream)
            except Exception:
                _log.exception("a response could not be sent")
                self._fail(stream)

    def _fail(self, stream: Stream) -> None:
        assert self.calls is not None
        assert stream.call is not None
        try:
            error = ContractError("the response could not be made", Code.INTERNAL)
            self.calls.fail(stream.call, error)
        except Exception:
            _log.exception("a call could not be ended")

    def _send(self, stream: Stream) -> None:
        call, calls = stream.call, self.calls
        assert calls is not None
        assert call is not None, "handed over before it was opened"
        with call.lock:
            if call.is_over or call.is_failing:
                return
            tokens, is_last = stream.take()
            expiry = call.expiry if is_last else None
            if expiry is None:
                is_taken = self._send_response(calls, call, stream, tokens, is_last)
            else:  # the error ends the call, after the last tokens of every stream
                call.num_open -= 1
                is_taken = True
                if stream.is_streaming and any(each.token_ids or each.beams for each in tokens):
                    self._send_response(calls, call, stream, tokens, False)
                elif stream.credit is not None:
                    stream.credit.leave()  # it sends nothing in its turn
        if expiry is not None and call.num_open == 0:
            calls.fail(call, expiry)
        if not is_taken and not stream.release():
            self.hand_over(stream)

    def _send_response(
        self, calls: Calls, call: Call, stream: Stream, tokens: list[wire.Tokens], is_last: bool
    ) -> bool:
        """Send one response; return whether the stream stays taken."""
        call.num_open -= is_last
        is_final = is_last and call.num_open == 0
        outputs = stream.write(tokens, is_last, is_final)
        tally = calls.tally(call.reply)
        tally.count_response()
        if is_final:
            calls.remove(call)  # before sending: the client may use the id again at once
            call.reply.send(outputs, True)
            call.is_over = True
            return True
        if not stream.has_sent and not is_last:
            tally.add_first_token_time(time.monotonic() - call.start_s)
        stream.has_sent = True
        if stream.credit is not None:
            stream.credit.spend(lambda: call.reply.send(outputs, False))
            return True  # until the credit comes back
        call.reply.send(outputs, False)
        return is_last
