# kvexport on the CPU: serves artifacts on ONNX Runtime, with the native operators. No compiler and no PyTorch is in it.
#
#   docker build -f docker/cpu.Dockerfile -t kvexport:cpu .
#   docker run --rm --read-only --tmpfs /tmp -v "$PWD/artifacts:/artifacts:ro" kvexport:cpu generate /artifacts/ARTIFACT "a prompt"
#   ARTIFACT="$PWD/artifacts/ARTIFACT" KVEXPORT_API_KEY=KEY docker compose -f docker/compose.yaml up
#
# PYTHON_DIGEST=sha256:... pins the base. EXTRAS=export,serve adds what building takes (PyTorch, transformers, onnx).
ARG PYTHON_TAG=3.12-slim-trixie
ARG PYTHON_DIGEST=

FROM python:${PYTHON_TAG}${PYTHON_DIGEST:+@${PYTHON_DIGEST}} AS build
RUN apt-get update \
    && apt-get install --yes --no-install-recommends cmake g++ make \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY pyproject.toml hatch_build.py constraints.txt README.md LICENSE ./
COPY licenses licenses
COPY plugins plugins
COPY docs docs
COPY recipes recipes
COPY kvexport kvexport
ARG EXTRAS=serve
# The folder has no pip of its own, which would be a tenth of it.
RUN python -m venv --without-pip /opt/kvexport \
    && pip --python /opt/kvexport/bin/python install --no-cache-dir --constraint constraints.txt ".${EXTRAS:+[${EXTRAS}]}"

FROM python:${PYTHON_TAG}${PYTHON_DIGEST:+@${PYTHON_DIGEST}}
ARG VERSION=0.1.0
LABEL org.opencontainers.image.title="kvexport" \
      org.opencontainers.image.description="Serves language models whose KV cache has a fixed budget, on the CPU" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=build /opt/kvexport /opt/kvexport
RUN useradd --uid 10001 --create-home kvexport && mkdir /artifacts /sessions && chown kvexport /artifacts /sessions
ENV ORT_DISABLE_TELEMETRY=1 PATH=/opt/kvexport/bin:$PATH
USER 10001
WORKDIR /artifacts
EXPOSE 8000
# For `kvexport serve`; other commands serve nothing: docker run --no-healthcheck.
HEALTHCHECK --interval=30s --timeout=5s --start-period=60s CMD ["python", "-c", "import urllib.request as u; u.build_opener(u.ProxyHandler({})).open('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["kvexport"]
CMD ["--help"]
