# syntax=docker/dockerfile:1
# Both images: `--target operator` (operator and coordinator, no torch) and `--target trainer` (coordinator, command line and trainer).
# What each is made of, its size and its build arguments: docs/start/installing.md. Dependencies come from the hashed locks in
# tools/requirements/ and are a layer of their own below the code, so a change of code rebuilds and ships some hundred kilobytes.

# Any Debian-like image with python3 and its venv module. The CPU build of torch is locked for CPython 3.11.
ARG BASE_IMAGE=docker.io/library/python:3.11-slim-bookworm

# A folder of wheels for the trainer's dependencies, if one is given: --build-context wheels=FOLDER
FROM scratch AS wheels

FROM ${BASE_IMAGE} AS base
# Debian packages to add, e.g. "g++ libc6-dev" where torch.compile is wanted.
ARG PACKAGES=""
RUN if [ -n "$PACKAGES" ]; then \
        apt-get update -q && apt-get install -q -y --no-install-recommends $PACKAGES && rm -rf /var/lib/apt/lists/*; \
    fi \
    && echo 'evergrad:x:10001:10001::/tmp:/usr/sbin/nologin' >>/etc/passwd && echo 'evergrad:x:10001:' >>/etc/group
# The root may be read-only and the user any number: everything that is written at run time goes below /tmp.
ENV PATH=/opt/evergrad/bin:$PATH \
    HOME=/tmp USER=evergrad LOGNAME=evergrad \
    XDG_CACHE_HOME=/tmp/.cache \
    LANG=C.UTF-8 \
    PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
WORKDIR /tmp
STOPSIGNAL SIGTERM

# The locks without their comments, which say only who needs what: a change there installs nothing anew.
FROM base AS locks
COPY tools/requirements/*.txt /locks/
RUN sed -i '/^ *#/d' /locks/*.txt && touch --date=@0 /locks/*.txt && chmod 644 /locks/*.txt

# pip and setuptools, which no image keeps. A private index, a proxy's certificate: --secret id=pip.conf and --secret id=ca.
FROM base AS tools
COPY --from=locks /locks/trainer.txt /locks/
RUN --mount=type=secret,id=pip.conf,required=false --mount=type=secret,id=ca,required=false \
    python3 -m venv /opt/evergrad \
    && awk '/^setuptools==/ {on = 1} on {print} on && !/\\$/ {exit}' /locks/trainer.txt >/locks/setuptools.txt \
    && PIP_CONFIG_FILE=/run/secrets/pip.conf python -m pip install \
        --disable-pip-version-check --no-cache-dir --require-hashes -r /locks/setuptools.txt

FROM tools AS operator-code
COPY common /source/common
COPY coordinator /source/coordinator
COPY manifest /source/manifest
COPY operator /source/operator
RUN python -m pip install --disable-pip-version-check --no-cache-dir --no-index --no-deps --no-build-isolation --no-compile \
        --ignore-installed --prefix /out --no-warn-script-location /source/common /source/coordinator /source/manifest /source/operator \
    && python -m compileall -q --invalidation-mode unchecked-hash -s /out -p /opt/evergrad /out \
    && chmod -R a+rX,go-w /out

FROM tools AS trainer-code
COPY common /source/common
COPY coordinator /source/coordinator
COPY manifest /source/manifest
COPY cli /source/cli
COPY trainer_image /source/trainer_image
COPY latent_edit /source/latent_edit
RUN python -m pip install --disable-pip-version-check --no-cache-dir --no-index --no-deps --no-build-isolation --no-compile \
        --ignore-installed --prefix /out --no-warn-script-location /source/common /source/coordinator /source/manifest /source/cli /source/trainer_image /source/latent_edit \
    && python -m compileall -q --invalidation-mode unchecked-hash -s /out -p /opt/evergrad /out \
    && chmod -R a+rX,go-w /out

# pip is a guest of these layers: gone at their end. A file in a syntax newer than this Python stays uncompiled.
FROM base AS operator-dependencies
COPY --from=locks /locks/operator.txt /opt/evergrad/locks/
RUN --mount=type=secret,id=pip.conf,required=false --mount=type=secret,id=ca,required=false \
    python3 -m venv --without-pip /opt/evergrad && python3 -m venv /tmp/pip \
    && PIP_CONFIG_FILE=/run/secrets/pip.conf /tmp/pip/bin/python -m pip --python /opt/evergrad/bin/python install \
        --disable-pip-version-check --no-cache-dir --no-compile --require-hashes --only-binary :all: -r /opt/evergrad/locks/operator.txt \
    && { python -m compileall -qq -j 0 --invalidation-mode unchecked-hash /opt/evergrad/lib || true; } \
    && chmod -R a+rX,go-w /opt/evergrad && rm -r /tmp/pip

# TORCH=cuda: the index's build and the CUDA packages it needs. TORCH=cpu: a CPU build, which the index does not carry;
# it comes from the folder of wheels or from an index that pip.conf names.
FROM base AS trainer-dependencies
ARG TORCH=cuda
ARG PACKAGES=""
# With accelerators models are compiled by default: Triton builds a stub of its driver, inductor what runs on the CPU.
RUN if [ "$TORCH" = cuda ]; then \
        headers=$(python3 -c 'import os, sysconfig; print(os.path.exists(sysconfig.get_path("include") + "/Python.h"))') \
        && apt-get update -q \
        && apt-get install -q -y --no-install-recommends g++ libc6-dev $(if [ "$headers" = False ]; then echo python3-dev; fi) \
        && rm -rf /var/lib/apt/lists/*; \
    fi
COPY --from=locks /locks/trainer.txt /locks/torch.txt /locks/torch-cpu.txt /opt/evergrad/locks/
RUN --mount=type=bind,from=wheels,target=/opt/wheels \
    --mount=type=secret,id=pip.conf,required=false --mount=type=secret,id=ca,required=false \
    case "$TORCH" in \
        cuda) torch=torch.txt ;; \
        cpu) torch=torch-cpu.txt ;; \
        *) echo "TORCH: $TORCH is neither cpu nor cuda" >&2; exit 64 ;; \
    esac \
    && python3 -m venv --without-pip /opt/evergrad && python3 -m venv /tmp/pip \
    && PIP_CONFIG_FILE=/run/secrets/pip.conf /tmp/pip/bin/python -m pip --python /opt/evergrad/bin/python install \
        --disable-pip-version-check --no-cache-dir --no-compile --require-hashes --only-binary :all: --find-links /opt/wheels \
        -r /opt/evergrad/locks/trainer.txt -r "/opt/evergrad/locks/$torch" \
    && cd /opt/evergrad/lib/python3*/site-packages \
    # Test programs and test suites of others, and headers that only a compiler reads.
    && for folder in torch/test torch/bin; do \
        if [ -d "$folder" ]; then find "$folder" -type f ! -name torch_shm_manager ! -name 'ptxas*' -delete; fi; done \
    && find sympy networkx mpmath matplotlib mpl_toolkits -type d -name tests -prune -exec rm -r {} + \
    && if [ -z "$PACKAGES" ] && [ "$TORCH" = cpu ]; then rm -rf torch/include; fi \
    && { python -m compileall -qq -j 0 --invalidation-mode unchecked-hash /opt/evergrad/lib || true; } \
    && chmod -R a+rX,go-w /opt/evergrad && rm -r /tmp/pip

