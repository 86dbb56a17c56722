"""The plugins of all tests: tiers, durations, and repeats after a crash of tritonserver itself."""

pytest_plugins = [
    "pytester",
    "fixtures.crashes",
    "fixtures.durations",
    "fixtures.gateway.served",
    "fixtures.tiers",
]
