"""The protocols by which `slipstream bench` reaches a server."""

GRPC, HTTP, OPENAI = PROTOCOLS = ("grpc", "http", "openai")
