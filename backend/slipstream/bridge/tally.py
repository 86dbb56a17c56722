"""Count what a model has received and answered: of its clients, or of probes."""

import threading
from collections import Counter, deque

from slipstream_contract.errors import ContractError

_MAX_TIMES = 4096


class Tally:
    """Counts since the model was loaded."""

    def __init__(self) -> None:
        self.num_calls = 0  # ever opened
        self.num_tokens = 0  # ever delivered
        self.num_responses = 0  # ever sent
        self.refused: Counter[str] = Counter()  # requests not begun, by the error's `reason`
        self._first_token_s: deque[float] = deque(maxlen=_MAX_TIMES)
        self._counting = threading.Lock()  # guards `num_responses` and `refused`

    def add_first_token_time(self, seconds: float) -> None:
        """Note how long a call waited for its first response."""
        self._first_token_s.append(seconds)

    def take_first_token_times(self) -> list[float]:
        """Take the times added since the last call; of very many the oldest are lost."""
        return [self._first_token_s.popleft() for _ in range(len(self._first_token_s))]

    def count_response(self) -> None:
        """Count a response that is sent; by any thread."""
        with self._counting:
            self.num_responses += 1

    def count_refusal(self, error: ContractError) -> None:
        """Count a request that is not begun; by any thread."""
        with self._counting:
            self.refused[error.reason] += 1
