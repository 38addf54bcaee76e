# kvexport on ONNX Runtime's CUDA provider: serves artifacts on an NVIDIA GPU. No compiler and no PyTorch is in it. Needs the
# NVIDIA Container Toolkit and a driver of CUDA 13 to run, and no GPU to be built.
#
# Never built with Docker, and never run on a GPU. Its RUN lines but apt-get's and useradd's ran in a folder without Docker.
#
#   docker build -f docker/cuda.Dockerfile --build-arg CAPABILITIES=89 -t kvexport:cuda .
#   docker run --rm --gpus all -v "$PWD/artifacts:/artifacts:ro" kvexport:cuda generate /artifacts/ARTIFACT "a prompt" --device cuda
#
# PYTHON_DIGEST=sha256:... pins the base. CUDA, cuDNN and nvcc are NVIDIA's Python packages, nvcc in the build stage alone.
ARG PYTHON_TAG=3.12-slim-trixie
ARG PYTHON_DIGEST=

FROM python:${PYTHON_TAG}${PYTHON_DIGEST:+@${PYTHON_DIGEST}} AS build
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY pyproject.toml hatch_build.py constraints.txt README.md LICENSE ./
COPY licenses licenses
COPY plugins plugins
COPY docs docs
COPY recipes recipes
COPY kvexport kvexport
# Of the version whose registers and spills plugins/cuda/resources.json records. nvcc looks for its libraries in lib64.
ARG NVCC=13.0.88
RUN python -m venv --without-pip /opt/nvcc \
    && pip --python /opt/nvcc/bin/python install --no-cache-dir --constraint constraints.txt "nvidia-cuda-nvcc==${NVCC}" "nvidia-cuda-crt==${NVCC}" "nvidia-nvvm==${NVCC}" "nvidia-cuda-runtime==13.0.*" "nvidia-cuda-cccl==13.0.*" \
    && ln -s lib "$(echo /opt/nvcc/lib/python3*/site-packages/nvidia/cu13)/lib64"
# Compute capabilities of the GPUs that the image is for, as in "90" or "80 86 89 90"; nvcc takes minutes for each.
ARG CAPABILITIES="80 86 87 89 90 100 110 120"
RUN PATH="$(echo /opt/nvcc/lib/python3*/site-packages/nvidia/cu13/bin):$PATH" \
    && python plugins/build.py onnxruntime-cuda --capabilities ${CAPABILITIES} --out /opt/libraries/cuda13
ARG EXTRAS=gpu,serve
# onnxruntime-gpu is installed last, since both packages of ONNX Runtime have the same module. The operators for the CPU are
# left out.
RUN python -m venv --without-pip /opt/kvexport \
    && KVEXPORT_NATIVE=off pip --python /opt/kvexport/bin/python install --no-cache-dir --constraint constraints.txt ".${EXTRAS:+[${EXTRAS}]}" \
    && pip --python /opt/kvexport/bin/python install --no-cache-dir --constraint constraints.txt --force-reinstall --no-deps onnxruntime-gpu \
    && KVEXPORT_CUDA_LIBRARIES=/opt/libraries pip --python /opt/kvexport/bin/python install --no-cache-dir --constraint constraints.txt --no-deps ./plugins/cuda_wheel

FROM python:${PYTHON_TAG}${PYTHON_DIGEST:+@${PYTHON_DIGEST}}
ARG VERSION=0.1.0
LABEL org.opencontainers.image.title="kvexport" \
      org.opencontainers.image.description="Serves language models whose KV cache has a fixed budget, on ONNX Runtime's CUDA provider" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=build /opt/kvexport /opt/kvexport
RUN useradd --uid 10001 --create-home kvexport && mkdir /artifacts /sessions && chown kvexport /artifacts /sessions
ENV ORT_DISABLE_TELEMETRY=1 PATH=/opt/kvexport/bin:$PATH NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 10001
WORKDIR /artifacts
EXPOSE 8000
# For `kvexport serve`; other commands serve nothing: docker run --no-healthcheck.
HEALTHCHECK --interval=30s --timeout=5s --start-period=60s CMD ["python", "-c", "import urllib.request as u; u.build_opener(u.ProxyHandler({})).open('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["kvexport"]
CMD ["--help"]
