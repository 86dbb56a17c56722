"""Every bound on a request, as docs/limits.md shows it; tests check each row on what refuses."""

from slipstream_contract import limits
from slipstream_contract.beams import Beams
from slipstream_contract.drafts import Drafts, Lookahead
from slipstream_contract.fields import BOTH, ENGINE, MODEL, SERVER, Row, markdown, rows
from slipstream_contract.retention import SALT_ROW, Retention
from slipstream_contract.sampling import SamplingParams
from slipstream_contract.urgency import Urgency

ROWS = (
    Row("prompts in a request", 1, limits.MAX_BATCH_SIZE, SERVER),
    Row("request id, bytes", 0, limits.MAX_REQUEST_ID_BYTES, MODEL),
    Row("prompt, tokens", 1, "`max_model_len` - 1, and what the KV cache holds", BOTH),
    Row("token ids", 0, "vocabulary - 1", ENGINE),
    *rows(SamplingParams),
    *rows(Beams),
    *rows(Drafts),
    *rows(Lookahead),
    Row("`sampling_parameters`, bytes", 0, limits.MAX_JSON_BYTES, MODEL),
    *rows(Urgency),
    SALT_ROW,
    *rows(Retention),
    Row("`TOKENS_BATCH`, token ids", 0, limits.MAX_DETOKENIZED, MODEL),
    Row("requests that wait", 0, "`max_waiting` (4,096 unless configured)", ENGINE),
    Row("tokens that wait", 0, "`max_waiting_tokens` (2,097,152 unless configured)", ENGINE),
)


def page() -> str:
    """Return all of them in Markdown."""
    return markdown(ROWS)
