# kvexport with TensorRT: builds the plugins and engines, and runs them. Needs the NVIDIA Container Toolkit to run, and no GPU to be built.
# Never built with Docker, and never run on a GPU.
#
#   docker build -f docker/tensorrt.Dockerfile --build-arg TENSORRT_TAG=YY.MM-py3 -t kvexport:tensorrt .
#   docker run --rm --gpus all -v "$PWD/artifacts:/artifacts" kvexport:tensorrt build --from /artifacts/ARTIFACT --backend tensorrt
#
# TENSORRT_TAG: of an image with TensorRT 11 (NGC's catalogue lists them); it has no default, so that nobody builds on one that was not
# chosen. TENSORRT_DIGEST=sha256:... pins it. Without PyTorch and its CUDA libraries the image builds engines --from graphs that another machine exported;
# EXTRAS=export,serve adds them.
ARG TENSORRT_TAG
ARG TENSORRT_DIGEST=

FROM nvcr.io/nvidia/tensorrt:${TENSORRT_TAG}${TENSORRT_DIGEST:+@${TENSORRT_DIGEST}} AS build
RUN apt-get update \
    && apt-get install --yes --no-install-recommends cmake g++ make python3-venv \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY pyproject.toml hatch_build.py constraints.txt README.md LICENSE ./
COPY licenses licenses
COPY plugins plugins
COPY docs docs
COPY recipes recipes
COPY kvexport kvexport
# Compute capabilities of the GPUs that the image is for, as in "90" or "80 86 89 90"; nvcc takes minutes for each. 87 is Orin, 110 Thor.
ARG CAPABILITIES="80 86 87 89 90 100 110 120"
RUN python3 plugins/build.py tensorrt --capabilities ${CAPABILITIES} --out /opt/kvexport/lib
ARG EXTRAS=serve
# TensorRT and its Python module are the image's own. The operators for the CPU, which engines do not need, are left out.
RUN python3 -m venv --system-site-packages /opt/kvexport \
    && KVEXPORT_NATIVE=off /opt/kvexport/bin/pip install --no-cache-dir --constraint constraints.txt ".${EXTRAS:+[${EXTRAS}]}" onnx cuda-bindings

FROM nvcr.io/nvidia/tensorrt:${TENSORRT_TAG}${TENSORRT_DIGEST:+@${TENSORRT_DIGEST}}
ARG VERSION=0.1.0
LABEL org.opencontainers.image.title="kvexport" \
      org.opencontainers.image.description="Builds and serves TensorRT engines of models whose KV cache has a fixed budget" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=build /opt/kvexport /opt/kvexport
RUN useradd --uid 10001 --create-home kvexport && mkdir -p /artifacts /sessions && chown kvexport /artifacts /sessions
ENV ORT_DISABLE_TELEMETRY=1 PATH=/opt/kvexport/bin:$PATH KVEXPORT_TENSORRT_PLUGIN=/opt/kvexport/lib/libkvexport_tensorrt.so
USER 10001
WORKDIR /artifacts
EXPOSE 8000
# For `kvexport serve`; other commands serve nothing: docker run --no-healthcheck.
HEALTHCHECK --interval=30s --timeout=5s --start-period=60s CMD ["python", "-c", "import urllib.request as u; u.build_opener(u.ProxyHandler({})).open('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["kvexport"]
CMD ["--help"]
