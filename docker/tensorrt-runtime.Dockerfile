# kvexport with TensorRT's runtime: serves artifacts with engines that docker/tensorrt.Dockerfile, or a machine with TensorRT,
# has built. No compiler, no PyTorch and nothing that builds engines is in it. Needs the NVIDIA Container Toolkit to run, and
# no GPU to be built.
#
# Never built with Docker, and never run on a GPU. tests/docker replays the lines that gather TensorRT's libraries and module.
#
#   docker build -f docker/tensorrt-runtime.Dockerfile --build-arg TENSORRT_TAG=YY.MM-py3 -t kvexport:tensorrt-runtime .
#   docker run --rm --gpus all -v "$PWD/artifacts:/artifacts:ro" kvexport:tensorrt-runtime generate /artifacts/ARTIFACT "a prompt"
#
# TENSORRT_TAG: the tag of NGC's image that built the engines, or one with the same version of TensorRT 11, whose Python is
# that of PYTHON_TAG. TENSORRT_DIGEST=sha256:... and PYTHON_DIGEST=sha256:... pin the bases.
ARG TENSORRT_TAG
ARG TENSORRT_DIGEST=
ARG PYTHON_TAG=3.12-slim-trixie
ARG PYTHON_DIGEST=

FROM nvcr.io/nvidia/tensorrt:${TENSORRT_TAG}${TENSORRT_DIGEST:+@${TENSORRT_DIGEST}} AS tensorrt
WORKDIR /source
COPY plugins plugins
# Compute capabilities of the GPUs that the image is for, as in "90" or "80 86 89 90"; nvcc takes minutes for each.
ARG CAPABILITIES="80 86 87 89 90 100 110 120"
RUN python3 plugins/build.py tensorrt --capabilities ${CAPABILITIES} --out /opt/tensorrt/lib
# The libraries and the Python module that run engines, without the resources of the builder.
RUN find / -xdev \( -name 'libnvinfer*.so.11*' -o -name 'libnvonnxparser.so.11*' \) ! -name '*builder_resource*' ! -path '/opt/tensorrt/*' -exec cp --no-dereference --no-clobber {} /opt/tensorrt/lib \; \
    && module="$(python3 -c 'import importlib.util as u; print(u.find_spec("tensorrt").submodule_search_locations[0])')" \
    && mkdir /opt/tensorrt/python && cp -R "$module" "$module"-*.dist-info /opt/tensorrt/python

FROM python:${PYTHON_TAG}${PYTHON_DIGEST:+@${PYTHON_DIGEST}} AS build
WORKDIR /source
COPY pyproject.toml hatch_build.py constraints.txt README.md LICENSE ./
COPY licenses licenses
COPY plugins plugins
COPY docs docs
COPY recipes recipes
COPY kvexport kvexport
ARG EXTRAS=serve
RUN python -m venv --without-pip /opt/kvexport \
    && KVEXPORT_NATIVE=off pip --python /opt/kvexport/bin/python install --no-cache-dir --constraint constraints.txt ".${EXTRAS:+[${EXTRAS}]}" cuda-bindings
COPY --from=tensorrt /opt/tensorrt /opt/tensorrt
RUN mv /opt/tensorrt/python/* /opt/kvexport/lib/python3*/site-packages && mv /opt/tensorrt/lib /opt/kvexport/tensorrt

FROM python:${PYTHON_TAG}${PYTHON_DIGEST:+@${PYTHON_DIGEST}}
ARG VERSION=0.1.0
LABEL org.opencontainers.image.title="kvexport" \
      org.opencontainers.image.description="Serves TensorRT engines of models whose KV cache has a fixed budget" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=build /opt/kvexport /opt/kvexport
RUN useradd --uid 10001 --create-home kvexport && mkdir /artifacts /sessions && chown kvexport /artifacts /sessions
ENV ORT_DISABLE_TELEMETRY=1 PATH=/opt/kvexport/bin:$PATH LD_LIBRARY_PATH=/opt/kvexport/tensorrt KVEXPORT_TENSORRT_PLUGIN=/opt/kvexport/tensorrt/libkvexport_tensorrt.so \
    NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 10001
WORKDIR /artifacts
EXPOSE 8000
# For `kvexport serve`; other commands serve nothing: docker run --no-healthcheck.
HEALTHCHECK --interval=30s --timeout=5s --start-period=60s CMD ["python", "-c", "import urllib.request as u; u.build_opener(u.ProxyHandler({})).open('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["kvexport"]
CMD ["--help"]
