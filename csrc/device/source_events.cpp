#include "device/source_events.h"

#include <algorithm>
#include <exception>
#include <string>

#include "device/counters.h"
#include "device/cuda_driver.h"

namespace dcpx::device {
namespace {

std::string name_of(int device, Stream stream) {
  if (stream == nullptr) return "the default stream of device " + std::to_string(device);
  return "stream " + std::to_string(reinterpret_cast<std::uintptr_t>(stream)) + " of device " +
         std::to_string(device);
}

}  // namespace

SourceEvents::SourceEvents(const std::vector<CallerStream>& streams) {
  entries_.reserve(streams.size());
  try {
    for (const auto& [device, handle] : streams) add(device, reinterpret_cast<Stream>(handle));
  } catch (const Error&) {
    destroy();
    throw;
  }
}

SourceEvents::~SourceEvents() { destroy(); }

void SourceEvents::add(int device, Stream stream) {
  const auto is_same = [&](const Entry& e) { return e.device == device && e.stream == stream; };
  if (std::any_of(entries_.begin(), entries_.end(), is_same)) return;
  Driver& driver = Driver::get();
  driver.check_device(device);
  const ContextGuard guard(device);
  const std::string name = name_of(device, stream);
  CaptureStatus status = CaptureStatus::kNone;
  driver.check(driver.api().cuStreamIsCapturing(stream, &status), "cuStreamIsCapturing",
               "asking whether " + name + " captures a graph");
  if (status != CaptureStatus::kNone) {
    throw Error(ErrorCode::kStaging, "tensors cannot be copied while " + name +
                                         " captures a CUDA graph: do it before or after");
  }
  Event event = nullptr;
  driver.check(driver.api().cuEventCreate(&event, kEventDisableTiming), "cuEventCreate",
               "marking what " + name + " has queued");
  entries_.push_back({device, stream, event});
  driver.check(driver.api().cuEventRecord(event, stream), "cuEventRecord",
               "marking what " + name + " has queued");
  add_count(Count::kEventsRecorded);
}

void SourceEvents::destroy() noexcept {
  for (const Entry& entry : entries_) {
    try {
      const ContextGuard guard(entry.device);
      Driver::get().api().cuEventDestroy(entry.event);
    } catch (const std::exception&) {  // no driver any more, so no event
      continue;
    }
  }
  entries_.clear();
}

bool SourceEvents::has(int device) const noexcept {
  return std::any_of(entries_.begin(), entries_.end(),
                     [&](const Entry& entry) { return entry.device == device; });
}

std::vector<int> SourceEvents::devices() const {
  std::vector<int> out;
  for (const Entry& entry : entries_) out.push_back(entry.device);
  std::sort(out.begin(), out.end());
  out.erase(std::unique(out.begin(), out.end()), out.end());
  return out;
}

void SourceEvents::order_behind(int device, Stream stream) const {
  Driver& driver = Driver::get();
  for (const Entry& entry : entries_) {
    if (entry.device != device) continue;
    driver.check(driver.api().cuStreamWaitEvent(stream, entry.event, 0), "cuStreamWaitEvent",
                 "ordering copies behind " + name_of(device, entry.stream));
  }
}

Stream SourceEvents::caller_stream(int device) const {
  for (auto entry = entries_.rbegin(); entry != entries_.rend(); ++entry) {
    if (entry->device == device) return entry->stream;
  }
  throw Error(ErrorCode::kStaging, "no stream of device " + std::to_string(device) + " was given");
}

}  // namespace dcpx::device
