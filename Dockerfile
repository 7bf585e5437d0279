FROM python:3.12-slim
WORKDIR /opt/openrelay
COPY requirements.runtime.lock ./
RUN pip install --no-cache-dir --require-hashes -r requirements.runtime.lock
COPY pyproject.toml README.md LICENSE ./
COPY schemas schemas
COPY streams streams
COPY services services
RUN pip install --no-cache-dir --no-deps --no-build-isolation . && useradd --create-home openrelay \
    && install -d -o openrelay /var/lib/openrelay
USER openrelay
WORKDIR /var/lib/openrelay
ENTRYPOINT ["openrelay"]
