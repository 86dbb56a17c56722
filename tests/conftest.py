"""The plugins of all tests: tiers, durations, ends of hangs, repeats after tritonserver crashed."""

pytest_plugins = [
    "pytester",
    "fixtures.crashes",
    "fixtures.durations",
    "fixtures.gateway.served",
    "fixtures.hangs",
    "fixtures.tiers",
]
