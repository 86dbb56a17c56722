"""Share a device's memory among the engines of a repository."""

from collections.abc import Sequence

from slipstream_contract.deployment import Deployment
from slipstream_contract.errors import clip

_ROUNDING = 1e-9  # of a sum: 0.7 + 0.2 + 0.1 is 1


def memory_share(deployments: Sequence[Deployment], engine_model: str) -> float | None:
    """Return the share of one engine of a repository; None: whatever is free.

    It is what its settings say, else an even part of what the shares of the others leave. So no
    share depends on which engine starts first. Raises ValueError for shares above 1 in all, with
    each of them.
    """
    given = {each.engine_model: share_of(each) for each in deployments}
    check_shares(deployments)
    own = given.get(engine_model)
    if own is not None or len(given) < 2:
        return own
    left = 1.0 - sum(share for share in given.values() if share is not None)
    return left / sum(share is None for share in given.values())


def check_shares(deployments: Sequence[Deployment]) -> None:
    """Raise ValueError unless the shares of all engines fit on one device."""
    given = {each.name: share for each in deployments if (share := share_of(each)) is not None}
    total, is_last = sum(given.values()), len(given) == len(deployments)
    if total > 1.0 + _ROUNDING or (total > 1.0 - _ROUNDING and not is_last):
        each = ", ".join(f"{name} {share:g}" for name, share in given.items())
        others = [each.name for each in deployments if each.name not in given]
        left = "" if is_last else f" and leave nothing for {', '.join(others)}"
        raise ValueError(f"the memory shares of {each} are {total:g} in all, of 1{left}")


def share_of(deployment: Deployment) -> float | None:
    """Return the share in a deployment's settings. Raises ValueError for one out of range."""
    share = deployment.settings.get("memory_share")
    if share is None:
        return None
    is_number = isinstance(share, int | float) and not isinstance(share, bool)
    if not (is_number and 0.0 < share <= 1.0):
        where = f"{deployment.engine_model}/1/model.json"
        raise ValueError(f"{where}: memory_share is {clip(share)}, not above 0 and at most 1")
    return float(share)
