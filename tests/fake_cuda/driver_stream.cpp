// Streams and events.
#include <algorithm>

#include "world.h"

using namespace fake;

namespace {

// What a stream that records a graph would take into it: never wanted here.
Result check_not_capturing(const Call& call, Stream& stream) {
  if (!stream.is_capturing) return kSuccess;
  stream.is_capture_broken = true;
  return call.wrong(kCaptureUnsupported, "a stream that is capturing a graph");
}

WorkPtr new_mark(const char* what) {
  auto mark = std::make_shared<Work>();
  mark->what = what;
  return mark;
}

}  // namespace

FAKE_EXPORT Result cuStreamCreateWithPriority(Handle* out, unsigned flags, int priority) {
  Call call("cuStreamCreateWithPriority", kNeedsContext);
  if (call.is_refused()) return call.result();
  World& w = world();
  const StreamPtr stream = w.new_stream(current_device());
  stream->handle = w.new_handle(5);
  stream->is_blocking = (flags & kStreamNonBlocking) == 0U;
  stream->priority = std::clamp(priority, -5, 0);
  w.streams[stream->handle] = stream;
  if (stream->is_blocking) ++w.totals["blocking_streams_made"];
  if (stream->priority < 0) ++w.totals["urgent_streams_made"];
  *out = stream->handle;
  return kSuccess;
}

// Returns at once; what is queued still runs.
FAKE_EXPORT Result cuStreamDestroy_v2(Handle handle) {
  Call call("cuStreamDestroy");
  if (call.is_dead()) return call.result();
  StreamPtr stream;
  const Result lost = call.find(handle, stream);
  if (!stream) return lost;
  if (stream->handle == nullptr || stream->is_tests)
    return call.wrong(kInvalidHandle, "a stream of somebody else");
  world().streams.erase(handle);
  return call.is_refused() ? call.result() : lost;
}

FAKE_EXPORT Result cuStreamWaitEvent(Handle handle, Handle event_handle, unsigned) {
  Call call("cuStreamWaitEvent");
  if (call.is_refused()) return call.result();
  StreamPtr stream;
  Event* event = nullptr;
  if (const Result bad = call.find(handle, stream)) return bad;
  if (const Result bad = call.find(event_handle, event)) return bad;
  if (const Result bad = check_not_capturing(call, *stream)) return bad;
  if (!event->recorded || event->recorded->is_over) return kSuccess;
  const WorkPtr mark = new_mark("cuStreamWaitEvent");
  mark->after.push_back(event->recorded);
  enqueue(stream, mark);
  return kSuccess;
}

FAKE_EXPORT Result cuStreamSynchronize(Handle handle) {
  Call call("cuStreamSynchronize", kUnsafeInCapture);
  if (call.is_refused()) return call.result();
  StreamPtr stream;
  if (const Result bad = call.find(handle, stream)) return bad;
  if (const Result bad = check_not_capturing(call, *stream)) return bad;
  return wait_for(call.lock(), stream->last);
}

FAKE_EXPORT Result cuStreamQuery(Handle handle) {
  Call call("cuStreamQuery", kUnsafeInCapture);
  if (call.is_refused()) return call.result();
  StreamPtr stream;
  if (const Result bad = call.find(handle, stream)) return bad;
  if (!stream->last) return kSuccess;
  want(stream->last);
  return stream->last->is_over ? stream->last->failure : kNotReady;
}

FAKE_EXPORT Result cuStreamIsCapturing(Handle handle, int* status) {
  Call call("cuStreamIsCapturing");
  if (call.is_refused()) return call.result();
  StreamPtr stream;
  if (const Result bad = call.find(handle, stream)) return bad;
  if (stream->is_legacy)
    for (const auto& [other_handle, other] : world().streams)
      if (other->is_capturing && other->is_blocking && other->device == stream->device)
        return kCaptureImplicit;
  *status = !stream->is_capturing ? 0 : stream->is_capture_broken ? 2 : 1;
  return kSuccess;
}

FAKE_EXPORT Result cuEventCreate(Handle* out, unsigned) {
  Call call("cuEventCreate", kNeedsContext);
  if (call.is_refused()) return call.result();
  World& w = world();
  Event event;
  event.handle = w.new_handle(7);
  event.device = current_device();
  w.events[event.handle] = event;
  *out = event.handle;
  return kSuccess;
}

FAKE_EXPORT Result cuEventDestroy_v2(Handle handle) {
  Call call("cuEventDestroy");
  if (call.is_dead()) return call.result();
  Event* event = nullptr;
  const Result lost = call.find(handle, event);
  if (event == nullptr) return lost;
  world().events.erase(handle);
  return call.is_refused() ? call.result() : lost;
}

FAKE_EXPORT Result cuEventRecord(Handle handle, Handle stream_handle) {
  Call call("cuEventRecord");
  if (call.is_refused()) return call.result();
  StreamPtr stream;
  Event* event = nullptr;
  if (const Result bad = call.find(handle, event)) return bad;
  if (const Result bad = call.find(stream_handle, stream)) return bad;
  if (event->device != stream->device)
    return call.wrong(kInvalidHandle, "an event of device " + std::to_string(event->device) +
                                          " on a stream of device " +
                                          std::to_string(stream->device));
  if (const Result bad = check_not_capturing(call, *stream)) return bad;
  event->recorded = new_mark("cuEventRecord");
  enqueue(stream, event->recorded);
  return kSuccess;
}

FAKE_EXPORT Result cuEventQuery(Handle handle) {
  Call call("cuEventQuery", kUnsafeInCapture);
  if (call.is_refused()) return call.result();
  Event* event = nullptr;
  if (const Result bad = call.find(handle, event)) return bad;
  if (!event->recorded) return kSuccess;
  want(event->recorded);
  return event->recorded->is_over ? event->recorded->failure : kNotReady;
}

FAKE_EXPORT Result cuEventSynchronize(Handle handle) {
  Call call("cuEventSynchronize", kUnsafeInCapture);
  if (call.is_refused()) return call.result();
  Event* event = nullptr;
  if (const Result bad = call.find(handle, event)) return bad;
  return wait_for(call.lock(), event->recorded);  // the mark may outlive the event
}
