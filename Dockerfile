# specdec with GGUF models and the server:
#
#   docker build -t specdec .
#   docker run --rm -v ~/models:/models specdec run /models/TARGET.gguf "Why is the sky blue?"
#   docker run --rm -p 8080:8080 -v ~/models:/models specdec serve /models/TARGET.gguf --host 0.0.0.0
#
# The container's limit of memory (docker run --memory) is the budget unless --memory-budget is given.
FROM python:3.12-slim AS build
RUN apt-get update \
    && apt-get install -y --no-install-recommends build-essential cmake git ninja-build \
    && rm -rf /var/lib/apt/lists/*
# llama.cpp is compiled for the building machine's processor; for another one:
#   --build-arg CMAKE_ARGS="-DGGML_NATIVE=OFF -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON"
ARG CMAKE_ARGS=""
# torch without the CUDA libraries, which are several GB.
ARG TORCH_INDEX="https://download.pytorch.org/whl/cpu"
ARG SPECDEC_PROJECT_URL=""
WORKDIR /src
COPY . .
RUN python -m venv /opt/specdec \
    && /opt/specdec/bin/pip install --no-cache-dir --extra-index-url "$TORCH_INDEX" \
       -c constraints.txt ".[gguf,serve]"

FROM python:3.12-slim
RUN apt-get update \
    && apt-get install -y --no-install-recommends libgomp1 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home specdec
COPY --from=build /opt/specdec /opt/specdec
ENV PATH="/opt/specdec/bin:$PATH"
USER specdec
WORKDIR /home/specdec
ENTRYPOINT ["specdec"]
CMD ["--help"]
