# kvexport on the CPU: builds artifacts and runs them on ONNX Runtime, with the native operators.
#
#   docker build -f docker/cpu.Dockerfile -t kvexport:cpu .
#   docker run --rm -v "$PWD/artifacts:/artifacts" kvexport:cpu generate /artifacts/ARTIFACT "a prompt"
#
# EXTRAS= leaves out what only building takes (PyTorch, transformers, onnx).
ARG PYTHON_TAG=3.12-slim-trixie
ARG PYTHON_DIGEST=

FROM python:${PYTHON_TAG}${PYTHON_DIGEST:+@${PYTHON_DIGEST}} AS build
RUN apt-get update \
    && apt-get install --yes --no-install-recommends cmake g++ libonnxruntime-dev make \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY pyproject.toml hatch_build.py constraints.txt README.md LICENSE ./
COPY plugins plugins
COPY recipes recipes
COPY kvexport kvexport
ARG EXTRAS=export
RUN python -m venv /opt/kvexport \
    && /opt/kvexport/bin/pip install --no-cache-dir --constraint constraints.txt ".${EXTRAS:+[${EXTRAS}]}"

FROM python:${PYTHON_TAG}${PYTHON_DIGEST:+@${PYTHON_DIGEST}}
COPY --from=build /opt/kvexport /opt/kvexport
RUN useradd --uid 10001 --create-home kvexport && mkdir /artifacts && chown kvexport /artifacts
ENV PATH=/opt/kvexport/bin:$PATH
USER 10001
WORKDIR /artifacts
HEALTHCHECK --interval=60s --timeout=30s --start-period=10s CMD ["kvexport", "doctor"]
ENTRYPOINT ["kvexport"]
CMD ["--help"]
