# Slipstream inside an NGC tritonserver container.
#
# Needs an image whose Python backend embeds Python 3.11 or newer: 24.11-py3 and later (24.10-py3 has
# 3.10; its server, Triton 2.51, is the one that `make serve` puts together from wheels).
ARG TRITON_IMAGE=nvcr.io/nvidia/tritonserver:25.10-py3
FROM ${TRITON_IMAGE}

# The CUDA of the image: cuda13 from 25.08-py3 on; cuda12 before, and then an index with torch for CUDA 12.
ARG CUDA_EXTRA=cuda13
ARG PIP_EXTRA_INDEX_URL=

RUN apt-get update \
    && apt-get install -y --no-install-recommends python3-venv \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/slipstream/source

# The packages alone first: this layer is gigabytes, and a change of our code must not rebuild it.
COPY pyproject.toml constraints.txt ./
RUN python3 -m venv /opt/slipstream/engine \
    && grep -v -e '^cuda-' -e '^nvidia-' constraints.txt >/opt/slipstream/constraints.txt \
    && /opt/slipstream/engine/bin/pip install --no-cache-dir -c /opt/slipstream/constraints.txt \
        setuptools $(python3 -c 'import sys, tomllib; \
            project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
            extras = project["optional-dependencies"]; \
            names = project["dependencies"] + extras["engine"] + extras["gateway"] + extras[sys.argv[1]]; \
            print(*[name.replace(" ", "") for name in names])' ${CUDA_EXTRA})

COPY README.md LICENSE ./
COPY backend backend
COPY client client
COPY ensemble ensemble
COPY gateway gateway
COPY preprocessing preprocessing
COPY postprocessing postprocessing
RUN /opt/slipstream/engine/bin/pip install --no-cache-dir --no-deps --no-build-isolation -e . \
    && /opt/slipstream/engine/bin/python ensemble/slipstream_serve/server.py \
        --existing-server /opt/tritonserver --stub /opt/slipstream/stub \
    && useradd --no-log-init --create-home --uid 10001 slipstream \
    && install -d -o slipstream -g slipstream /home/slipstream/.cache  # a volume keeps this owner

# For a tritonserver without `serve`, too: the stub takes its Python from the first python3 on PATH.
ENV PATH=/opt/slipstream/stub/bin:/opt/tritonserver/bin:${PATH} \
    SLIPSTREAM_PYTHON=/opt/slipstream/engine/bin/python \
    SLIPSTREAM_SERVER=/opt/tritonserver \
    SLIPSTREAM_STUB=/opt/slipstream/stub

USER slipstream
WORKDIR /home/slipstream
EXPOSE 8000 8001 8002 9000
HEALTHCHECK --interval=5s --timeout=5s --start-period=10m --retries=2 \
    CMD ["/opt/slipstream/engine/bin/slipstream", "health", "--grpc-port", "8001"]
# `serve` repairs a model's process that died or hangs; plain Docker restarts nothing for being unhealthy.
CMD ["/opt/slipstream/engine/bin/slipstream", "serve", "--model-repository=/models", "--host=0.0.0.0", "--log-file=/dev/stderr"]
