"""Make the drafter that the configuration names, and the decision about its drafts."""

import logging

from slipstream.config import EngineConfig
from slipstream.core.drafts import Drafter, Speculation
from slipstream.drafting.forced import WithForced
from slipstream.drafting.longest import LongestMatch
from slipstream.drafting.lookup import PromptLookup
from slipstream.drafting.speculator import Speculator
from slipstream.drafting.suffix import SuffixDrafts
from slipstream.drafting.synthetic import SyntheticDrafts, rates_of
from slipstream.engine.device_drafts import DeviceDrafts

_log = logging.getLogger(__name__)


def choose(
    config: EngineConfig, num_device_drafts: int
) -> tuple[Speculation | None, DeviceDrafts | None]:
    """Return the speculation of an engine, and its drafts from the device, if any.

    Args:
        config: checked by the plan.
        num_device_drafts: most drafts of a drafter on the device; 0: there is none.
    """
    name, most = config.speculation, config.num_draft_tokens
    if num_device_drafts:
        drafts = DeviceDrafts(name, num_device_drafts, has_cache=name != "medusa")
        return Speculator(WithForced(drafts), num_device_drafts), drafts
    if name == "none":
        return None, None
    if name == "synthetic":
        _log.warning(
            "speculation = synthetic: drafts count as right by chance (%s), and texts mean nothing",
            config.synthetic_acceptance,
        )
        synthetic = SyntheticDrafts(rates_of(config.synthetic_acceptance))
        return Speculator(synthetic, most, accepted=synthetic), None
    lookup, suffix = PromptLookup(), SuffixDrafts(config.suffix_tokens)
    made: dict[str, Drafter | None] = {
        "forced": None,
        "lookup": lookup,
        "suffix": suffix,
        "auto": LongestMatch(lookup, suffix),
    }
    return Speculator(WithForced(made[name]), most), None
