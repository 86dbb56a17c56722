# What a Dockerfile of this project finds in NGC's image, for machines that cannot have that: the server
# of `make install`. The build's context is `.slipstream`; PYTHON is the version its stub was made for.
ARG BASE=docker.io/library/debian:bookworm-slim
FROM ${BASE}
ARG PYTHON=3.11
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates libpython${PYTHON} python3 \
    && rm -rf /var/lib/apt/lists/*
COPY server /opt/tritonserver
ENV LD_LIBRARY_PATH=/opt/tritonserver/lib