FROM operator-dependencies AS operator
COPY --from=operator-code /out/ /opt/evergrad/
ARG VERSION=0.2.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="evergrad-operator" \
      org.opencontainers.image.description="Evergrad's operator, and the coordinator of a run" \
      org.opencontainers.image.version="$VERSION" \
      org.opencontainers.image.revision="$REVISION" \
      org.opencontainers.image.licenses="Apache-2.0"
# Read by the operator's settings alone, for build_info. In the last layer: a commit changes nothing below it.
ENV EVERGRAD_REVISION=$REVISION
EXPOSE 8080 29400 29401
USER 10001:10001
ENTRYPOINT ["python", "-m", "evergrad_operator"]

FROM trainer-dependencies AS trainer
COPY --from=trainer-code /out/ /opt/evergrad/
ARG VERSION=0.2.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="evergrad-trainer" \
      org.opencontainers.image.description="Evergrad's trainer: one node of a TrainingRun" \
      org.opencontainers.image.version="$VERSION" \
      org.opencontainers.image.revision="$REVISION" \
      org.opencontainers.image.licenses="Apache-2.0"
# Huge pages for the heap, where the kernel gives them to those that ask: see cli/evergrad_cli/huge_pages.py.
ENV GLIBC_TUNABLES=glibc.malloc.hugetlb=1
USER 10001:10001
ENTRYPOINT ["evergrad"]
