"""OpenTelemetry: instruments and spans of the saves and loads of this process.

    from torch_dcpx.integrations.opentelemetry import instrument

    instrument()  # reports to the providers that the program has set

Everything comes from `torch_dcpx.on_event`. Only the API is needed (`torch-dcpx[otel]`): which SDK
and which exporter take the data is the program's choice. docs/reference/metrics.md lists all names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from time import monotonic
from weakref import WeakKeyDictionary

from torch_dcpx._keywords import telling
from torch_dcpx._version import __version__
from torch_dcpx.events import Event, LoadEnded, LoadFailed, SaveEnded, SaveFailed, on_event
from torch_dcpx.integrations._framework import needed
from torch_dcpx.timelines import Phase

with needed(__name__, "torch-dcpx[otel]"):
    from opentelemetry import metrics, trace

_SCOPE = "torch_dcpx"
# Bounds of the histograms, unless a view of the SDK has others.
_BOUNDS_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)
_BOUNDS_BYTES = tuple(4.0**power for power in range(10, 21))  # 1 MiB to 1 TiB


@telling
def instrument(
    meter_provider: metrics.MeterProvider | None = None,
    tracer_provider: trace.TracerProvider | None = None,
) -> Callable[[], None]:
    """Reports each save and load that begins from now on.

    A span begins at the call, and its parent is the span that was current there, of `async_save`
    as well. No attribute of an instrument names a path: the number of series is bounded.

    Args:
        meter_provider, tracer_provider: get the data. Default None: the providers that
            `opentelemetry.metrics` and `opentelemetry.trace` have.

    Returns:
        A function that ends it; safe to call twice.
    """
    meter = metrics.get_meter(_SCOPE, __version__, meter_provider)
    age = _ages.setdefault(meter, _Age())
    instruments = _Instruments(meter, age)
    tracer = trace.get_tracer(_SCOPE, __version__, tracer_provider)

    def report(event: Event) -> None:
        instruments.record(event)
        _trace(tracer, event)

    remove = on_event(report)

    def uninstrument() -> None:
        remove()
        age.forget()

    return uninstrument


class _Age:
    """Seconds since the state of this process was last the one of a durable checkpoint."""

    def __init__(self) -> None:
        self._noted: float | None = None

    def note(self) -> None:
        self._noted = monotonic()

    def forget(self) -> None:
        self._noted = None

    def observe(self, _options: metrics.CallbackOptions) -> Iterable[metrics.Observation]:
        noted = self._noted
        return [] if noted is None else [metrics.Observation(monotonic() - noted)]


# An SDK makes an instrument of a name once, and keeps the callback that it had then.
_ages: WeakKeyDictionary[metrics.Meter, _Age] = WeakKeyDictionary()


class _Instruments:
    """The instruments of one meter."""

    def __init__(self, meter: metrics.Meter, age: _Age) -> None:
        def seconds(name: str, text: str) -> metrics.Histogram:
            return meter.create_histogram(
                name, "s", text, explicit_bucket_boundaries_advisory=_BOUNDS_S
            )

        self._age = age
        self._save_duration = seconds(
            "dcpx.save.duration", "Time from the call until the checkpoint was durable."
        )
        self._save_stall = seconds("dcpx.save.stall", "Time for which a save kept its caller.")
        self._save_io = meter.create_counter(
            "dcpx.save.io", "By", "Bytes of the files that this rank wrote."
        )
        self._staged = meter.create_histogram(
            "dcpx.staged.size",
            "By",
            "Bytes of tensors that async_save copied to host memory on this rank.",
            explicit_bucket_boundaries_advisory=_BOUNDS_BYTES,
        )
        self._save_failures = meter.create_counter(
            "dcpx.save.failures", "{failure}", "Saves that failed."
        )
        self._load_duration = seconds("dcpx.load.duration", "Time of a load.")
        self._load_io = meter.create_counter(
            "dcpx.load.io", "By", "Bytes that this rank read from files."
        )
        self._load_failures = meter.create_counter(
            "dcpx.load.failures", "{failure}", "Loads that failed."
        )
        meter.create_observable_gauge(
            "dcpx.checkpoint.age",
            [age.observe],
            "s",
            "Time since this process last saved or loaded a durable checkpoint.",
        )

    def record(self, event: Event) -> None:
        call = {"dcpx.call": event.call}
        if isinstance(event, SaveEnded):
            self._save_duration.record(event.seconds, call)
            if event.report is not None:
                self._save_stall.record(event.report.blocked_s, call)
            if event.write is not None:
                self._save_io.add(event.write.file_bytes, call)
            if event.call == "dcpx.async_save":
                self._staged.record(event.staged_bytes, call)
            self._age.note()
        elif isinstance(event, LoadEnded):
            self._load_duration.record(event.seconds, call)
            if event.read is not None:
                self._load_io.add(event.read.read_bytes, call)
            self._age.note()
        elif isinstance(event, SaveFailed):
            self._save_failures.add(1, call | {"error.type": type(event.error).__qualname__})
        elif isinstance(event, LoadFailed):
            self._load_failures.add(1, call | {"error.type": type(event.error).__qualname__})


def _trace(tracer: trace.Tracer, event: Event) -> None:
    """Makes the span of an operation. REQUIRES: the context of its caller is current."""
    name = "dcpx.save" if isinstance(event, (SaveEnded, SaveFailed)) else "dcpx.load"
    attributes: dict[str, str | int] = {"dcpx.call": event.call, "dcpx.path": event.path}
    if isinstance(event, SaveEnded) and event.report is not None:
        attributes |= {"dcpx.save_id": event.report.save_id, "dcpx.ranks": event.report.ranks}
    span = tracer.start_span(name, attributes=attributes, start_time=event.began_ns)
    if isinstance(event, (SaveFailed, LoadFailed)):
        error_type = type(event.error).__qualname__
        span.set_attribute("error.type", error_type)
        span.record_exception(event.error, timestamp=event.ended_ns)
        span.set_status(trace.Status(trace.StatusCode.ERROR, f"{error_type}: {event.error}"))
    within = trace.set_span_in_context(span)
    for phase in _phases_of(event):
        child = tracer.start_span(
            f"{name}/{phase.name}",
            within,
            attributes={"thread.id": phase.thread},
            start_time=phase.began_ns,
        )
        child.end(end_time=phase.ended_ns)
    span.end(end_time=event.ended_ns)


def _phases_of(event: Event) -> tuple[Phase, ...]:
    """Returns the phases of an operation that ended well; of another one none are known."""
    if isinstance(event, SaveEnded):
        saved = event.report or event.write
        return saved.phases if saved else ()
    if isinstance(event, LoadEnded):
        loaded = event.report or event.read
        return loaded.phases if loaded else ()
    return ()
