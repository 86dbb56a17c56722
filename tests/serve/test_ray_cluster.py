"""What `slipstream ray` places, and where each command finds its ranks."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from slipstream.config import EngineConfig
from slipstream_runtime.rendezvous import place_of
from slipstream_serve.ray_cluster import placement_of, variables
from slipstream_serve.triton import ServeError

SPLITS = st.sampled_from([(tensor, stages) for tensor in (1, 2, 4, 8) for stages in (1, 2, 3)])


@given(SPLITS, st.integers(2, 8), st.sampled_from(["auto", "cpu", "cuda"]), st.booleans())
def test_the_nodes_have_all_ranks_once(
    split: tuple[int, int], nodes: int, device: str, has_gpus: bool
) -> None:
    tensor, stages = split
    config = EngineConfig(
        checkpoint="x", tensor_parallel=tensor, pipeline_parallel=stages, device=device
    )
    assume(config.num_ranks % nodes == 0)
    placement = placement_of(config, nodes, has_gpus)
    places = [
        place_of(variables(i, placement, "10.0.0.1", 29500, "key"), config.num_ranks)
        for i in range(nodes)
    ]
    ranks = [place.first + i for place in places if place for i in range(place.num)]
    assert ranks == list(range(config.num_ranks))
    is_gpu = device == "cuda" or (device == "auto" and has_gpus)
    assert placement.gpus == (config.num_ranks // nodes if is_gpu else 0)
    assert placement.bundle.get("GPU", 0) == placement.gpus


@pytest.mark.parametrize(("nodes", "said"), [(1, "from 2 on"), (3, "--nodes 3 .* 4 ranks")])
def test_nodes_that_cannot_share_the_ranks_are_refused(nodes: int, said: str) -> None:
    config = EngineConfig(checkpoint="x", tensor_parallel=2, pipeline_parallel=2)
    with pytest.raises(ServeError, match=said):
        placement_of(config, nodes, has_gpus=True)
