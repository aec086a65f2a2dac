"""What the gateway counts about itself. Labels come from tables here, never from what a client sends."""

from prometheus_client import CollectorRegistry, Counter, Histogram


class GatewayMetrics:
    """An Observer of exchanges. registry: where the series are registered, once per process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = Counter(
            "tercet_gateway_requests",
            "HTTP requests that ended, by path and by the status that their outcome means (499: the client left)",
            ["route", "status"],
            registry=registry,
        )
        self._seconds = Histogram(
            "tercet_gateway_request_seconds",
            "From the request's head to the last byte of its reply",
            ["route"],
            registry=registry,
            buckets=(0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640),
        )

    def __call__(self, route: str, status: int, seconds: float) -> None:
        self._requests.labels(route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)
